"""The same LSTM, trained on windows and on the unbroken stream: `make demo`, or `python demo.py`.

A machine is off or on. A pulse of ten steps, about every 2,000 steps, switches it. Single spikes,
about every 30 steps, mean nothing. Each step is labelled off or on, and one label in twenty is
wrong at random. So no model can reach an accuracy above 0.95, and one that remembers the last pulse
reaches it.

Windows of 100 steps from a zero state seldom contain a pulse. A network trained on them learns
little about pulses, and nothing about keeping their effect.

    python examples/demo.py            # three seeds
    python examples/demo.py --short    # one seed: to see that everything works

Shapes: `T` steps.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import throughtime as tt

PULSES = (-3.0, 3.0)  # height of the pulse that switches off and on
SPIKES = (-2.0, 2.0)  # height of the spikes that mean nothing
WRONG_LABELS = 0.05
BEST, CHANCE = 1 - WRONG_LABELS, 0.5  # BEST: reached by naming the mode of the last pulse
STRIDE, LANES, HIDDEN, RATE = 100, 16, 32, 1e-2
TRAINED, TESTED, TEST_SEED = 20_000, 60_000, 999  # steps of a recording
SHOWN = slice(20_000, 38_000)
WINDOWS, STREAM = "windows from a zero state", "one unbroken stream"


@dataclass(frozen=True)
class Task:
    """A generated recording: its signal, its labels, and the steps since the last pulse."""

    inputs: np.ndarray
    labels: np.ndarray
    since: np.ndarray

    @property
    def recording(self) -> dict[str, np.ndarray]:
        """As `tt.Stream` takes it."""
        return {"inputs": self.inputs, "targets": self.labels}


@dataclass(frozen=True)
class Result:
    """A trained network, its class of every step of the test recording, and its accuracy."""

    trained_on: str
    seed: int
    net: Any
    predicted: np.ndarray
    accuracy: float


def generate(steps: int, seed: int) -> Task:
    """A recording of `steps` steps, the same for the same seed."""
    random = np.random.default_rng(seed)
    gaps = 300 + random.exponential(1_700, size=steps // 300 + 2)
    starts = np.concatenate([[0], np.cumsum(gaps).astype(np.int64)])
    starts = starts[starts < steps - 10]
    lengths = np.diff(np.append(starts, steps))
    modes = (np.arange(len(starts)) + random.integers(2)) % 2
    signal = random.normal(0.0, 0.3, steps).astype(np.float32)
    spikes = np.flatnonzero(random.random(steps) < 1 / 30)
    signal[spikes] += random.choice(SPIKES, size=len(spikes))
    for start, mode in zip(starts, modes, strict=True):
        signal[start : start + 10] += PULSES[mode]
    mode = np.repeat(modes, lengths)
    labels = np.where(random.random(steps) < WRONG_LABELS, 1 - mode, mode)
    return Task(signal[:, None], labels, np.arange(steps) - np.repeat(starts, lengths))


def train(name: str, seed: int, count: int, report: bool = True) -> Any:
    """A network after `count` updates on windows or on the stream."""
    torch.manual_seed(seed)
    net = tt.carry(nn.Sequential(nn.LSTM(1, HIDDEN), nn.Linear(HIDDEN, 2)))
    recordings: Any = [generate(TRAINED, i).recording for i in range(LANES)]
    if name == WINDOWS:
        recordings = list(tt.windows(recordings, STRIDE))
    stream = tt.Stream(recordings, lanes=LANES, chunk=STRIDE, seed=seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)

    def epochs() -> Iterator[Any]:
        while True:
            yield from tt.updates(
                net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(stride=STRIDE)
            )

    for done, update in enumerate(islice(epochs(), count), 1):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if report and (done % 500 == 0 or done == count):
            loss = f"loss {float(update.loss):.4f}"
            print(f"  {name}, seed {seed}: update {done}/{count}  {loss}", flush=True)
    return net


def run(count: int = 1_000, seeds: Sequence[int] = (0, 1, 2), report: bool = True) -> list[Result]:
    """Train both ways with every seed, and play the unbroken test recording."""
    torch.set_num_threads(1)  # the net is too small for more
    test, results = generate(TESTED, TEST_SEED), list[Result]()
    for seed in seeds:
        for name in (WINDOWS, STREAM):
            net = train(name, seed, count, report)
            outputs = cast("torch.Tensor", tt.predict(net, test.inputs)[0])
            predicted = outputs.argmax(dim=1).numpy()
            accuracy = float((predicted == test.labels).mean())
            results.append(Result(name, seed, net, predicted, accuracy))
    return results


def draw(results: Sequence[Result], path: Path) -> None:
    """The signal, and what the first network of each kind predicts."""
    test, figure = generate(TESTED, TEST_SEED), Figure((10, 5), layout="constrained")
    rows: dict[str, np.ndarray] = {"signal": test.inputs[:, 0], "label": test.labels}
    rows |= {f"trained on {r.trained_on}": r.predicted for r in results[:2]}
    panels = figure.subplots(len(rows), 1, sharex=True)
    for axes, (name, values) in zip(panels, rows.items(), strict=True):
        axes.plot(np.arange(TESTED)[SHOWN], values[SHOWN], linewidth=0.6)
        axes.set_title(name, loc="left", fontsize=10)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the accuracies and what truncating costs, draw, and write the figures."""
    parser = argparse.ArgumentParser(description="Train on windows and on the unbroken stream.")
    parser.add_argument("--short", action="store_true", help="one seed")
    parser.add_argument("--updates", type=int, default=1_000, help="of each network")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the picture")
    options = parser.parse_args(arguments)
    if options.updates < 1:
        parser.error(f"--updates {options.updates}: expected at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    print(
        "Rare pulses switch a machine off and on. The same LSTM, trained in two ways:", flush=True
    )
    results = run(options.updates, range(1 if options.short else 3))
    print("accuracy on one unbroken recording, median of the seeds:")
    for name in (WINDOWS, STREAM):
        scores = [r.accuracy for r in results if r.trained_on == name]
        print(f"  {name:28} {median(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})")
    print(f"  {'best possible':28} {BEST:.3f}\n  {'chance':28} {CHANCE:.3f}")
    recordings = [generate(TRAINED, i).recording for i in range(LANES)]
    stream = tt.Stream(recordings, lanes=LANES, chunk=STRIDE, seed=None)
    net = next(r.net for r in results if r.trained_on == STREAM)
    cost = tt.audit(net, stream, nn.CrossEntropyLoss(), [STRIDE], steps=4_000).rows[0].bias
    print(f"cutting the credit every {STRIDE} steps changes the gradient by {cost:.1%}")
    kept = [{"trained_on": r.trained_on, "seed": r.seed, "accuracy": r.accuracy} for r in results]
    (options.out / "demo.json").write_text(
        json.dumps({"updates": options.updates, "networks": kept})
    )
    draw(results, options.out / "demo.svg")
    print(f"the picture is {options.out / 'demo.svg'}")


if __name__ == "__main__":
    main()
