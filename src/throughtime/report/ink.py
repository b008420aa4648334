"""Pen and paper of the charts: text, lines, blocks, axes, and the frame that names a picture for
who cannot see it.

Lengths are in user units: a chart is `WIDTH` wide and as tall as it needs to be.
"""

import hashlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from throughtime.report.page import (
    PALETTE,
    Range,
    clean,
    log_ticks,
    shorten,
    tick_labels,
    ticks,
    width,
)

WIDTH = 760.0
_DASHES = ("none", "7 4", "2 4", "10 3 2 3", "4 2", "12 4", "1 3", "7 3 2 3 2 3")
_PLAIN = (
    'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13"'
    ' fill="currentColor"'
)
HATCH = (
    '<pattern id="<id>-hatch" width="6" height="6" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><path d="M0 3h6" stroke="currentColor" stroke-opacity=".45"'
    ' stroke-width="2.4"/></pattern>'
)
MIDDLE, END = 'text-anchor="middle"', 'text-anchor="end"'
DOTTED = 'stroke-opacity=".7" stroke-dasharray="1 3" stroke-width="1.5"'
HALO = 'style="paint-order:stroke;stroke:var(--paper,#fff);stroke-width:4;stroke-linejoin:round"'


@dataclass(frozen=True)
class Scale:
    """From the numbers of one axis, `low` to `high`, to the picture, `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        # Far outside is as good as infinitely far, and browsers draw it.
        return self.start + min(max((at - low) / (high - low), -9.0), 10.0) * (
            self.stop - self.start
        )

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Where the ticks within the axis are, and what they say."""
        every = (
            log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, 6)
        )  # 6: the ends stay ticks
        slack = 1e-9 * (self.high - self.low)
        inside = [t for t in every if self.low - slack <= t <= self.high + slack]
        says = [tick_labels([t])[0] for t in inside] if self.log else tick_labels(inside)
        return list(zip(inside, says, strict=True))


def margin(y_range: Range, *, log: bool = False) -> float:
    """The room that the labels of a y axis need."""
    return width(*(label for _, label in Scale(*y_range, 0, 0, log).ticks)) + 10


def short(value: float) -> str:
    """A number as it stands in a path."""
    return f"{value:.1f}".removesuffix(".0")


def written(x: float, y: float, text: str, more: str = "") -> str:
    """A text at a place."""
    return f'<text x="{short(x)}" y="{short(y)}" {more}>{clean(text)}</text>'


def faint(x: float, y: float, text: str, more: str = "") -> str:
    """The same, less loud."""
    return written(x, y, text, f'fill-opacity=".72" {more}')


def colour_of(i: int) -> str:
    """The colour of series or class `i`, ink below 0."""
    return (
        f"var(--series-{i % len(PALETTE) + 1},{PALETTE[i % len(PALETTE)]})"
        if i >= 0
        else "currentColor"
    )


def stroke(i: int, path: str, *, clip: bool = False) -> str:
    """A line in the colour and dashes of series `i`, in thin ink below 0."""
    look = f"stroke:{colour_of(i)};stroke-width:{2 if i >= 0 else 1};stroke-dasharray:{_DASHES[i % len(_DASHES)] if i >= 0 else 'none'}"
    clipped = ' clip-path="url(#<id>-clip)"' if clip else ""
    return (
        f'<path d="{path}" fill="none" style="{look}" stroke-linejoin="round"{clipped}/>'
        if path
        else ""
    )


def block(i: int, x: float, y: float, wide: float, height: float) -> str:
    """A rectangle in the colour of class `i`, hatched once the colours are used up."""
    place = f'x="{short(x)}" y="{short(y)}" width="{max(wide, 0.8):.2f}" height="{short(height)}"'
    hatch = f'<rect {place} fill="url(#<id>-hatch)"/>' if i >= len(PALETTE) else ""
    return f'<rect {place} style="fill:{colour_of(i)}"/>{hatch}'


def heading(title: str, keys: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """The title and the legend, and where they end."""
    rows = textwrap.wrap(title, 88 if title.isascii() else 48)
    parts = [
        written(0, 15 + 20 * i, row, 'font-size="15" font-weight="600"')
        for i, row in enumerate(rows)
    ]
    x, y = 0.0, 20.0 * len(rows) + 18
    for glyph, full in keys:
        name = shorten(full, 60)
        if x and x + 30 + width(name) > WIDTH:
            x, y = 0.0, y + 22
        parts.append(
            f'<g transform="translate({short(x)} {short(y)})">{glyph}{written(29, 4.5, name)}</g>'
        )
        x += 50 + width(name)
    return "".join(parts), y + (16 if keys else -12)


def axes(x: Scale, y: Scale, floor: float, x_label: str) -> str:
    """Both axes: rows with their labels, and the columns of x."""
    rows = (
        ruled(f"M{short(x.start)} {short(y(v))}H{short(x.stop)}")
        + faint(x.start - 8, y(v) + 4.5, label, END)
        for v, label in y.ticks
    )
    return "".join(rows) + x_axis(x, y.stop, floor, x_label)


def x_axis(x: Scale, top: float, floor: float, x_label: str) -> str:
    """Columns and their labels."""
    columns = (
        ruled(f"M{short(x(v))} {short(top)}V{short(floor + 4)}")
        + faint(x(v), floor + 20, label, MIDDLE)
        for v, label in x.ticks
    )
    return "".join(columns) + faint((x.start + x.stop) / 2, floor + 41, x_label, MIDDLE)


def ruled(path: str, more: str = 'stroke-opacity=".13"') -> str:
    """A line in ink."""
    return f'<path d="{path}" stroke="currentColor" {more}/>'


def empty(x: Scale, y: Scale) -> str:
    """What stands in a chart without data."""
    return written((x.start + x.stop) / 2, (y.start + y.stop) / 2, "no data", f"{MIDDLE} {HALO}")


def chart(height: float, title: str, description: str, body: Sequence[str]) -> str:
    """The picture with its name and description.

    Ids are made of what it shows, so that two pictures differ in them.
    """
    inside = "".join(body)
    name = (
        "chart-"
        + hashlib.blake2b(
            f"{title}\n{description}\n{inside}".encode("utf-8", "replace"), digest_size=5
        ).hexdigest()
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="<id>-title <id>-desc"'
        f' viewBox="0 0 {short(WIDTH)} {short(height)}" width="100%" {_PLAIN}><title'
        f' id="<id>-title">{clean(title)}</title><desc'
        f' id="<id>-desc">{clean(description)}</desc>{inside}</svg>'
    ).replace("<id>", name)
