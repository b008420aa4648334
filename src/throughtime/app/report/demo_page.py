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
    DemoNetwork,
    exact,
    facts,
    results_table,
)
from throughtime.app.report.audit_section import audit_figures, audit_table, settling_parts
from throughtime.app.report.charts import Band, Mark, Series, lines, strip
from throughtime.app.report.page import Figure, Page, Paragraphs, Part, Section, render

_SHOWN = 6_000


def write_report(demo: Demo, folder: Path) -> Path:
    """Write `report.html` and `demo.json` into the folder; return the page's path."""
    write_atomically(folder / "demo.json", json.dumps(facts(demo), indent=1).encode())
    sections = [
        Section("Results", _results(demo)),
        Section("Why", _explanation(demo)),
        Section("Where the gradient goes", _gradient(demo)),
        Section("After a cold start", settling_parts(demo.audit_report.settling)),
        Section("Learning", [_training_loss(demo)]),
        Section("The task", [_task()]),
    ]
    page = Page(
        "throughtime: train on the stream you will run on",
        f"The same LSTM, {demo.updates:,} updates each: on windows from a zero state, and on one"
        " unbroken stream.",
        sections,
    )
    path = folder / "report.html"
    write_atomically(path, render(page).encode())
    return path


def _results(demo: Demo) -> list[Part]:
    return [
        results_table(demo),
        Paragraphs(
            "Every frame has a label: the machine is off or on. A pulse of ten frames switches it."
            " For the next thousands of frames nothing in the signal shows the mode, so the network"
            " must remember the last pulse. With it, 95 of 100 frames can be labelled correctly."
            " More is impossible, because one label in twenty is wrong at random."
        ),
    ]


def _explanation(demo: Demo) -> list[Part]:
    since = [*SINCE[1:], 2 * SINCE[-1]]
    accuracy = "; ".join(
        f"{_label(n)}: {n.by_lag[0]:.2f} right after a pulse, {n.by_lag[-1]:.2f} long after it"
        for n in demo.networks
    )
    by_lag = lines(
        [Series(_label(n), since, n.by_lag) for n in _networks(demo)],
        title="Accuracy by frames since the last pulse",
        description=f"{accuracy}.",
        x_label="frames since the last pulse (upper edge of each group)",
        y_label="accuracy",
        y_range=(0.0, 1.0),
        log_x=True,
        x_marks=[Mark(STRIDE, "window")],
        y_marks=[Mark(BEST, "maximum"), Mark(CHANCE, "chance")],
    )
    return [
        Paragraphs(
            f"Few windows of {STRIDE} frames contain a pulse. In all others a network that starts"
            " from a zero state cannot know the label, so it learns nothing from them. No window"
            " asks it to keep a mode for longer than the window. On the unbroken recording its"
            " state reaches values that never occurred in training. What it predicts there is luck"
            " and differs from seed to seed."
        ),
        Figure(by_lag, "Accuracy of each network by the time since the pulse that sets the label."),
        Figure(
            _excerpt(demo),
            "The signal, the true labels and the predictions. For each way to train, the network"
            " with the median accuracy is shown.",
        ),
    ]


def _gradient(demo: Demo) -> list[Part]:
    report, reach = demo.audit_report, demo.audit_report.reach
    own = next(row for row in report.audit.rows if row.horizon == STRIDE)
    steps, zero_state_loss = max(reach.contexts.items())
    truncation = (
        f"Training truncated the gradient every {STRIDE} frames, although the task needs a memory"
        " of thousands. The cost was measured on one network (stream, seed"
        f" {demo.of(STREAM)[0].seed}), against the exact gradient. Truncation changes the gradient"
        f" by {own.bias:.1%}, and 99% of the gradient of a loss lies within the last"
        f" {reach.shares[0.99]} frames. For comparison, {exact(demo)}. This is tt.Exact, for tasks"
        " on which truncation fails."
    )
    state = (
        "The memory is in the state. From a zero state the same network has a loss of"
        f" {zero_state_loss:.2f} even after {steps:,} frames; with the state carried from the start"
        f" of the recording, {reach.loss:.2f}. On this task a longer horizon gains nothing, and"
        " carrying the state gains everything. Other tasks need both. For a run of your own,"
        " throughtime audit RUN draws these charts."
    )
    return [
        Paragraphs(f"{truncation}\n\n{state if reach.memory_used else report.warning()}"),
        *audit_figures(report, own),
        audit_table(report.audit),
    ]


def _networks(demo: Demo) -> list[DemoNetwork]:
    return [*demo.of(WINDOWS), *demo.of(STREAM)]


def _label(network: DemoNetwork) -> str:
    return f"{'windows' if network.name == WINDOWS else 'stream'}, seed {network.seed}"


def _excerpt(demo: Demo) -> str:
    """The excerpt with most pulses, with the predictions of two networks of median accuracy."""
    recording, since, labels = demo.test.recording, demo.test.since, demo.test.labels
    starts = range(0, len(recording) - _SHOWN + 1, _SHOWN // 4)
    pulses = [int((since[start : start + _SHOWN] == 0).sum()) for start in starts]
    start = starts[pulses.index(max(pulses))]
    shown = slice(start, start + _SHOWN)
    medians = [
        sorted(demo.of(name), key=lambda n: n.accuracy)[len(demo.of(name)) // 2]
        for name in (STREAM, WINDOWS)
    ]
    accuracy = "; ".join(
        f"{_label(n)}, {float((n.predicted[shown] == labels[shown]).mean()):.0%} correct"
        for n in medians
    )
    bands = [Band(_label(n), n.predicted[shown].tolist()) for n in medians]
    return strip(
        recording.inputs.read(start, start + _SHOWN).tolist(),
        [Band("labels", labels[shown].tolist()), *bands],
        title="A stretch of the test recording",
        description=(
            f"Frames {start} to {start + _SHOWN} with {max(pulses)} pulses, the labels and two"
            f" predictions: {accuracy}."
        ),
        x_label="frame",
        y_label="signal",
        classes=MODES,
        start=start,
    )


def _training_loss(demo: Demo) -> Figure:
    networks = _networks(demo)
    last = "; ".join(f"{_label(n)}, last value {n.losses[-1][1]:.2f}" for n in networks)
    svg = lines(
        [Series(_label(n), *zip(*n.losses, strict=True)) for n in networks],
        title="Training loss",
        description=f"Mean loss per 100 updates: {last}.",
        x_label="update",
        y_label="cross-entropy",
    )
    return Figure(
        svg,
        f"Guessing gives {np.log(len(MODES)):.2f}. Almost no window contains the pulse that its"
        " labels depend on.",
    )


def _task() -> Paragraphs:
    return Paragraphs(
        "Pulses are at least 300 and on average 2,000 frames apart. Each is ten frames long and 3"
        " high, up for on and down for off. One frame in 30 has a random spike of 2 that means"
        " nothing; the rest is normal noise of deviation 0.3.\n\nAll networks are an LSTM of"
        f" {HIDDEN} units with a linear readout. They train with Adam at learning rate {RATE:g},"
        f" gradients clipped to norm 1, {LANES} lanes and an update every {STRIDE} frames. The only"
        " differences are the order of the chunks and the state that enters each."
    )
