"""The demo: rare events that change the labels of thousands of later frames.

A machine is off or on. A pulse of ten frames, about every 2,000 frames, switches it. Single spikes,
about every 30 frames, mean nothing. Each frame is labelled off or on, and one label in twenty is
wrong at random. So no model can reach an accuracy above 0.95, and one that remembers the last pulse
reaches it.

Windows of 100 frames from a zero state seldom contain a pulse. A network trained on them learns
little about pulses, and nothing about keeping their effect.

Shapes: `T` frames.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from throughtime._device import seed_generators
from throughtime.app.audit import AuditReport
from throughtime.app.model import one_thread
from throughtime.app.report.page import DataTable
from throughtime.carry.carried import Carried, carry
from throughtime.diagnose import audit, reach, settling_time
from throughtime.evaluation import evaluate
from throughtime.gradient import Exact, Truncated, Update
from throughtime.metrics import Classification
from throughtime.predict import predict
from throughtime.stream import Recording, Stream, windows
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import TableRecording
from throughtime.updates import updates

MODES = ("off", "on")
PULSES = (-3.0, 3.0)  # height of the pulse that switches to each mode
SPIKES = (-2.0, 2.0)  # height of the spikes that mean nothing
WRONG_LABELS = 0.05
BEST = 1 - WRONG_LABELS  # reached by naming the mode of the last pulse
CHANCE = 1 / len(MODES)
STRIDE, LANES, HIDDEN, RATE = 100, 16, 32, 1e-2
HORIZONS = (10, 25, 50, STRIDE, 400)  # of the audit, in frames
AUDITED, LAGS, TOLERANCE = 4_000, 1_024, 0.1  # of the audit: frames, frames, a bias
SINCE = (0, 30, 100, 300, 1_000, 3_000)  # frames since the last pulse: edges of bins
WINDOWS, STREAM = "windows from a zero state", "one unbroken stream"


@dataclass(frozen=True)
class GeneratedRecording:
    """A generated recording, its labels, and the frames since the last pulse."""

    recording: TableRecording
    labels: Array
    since: Array


def generate(name: str, frames: int, seed: int) -> GeneratedRecording:
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
    return GeneratedRecording(
        TableRecording(name, ArrayRows("inputs", signal), ArrayRows("targets", labels)),
        labels,
        np.arange(frames) - np.repeat(starts, lengths),
    )


@dataclass
class DemoNetwork:
    """One network and its accuracy on the unbroken test recording.

    Attributes:
        name: what it was trained on.
        seed: of its weights and the order of its recordings.
        losses: updates, each with the mean loss before it.
        accuracy: on the unbroken recording.
        as_trained: on pieces like those of training: windows from a zero state, or the stream.
        by_lag: accuracy by the frames since the last pulse, in the bins of `SINCE`.
        predicted: the class of every frame.
    """

    name: str
    seed: int
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    accuracy: float = float("nan")
    as_trained: float = float("nan")
    by_lag: list[float] = field(default_factory=list[float])
    predicted: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class ExactCost:
    """The cost of the exact gradient of all training recordings.

    Attributes:
        frames: of each recording.
        seconds: that it took.
    """

    frames: int
    seconds: float


@dataclass(frozen=True)
class Demo:
    """The results: networks of every kind and seed, and measurements of one on the stream.

    The nets are those of the first seed, by the way they were trained.
    """

    updates: int
    test: GeneratedRecording
    networks: tuple[DemoNetwork, ...]
    audit_report: AuditReport
    exact_cost: ExactCost
    nets: Mapping[str, Carried]

    def of(self, name: str) -> list[DemoNetwork]:
        """The networks that were trained on this."""
        return [network for network in self.networks if network.name == name]


def run_demo(
    updates_each: int, seeds: Sequence[int], on_loss: Callable[[str, int, float], None]
) -> Demo:
    """Train on windows and on the stream with every seed; evaluate on one unbroken recording.

    Args:
        updates_each: updates of each network.
        seeds: draw the weights and the order of the recordings.
        on_loss: called with a network's name, the update and the loss every 100 updates.
    """
    train: list[Recording] = [generate(f"train {i}", 20_000, i).recording for i in range(LANES)]
    test = generate("test", 60_000, 999)
    pieces: dict[str, tuple[list[Recording], list[Recording]]] = {
        WINDOWS: (list(windows(train, STRIDE)), list(windows([test.recording], STRIDE))),
        STREAM: (train, [test.recording]),
    }
    networks: list[DemoNetwork] = []
    nets: dict[str, Carried] = {}
    with one_thread():
        for seed in seeds:
            for name, (to_train, to_score) in pieces.items():
                network = DemoNetwork(name, seed)
                net = _train(network, to_train, updates_each, on_loss)
                _evaluate(network, net, to_score, test)
                networks.append(network)
                nets.setdefault(name, net)
        report = _audit(nets[STREAM], train, updates_each)
        cost = _exact_cost(nets[STREAM], train)
    return Demo(updates_each, test, tuple(networks), report, cost, nets)


def _exact_cost(net: Carried, train: list[Recording]) -> ExactCost:
    """Measure one exact gradient of everything; the weights do not change."""
    stream, loss_fn = Stream(train, LANES, STRIDE, seed=None), nn.CrossEntropyLoss()
    started = time.perf_counter()
    for _ in updates(net, stream, loss_fn, gradient=Exact()):
        net.zero_grad()
    return ExactCost(stream.steps, time.perf_counter() - started)


def _audit(net: Carried, train: list[Recording], count: int) -> AuditReport:
    """Measure the reach of the gradient of a trained network, and the cost of truncating it."""
    stream, loss_fn = Stream(train, LANES, STRIDE, seed=None), nn.CrossEntropyLoss()
    costs = audit(net, stream, loss_fn, HORIZONS, steps=AUDITED)
    decay = reach(net, stream, loss_fn, max_lag=LAGS, anchors=2 * LANES, steps=AUDITED)
    settling = settling_time(net, stream, steps=AUDITED)
    return AuditReport(
        "train", "generated recordings", count, stream.steps, TOLERANCE, costs, decay, settling
    )


def _evaluate(
    network: DemoNetwork, net: Carried, pieces: list[Recording], test: GeneratedRecording
) -> None:
    """Compute the accuracies of a network."""
    outputs, _ = predict(net, test.recording)
    network.predicted = outputs.argmax(dim=1).numpy()
    correct = network.predicted == test.labels
    network.accuracy = float(correct.mean())
    bins = [
        correct[(test.since >= low) & (test.since < high)]
        for low, high in pairwise((*SINCE, len(correct) + 1))
    ]
    network.by_lag = [float(b.mean()) if len(b) else float("nan") for b in bins]
    stream = Stream(pieces, min(LANES, len(pieces)), STRIDE, seed=None)
    scores = evaluate(net, stream, metrics=Classification(MODES))
    network.as_trained = scores.metrics["accuracy"]


def _train(
    network: DemoNetwork,
    recordings: list[Recording],
    count: int,
    on_loss: Callable[[str, int, float], None],
) -> Carried:
    seed_generators(network.seed, torch.device("cpu"))
    net = carry(
        nn.Sequential(OrderedDict(lstm=nn.LSTM(1, HIDDEN), readout=nn.Linear(HIDDEN, len(MODES))))
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    stream = Stream(recordings, LANES, STRIDE, seed=network.seed)
    losses = list[torch.Tensor]()
    for done, update in enumerate(islice(_epochs(net, stream), count), 1):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(update.loss)
        if done % 100 == 0 or done == count:
            network.losses.append((done, torch.stack(losses).mean().item()))
            on_loss(f"{network.name}, seed {network.seed}", done, network.losses[-1][1])
            losses.clear()
    return net


def _epochs(net: Carried, stream: Stream) -> Iterator[Update]:
    """Updates without end."""
    while True:
        yield from updates(net, stream, nn.CrossEntropyLoss(), gradient=Truncated(STRIDE))


def results_table(demo: Demo) -> DataTable:
    """The accuracy of each way to train, the best one, and chance."""
    rows: list[tuple[str, str, str]] = []
    for name in (WINDOWS, STREAM):
        networks = demo.of(name)
        pieces = spread([n.as_trained for n in networks])
        rows.append((name, spread([n.accuracy for n in networks]), pieces))
    rows += [
        ("best reachable, by construction", f"{BEST:.3f}", ""),
        ("chance", f"{CHANCE:.3f}", ""),
    ]
    count = len(demo.of(STREAM))
    seeds = "" if count == 1 else f" Mean of {count} seeds, with the worst and the best."
    return DataTable(
        ["trained on", "accuracy on the unbroken recording", "accuracy on pieces as trained"],
        rows,
        f"One test recording of {len(demo.test.recording):,} frames, new to all networks.{seeds}",
        numeric=(1, 2),
    )


def credit(demo: Demo) -> str:
    """The reach of the gradient and the cost of truncating it, in a sentence."""
    reach, rows = demo.audit_report.reach, demo.audit_report.audit.rows
    bias = next(row.bias for row in rows if row.horizon == STRIDE)
    steps, cold = max(reach.contexts.items())
    return (
        f"credit on the stream: 99% of it goes back {reach.shares[0.99]} frames or fewer, and"
        f" cutting it every {STRIDE} frames changes the gradient by {bias:.1%}; loss after"
        f" {steps:,} frames from a zero state {cold:.2f}, with the state carried {reach.loss:.2f}"
    )


def exact(demo: Demo) -> str:
    """The cost of the exact gradient, in a sentence."""
    cost = demo.exact_cost
    return (
        f"the exact gradient of all {LANES} x {cost.frames:,} frames, credit from the last to the"
        f" first, took {cost.seconds:.1f} s"
    )


def spread(values: list[float]) -> str:
    """The mean and the range."""
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def facts(demo: Demo) -> dict[str, Any]:
    """The results as plain values."""
    names = ("name", "seed", "accuracy", "as_trained", "by_lag")
    networks = [{key: getattr(network, key) for key in names} for network in demo.networks]
    return {
        "updates": demo.updates,
        "best": BEST,
        "chance": CHANCE,
        "since": list(SINCE),
        "networks": networks,
        "audit": demo.audit_report.facts(),
        "exact": asdict(demo.exact_cost),
    }
