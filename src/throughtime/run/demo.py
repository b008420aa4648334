"""The demo: rare events that change the labels of thousands of later frames.

A machine is in one of three modes. A pulse of ten frames, one every 2,000 frames or so, switches it; between pulses
the signal is noise, whatever the mode. Each frame is labelled with the mode, and one label in twenty is wrong at
random: no model can be right more often than 0.95, and one that remembers the last pulse is.

Windows of 100 frames from a zero state seldom hold a pulse. A network trained on them learns from almost nothing
what to do with one, and nothing at all about keeping it.

Shapes: `T` frames.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from throughtime.carry import Carried, carry
from throughtime.gradient import Truncated
from throughtime.predict import evaluate, predict
from throughtime.score import Classification
from throughtime.stream import Recording, Stream, windows
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Arrays
from throughtime.updates import updates

MODES = ("idle", "slow", "fast")
PULSES = (-3.0, 3.0, 6.0)  # height of the pulse that switches to each mode
WRONG_LABELS = 0.05
BEST = 1 - WRONG_LABELS  # reached by naming the mode of the last pulse
CHANCE = 1 / len(MODES)
STRIDE, LANES, HIDDEN, RATE = 100, 16, 32, 1e-2
SINCE = (0, 30, 100, 300, 1_000, 3_000)  # frames since the last pulse, edges of the bins of the picture


@dataclass(frozen=True)
class Generated:
    """A recording made by the rules above, with what only its maker knows."""

    recording: Arrays
    labels: Array
    since: Array  # frames since the last pulse


def generate(name: str, frames: int, seed: int) -> Generated:
    """A recording of `frames` frames, the same for the same seed."""
    random = np.random.default_rng(seed)
    gaps = 300 + random.exponential(1_700, size=frames // 300 + 2)
    starts = np.concatenate([[0], np.cumsum(gaps).astype(np.int64)])
    starts = starts[starts < frames - 10]
    lengths = np.diff(np.append(starts, frames))
    steps = random.integers(1, len(MODES), size=len(starts))
    modes = np.cumsum(steps) % len(MODES)
    signal = random.normal(0.0, 0.1, frames).astype(np.float32)
    for start, mode in zip(starts, modes, strict=True):
        signal[start : start + 10] += PULSES[mode]
    mode = np.repeat(modes, lengths)
    wrong = random.random(frames) < WRONG_LABELS
    labels = np.where(wrong, (mode + random.integers(1, len(MODES), frames)) % len(MODES), mode)
    return Generated(Arrays(name, signal, labels), labels, np.arange(frames) - np.repeat(starts, lengths))


@dataclass
class Trained:
    """One way of training, and how it did on the unbroken test recording."""

    name: str
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    accuracy: float = float("nan")
    as_trained: float = float("nan")  # on the pieces it was trained on: windows, or the stream
    by_lag: list[float] = field(default_factory=list[float])
    predicted: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Demo:
    """What the demo found."""

    updates: int
    test: Generated
    ways: tuple[Trained, ...]


def run_demo(updates_each: int, seed: int, watch: Callable[[str, int, float], None]) -> Demo:
    """Trains both ways at the same number of updates and runs both on the same unbroken recording.

    Args:
        updates_each: updates of each way.
        seed: draws recordings and weights.
        watch: called with the way's name, the update and the loss every 100 updates.
    """
    train: list[Recording] = [generate(f"train {i}", 20_000, 1_000 * seed + i).recording for i in range(LANES)]
    test = generate("test", 60_000, 1_000 * seed + 999)
    pieces: dict[str, tuple[list[Recording], list[Recording]]] = {
        "windows from a zero state": (list(windows(train, STRIDE)), list(windows([test.recording], STRIDE))),
        "one unbroken stream": (train, [test.recording]),
    }
    ways = tuple(_way(name, *parts, test, updates_each, seed, watch) for name, parts in pieces.items())
    return Demo(updates_each, test, ways)


def _way(
    name: str,
    train: list[Recording],
    as_trained: list[Recording],
    test: Generated,
    count: int,
    seed: int,
    watch: Callable[[str, int, float], None],
) -> Trained:
    way = Trained(name)
    net = _trained(way, train, count, seed, watch)
    outputs, _ = predict(net, test.recording)
    way.predicted = outputs.argmax(dim=1).numpy()
    right = way.predicted == test.labels
    way.accuracy = float(right.mean())
    edges = (*SINCE, len(right) + 1)
    bins = [right[(test.since >= low) & (test.since < high)] for low, high in pairwise(edges)]
    way.by_lag = [float(b.mean()) if len(b) else float("nan") for b in bins]
    pieces = Stream(as_trained, min(LANES, len(as_trained)), STRIDE, seed=None)
    way.as_trained = evaluate(net, pieces, score=Classification(MODES)).figures["accuracy"]
    return way


def _trained(way: Trained, train: list[Recording], count: int, seed: int, watch: Callable[[str, int, float], None]) -> Carried:
    torch.manual_seed(seed)
    net = carry(nn.Sequential(nn.LSTM(1, HIDDEN), nn.Linear(HIDDEN, len(MODES))))
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    stream = Stream(train, LANES, STRIDE, seed=seed)
    done, losses = 0, list[torch.Tensor]()
    while done < count:
        for update in updates(net, stream, nn.CrossEntropyLoss(), gradient=Truncated(STRIDE)):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            losses.append(update.loss)
            if done % 100 == 0 or done == count:
                way.losses.append((done, torch.stack(losses).mean().item()))
                watch(way.name, done, way.losses[-1][1])
                losses.clear()
            if done == count:
                break
    return net


def summary(demo: Demo) -> list[tuple[str, str, str]]:
    """The table of the demo: what, on the unbroken recording, on the pieces trained on."""
    rows = [(way.name, f"{way.accuracy:.3f}", f"{way.as_trained:.3f}") for way in demo.ways]
    return [*rows, ("best reachable, by construction", f"{BEST:.3f}", ""), ("chance", f"{CHANCE:.3f}", "")]


def facts(demo: Demo) -> dict[str, Any]:
    """The figures of the demo, for machines."""
    ways = {way.name: {"accuracy": way.accuracy, "as_trained": way.as_trained, "by_lag": way.by_lag} for way in demo.ways}
    return {"updates": demo.updates, "best": BEST, "chance": CHANCE, "since": list(SINCE), "ways": ways}
