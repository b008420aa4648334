"""The report of the demo: why a network trained on windows fails on the unbroken stream."""

import json
from pathlib import Path

import numpy as np

from throughtime import files
from throughtime.report.page import Figure, Page, Section, Table, Text, render
from throughtime.report.svg import Band, Mark, Series, lines, strip
from throughtime.run.demo import BEST, CHANCE, HIDDEN, LANES, MODES, RATE, SINCE, STRIDE, Demo, facts, summary

_SHOWN = 6_000


def write_report(demo: Demo, folder: Path) -> Path:
    """Writes `report.html` and `demo.json` into the folder; returns the page's path."""
    files.write_atomically(folder / "demo.json", json.dumps(facts(demo), indent=1).encode())
    lead = f"The same LSTM, {demo.updates:,} updates each: on windows from a zero state, and on one unbroken stream with the state carried."
    sections = [
        Section("What came out", _outcome(demo)),
        Section("Why", _why(demo)),
        Section("Learning", [_learning(demo)]),
        Section("The task", _task()),
    ]
    files.write_atomically(
        folder / "report.html", render(Page("throughtime: train on the stream you will run on", lead, sections)).encode()
    )
    return folder / "report.html"


def _outcome(demo: Demo) -> list[Table | Text]:
    table = Table(
        ["trained on", "accuracy on the unbroken recording", "accuracy on pieces as trained"],
        summary(demo),
        f"One test recording of {len(demo.test.recording):,} frames that neither network has seen; {demo.updates:,} updates each.",
        numeric=(1, 2),
    )
    return [
        table,
        Text(
            "Every frame is labelled with the mode of a machine. A pulse of ten frames switches the mode; then, for thousands of "
            "frames, nothing "
            "in the signal tells it. Whoever remembers the last pulse is right on 95 of 100 frames, and nobody can be right more "
            "often, because "
            "one label in twenty is wrong at random."
        ),
    ]


def _why(demo: Demo) -> list[Figure | Text]:
    frames = [*SINCE[1:], 2 * SINCE[-1]]
    by_lag = lines(
        [Series(way.name, [float(f) for f in frames], way.by_lag) for way in demo.ways],
        title="Accuracy by frames since the last pulse",
        description="; ".join(f"{w.name}: {w.by_lag[0]:.2f} right after a pulse, {w.by_lag[-1]:.2f} long after it" for w in demo.ways)
        + ".",
        x_label="frames since the last pulse (upper edge of each group)",
        y_label="accuracy",
        y_range=(0.0, 1.0),
        log_x=True,
        marks=(Mark(BEST, "best reachable", "y"), Mark(CHANCE, "chance", "y"), Mark(float(STRIDE), "window", "x")),
    )
    return [
        Text(
            f"A window of {STRIDE} frames seldom holds a pulse. In all the others the labels cannot be known from a zero state, so "
            "there is nothing "
            "to learn from them; and what it takes to keep a mode for longer than a window is never asked for. Run on the unbroken "
            "recording, the "
            "network's state goes where training never took it: what it does there is luck, and differs from seed to seed."
        ),
        Figure(by_lag, "How often each network names the label, by how long ago the pulse came that it depends on."),
        Figure(_stretch(demo), "The signal, the true labels, and what each network says, on the same stretch of the test recording."),
    ]


def _stretch(demo: Demo) -> str:
    """The stretch with most pulses."""
    recording, since, labels = demo.test.recording, demo.test.since, demo.test.labels
    starts = range(0, len(recording) - _SHOWN + 1, _SHOWN // 4)
    pulses = [int((since[s : s + _SHOWN] == 0).sum()) for s in starts]
    start = starts[int(np.argmax(pulses))]
    shown = slice(start, start + _SHOWN)
    right = {way.name: float((way.predicted[shown] == labels[shown]).mean()) for way in demo.ways}
    said = "; ".join(f"{name} is right on {share:.0%}" for name, share in right.items())
    return strip(
        recording.inputs[shown].tolist(),
        [Band("labels", labels[shown].tolist()), *(Band(way.name, way.predicted[shown].tolist()) for way in reversed(demo.ways))],
        title="A stretch of the test recording",
        description=f"Frames {start} to {start + _SHOWN} with {max(pulses)} pulses, the labels and both predictions: {said}.",
        x_label="frame",
        y_label="signal",
        classes=MODES,
        start=start,
    )


def _learning(demo: Demo) -> Figure:
    series = [Series(way.name, [float(u) for u, _ in way.losses], [loss for _, loss in way.losses]) for way in demo.ways]
    ends = "; ".join(f"{way.name} ends at {way.losses[-1][1]:.2f}" for way in demo.ways)
    svg = lines(series, title="Training loss", description=f"Mean loss per 100 updates: {ends}.", x_label="update", y_label="cross-entropy")
    return Figure(svg, f"Guessing costs {np.log(len(MODES)):.2f}. Almost no window holds what its labels depend on.")


def _task() -> list[Text]:
    return [
        Text(
            "Pulses come 300 frames apart at least and 2,000 on average, each ten frames long, its height telling the new mode. The "
            "signal is "
            f"otherwise normal noise of deviation 0.1. Both networks are an LSTM of {HIDDEN} units with a linear readout; Adam at "
            f"{RATE:g}, gradients "
            f"clipped to norm 1, {LANES} lanes, an update every {STRIDE} frames. They differ in one thing: the state entering each "
            "chunk is carried, "
            "or zero."
        )
    ]
