"""Pen and paper of the charts: text, lines, blocks, axes, and the frame that names a picture for
who cannot see it.

Lengths are in user units: a chart is `WIDTH` wide and as tall as it needs to be.
"""

import hashlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from throughtime.errors import ConfigError

_MINUS, _NONE = "\u2212", "\u2013"

Range: TypeAlias = tuple[float, float]


PALETTE = ("#2350c4", "#cf3a0a", "#0c694c", "#620b82", "#776e21", "#177b9e", "#850125", "#444956")


def clean(text: str) -> str:
    """The text as it can stand in a page: escaped, and without what neither UTF-8 nor XML can hold."""
    whole = text.encode("utf-8", "replace").decode()
    return escape(
        "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in whole)
    )


def numbers(values: Sequence[float], digits: int = 4) -> list[str]:
    """The values as text with one number of decimals for all, so that they line up in a column.

    Args:
        values: the numbers; one that is not finite becomes a dash.
        digits: the most significant digits of the largest; decimals that none of them needs are
            left away.

    Example:
        >>> from throughtime._svg import numbers
        >>> numbers([0.98123, 0.5])
        ['0.9812', '0.5000']
    """
    finite = [abs(v) for v in values if math.isfinite(v)]
    top = max(finite, default=0.0)
    if top >= 1e12 or 0 < top < 1e-3:
        return [_scientific(v, digits) for v in values]
    most = max(0, digits - 1 - math.floor(math.log10(top))) if top else 0
    if len(finite) > 1 and any(0 < v < 10.0**-most for v in finite):  # it would read as zero
        return [numbers([v], digits)[0] for v in values]
    places = next(
        (p for p in range(most) if all(abs(round(v, p) - v) <= 1e-9 * v for v in finite)), most
    )
    return [f"{v:,.{places}f}".replace("-", _MINUS) if math.isfinite(v) else _NONE for v in values]


def _scientific(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return _NONE
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return (f"{mantissa}e{int(power)}" if value else "0").replace("-", _MINUS)


_TINY = 1e-290  # powers of ten are exact enough above it


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, from at or below `low` to at or above
    `high`.

    Example:
        >>> from throughtime._svg import ticks
        >>> ticks(0.13, 0.94)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high - low > max(
        1e-12 * max(abs(low), abs(high)), _TINY
    ):  # one value: room on both sides
        room = abs(low) / 2 if abs(low) > _TINY else 1.0
        low, high = low - room, high + room
    rough = (high - low) / about
    power = math.floor(math.log10(rough))
    lead = next(lead for lead in (1, 2, 5, 10) if lead * 10.0**power >= rough * (1 - 1e-9))
    step = lead * 10.0**power
    whole = range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    # An exact quotient of integers: 3 / 10, not 3 * 0.1.
    return [i * lead / 10**-power if power < 0 else float(i * lead * 10**power) for i in whole]


def log_ticks(low: float, high: float) -> list[float]:
    """The same on a logarithmic axis: 1, 2 and 5, or only powers of ten where they are many; some may lie outside."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if high / low < 1e3 else (1,)
    found = [lead * 10.0**power for power in powers[:: 1 + len(powers) // 9] for lead in leads]
    return found if sum(low <= t <= high for t in found) > 1 else ticks(low, high)


def tick_labels(values: Sequence[float]) -> list[str]:
    """The ticks of one axis as text, in thousands (k), millions (M) or billions (G) where that is
    exact.

    Example:
        >>> from throughtime._svg import tick_labels
        >>> tick_labels([0, 5000, 10000])
        ['0', '5k', '10k']
    """
    top = max(map(abs, values), default=0.0)
    for unit, sign, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if least <= top < 1e12 and all(abs(round(v / unit, 1) - v / unit) < 1e-9 for v in values):
            return [
                text + sign if v else "0"
                for v, text in zip(values, numbers([v / unit for v in values]), strict=True)
            ]
    return numbers(values, digits=12)


def drawn(value: float, *, log: bool = False) -> bool:
    """Whether a chart can show the value.

    Browsers draw nothing far beyond 1e300, nor does arithmetic end well there.
    """
    return abs(value) < 1e300 and (value > 0 or not log)


def extent(values: Sequence[float], *, log: bool = False) -> Range:
    """From the least to the greatest, with room around a single value."""
    low, high = min(values, default=1.0 if log else 0.0), max(values, default=10.0 if log else 1.0)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    return (low / 2, low * 2) if log else (low - (abs(low) / 2 or 1.0), low + (abs(low) / 2 or 1.0))


def axis_range(values: Sequence[float], given: Range | None = None, *, log: bool = False) -> Range:
    """What an axis shows: what is asked for, or all values and up to the next ticks, powers of ten on a logarithmic axis."""
    if given is None and log:
        low, high = extent(values, log=True)
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    if given is None:
        every = ticks(*extent(values))
        return every[0], every[-1]
    if not (drawn(given[0], log=log) and drawn(given[1]) and given[0] < given[1]):
        raise ConfigError(
            f"range {given}: expected two finite numbers{' above 0' if log else ''}, the lower one"
            " first"
        )
    return given


def width(*texts: str) -> float:
    """A generous guess at the width of the widest: digits are wide in some fonts, and wide scripts take about twice the room."""
    return max(
        (
            sum(8.3 if c.isdigit() else 7.4 if ord(c) < 0x1100 else 14 for c in text)
            for text in texts
        ),
        default=0.0,
    )


def shorten(text: str, most: int) -> str:
    """What names of files share is at the front, what tells them apart at the end: the middle goes."""
    return (
        text
        if len(text) <= most
        else f"{text[: most // 3]}…{text[len(text) + 1 + most // 3 - most :]}"
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
