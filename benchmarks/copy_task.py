"""How far back credit must flow to learn to copy.

The first rows of Table C.1 of Aicher, Foti and Fox (UAI 2019, arXiv 1905.07473).

    python benchmarks/copy_task.py [--rows 5,10,15] [--seeds 0,1] [--out runs/copy_task]
    python benchmarks/copy_task.py --table [--out runs/copy_task]

A marker and nine of four letters are read, then written while blanks are read, over and over:
memory 10, 6 symbols. Network (linear, 2 LSTM layers of 50, linear), initial weights (uniform within
sqrt(3 / larger size), biases 0), SGD at sqrt(K) with weight decay 1e-5, clipping and 210 epochs
over 64 lanes of 4,000 steps are theirs (github.com/aicherc/adaptive_tbptt, MIT licence). Every
(row, seed) is a file under --out, written when it is finished and not run again. `--table` prints
what is there and writes `benchmarks/results/copy_task.json`. The score is the perplexity of all
1,000 steps of 64 test lanes from the zero state; the paper does not say of which epoch: the last
stands here beside the best on as many validation lanes.

What was taken from their code, not from the paper: K counts losses, and the window behind them is
2K - 1 steps, so that each loss sees back K steps at least (`original_buffer`); the gradient of the
mean loss is clipped at 1/K, that of the sum at 1; and lanes are shifted in phase, but lane i as
often as there are lanes behind it, each time with the same steps drawn in at its end, which breaks
the period in the last steps, some 600 of the first lane. A network without memory comes to 1.69 on
these lanes and would come to 1.87 on unbroken ones; the letters that were read before the first
step keep any network above 1.007.

What differs: the data are drawn anew, once for all rows and seeds; their copy starts a window of K
steps every 500 steps, with the state of K - 1 steps earlier or later, ours carries the state from
end to end; and they leave out the last steps that fill no stride, ours are an update of their own.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.gradient import Policy
from throughtime.updates import Updates

MEMORY, SYMBOLS, LANES, HIDDEN, EPOCHS = 10, 6, 64, 50, 210
STEPS = {"train": 4_000, "valid": 1_000, "test": 1_000}
RESULTS = Path(__file__).parent / "results" / "copy_task.json"


def fixed(losses: int) -> Callable[[], Policy]:
    """Their truncation at K = `losses`."""
    return lambda: tt.Truncated(stride=losses, horizon=2 * losses - 1)


@dataclass(frozen=True)
class Row:
    """A way to truncate, and the paper's test perplexity."""

    gradient: Callable[[], Policy]
    paper: float | None = None


ROWS = {
    "5": Row(fixed(5), 1.646),
    "10": Row(fixed(10), 1.036),
    "15": Row(fixed(15), 1.039),
    "20": Row(fixed(20), 1.040),
    "30": Row(fixed(30), 1.043),
    "adaptive": Row(
        lambda: tt.Adaptive(tolerance=0.1, min=19, max=76, stride=10, every=400, probe=640), 1.030
    ),
}


def sequences(steps: int, draw: np.random.Generator) -> tt.Stream:
    """Lanes of symbols to read and to write: 0 is the blank, 1 the marker."""
    symbols = np.zeros((2, steps + 4 * MEMORY, LANES), dtype=np.int64)
    for lane in range(LANES):
        for start in range(0, steps + 2 * MEMORY, 2 * MEMORY):
            middle, stop = start + MEMORY, start + 2 * MEMORY
            word = [1, *draw.integers(2, SYMBOLS, MEMORY - 1)]
            symbols[0, start:middle, lane] = symbols[1, middle:stop, lane] = word
        shift = draw.integers(2 * MEMORY)  # of all lanes, as there: see above
        symbols[:, :steps] = symbols[:, shift : steps + shift].copy()
    read, written = np.eye(SYMBOLS, dtype=np.float32)[symbols[0, :steps]], symbols[1, :steps]
    recordings = [{"inputs": read[:, lane], "targets": written[:, lane]} for lane in range(LANES)]
    return tt.Stream(recordings, lanes=LANES, chunk=steps, seed=None)


def network() -> nn.Sequential:
    """Theirs, with its initial weights."""
    net = nn.Sequential(
        nn.Linear(SYMBOLS, HIDDEN),
        nn.LSTM(HIDDEN, HIDDEN, num_layers=2),
        nn.Linear(HIDDEN, SYMBOLS),
    )
    for weight in net.parameters():
        bound = math.sqrt(3 / max(weight.shape)) if weight.dim() > 1 else 0.0
        nn.init.uniform_(weight, -bound, bound)
    return net


def epoch(optimizer: torch.optim.Optimizer, updates: Updates) -> Iterator[int]:
    """Trains on all lanes once.

    The learning rate and the clipping follow the number of losses of each update, which it yields.
    """
    weights: list[Tensor] = optimizer.param_groups[0]["params"]
    for update in updates:
        losses = update.chunk.steps
        optimizer.param_groups[0]["lr"] = math.sqrt(losses)
        nn.utils.clip_grad_norm_(weights, 1 / losses)
        optimizer.step()
        optimizer.zero_grad()
        yield losses


def one_run(name: str, seed: int, epochs: int) -> dict[str, Any]:
    """Trains one model and scores it after every epoch.

    `seconds` is processor time of the training alone.
    """
    draw = np.random.default_rng(0)
    streams = {split: sequences(steps, draw) for split, steps in STEPS.items()}
    torch.manual_seed(seed)
    net, gradient = tt.carry(network()), ROWS[name].gradient()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=1e-5)
    seconds, count, policy_state, curve = 0.0, 0, None, list[dict[str, float]]()
    for done in range(1, epochs + 1):
        began = time.process_time()
        updates = tt.updates(
            net,
            streams["train"],
            nn.CrossEntropyLoss(),
            gradient=gradient,
            policy_state=policy_state,
        )
        losses = list(epoch(optimizer, updates))
        policy_state = updates.policy_state
        seconds += time.process_time() - began
        count += len(losses)
        point = {
            "epochs": done,
            "updates": count,
            "seconds": round(seconds, 3),
            "losses_per_update": statistics.mean(losses),
        }
        for split in ("valid", "test"):
            point[split] = math.exp(tt.evaluate(net, streams[split], nn.CrossEntropyLoss()).loss)
        curve.append(point)
        if done % 5 == 0:
            print(name, seed, json.dumps(point), flush=True)
    return {
        "row": name,
        "seed": seed,
        "gradient": repr(gradient),
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


def finish(name: str, seed: int, out: Path, epochs: int) -> None:
    """Makes sure that a run is there; its file appears whole or not at all."""
    path = out / f"{name}-{seed}.json"
    if path.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(one_run(name, seed, epochs)), encoding="utf-8")
    path.with_suffix(".part").replace(path)


def finished(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs that are there, by row; those of one length only, or they would not compare."""
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for name in ROWS
        for path in sorted(folder.glob(f"{name}-[0-9].json"))
    ]
    lengths = {run["curve"][-1]["epochs"] for run in runs}
    if len(lengths) != 1:
        raise SystemExit(
            f"{folder} holds runs of {sorted(lengths)} epochs; expected one length, and at least"
            " one run"
        )
    by_row = {name: [run for run in runs if run["row"] == name] for name in ROWS}
    return {name: mine for name, mine in by_row.items() if mine}


def picked(run: dict[str, Any], budget: float) -> dict[str, Any]:
    """Scores of a run: at the last epoch, at the best validation loss, and at the time limit."""
    curve = run["curve"]
    return {
        **{key: run[key] for key in ("row", "seed", "gradient")},
        "final": curve[-1],
        "best": min(curve, key=lambda point: point["valid"]),
        "timed": [point for point in curve if point["seconds"] <= budget][-1],
    }


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def table(folder: Path) -> None:
    """Prints the Markdown table and writes the results.

    Equal time is what the quickest row needs for all its epochs.
    """
    by_row = finished(folder)
    budget = min(
        statistics.mean(run["curve"][-1]["seconds"] for run in runs) for runs in by_row.values()
    )
    rows = {name: [picked(run, budget) for run in runs] for name, runs in by_row.items()}
    epochs = next(iter(rows.values()))[0]["final"]["epochs"]
    heads = (f"after {epochs} epochs", "best on validation", f"after {budget:.0f} s of training")
    print("| K | seeds | updates | seconds | paper | " + " | ".join(heads) + " |")
    print("|---|---|---|---|---|" + "---|" * len(heads))
    for name, runs in rows.items():
        cells = [
            name,
            str(len(runs)),
            *(spread([run["final"][key] for run in runs], 0) for key in ("updates", "seconds")),
        ]
        cells.append("" if ROWS[name].paper is None else f"{ROWS[name].paper:.3f}")
        cells += [
            spread([run[when]["test"] for run in runs]) for when in ("final", "best", "timed")
        ]
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
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=Path("runs/copy_task"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table(options.out)
        return
    torch.set_num_threads(1)
    for name in options.rows.split(","):
        for seed in options.seeds.split(","):
            finish(name, int(seed), options.out, options.epochs)


if __name__ == "__main__":
    main()
