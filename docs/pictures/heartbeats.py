"""The tutorial in a picture: the ECG of a test patient, its labels, and the answers of the net."""

import contextlib
import json
import re
import tempfile
from typing import Any

import numpy as np
from docs.pictures.frame import FOLDER, MARGIN, WIDTH, label, picture
from docs.pictures.shapes import DOCS, SOFT
from docs.pictures.svg import Scale, colour, rect, rule, short

MEASURED = FOLDER / "heartbeats.json"
CLASSES = ("early", "none", "normal")
SHOWN, TOP = 450, 72  # samples


def blocks() -> list[str]:
    """The Python of the page."""
    page = (DOCS / "tutorial" / "heartbeats.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def train() -> list[list[int]]:
    """Run the page up to its training in Python; runs of steps with the class that is answered."""
    import throughtime as tt

    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks()[:2]:
            exec(block, names)
        test = names["heartbeats"](18)[0].astype(np.float32)
        answers = tt.predict(names["net"], test[:SHOWN, None])[0].argmax(1).tolist()
    return runs(answers)


def runs(classes: list[int]) -> list[list[int]]:
    """First step, last step and class of each run that is not `none`."""
    changes = [0, *(i for i in range(1, len(classes)) if classes[i] != classes[i - 1])]
    ends = [*changes[1:], len(classes)]
    return [[a, b, classes[a]] for a, b in zip(changes, ends, strict=True) if classes[a] != 1]


def draw() -> dict[str, str]:
    """The first nine seconds."""
    names: dict[str, Any] = {}
    exec(blocks()[0].split("\nfor split")[0], names)
    ecg, labels = names["heartbeats"](18)
    truth = runs([CLASSES.index(name) for name in labels[:SHOWN]])
    answers = json.loads(MEASURED.read_text(encoding="utf-8"))
    x, y = Scale(0, SHOWN, MARGIN, WIDTH - MARGIN), Scale(-0.5, 1.3, TOP + 110, TOP)
    points = "L".join(f"{short(x(i))} {short(y(float(ecg[i])))}" for i in range(SHOWN))
    body = [rule(f"M{points}", 'fill="none" stroke-width="1.4" stroke-linejoin="round"')]
    for i, (name, found) in enumerate((("the labels", truth), ("the answers", answers))):
        top = TOP + 150 + 56 * i
        body.append(label(MARGIN, top, name, SOFT))
        for start, stop, kind in found:
            style = f'style="fill:{colour(1 if kind == 0 else 0)}" rx="2"'
            body.append(rect(x(start), top + 10, x(stop) - x(start), 16, style))
    bottom = TOP + 150 + 56 * 2
    body += [
        rect(MARGIN, bottom - 8, 14, 14, f'style="fill:{colour(1)}"'),
        label(MARGIN + 24, bottom + 5, "an early beat", SOFT),
        rect(MARGIN + 170, bottom - 8, 14, 14, f'style="fill:{colour(0)}"'),
        label(MARGIN + 194, bottom + 5, "a normal beat", SOFT),
    ]
    return {
        "heartbeats.svg": picture(
            bottom + 26,
            "A patient whom the net has never seen",
            "Nine seconds of an ECG. Early beats look like all others; only the time since the last"
            " beat differs. Below it the labels, and the answers of the net, sample by sample.",
            body,
        )
    }
