"""The forecasting recipe for several hours ahead, against persistence and seasonal persistence.

    python benchmarks/forecasting.py [--ahead 1,24,168] [--seeds 0,1,2] [--out runs/forecasting]
    python benchmarks/forecasting.py --table

Generates the data with the block of `docs/how-to/recipes/forecasting.md`, trains with its command
for each number of hours and each seed, and scores the split `test`. Model and baselines are
compared on the same steps, by `throughtime eval`. Writes `benchmarks/results/forecasting.json`;
`--table` prints the table of the recipe from it. About 20 s for each run on one thread.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "recipes" / "forecasting.md"
RESULTS = Path(__file__).parent / "results" / "forecasting.json"


def blocks(kind: str) -> list[str]:
    """The code blocks of the recipe, of one language."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def score(folder: Path, ahead: int, seed: int) -> dict[str, float]:
    """Train as the recipe does, and score the split `test`."""
    train = shlex.split(blocks("bash")[0].splitlines()[0])[1:]
    train[train.index("--ahead") + 1] = str(ahead)
    run = f"runs/{ahead}-{seed}"
    train[train.index("--out") + 1] = run
    for words in ([*train, "--seed", str(seed)], ["eval", run]):
        command = [sys.executable, "-m", "throughtime", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    content = json.loads((folder / run / "scores-test.json").read_text(encoding="utf-8"))
    return content["metrics"]


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the recipe, in Markdown."""

    def spread(values: list[float]) -> str:
        return f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}"

    lines = [
        "| hours ahead | RMSE, model | value now | value one week before | skill against that |",
        "|---|---|---|---|---|",
    ]
    for ahead in sorted({row["ahead"] for row in rows}):
        own = [row["metrics"] for row in rows if row["ahead"] == ahead]
        week = "season" if "season/rmse[OT]" in own[0] else "persistence"  # the week ends now
        now, season = (own[0][f"{name}/rmse[OT]"] for name in ("persistence", week))
        model, skill = ([m[key] for m in own] for key in ("model/rmse[OT]", f"{week}/skill[OT]"))
        lines.append(f"| {ahead} | {spread(model)} | {now:.2f} | {season:.2f} | {spread(skill)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the results and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ahead", default="1,24,168")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/forecasting"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        data = [sys.executable, "-c", blocks("python")[0]]
        subprocess.run(data, cwd=options.out, check=True)
        rows = [
            {"ahead": ahead, "seed": seed, "metrics": score(options.out, ahead, seed)}
            for ahead in map(int, options.ahead.split(","))
            for seed in map(int, options.seeds.split(","))
        ]
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        content = {"versions": versions, "processor": platform.machine(), "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]))


if __name__ == "__main__":
    main()
