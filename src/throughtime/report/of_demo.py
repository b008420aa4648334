"""The report of the demo: why a network trained on windows fails on the unbroken stream."""

import json
from pathlib import Path

import numpy as np

from throughtime import files
from throughtime.report.page import Figure, Page, Section, Table, Text, render
from throughtime.report.svg import Band, Mark, Series, lines, strip
from throughtime.run.demo import BEST, CHANCE, MODES, SINCE, STRIDE, Demo, facts, summary

_SHOWN = 6_000


def write_report(demo: Demo, folder: Path) -> Path:
    """Writes `report.html` and `demo.json` into the folder; returns the page's path."""
    files.write_atomically(folder / "demo.json", json.dumps(facts(demo), indent=1).encode())
    page = Page(
        "throughtime: train on the stream you will run on",
        f"The same LSTM, trained with the same {demo.updates:,} updates: on windows from a zero state, and on one unbroken stream with the state carried.",
        [
            Section("What came out", _outcome(demo)),
            Section("Why", _why(demo)),
            Section("Learning", [_learning(demo)]),
            Section("The task", _task()),
        ],
    )
    files.write_atomically(folder / "report.html", render(page).encode())
    return folder / "report.html"


def _outcome(demo: Demo) -> list[Table | Text]:
    table = Table(
        ["trained on", "accuracy on the unbroken recording", "accuracy on pieces as trained"], summary(demo),
        f"One test recording of {len(demo.test.recording):,} frames that neither network has seen; {demo.updates:,} updates each.", numeric=(1, 2),
    )  # fmt: skip
    return [table, Text("Every frame is labelled with the mode of a machine. A pulse of ten frames switches the mode; then, for thousands of frames, nothing in the signal tells it. Whoever remembers the last pulse is right on 95 of 100 frames, and nobody can be right more often, because one label in twenty is wrong at random.")]  # fmt: skip


def _why(demo: Demo) -> list[Figure | Text]:
    frames = [*SINCE[1:], 2 * SINCE[-1]]
    series = [Series(way.name, [float(f) for f in frames], way.by_lag) for way in demo.ways]
    by_lag = lines(
        series, title="Accuracy by frames since the last pulse",
        description="; ".join(f"{way.name}: {way.by_lag[0]:.2f} right after a pulse, {way.by_lag[-1]:.2f} long after it" for way in demo.ways) + ".",
        x_label="frames since the last pulse (upper edge of each group)", y_label="accuracy", y_range=(0.0, 1.0), log_x=True,
        marks=(Mark(BEST, "best reachable", "y"), Mark(CHANCE, "chance", "y"), Mark(float(STRIDE), "window", "x")),
    )  # fmt: skip
    return [
        Text(f"A window of {STRIDE} frames seldom holds a pulse. In all the others the labels cannot be known from a zero state, so there is nothing to learn from them; and what it takes to keep a mode for longer than a window is never asked for. Run on the unbroken recording, the network's state goes where training never took it."),
        Figure(by_lag, "The network trained on the stream knows the mode however long ago it was set."),
        Figure(_stretch(demo), "The signal, the true labels, and what each network says, on the same stretch of the test recording."),
    ]  # fmt: skip


def _stretch(demo: Demo) -> str:
    """The stretch with most pulses."""
    recording, since = demo.test.recording, demo.test.since
    starts = range(0, len(recording) - _SHOWN + 1, _SHOWN // 4)
    pulses = [int((since[s : s + _SHOWN] == 0).sum()) for s in starts]
    start = starts[int(np.argmax(pulses))]
    shown = slice(start, start + _SHOWN)
    assert recording.targets is not None
    bands = [
        Band("labels", recording.targets[shown].tolist()),
        *(Band(way.name, way.predicted[shown].tolist()) for way in reversed(demo.ways)),
    ]
    return strip(
        recording.inputs[shown].tolist(), bands, title="A stretch of the test recording",
        description=f"Frames {start} to {start + _SHOWN} with {max(pulses)} pulses. The network trained on the stream follows the labels, the one trained on windows does not.",
        x_label="frame", y_label="signal", classes=MODES, start=start,
    )  # fmt: skip


def _learning(demo: Demo) -> Figure:
    series = [Series(way.name, [float(u) for u, _ in way.losses], [loss for _, loss in way.losses]) for way in demo.ways]
    svg = lines(
        series,
        title="Training loss",
        description="Mean training loss per 100 updates of both networks.",
        x_label="update",
        y_label="cross-entropy",
    )
    return Figure(svg, "On windows the loss stays near that of guessing: almost no window holds what its labels depend on.")


def _task() -> list[Text]:
    return [Text("Pulses come 300 frames apart at least and 2,000 on average, each ten frames long, its height telling the new mode. The signal is otherwise normal noise of deviation 0.1. Both networks are an LSTM of 32 units with a linear readout; Adam at 0.01, gradients clipped to norm 1, 16 lanes, an update every 100 frames. They differ in one thing: the state entering each chunk is carried, or zero.")]  # fmt: skip
