"""The idea in five seconds: what two networks of the demo answer on one unbroken recording."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from docs.pictures.frame import FOLDER, MARGIN, WIDTH, Theme, label, picture
from docs.pictures.svg import Scale, colour, horizontal, rule, short, vertical
from examples.demo import (
    BEST,
    CHANCE,
    STREAM,
    STRIDE,
    TEST_SEED,
    TESTED,
    WINDOWS,
    generate,
    run,
)

MEASURED = FOLDER / "demo.json"
SHOWN = range(20_000, 37_800)
ROWS = (
    (STREAM, "Trained on the unbroken stream"),
    (WINDOWS, f"Trained on windows of {STRIDE} steps"),
)


def train(updates: int = 1_000, seeds: Sequence[int] = range(3)) -> dict[str, Any]:
    """Train the networks of `examples/demo.py`; what they answer on the test recording."""
    networks = [
        {
            "trained_on": network.trained_on,
            "seed": network.seed,
            "accuracy": round(network.accuracy, 4),
            "changes": _changes(network.predicted),
        }
        for network in run(updates, seeds, report=False)
    ]
    return {"updates": updates, "networks": networks}


def measured() -> list[dict[str, Any]]:
    """What `train` returned for each network."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))["networks"]


def draw() -> dict[str, str]:
    """The picture for light, for dark and for all pages."""
    networks = measured()
    return {
        "idea.svg": _draw(networks, "auto"),
        "idea-light.svg": _draw(networks, "light"),
        "idea-dark.svg": _draw(networks, "dark"),
    }


def _draw(networks: list[dict[str, Any]], theme: Theme) -> str:
    test = generate(TESTED, TEST_SEED)
    x = Scale(SHOWN.start, SHOWN.stop, MARGIN, WIDTH - MARGIN)
    pulses = [int(step) for step in np.flatnonzero(test.since == 0)]
    modes = [round(float(test.labels[a:b].mean())) for a, b in pairwise((*pulses, TESTED))]
    truth = list(zip(pulses, modes, strict=True))
    signal = test.inputs[SHOWN.start : SHOWN.stop, 0]
    body = [
        label(
            MARGIN,
            62,
            "A pulse switches a machine on or off. Nothing else shows it.",
            'class="soft"',
        ),
        _signal(signal, pulses, x, Scale(-3.6, 3.6, 136, 76)),
        _row(x, 170, "The machine", "", truth, -1),
    ]
    scores: list[str] = []
    for i, (name, text) in enumerate(ROWS):
        same = sorted((n for n in networks if n["trained_on"] == name), key=lambda n: n["accuracy"])
        middle = same[len(same) // 2]
        share = f"{middle['accuracy']:.0%} right"
        scores.append(f"{text}: {share}")
        body.append(_row(x, 244 + 74 * i, text, share, middle["changes"], i))
    body.append(
        label(
            MARGIN,
            392,
            f"{len(SHOWN):,} steps. {BEST:.0%} is the best possible, {CHANCE:.0%} is guessing.",
            'class="soft"',
        )
    )
    return picture(
        410,
        "The same LSTM, trained in two ways",
        "The signal, the mode of the machine, and what two networks answer step by step. "
        + "; ".join(scores)
        + " on the whole recording, the median of three seeds. The network of the stream follows"
        " every switch. That of the windows never switches.",
        body,
        theme=theme,
    )


def _signal(signal: np.ndarray, pulses: Sequence[int], x: Scale, y: Scale) -> str:
    """The signal, its lowest and highest value in every column, and dots at its pulses."""
    columns = np.array_split(signal, int(x.stop - x.start))
    path = "".join(
        vertical(x.start + i + 0.5, y(float(column.max())), y(float(column.min())))
        for i, column in enumerate(columns)
    )
    heights = {step: y(float(signal[step - SHOWN.start])) for step in pulses if step in SHOWN}
    dots = "".join(
        f'<circle cx="{short(x(step))}" cy="{short(height)}" r="4"/>'
        for step, height in heights.items()
    )
    return rule(path, 'stroke-opacity=".35" fill="none"') + dots


def _row(
    x: Scale, top: float, text: str, share: str, changes: Sequence[tuple[int, int]], i: int
) -> str:
    """A step function, high while on, with its name and score above it."""
    base, high = top + 42, top + 14
    path, mode = "", 0
    for step, value in changes:
        if step <= x.low:
            mode = value
    path = f"M{short(x.start)} {short(base)}V{short(high if mode else base)}"
    for step, value in changes:
        if x.low < step < x.high:
            path += f"H{short(x(step))}V{short(high if value else base)}"
    path += f"H{short(x.stop)}V{short(base)}"
    style = f'style="fill:{colour(i)};stroke:{colour(i)}" fill-opacity=".3" stroke-width="2"'
    score = f'text-anchor="end" class="bold" style="fill:{colour(i)}"'
    return (
        label(x.start, top, text, 'class="bold"')
        + label(x.stop, top, share, score)
        + rule(horizontal(base, x.start, x.stop), 'stroke-opacity=".3"')
        + f'<path d="{path}" {style} stroke-linejoin="round"/>'
    )


def _changes(classes: np.ndarray) -> list[tuple[int, int]]:
    """The steps at which the answer changes, with the new answer."""
    starts = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist()]
    return [(start, int(classes[start])) for start in starts]
