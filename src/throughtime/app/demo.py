"""The demo: rare events that change the labels of thousands of later frames.

A machine is off or on. A pulse of ten frames, one every 2,000 frames or so, switches it; single
spikes, one every 30 frames or so, mean nothing. Each frame is labelled off or on, and one label in
twenty is wrong at random: no model can be right more often than 0.95, and one that remembers the
last pulse is.

Windows of 100 frames from a zero state seldom hold a pulse. A network trained on them learns from
almost nothing what to do with one, and nothing at all about keeping it.

Shapes: `T` frames.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from throughtime.app.audit_report import AuditReport
from throughtime.app.threads import one_thread
from throughtime.carry.carried import Carried, carry
from throughtime.diagnose import audit, reach
from throughtime.gradient import Exact, Objective, Truncated, Update
from throughtime.gradient._memory import measure_graph
from throughtime.gradient.schedule import in_bytes
from throughtime.metrics import Classification
from throughtime.predict import evaluate, predict
from throughtime.stream import Recording, Stream, windows
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import TableRecording
from throughtime.stream.rows import ArrayRows
from throughtime.updates import updates

MODES = ("off", "on")
PULSES = (-3.0, 3.0)  # height of the pulse that switches to each mode
SPIKES = (-2.0, 2.0)  # height of the spikes that mean nothing
WRONG_LABELS = 0.05
BEST = 1 - WRONG_LABELS  # reached by naming the mode of the last pulse
CHANCE = 1 / len(MODES)
STRIDE, LANES, HIDDEN, RATE = 100, 16, 32, 1e-2
HORIZONS, AUDITED, LAGS, TOLERANCE = (
    (10, 25, 50, STRIDE, 400),
    4_000,
    1_024,
    0.1,
)  # of the audit, in frames, and a bias
SINCE = (
    0,
    30,
    100,
    300,
    1_000,
    3_000,
)  # frames since the last pulse, edges of the bins of the picture
WINDOWS, STREAM = "windows from a zero state", "one unbroken stream"


@dataclass(frozen=True)
class Generated:
    """A recording made by the rules above, with what only its maker knows."""

    recording: TableRecording
    labels: Array
    since: Array  # frames since the last pulse


def generate(name: str, frames: int, seed: int) -> Generated:
    """A recording of `frames` frames, the same for the same seed."""
    random = np.random.default_rng(seed)
    gaps = 300 + random.exponential(1_700, size=frames // 300 + 2)
    starts = np.concatenate([[0], np.cumsum(gaps).astype(np.int64)])
    starts = starts[starts < frames - 10]
    lengths = np.diff(np.append(starts, frames))
    modes = (np.arange(len(starts)) + random.integers(2)) % 2
    signal = random.normal(0.0, 0.3, frames).astype(np.float32)
    spikes = np.flatnonzero(random.random(frames) < 1 / 30)
    signal[spikes] += random.choice(SPIKES, size=len(spikes))
    for start, mode in zip(starts, modes, strict=True):
        signal[start : start + 10] += PULSES[mode]
    mode = np.repeat(modes, lengths)
    labels = np.where(random.random(frames) < WRONG_LABELS, 1 - mode, mode)
    return Generated(
        TableRecording(name, ArrayRows("inputs", signal), ArrayRows("targets", labels)),
        labels,
        np.arange(frames) - np.repeat(starts, lengths),
    )


@dataclass
class Trained:
    """One network, and how it did on the unbroken test recording."""

    name: str
    seed: int
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    accuracy: float = float("nan")
    as_trained: float = float("nan")  # on the pieces it was trained on: windows, or the stream
    by_lag: list[float] = field(default_factory=list[float])
    predicted: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Whole:
    """What the exact gradient of all training recordings took, from their first frames to their last."""

    frames: int  # of each recording
    seconds: float
    chunk: int  # frames per forward call
    edges: int  # bytes of the states between chunks, and of the graph of one of them
    one_graph: int  # bytes that the graph of all frames would have


@dataclass(frozen=True)
class Demo:
    """What the demo found: one network of each way for every seed."""

    updates: int
    test: Generated
    networks: tuple[Trained, ...]
    audited: AuditReport  # of the first network trained on the stream
    whole: Whole  # of the same

    def of(self, name: str) -> list[Trained]:
        """The networks trained one way."""
        return [network for network in self.networks if network.name == name]


def run_demo(
    updates_each: int, seeds: Sequence[int], watch: Callable[[str, int, float], None]
) -> Demo:
    """Trains both ways at the same number of updates, for every seed, and runs all on the same
    unbroken recording.

    Args:
        updates_each: updates of each network.
        seeds: draw the weights and the order of the recordings.
        watch: called with what is trained, the update and the loss every 100 updates.
    """
    train: list[Recording] = [generate(f"train {i}", 20_000, i).recording for i in range(LANES)]
    test = generate("test", 60_000, 999)
    pieces: dict[str, tuple[list[Recording], list[Recording]]] = {
        WINDOWS: (list(windows(train, STRIDE)), list(windows([test.recording], STRIDE))),
        STREAM: (train, [test.recording]),
    }
    with one_thread():
        found = [
            _way(Trained(name, seed), *parts, test, updates_each, watch)
            for seed in seeds
            for name, parts in pieces.items()
        ]
        net = next(net for way, net in found if way.name == STREAM)
        audited, whole = _audited(net, train, updates_each), _whole(net, train)
    return Demo(updates_each, test, tuple(way for way, _ in found), audited, whole)


def _whole(net: Carried, train: list[Recording]) -> Whole:
    """One exact gradient of everything; the network is left as it was."""
    stream, loss_fn = Stream(train, LANES, STRIDE, seed=None), nn.CrossEntropyLoss()
    size = measure_graph(
        net, lambda steps: stream.read(0, steps), net.initial_state(LANES), Objective(loss_fn)
    )
    began = time.perf_counter()
    (update,) = updates(net, stream, loss_fn, gradient=Exact())
    seconds = time.perf_counter() - began
    net.zero_grad()
    chunk = stream.steps if update.adjoint_stats is None else update.adjoint_stats.chunk
    edges = size.total(stream.steps, chunk, stored=True)
    return Whole(stream.steps, seconds, chunk, round(edges), round(size.step * stream.steps))


def _audited(net: Carried, train: list[Recording], count: int) -> AuditReport:
    """How far the gradient of a trained network goes, and what cutting it costs."""
    stream = Stream(train, LANES, STRIDE, seed=None)
    costs = audit(net, stream, nn.CrossEntropyLoss(), HORIZONS, steps=AUDITED)
    goes = reach(net, stream, nn.CrossEntropyLoss(), max_lag=LAGS, anchors=2 * LANES, steps=AUDITED)
    return AuditReport("train", "generated recordings", count, stream.steps, TOLERANCE, costs, goes)


def _way(
    way: Trained,
    train: list[Recording],
    as_trained: list[Recording],
    test: Generated,
    count: int,
    watch: Callable[[str, int, float], None],
) -> tuple[Trained, Carried]:
    net = _trained(way, train, count, watch)
    outputs, _ = predict(net, test.recording)
    way.predicted = outputs.argmax(dim=1).numpy()
    right = way.predicted == test.labels
    way.accuracy = float(right.mean())
    bins = [
        right[(test.since >= low) & (test.since < high)]
        for low, high in pairwise((*SINCE, len(right) + 1))
    ]
    way.by_lag = [float(b.mean()) if len(b) else float("nan") for b in bins]
    pieces = Stream(as_trained, min(LANES, len(as_trained)), STRIDE, seed=None)
    way.as_trained = evaluate(net, pieces, metrics=Classification(MODES)).metrics["accuracy"]
    return way, net


def _trained(
    way: Trained, train: list[Recording], count: int, watch: Callable[[str, int, float], None]
) -> Carried:
    torch.manual_seed(way.seed)
    net = carry(
        nn.Sequential(OrderedDict(lstm=nn.LSTM(1, HIDDEN), readout=nn.Linear(HIDDEN, len(MODES))))
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    stream = Stream(train, LANES, STRIDE, seed=way.seed)
    losses = list[torch.Tensor]()
    for done, update in enumerate(islice(_epochs(net, stream), count), 1):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(update.loss)
        if done % 100 == 0 or done == count:
            way.losses.append((done, torch.stack(losses).mean().item()))
            watch(f"{way.name}, seed {way.seed}", done, way.losses[-1][1])
            losses.clear()
    return net


def _epochs(net: Carried, stream: Stream) -> Iterator[Update]:
    """Updates without end."""
    while True:
        yield from updates(net, stream, nn.CrossEntropyLoss(), gradient=Truncated(STRIDE))


def summary(demo: Demo) -> list[tuple[str, str, str]]:
    """The table of the demo: what, on the unbroken recording, on the pieces trained on."""
    rows = [
        (
            name,
            _spread([n.accuracy for n in demo.of(name)]),
            _spread([n.as_trained for n in demo.of(name)]),
        )
        for name in (WINDOWS, STREAM)
    ]
    return [
        *rows,
        ("best reachable, by construction", f"{BEST:.3f}", ""),
        ("chance", f"{CHANCE:.3f}", ""),
    ]


def credit(demo: Demo) -> str:
    """What the audit found, in a sentence."""
    reach, rows = demo.audited.reach, demo.audited.audit.rows
    bias = next(row.bias for row in rows if row.horizon == STRIDE)
    steps, cold = max(reach.contexts.items())
    return (
        f"credit on the stream: 99% of it goes back {reach.reach_99} frames or fewer, and cutting"
        f" it every {STRIDE} frames changes the gradient by {bias:.1%}; loss after {steps:,} frames"
        f" from a zero state {cold:.2f}, with the state carried {reach.loss:.2f}"
    )


def exact(demo: Demo) -> str:
    """What the exact gradient took, in a sentence."""
    whole = demo.whole
    return (
        f"the exact gradient of all {LANES} x {whole.frames:,} frames, credit from the last to the"
        f" first, took {whole.seconds:.1f} s and {in_bytes(whole.edges)}, {whole.chunk} frames at a"
        f" time; one graph of them would hold {in_bytes(whole.one_graph)}"
    )


def _spread(values: list[float]) -> str:
    """The mean, and from where to where."""
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def facts(demo: Demo) -> dict[str, Any]:
    """The figures of the demo, for machines."""
    kept = ("name", "seed", "accuracy", "as_trained", "by_lag")
    networks = [{key: getattr(network, key) for key in kept} for network in demo.networks]
    return {
        "updates": demo.updates,
        "best": BEST,
        "chance": CHANCE,
        "since": list(SINCE),
        "networks": networks,
        "audit": demo.audited.facts(),
        "exact": asdict(demo.whole),
    }
