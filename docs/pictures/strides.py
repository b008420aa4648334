"""Stride, horizon and chunk: the windows of a plan of the library, still and moving."""

from typing import Any

from docs.pictures.frame import ARROW_HEAD, MARGIN, WIDTH, arrow, beats, label, picture
from docs.pictures.svg import colour, rect, rule, short, vertical

from throughtime.gradient import Progress, Truncated, Window

STEPS, STRIDE, HORIZON, CHUNK, BEATS = 24, 4, 10, 8, 5


class Steps:
    """So many steps, without data: all that a plan of windows asks for."""

    position = 0

    def remaining(self, steps: int) -> int:
        return min(steps, STEPS - self.position)


def plan(policy: Any) -> list[Window]:
    """The windows of a policy of the library."""
    windows, source, at = list[Window](), Steps(), Progress()
    while (window := policy.plan(source, at, None)[0]) is not None:
        windows.append(window)
        source.position = window.stop
        at = Progress(window.stop, lead=window.keep)
    return windows


PLAN = plan(Truncated(STRIDE, HORIZON))
UNIT = (WIDTH - 2 * MARGIN) / STEPS
SECONDS = 1.8  # of an update in the animation
COUNTED, GRADIENT = colour(0), colour(1)
_DASHES = 'stroke-dasharray="2 4"'
_GRADIENT_BACK = f'class="back" style="fill:{GRADIENT}"'


def draw() -> dict[str, str]:
    """The still picture and the animation."""
    return {"strides.svg": _still(), "sliding.svg": _moving()}


def _still() -> str:
    """A row for each update."""
    left, row, top = MARGIN + 84, 30, 128
    unit, bottom = (WIDTH - MARGIN - left) / STEPS, top + row * len(PLAN)
    body = [f"<defs>{ARROW_HEAD}</defs>", _signal(left, 104, 40)]
    body += [
        rule(vertical(left + unit * step, 60, bottom), f'stroke-opacity=".35" {_DASHES}')
        for step in range(0, STEPS + 1, CHUNK)
    ]
    for i, window in enumerate(PLAN):
        y = top + row * i
        head, tail = left + unit * window.start + 4, left + unit * window.stop - 4
        body += [
            label(MARGIN, y + 16, f"update {i + 1}", 'class="soft"'),
            _bars(window, left, unit, y),
            arrow(f"M{short(tail)} {y + 10}H{short(head)}", GRADIENT),
        ]
    return picture(
        bottom + 112,
        "Stride, horizon and chunk",
        f"The updates of {STEPS} steps with a stride of {STRIDE} and a horizon of {HORIZON}. Each"
        f" counts the losses of the newest {STRIDE} steps; their gradient flows back through the"
        f" last {HORIZON}. Every loss counts once. Chunks of {CHUNK} steps change nothing.",
        [*body, _legend(bottom + 34)],
    )


def _moving() -> str:
    """The window slides by a stride for each update; the losses that it counted stay marked."""
    top, base, losses = 66, 152, 178
    frame = f'rx="4" fill="none" stroke="currentColor" stroke-opacity=".45" {_DASHES}'
    clip = rect(MARGIN, 60, WIDTH - 2 * MARGIN, 110, "")
    window = (
        rect(
            MARGIN + UNIT * (STRIDE - HORIZON), top + 4, UNIT * (HORIZON - STRIDE), 78, _fill(0.16)
        )
        + rect(MARGIN, top + 4, UNIT * STRIDE, 78, _fill(0.42))
        + rect(MARGIN + UNIT * (STRIDE - HORIZON), base - 2, UNIT * HORIZON, 5, _GRADIENT_BACK)
    )
    body = [
        f'<clipPath id="recording">{clip}</clipPath>',
        *(
            rect(MARGIN + UNIT * start + 1, top, UNIT * CHUNK - 2, base - top + 6, frame)
            for start in range(0, STEPS, CHUNK)
        ),
        _signal(MARGIN, base - 24, 46),
        f'<g clip-path="url(#recording)"><g class="slide">{window}</g></g>',
    ]
    for i, step in enumerate(PLAN):
        marks = "".join(
            rect(MARGIN + UNIT * s + 2, losses, UNIT - 4, 12, f'rx="2" style="fill:{COUNTED}"')
            for s in range(step.counted, step.stop)
        )
        middle = MARGIN + UNIT * (step.counted + step.stop) / 2
        number = label(middle, losses + 32, str(i + 1), 'text-anchor="middle"')
        body.append(f'<g class="u{i}">{marks}{number}</g>')
    body.append(label(MARGIN, losses + 56, "the losses of updates 1 to 6", 'class="soft"'))
    return picture(
        losses + 170,
        "An update every stride",
        f"A window of {HORIZON} steps slides over a recording, {STRIDE} steps at a time. At each"
        f" stop the gradient flows from its newest {STRIDE} steps back through all of it, and the"
        " losses of these steps are counted, each once.",
        [*body, _legend(losses + 90)],
        style=_animation(),
    )


def _animation() -> str:
    """The rules of the moving window. Who prefers no motion gets the fourth update, still."""
    count = len(PLAN)
    total = f"{SECONDS * count:g}s"
    stops = [f"translateX({short(UNIT * step.counted)}px)" for step in PLAN]
    rules = [
        "@keyframes back{0%,30%{transform:scaleX(0)}75%,100%{transform:scaleX(1)}}",
        ".back{transform-box:fill-box;transform-origin:right;",
        f"animation:back {SECONDS}s linear infinite}}",
        f".slide{{transform:{stops[3]};animation:slide {total} infinite}}",
        "@keyframes slide{",
        *(
            f"{100 * i / count:.1f}%,{(100 * i + 80) / count:.1f}%{{transform:{stop}}}"
            for i, stop in enumerate(stops)
        ),
        "}",
    ]
    for i in range(count):
        shown = (100 * i + 75) / count
        rules += [
            f"@keyframes u{i}{{0%,{shown:.1f}%{{opacity:.18}}{shown + 1:.1f}%,100%{{opacity:1}}}}",
            f".u{i}{{opacity:{1 if i < 4 else 0.18};animation:u{i} {total} infinite}}",
        ]
    return "".join([*rules, "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"])


def _legend(top: float) -> str:
    """The three words."""
    line = f'<rect y="-2" width="30" height="4" style="fill:{GRADIENT}"/>'
    ends = rule(vertical(4, -9, 9) + vertical(26, -9, 9), f'stroke-opacity=".6" {_DASHES}')
    rows = (
        (rect(0, -7, 30, 14, _fill(0.55)), f"stride (k1) = {STRIDE}: the losses of one update"),
        (
            rect(0, -7, 30, 14, _fill(0.16)) + line,
            f"horizon (k2) = {HORIZON}: how far their gradient flows",
        ),
        (ends, f"chunk = {CHUNK}: steps of a forward call, changes no gradient"),
    )
    return "".join(
        f'<g transform="translate({MARGIN} {short(top + 27 * i)})">{key}{label(42, 5.5, text)}</g>'
        for i, (key, text) in enumerate(rows)
    )


def _signal(left: float, base: float, height: float) -> str:
    path = beats(left, WIDTH - MARGIN, base, height, BEATS)
    return rule(path, 'fill="none" stroke-width="1.6" stroke-linejoin="round"')


def _bars(window: Window, left: float, unit: float, y: float) -> str:
    """The steps that run again, and those whose losses count."""
    again = unit * (window.counted - window.start)
    counted = unit * (window.stop - window.counted)
    return rect(left + unit * window.start, y, again, 20, _fill(0.16)) + rect(
        left + unit * window.counted, y, counted, 20, _fill(0.42)
    )


def _fill(opacity: float) -> str:
    return f'style="fill:{COUNTED}" fill-opacity="{opacity}"'
