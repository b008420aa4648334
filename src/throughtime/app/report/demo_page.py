"""The report of the demo: why a network trained on windows fails on the unbroken stream."""

import json
from pathlib import Path

import numpy as np

from throughtime._files import write_atomically
from throughtime.app.demo import (
    BEST,
    CHANCE,
    HIDDEN,
    LANES,
    MODES,
    RATE,
    SINCE,
    STREAM,
    STRIDE,
    WINDOWS,
    Demo,
    Trained,
    exact,
    facts,
    summary,
)
from throughtime.app.report import audit_section
from throughtime.app.report.charts import Band, Mark, Series, lines, strip
from throughtime.app.report.page import Figure, Page, Section, Table, Text, render

_SHOWN = 6_000


def write_report(demo: Demo, folder: Path) -> Path:
    """Writes `report.html` and `demo.json` into the folder; returns the page's path."""
    write_atomically(folder / "demo.json", json.dumps(facts(demo), indent=1).encode())
    lead = (
        f"The same LSTM, {demo.updates:,} updates each: on windows from a zero state, and on one"
        " unbroken stream with the state carried."
    )
    sections = [
        Section("What came out", _outcome(demo)),
        Section("Why", _why(demo)),
        Section("Where the gradient goes", _gradient(demo)),
        Section("Learning", [_learning(demo)]),
        Section("The task", _task()),
    ]
    write_atomically(
        folder / "report.html",
        render(Page("throughtime: train on the stream you will run on", lead, sections)).encode(),
    )
    return folder / "report.html"


def _outcome(demo: Demo) -> list[Table | Text]:
    count = len(demo.of(STREAM))
    seeds = "" if count == 1 else f"; mean of {count} seeds, and from the worst to the best"
    caption = (
        f"One test recording of {len(demo.test.recording):,} frames that no network has"
        f" seen{seeds}."
    )
    return [
        Table(
            ["trained on", "accuracy on the unbroken recording", "accuracy on pieces as trained"],
            summary(demo),
            caption,
            numeric=(1, 2),
        ),
        Text(
            "Every frame is labelled: the machine is off or on. A pulse of ten frames switches it;"
            " then, for thousands of frames, nothing in the signal tells. Whoever remembers the"
            " last pulse is right on 95 of 100 frames, and nobody can be right more often, because"
            " one label in twenty is wrong at random."
        ),
    ]


def _why(demo: Demo) -> list[Figure | Text]:
    by_lag = lines(
        [
            _line(network, [float(f) for f in (*SINCE[1:], 2 * SINCE[-1])], network.by_lag)
            for network in _ordered(demo)
        ],
        title="Accuracy by frames since the last pulse",
        description="; ".join(
            f"{_called(n)}: {n.by_lag[0]:.2f} right after a pulse, {n.by_lag[-1]:.2f} long after it"
            for n in demo.networks
        )
        + ".",
        x_label="frames since the last pulse (upper edge of each group)",
        y_label="accuracy",
        y_range=(0.0, 1.0),
        log_x=True,
        marks=(
            Mark(BEST, "best reachable", "y"),
            Mark(CHANCE, "chance", "y"),
            Mark(float(STRIDE), "window", "x"),
        ),
    )
    return [
        Text(
            f"A window of {STRIDE} frames seldom holds a pulse. In all the others the labels cannot"
            " be known from a zero state, so there is nothing to learn from them; and what it"
            " takes to keep a mode for longer than a window is never asked for. Run on the"
            " unbroken recording, the network's state goes where training never took it: what it"
            " does there is luck, and differs from seed to seed."
        ),
        Figure(
            by_lag,
            "How often each network names the label, by how long ago the pulse came that it"
            " depends on.",
        ),
        Figure(
            _stretch(demo),
            "The signal, the true labels, and what the middle network of each way says, on the same"
            " stretch of the test recording.",
        ),
    ]


def _gradient(demo: Demo) -> list[Figure | Text | Table]:
    found, reach = demo.audited, demo.audited.reach
    own = next(row for row in found.audit.rows if row.horizon == STRIDE)
    said = (
        f"The networks were trained with credit cut every {STRIDE} frames, which is short beside a"
        " memory of thousands. What that costs is measured on one of them (stream, seed"
        f" {demo.of(STREAM)[0].seed}), against the exact gradient: cut so, the gradient changes by"
        f" {own.bias:.1%}, and all but a hundredth of the credit for a frame's loss lies within the"
        f" last {reach.reach_99} frames."
    )
    steps, cold = max(reach.contexts.items())
    state = (
        "It is the state that holds the memory. From a zero state the same network has a loss of"
        f" {cold:.2f} even after {steps:,} frames; with the state carried from the start of the"
        f" recording, {reach.loss:.2f}. So on this task a longer horizon would gain nothing, and a"
        " carried state gains everything. Other tasks need both: throughtime audit RUN draws these"
        " pictures of a run of your own."
    )
    pictures = audit_section.pictures(found, own)
    said += f" And {exact(demo)}: that is tt.Exact, for when cutting is what goes wrong."
    return [
        Text(f"{said}\n\n{state if reach.memory_used else found.warning()}"),
        *pictures,
        audit_section.table(found.audit),
    ]


def _ordered(demo: Demo) -> list[Trained]:
    return [*demo.of(WINDOWS), *demo.of(STREAM)]


def _called(network: Trained) -> str:
    return f"{'windows' if network.name == WINDOWS else 'stream'}, seed {network.seed}"


def _line(network: Trained, x: list[float], y: list[float]) -> Series:
    return Series(_called(network), x, y)


def _stretch(demo: Demo) -> str:
    """The stretch with most pulses, as the network of middle accuracy of each way sees it."""
    recording, since, labels = demo.test.recording, demo.test.since, demo.test.labels
    starts = range(0, len(recording) - _SHOWN + 1, _SHOWN // 4)
    pulses = [int((since[s : s + _SHOWN] == 0).sum()) for s in starts]
    start = starts[int(np.argmax(pulses))]
    shown = slice(start, start + _SHOWN)
    pair = [
        sorted(demo.of(way), key=lambda network: network.accuracy)[len(demo.of(way)) // 2]
        for way in (STREAM, WINDOWS)
    ]
    said = "; ".join(
        f"{_called(n)}, is right on {float((n.predicted[shown] == labels[shown]).mean()):.0%}"
        for n in pair
    )
    return strip(
        recording.inputs.read(shown.start, shown.stop).tolist(),
        [
            Band("labels", labels[shown].tolist()),
            *(Band(_called(n), n.predicted[shown].tolist()) for n in pair),
        ],
        title="A stretch of the test recording",
        description=(
            f"Frames {start} to {start + _SHOWN} with {max(pulses)} pulses, the labels and two"
            f" predictions: {said}."
        ),
        x_label="frame",
        y_label="signal",
        classes=MODES,
        start=start,
    )


def _learning(demo: Demo) -> Figure:
    series = [
        _line(n, [float(u) for u, _ in n.losses], [loss for _, loss in n.losses])
        for n in _ordered(demo)
    ]
    ends = "; ".join(f"{_called(n)}, ends at {n.losses[-1][1]:.2f}" for n in _ordered(demo))
    svg = lines(
        series,
        title="Training loss",
        description=f"Mean loss per 100 updates: {ends}.",
        x_label="update",
        y_label="cross-entropy",
    )
    return Figure(
        svg,
        f"Guessing costs {np.log(len(MODES)):.2f}. Almost no window holds what its labels"
        " depend on.",
    )


def _task() -> list[Text]:
    return [
        Text(
            "Pulses come 300 frames apart at least and 2,000 on average, each ten frames long and"
            " 3 high, up for on and down for off. Single frames, one in 30, spike by 2 up or down"
            " and mean nothing; the rest is normal noise of deviation 0.3. All networks are an"
            f" LSTM of {HIDDEN} units with a linear readout; Adam at {RATE:g}, gradients clipped to"
            f" norm 1, {LANES} lanes, an update every {STRIDE} frames. They differ in one thing:"
            " the state entering each chunk is carried, or zero."
        )
    ]
