"""Skill of a forecast of the change from now, of the plain value, and of a loop written by hand.

    python benchmarks/forecast_ett.py ETTh1.csv [--seeds 0,1,2] [--updates 600] [--lr 0.0005]
        [--validations 20] [--out runs/ett] [--json benchmarks/results/forecast_ett.json]
    python benchmarks/forecast_ett.py --table

ETTh1 is a public hourly series of a transformer: the oil temperature `OT` and six loads (Zhou et
al. 2021, github.com/zhouhaoyi/ETDataset). The split is the usual one: 12 months to train, then 4 to
validate and 4 to test. Each method forecasts 1, 6 and 24 hours ahead with one net, an LSTM of 32.
Learning rate, weight decay and the number of updates are those that gave the difference, seed 0,
the best skill on the validation split, of four settings:

- difference: `throughtime train --ahead 1,6,24 --difference`
- difference, first:400: the same with `--standardise first:400`
- plain: the same command without it
- loop: `loop` below, about what people write: windows of 168 hours in random order from a zero
  state, inputs and targets standardised, the state not carried, the same number of updates, of
  validations and of steps read. Its test forecasts are made from the 168 hours before each.

All are scored on the same hours of the test split, those from its 168th on, against the value now
and the value one day before. Writes `benchmarks/results/forecast_ett.json`. About 5 minutes on one
thread.
"""

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

AHEAD, LENGTH, LANES, DAY = (1, 6, 24), 168, 16, 24
DECAY = 0.1
METHODS = {
    "difference": ["--difference"],
    "first:400": ["--difference", "--standardise", "first:400"],
    "plain": [],
}
MONTH = 30 * 24
CUTS = (0, 12 * MONTH, 16 * MONTH, 20 * MONTH)
RESULTS = Path(__file__).parent / "results" / "forecast_ett.json"
Scores = dict[str, float]


def read(path: Path) -> tuple[list[str], np.ndarray[Any, Any]]:
    """The names of the columns and their values; the time stamps are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return header[1:], np.array([[float(value) for value in row[1:]] for row in rows])


def write_splits(path: Path, out: Path) -> Path:
    """The splits as files, and a manifest of them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    out.mkdir(parents=True, exist_ok=True)
    manifest = ["id,split,inputs"]
    for split, begin, end in zip(("train", "valid", "test"), CUTS, CUTS[1:], strict=False):
        rows = [lines[0], *lines[1 + begin : 1 + end]]
        (out / f"{split}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        manifest.append(f"{split},{split},{split}.csv")
    (out / "ett.csv").write_text("\n".join(manifest) + "\n", encoding="utf-8")
    return out / "ett.csv"


class Setting(NamedTuple):
    """How long a method trains, at which rate, and how often it is validated."""

    updates: int
    lr: float
    validations: int

    @property
    def valid_every(self) -> int:
        """Updates from one validation to the next."""
        return self.updates // self.validations


def command(data: Path, run: Path, seed: int, setting: Setting, *more: str) -> np.ndarray[Any, Any]:
    """Train by the command line; the forecasts of the test split, `(T, 3)`."""
    options = f"--targets OT --ahead 1,6,24 --hidden 32 --lanes {LANES} --stride {LENGTH}"
    options += f" --hand-off --warm-up {LENGTH} --lr {setting.lr} --seed {seed}"
    options += f" --updates {setting.updates} --weight-decay {DECAY}"
    options += f" --valid-every {setting.valid_every}"
    output = data.parent / f"{run.name}.npy"
    for words in (
        ["train", str(data), *options.split(), *more, "--out", str(run)],
        ["predict", str(run), str(data.parent / "test.csv"), "--out", str(output)],
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "throughtime", *words]
        subprocess.run(line, env=environment, check=True, capture_output=True)
    return np.load(output)


def loop(values: np.ndarray[Any, Any], seed: int, setting: Setting) -> np.ndarray[Any, Any]:
    """A loop by hand on windows; the forecasts of the test split, NaN where it has no window."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    train, valid, test = (values[a:b] for a, b in pairwise(CUTS))
    mean, scale = train.mean(0), train.std(0)
    level, spread = float(mean[-1]), float(scale[-1])

    def windows(part: np.ndarray[Any, Any], starts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = np.stack([part[s : s + LENGTH] for s in starts])
        later = [[part[s + LENGTH - 1 + n, -1] for n in AHEAD] for s in starts]
        x, y = (x - mean) / scale, (np.array(later) - level) / spread
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)

    lstm, readout = nn.LSTM(len(mean), 32, batch_first=True), nn.Linear(32, len(AHEAD))
    weights = [*lstm.parameters(), *readout.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=setting.lr, weight_decay=DECAY)

    def forecast(x: torch.Tensor) -> torch.Tensor:
        return readout(lstm(x)[0][:, -1])

    def starts_of(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.arange(len(part) - LENGTH - max(AHEAD) + 1)

    draw, best, kept = np.random.default_rng(seed), np.inf, dict[str, Any]()
    held_out = windows(valid, starts_of(valid)[::7])
    for update in range(setting.updates):
        x, y = windows(train, draw.choice(starts_of(train), LANES))
        loss = (forecast(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if (update + 1) % setting.valid_every == 0:  # the best one is kept, as by the command
            with torch.no_grad():
                error = float((forecast(held_out[0]) - held_out[1]).square().mean())
            if error < best:
                best = error
                modules = {"lstm": lstm, "readout": readout}
                kept = {
                    name: {k: v.clone() for k, v in module.state_dict().items()}
                    for name, module in modules.items()
                }
    lstm.load_state_dict(kept["lstm"])
    readout.load_state_dict(kept["readout"])
    result = np.full((len(test), len(AHEAD)), np.nan)
    with torch.no_grad():
        for s in range(0, len(starts_of(test)), 256):
            part = starts_of(test)[s : s + 256]
            y = forecast(windows(test, part)[0]).numpy()
            result[part + LENGTH - 1] = y * spread + level
    return result


def scores(test: np.ndarray[Any, Any], forecasts: np.ndarray[Any, Any]) -> list[Scores]:
    """RMSE of a method and of both baselines for each number of hours, on the same hours."""
    hours = np.arange(LENGTH - 1, len(test) - max(AHEAD))
    results = list[Scores]()
    for k, n in enumerate(AHEAD):
        target = test[hours + n, -1]
        values = {"model": forecasts[hours, k], "now": test[hours, -1]}
        values["day"] = test[hours + n - DAY, -1]
        rmse = {
            key: float(np.sqrt(np.mean((value - target) ** 2))) for key, value in values.items()
        }
        results.append({"hours": n, **rmse, "skill": 1 - (rmse["model"] / rmse["now"]) ** 2})
    return results


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the recipe, in Markdown."""
    lines = [
        "| hours | now | one day before | difference | and first:400 | plain | loop by hand |",
        "|---|---|---|---|---|---|---|",
    ]
    for k, n in enumerate(AHEAD):
        of = {
            method: [row["scores"][k] for row in rows if row["method"] == method]
            for method in (*METHODS, "loop")
        }
        first = of["plain"][0]
        cells = [f"{first['now']:.2f}", f"{first['day']:.2f}"]
        for several in of.values():
            rmse, skill = ([s[key] for s in several] for key in ("model", "skill"))
            cells.append(
                f"{statistics.mean(rmse):.2f} ± {statistics.pstdev(rmse):.2f}"
                f" ({statistics.mean(skill):+.2f})"
            )
        lines.append(f"| {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the results and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--lr", type=float, default=0.0005)
    parser.add_argument("--validations", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/ett"))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        setting = Setting(options.updates, options.lr, options.validations)
        manifest = write_splits(options.data, options.out)
        _, values = read(options.data)
        test, rows = values[CUTS[2] : CUTS[3]], list[dict[str, Any]]()
        for seed in map(int, options.seeds.split(",")):
            of = {"loop": loop(values, seed, setting)}
            for method, more in METHODS.items():
                run = options.out / f"{method.replace(':', '-')}-{seed}"
                of[method] = command(manifest, run, seed, setting, *more)
            for method, forecasts in of.items():
                rows.append({"method": method, "seed": seed, "scores": scores(test, forecasts)})
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        content = {
            "versions": versions,
            "processor": platform.machine(),
            **setting._asdict(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(options.json.read_text(encoding="utf-8"))["rows"]))


if __name__ == "__main__":
    main()
