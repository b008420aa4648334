"""Several ways to train on one recording: the RLC circuit of Schiller et al. (arXiv 2602.10911).

    python benchmarks/rlc.py DATA [--rows windows,carried] [--seeds 0,1,2] [--out runs/rlc]
    python benchmarks/rlc.py --table [--out runs/rlc]

DATA is the folder with the paper's three files (github.com/jdschille/rnn-training, MIT licence).
Each row trains the paper's LSTM (8 hidden, linear readout of 2 outputs, Adam at 3e-4, mean squared
error, float32) for 97,500 updates on the 6,667 steps of the training file and is scored as it would
be used: one free run from the zero state over a whole file, mean squared error in standardised
units times 100. Every (row, seed) is a file under --out, written when it is finished and not run
again. `--table` prints what is there and writes `benchmarks/results/rlc.json`.

The paper scores the weights after the last update, of seed 0 alone; beside them stand here those
that were best on the validation file, and those that a row has after the processor time that the
first row takes for all its updates. Its row with a carried state (its code, `shuffle=False` over
windows at every start) plays 100 lanes, lane i from step i on, and resets them every 65 updates:
that is `carried-100`. The other rows that carry are ours: one lane, 67 updates from start to end,
the last of 67 steps. The outputs stand in the order of the paper's code, so that a seed draws the
same initial weights as there.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.gradient import Policy

WINDOW, BATCH, HIDDEN = 100, 100, 8
UPDATES, SCORED_EVERY = 97_500, 500
FILES = {
    "train": "data_rlc_train_6667.csv",
    "valid": "data_rlc_val_3333.csv",
    "test": "data_rlc_test_3333.csv",
}
RESULTS = Path(__file__).parent / "results" / "rlc.json"


@dataclass(frozen=True)
class Signals:
    """A standardised file: inputs `(T, 1)`, targets `(T, 2)`."""

    inputs: Tensor
    targets: Tensor

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Some of it as a recording."""
        return {"inputs": self.inputs[start:stop], "targets": self.targets[start:stop]}

    def whole(self) -> tt.Stream:
        """All of it on one lane."""
        return tt.Stream(self.part(0, len(self.inputs)), lanes=1, chunk=len(self.inputs))


Source: TypeAlias = tt.Stream | Iterable[Chunk]
Epochs: TypeAlias = Callable[[Signals, int], Iterator[Source]]


def at_every_start(train: Signals) -> tuple[Tensor, Tensor, Tensor]:
    """Windows: inputs `(100, 6568, 1)`, targets `(100, 6568, 2)`, and the resets of one batch."""
    inputs, targets = (
        signal.unfold(0, WINDOW, 1).permute(2, 0, 1) for signal in (train.inputs, train.targets)
    )
    resets = torch.zeros(WINDOW, BATCH, dtype=torch.bool)
    resets[0] = True
    return inputs, targets, resets


def windows(ignored: int) -> Epochs:
    """Windows at every start, shuffled, each from the zero state.

    The first `ignored` losses of each do not count.
    """

    def epochs(train: Signals, seed: int) -> Iterator[Source]:
        inputs, targets, resets = at_every_start(train)
        generator, mask = (
            torch.Generator().manual_seed(seed),
            torch.ones(WINDOW, BATCH, dtype=torch.bool),
        )
        mask[:ignored] = False
        while True:
            chosen = torch.randperm(inputs.shape[1], generator=generator).split(BATCH)[
                :-1
            ]  # the last batch is incomplete
            yield (
                Chunk.from_tensors(inputs[:, starts], targets[:, starts], resets=resets, mask=mask)
                for starts in chosen
            )

    return epochs


def abreast(train: Signals, seed: int) -> Iterator[Source]:
    """100 lanes with the state carried; lane i starts at step i, as the windows do in order."""
    del seed  # nothing is drawn
    inputs, targets, resets = at_every_start(train)
    steps = torch.arange(WINDOW).unsqueeze(1) + torch.arange(BATCH)
    batches = [
        slice(start, start + BATCH) for start in range(0, inputs.shape[1] - BATCH + 1, BATCH)
    ]
    while True:
        yield (
            Chunk.from_tensors(
                inputs[:, lanes],
                targets[:, lanes],
                resets=resets if lanes.start == 0 else None,
                position=steps + lanes.start,
            )
            for lanes in batches
        )


def unbroken(train: Signals, seed: int) -> Iterator[Source]:
    """The recording on one lane, from start to end."""
    del seed  # nothing is drawn
    stream = train.whole()
    while True:
        yield stream


@dataclass(frozen=True)
class Row:
    """A way to train, and the paper's scores on the training and test files."""

    title: str
    epochs: Epochs
    gradient: Callable[[], Policy]
    paper: tuple[float, float] | None = None


ROWS = {
    "windows": Row(
        "windows of 100 steps", windows(0), lambda: tt.Truncated(stride=WINDOW), (2.29, 3.527)
    ),
    "windows-83": Row(
        "the same, first 83 losses ignored",
        windows(83),
        lambda: tt.Truncated(stride=WINDOW),
        (1.122, 1.093),
    ),
    "carried": Row("state carried, 1 lane", unbroken, lambda: tt.Truncated(stride=WINDOW)),
    "carried-100": Row(
        "state carried, 100 lanes", abreast, lambda: tt.Truncated(stride=WINDOW), (1.101, 1.183)
    ),
    "carried-400": Row(
        "1 lane, horizon 400", unbroken, lambda: tt.Truncated(stride=WINDOW, horizon=400)
    ),
    "carried-1600": Row(
        "1 lane, horizon 1600", unbroken, lambda: tt.Truncated(stride=WINDOW, horizon=1600)
    ),
    "adaptive": Row(
        "1 lane, adaptive, 100 to 1600",
        unbroken,
        lambda: tt.Adaptive(tolerance=0.1, min=100, max=1600, every=500),
    ),
    "full": Row("whole recording, exact", unbroken, tt.Exact, (0.107, 0.176)),
}


def load(folder: Path) -> dict[str, Signals]:
    """The three files, standardised by the training file.

    A row of a file is a signal, the last three are u, y1, y2.
    """
    raw = {split: np.loadtxt(folder / name, delimiter=",")[-3:] for split, name in FILES.items()}
    middle, scale = (
        raw["train"].mean(axis=1, keepdims=True),
        raw["train"].std(axis=1, keepdims=True),
    )
    found: dict[str, Signals] = {}
    for split, signals in raw.items():
        u, first, second = torch.from_numpy((signals - middle) / scale).float()
        found[split] = Signals(u.unsqueeze(1), torch.stack([second, first], dim=1))
    return found


def training(net: Carried, row: Row, train: Signals, seed: int) -> Iterator[None]:
    """Trains without end; one item is one update."""
    gradient, optimizer = row.gradient(), torch.optim.Adam(net.parameters(), lr=3e-4)
    policy_state = None
    for source in row.epochs(train, seed):
        updates = tt.updates(
            net, source, nn.MSELoss(), gradient=gradient, policy_state=policy_state
        )
        for _ in updates:
            optimizer.step()
            optimizer.zero_grad()
            yield
        policy_state = updates.policy_state


def one_run(name: str, seed: int, splits: dict[str, Signals], updates: int) -> dict[str, Any]:
    """Trains one model and scores it on the way.

    `seconds` is processor time of the training alone.
    """
    torch.manual_seed(seed)
    net = tt.carry(nn.Sequential(nn.LSTM(1, HIDDEN), nn.Linear(HIDDEN, 2)))
    streams = {split: signals.whole() for split, signals in splits.items()}
    trained, seconds, curve = (
        training(net, ROWS[name], splits["train"], seed),
        0.0,
        list[dict[str, float]](),
    )
    for done in range(0, updates + 1, SCORED_EVERY):
        began = time.process_time()
        for _ in islice(trained, SCORED_EVERY if done else 0):
            pass
        seconds += time.process_time() - began
        found = {
            split: tt.evaluate(net, stream, nn.MSELoss()).loss * 100
            for split, stream in streams.items()
        }
        curve.append({"updates": done, "seconds": round(seconds, 3), **found})
        if done % (20 * SCORED_EVERY) == 0:
            print(name, seed, json.dumps(curve[-1]), flush=True)
    return {
        "row": name,
        "seed": seed,
        "gradient": repr(ROWS[name].gradient()),
        "machine": machine(),
        "curve": curve,
    }


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }


def finish(name: str, seed: int, options: argparse.Namespace) -> None:
    """Makes sure that a run is there; its file appears whole or not at all."""
    path: Path = options.out / f"{name}-{seed}.json"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(one_run(name, seed, load(options.data), options.updates))
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)


def finished(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs that are there, by row; those of one length only, or they would not compare."""
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for name in ROWS
        for path in sorted(folder.glob(f"{name}-[0-9].json"))
    ]
    lengths = {run["curve"][-1]["updates"] for run in runs}
    if len(lengths) != 1:
        raise SystemExit(
            f"{folder} holds runs of {sorted(lengths)} updates; expected one length, and at least"
            " one run"
        )
    by_row = {name: [run for run in runs if run["row"] == name] for name in ROWS}
    return {name: mine for name, mine in by_row.items() if mine}


def picked(run: dict[str, Any], budget: float) -> dict[str, Any]:
    """Scores of a run: at the last update, at the best validation loss, and at the time limit."""
    curve = run["curve"]
    return {
        **{key: run[key] for key in ("row", "seed", "gradient")},
        "ms_per_update": round(curve[-1]["seconds"] / curve[-1]["updates"] * 1e3, 3),
        "final": curve[-1],
        "best": min(curve, key=lambda point: point["valid"]),
        "timed": [point for point in curve if point["seconds"] <= budget][-1],
    }


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def scores(runs: list[dict[str, Any]], when: str) -> str:
    """Those on the training and on the test file."""
    return " / ".join(spread([run[when][split] for run in runs]) for split in ("train", "test"))


def table(folder: Path) -> None:
    """Prints the Markdown table and writes the results."""
    by_row = finished(folder)
    reference = by_row.get("windows", [run for runs in by_row.values() for run in runs])
    budget = statistics.mean(run["curve"][-1]["seconds"] for run in reference)
    rows = {name: [picked(run, budget) for run in runs] for name, runs in by_row.items()}
    updates = next(iter(rows.values()))[0]["final"]["updates"]
    heads = (
        f"after {updates:,} updates",
        "best on validation",
        f"after {budget:.0f} s of training",
    )
    print("| trained on | seeds | ms/update | paper | " + " | ".join(heads) + " |")
    print("|---|---|---|---|" + "---|" * len(heads))
    for name, runs in rows.items():
        paper = ROWS[name].paper
        cells = [
            ROWS[name].title,
            str(len(runs)),
            spread([run["ms_per_update"] for run in runs], 2),
        ]
        cells.append("" if paper is None else f"{paper[0]:g} / {paper[1]:g}")
        cells += [scores(runs, when) for when in ("final", "best", "timed")]
        print("| " + " | ".join(cells) + " |")
    found = {
        "machine": next(iter(by_row.values()))[0]["machine"],
        "budget_s": round(budget, 1),
        "runs": [run for runs in rows.values() for run in runs],
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--out", type=Path, default=Path("runs/rlc"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return table(options.out)
    if options.data is None:
        parser.error("DATA, the folder with the three files, is missing")
    torch.set_num_threads(1)
    for name in options.rows.split(","):
        for seed in options.seeds.split(","):
            finish(name, int(seed), options)
    return None


if __name__ == "__main__":
    main()
