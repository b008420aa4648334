"""The pictures of the page about `examples/nano.py`, drawn from what its functions return."""

from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from docs.pictures.frame import ARROW_HEAD, MARGIN, WIDTH, arrow, label, picture
from docs.pictures.svg import colour, rect, rule, short, vertical

NANO: Any = run_path(str(Path(__file__).parents[2] / "examples" / "nano.py"))
LENGTHS, LANES = (9, 5, 6, 7, 8, 3), 3
STEPS, STRIDE, HORIZON, SEGMENT = 24, 4, 10, 6
LEFT, ROW = MARGIN + 84, 34
UNIT = (WIDTH - MARGIN - LEFT) / STEPS
STATE, GRADIENT = colour(2), colour(1)
SOFT, MIDDLE = 'class="soft"', 'text-anchor="middle"'


def stream(lengths: tuple[int, ...], lanes: int) -> Any:
    """Recordings without data."""
    return NANO["Stream"]([(torch.zeros(n, 1), torch.zeros(n)) for n in lengths], lanes)


def draw() -> dict[str, str]:
    """A picture for each of the parts that need one: stream, plan, gradient."""
    return {"lanes.svg": _lanes(), "windows.svg": _windows(), "segments.svg": _segments()}


def _lanes() -> str:
    """Recordings on lanes: resets, and what is padded."""
    played = stream(LENGTHS, LANES)
    chunk, unit, top = played.read(0, played.steps), (WIDTH - MARGIN - LEFT) / played.steps, 62
    numbers = {id(recording): i for i, recording in enumerate(_in_order(played), 1)}
    body: list[str] = []
    for lane, recordings in enumerate(played.lanes):
        y = top + lane * (ROW + 12)
        body.append(label(MARGIN, y + 22, f"lane {lane + 1}", SOFT))
        starts = played.starts[lane]
        for (begin, end), recording in zip(pairwise(starts), recordings, strict=True):
            left, width = LEFT + unit * begin, unit * (end - begin)
            number = label(left + width / 2, y + 23, str(numbers[id(recording)]), MIDDLE)
            body.append(rect(left + 2, y, width - 3, ROW, _fill(0.2)) + number)
        idle = (played.steps - starts[-1]) * unit
        dashes = 'fill="none" stroke="currentColor" stroke-opacity=".4" stroke-dasharray="2 4"'
        body += [rect(LEFT + unit * starts[-1] + 2, y + 1, idle - 3, ROW - 2, dashes)] * (idle > 0)
        for step in chunk.resets[:, lane].nonzero()[:, 0].tolist():
            body.append(_reset(LEFT + unit * step + 2, y))
    bottom = top + LANES * (ROW + 12) + 22
    body += [
        _reset(MARGIN + 14, bottom - 12),
        label(MARGIN + 36, bottom + 10, "a recording starts: the state entering it is zeros", SOFT),
        label(MARGIN, bottom + 40, "Dashed: this lane has ended; its steps do not count.", SOFT),
    ]
    return picture(
        bottom + 60,
        "Recordings on the lanes of a batch",
        f"{len(LENGTHS)} recordings on {LANES} lanes, one after another without a gap. A lane that"
        " has ended is padded, and these steps do not count.",
        body,
    )


def _in_order(played: Any) -> list[Any]:
    """The recordings in the order in which they were given: by their lengths."""
    rest = [recording for lane in played.lanes for recording in lane]
    return sorted(rest, key=lambda recording: LENGTHS.index(len(recording[0])))


def _windows() -> str:
    """A row for each update, and the state that one hands to the next."""
    plan, top = NANO["truncated"](stream((STEPS,), 1), STRIDE, HORIZON), 62
    body = [f"<defs>{ARROW_HEAD}</defs>"]
    for i, window in enumerate(plan):
        y = top + i * (ROW + 8)
        start, counted, stop = (
            LEFT + UNIT * n for n in (window.start, window.counted, window.stop)
        )
        body += [
            label(MARGIN, y + 17, f"update {i + 1}", SOFT),
            rect(start, y, counted - start, 22, _fill(0.16)),
            rect(counted, y, stop - counted, 22, _fill(0.5)),
        ]
        if i + 1 < len(plan):
            x = LEFT + UNIT * window.keep
            body.append(_state(x, y + 22) + arrow(f"M{short(x)} {y + 28}V{y + ROW + 6}", STATE))
    bottom = top + len(plan) * (ROW + 8) + 12
    body += [
        rect(MARGIN, bottom - 12, 30, 14, _fill(0.16)),
        label(MARGIN + 42, bottom, "run again under the new weights", SOFT),
        rect(MARGIN, bottom + 15, 30, 14, _fill(0.5)),
        label(MARGIN + 42, bottom + 27, "the losses that count, each in one update", SOFT),
        _state(MARGIN + 15, bottom + 49),
        label(MARGIN + 42, bottom + 54, "the state that is kept for the next update", SOFT),
    ]
    return picture(
        bottom + 76,
        f"A plan: stride {STRIDE}, horizon {HORIZON}",
        f"The {len(plan)} updates of {STEPS} steps. Each counts the losses of the newest {STRIDE}"
        f" steps and runs up to {HORIZON}. It keeps the state that enters the next one.",
        body,
    )


def _segments() -> str:
    """The forward pass that stores states, and the segments on the way back."""
    (window,) = NANO["exact"](stream((STEPS,), 1), SEGMENT)
    parts = list(pairwise([*range(window.start, window.stop, window.segment), window.stop]))
    top, pitch = 92, ROW + 14
    body = [
        f"<defs>{ARROW_HEAD}</defs>",
        label(MARGIN, top + 17, "forward", SOFT),
        rect(LEFT, top, UNIT * parts[-1][0], 22, _fill(0.16)),
        *(_state(LEFT + UNIT * start, top + 11) for start, _ in parts),
    ]
    for i, (start, stop) in enumerate(reversed(parts), 1):
        y, left, right = top + i * pitch, LEFT + UNIT * start, LEFT + UNIT * stop
        body += [
            label(MARGIN, y + 17, f"back {i}", SOFT),
            rect(left, y, right - left, 22, _fill(0.5)),
            rule(vertical(left, top + 18, y), 'stroke-opacity=".5" stroke-dasharray="2 4"'),
            _state(left, y + 11),
            arrow(f"M{short(right - 8)} {y + 11}H{short(left + 12)}", GRADIENT),
        ]
        if start:
            body.append(arrow(f"M{short(left)} {y + 22}V{y + pitch + 8}", GRADIENT))
    bottom = top + (len(parts) + 1) * pitch + 12
    body += [
        label(MARGIN, 68, "Only one dark block exists at a time.", SOFT),
        _state(MARGIN + 15, bottom - 5),
        label(MARGIN + 42, bottom, "a stored state: the segment starts from it again", SOFT),
        rect(MARGIN, bottom + 15, 30, 14, _fill(0.5)),
        label(MARGIN + 42, bottom + 27, "a segment with its graph", SOFT),
        arrow(f"M{MARGIN + 30} {bottom + 49}H{MARGIN}", GRADIENT),
        label(MARGIN + 42, bottom + 54, "the gradient, also that of the state", SOFT),
    ]
    return picture(
        bottom + 76,
        "The exact gradient, segment by segment",
        f"{STEPS} steps in {len(parts)} segments. The forward pass stores the state that enters"
        " each. On the way back each runs again with its graph, the last one first, and passes the"
        " gradient of its state to the one before.",
        body,
    )


def _state(x: float, y: float) -> str:
    return f'<circle cx="{short(x)}" cy="{short(y)}" r="6" style="fill:{STATE}"/>'


def _reset(x: float, y: float) -> str:
    """A bar at the step where a recording starts."""
    return rect(x, y, 5, ROW, f'style="fill:{GRADIENT}"')


def _fill(opacity: float) -> str:
    return f'style="fill:{colour(0)}" fill-opacity="{opacity}"'
