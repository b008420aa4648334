"""A real ECG: the same model trained on the stream and on windows from a zero state.

    python benchmarks/ecg.py DATA [--updates 4000] [--seeds 3] [--out runs/ecg]

DATA is a manifest or a folder with one, such as twelve half-hour records of the MIT-BIH Arrhythmia
Database labelled frame by frame (0 background, 1 near a beat, 2 near a premature ventricular beat),
split by patient. Every run is a `throughtime train` of its own process followed by a `throughtime
eval` on the unbroken records of the test split, at equal updates, frames and seeds. Writes
`ecg.json` and prints the table of the README.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

COLUMNS = ("accuracy", "macro_f1", "f1[0]", "f1[1]", "f1[2]")


WAYS = {
    "windows of 100 frames from a zero state": "--train-on windows",
    "the stream, horizon 100": "--train-on stream",
    "the stream, horizon 400": "--train-on stream --horizon 400",
}


def one_run(data: str, way: str, seed: int, updates: int, out: Path) -> dict[str, Any]:
    """Trains and scores one model through the command line."""
    command = [sys.executable, "-m", "throughtime"]
    settings = (
        f"--task classify --hidden 64 --lanes 28 --stride 100 --lr 0.003 --updates {updates} --seed"
        f" {seed} {WAYS[way]}"
    )
    began = time.perf_counter()
    subprocess.run(
        [*command, "train", data, *settings.split(), "--valid-every", "0", "--out", str(out)],
        check=True,
    )
    seconds = time.perf_counter() - began
    subprocess.run([*command, "eval", str(out), "--split", "test"], check=True)
    scores: dict[str, Any] = json.loads((out / "scores-test.json").read_text(encoding="utf-8"))
    return {"way": way, "seed": seed, "seconds": seconds, "settings": settings, **scores}


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/ecg"))
    options = parser.parse_args()
    runs = [
        one_run(options.data, way, seed, options.updates, options.out / f"{number}-{seed}")
        for seed in range(options.seeds)
        for number, way in enumerate(WAYS)
    ]
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    (options.out / "ecg.json").write_text(
        json.dumps({"machine": machine, "runs": runs}, indent=1), encoding="utf-8"
    )
    print("| trained on | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    for way in WAYS:
        mine = [run["metrics"] for run in runs if run["way"] == way]
        print(
            f"| {way} | "
            + " | ".join(spread([figures[c] for figures in mine]) for c in COLUMNS)
            + " |"
        )


if __name__ == "__main__":
    main()
