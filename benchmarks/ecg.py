"""A real ECG: the same model trained on the stream and on windows from a zero state.

    python benchmarks/ecg.py DATA [--updates 4000] [--seeds 3] [--rows windows,stream,400]
        [--out runs/ecg]

DATA is a manifest or a folder with one, such as twelve half-hour records of the MIT-BIH Arrhythmia
Database labelled step by step (0 background, 1 near a beat, 2 near a premature ventricular beat),
split by patient. Every run is what `throughtime train` does with these settings, at equal updates,
steps and seeds; windows are recordings of their own in its stream. The model of the best of ten
validations and that of the last update are scored on the unbroken records of the test split. Writes
`ecg.json` and prints the table of the recipe.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import throughtime as tt
from throughtime.app.evaluate import evaluate_recordings
from throughtime.app.load import load_run
from throughtime.app.model import make_stream
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.evaluation import Evaluator

COLUMNS = ("accuracy", "macro_f1", "f1[0]", "f1[1]", "f1[2]")
STRIDE, VALIDATIONS = 100, 10
ROWS: dict[str, tuple[str, int | None]] = {  # the horizon
    "windows": ("windows of 100 steps from a zero state", None),
    "stream": ("the stream, horizon 100", None),
    "400": ("the stream, horizon 400", 400),
}
KEPT = {"best": "best on validation", "last": "last"}


def one_run(data: str, row: str, seed: int, updates: int, out: Path) -> dict[str, Any]:
    """Trains a model as the command line does; scores of its best and its last weights."""
    config = Config(
        data=data,
        task="classify",
        hidden=64,
        lanes=28,
        stride=STRIDE,
        horizon=ROWS[row][1],
        lr=0.003,
        updates=updates,
        seed=seed,
        valid_every=updates // VALIDATIONS,
        out=str(out),
    )
    began = time.perf_counter()
    training = Training.begin(config)
    if row == "windows":
        cut = tt.windows(training.dataset.train, STRIDE)
        training.stream = make_stream(cut, training.spec, config, config.lanes, seed=seed)
    training.run()
    seconds = time.perf_counter() - began
    settings = {key: str(value) for key, value in config.settings().items()}
    return {"row": row, "seed": seed, "seconds": seconds, "settings": settings, **scores(out)}


def scores(out: Path) -> dict[str, Any]:
    """The metrics of the best and the last weights on the test split, and the best update."""
    run = load_run(out)
    saved, recordings = run.files.read_checkpoint(), run.recordings(split="test")
    result: dict[str, Any] = {"update": run.spec.update}
    for name in KEPT:
        if name == "last" and saved is not None:
            run.net.load_state_dict(saved["net"])
        evaluator = Evaluator(run.net, metrics=run.spec.metrics())
        scored = evaluate_recordings(evaluator, run.spec, recordings, run.config)
        result[name] = {"metrics": scored.metrics, "recordings": scored.recordings}
    return result


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
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", type=Path, default=Path("runs/ecg"))
    options = parser.parse_args()
    rows = options.rows.split(",")
    runs = [
        one_run(options.data, row, seed, options.updates, options.out / f"{row}-{seed}")
        for seed in range(options.seeds)
        for row in rows
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
    print("| trained on | weights | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for row in rows:
        for name, words in KEPT.items():
            mine = [run[name]["metrics"] for run in runs if run["row"] == row]
            cells = " | ".join(spread([metrics[c] for metrics in mine]) for c in COLUMNS)
            print(f"| {ROWS[row][0]} | {words} | {cells} |")


if __name__ == "__main__":
    main()
