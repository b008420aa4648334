"""SVG primitives: number formatting, axes and ticks, text, lines, blocks, and the chart frame.

Lengths are in user units: a chart is `WIDTH` wide and as high as it needs to be. Colours are custom
properties of the page with a fallback, so one chart serves both themes.
"""

import hashlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from throughtime.errors import ConfigError

Range: TypeAlias = tuple[float, float]

WIDTH = 760.0
PALETTE = ("#2350c4", "#cf3a0a", "#0c694c", "#620b82", "#776e21", "#177b9e", "#850125", "#444956")
HATCH = (
    '<pattern id="<id>-hatch" width="6" height="6" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><path d="M0 3h6" stroke="currentColor" stroke-opacity=".45"'
    ' stroke-width="2.4"/></pattern>'
)
MIDDLE, END = 'text-anchor="middle"', 'text-anchor="end"'
DOTTED = 'stroke-opacity=".7" stroke-dasharray="1 3" stroke-width="1.5"'
HALO = 'style="paint-order:stroke;stroke:var(--paper,#fff);stroke-width:4;stroke-linejoin:round"'
_DASHES = ("none", "7 4", "2 4", "10 3 2 3", "4 2", "12 4", "1 3", "7 3 2 3 2 3")
_FONT = (
    'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13"'
    ' fill="currentColor"'
)
_MINUS, _DASH = "\u2212", "\u2013"
_TINY = 1e-290  # powers of ten are exact enough above it
_LONGEST_KEY = 60  # characters of a name in a legend


def printable(text: str) -> str:
    """The text without the characters that UTF-8 or XML forbid."""
    encodable = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in encodable)


def clean(text: str) -> str:
    """The text as XML: printable and escaped."""
    return escape(printable(text))


def numbers(values: Sequence[float], digits: int = 4) -> list[str]:
    """The values as text with equally many decimals, so that they line up in a column.

    Args:
        values: the numbers; a non-finite one becomes a dash.
        digits: significant digits of the largest value; decimals that no value needs are dropped.

    Example:
        >>> from throughtime._svg import numbers
        >>> numbers([0.98123, 0.5])
        ['0.9812', '0.5000']
    """
    magnitudes = [abs(v) for v in values if math.isfinite(v)]
    top = max(magnitudes, default=0.0)
    if top >= 1e12 or 0 < top < 1e-3:
        return [_scientific(v, digits) for v in values]
    most = max(0, digits - 1 - math.floor(math.log10(top))) if top else 0
    if len(magnitudes) > 1 and any(0 < v < 10.0**-most for v in magnitudes):
        return [numbers([v], digits)[0] for v in values]  # the smallest would read as zero
    decimals = next(
        (d for d in range(most) if all(abs(round(v, d) - v) <= 1e-9 * v for v in magnitudes)), most
    )
    return [
        f"{v:,.{decimals}f}".replace("-", _MINUS) if math.isfinite(v) else _DASH for v in values
    ]


def _scientific(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return _DASH
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return (f"{mantissa}e{int(power)}" if value else "0").replace("-", _MINUS)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`.

    They are 1, 2 or 5 times a power of ten apart.

    Example:
        >>> from throughtime._svg import ticks
        >>> ticks(0.13, 0.94)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high - low > max(1e-12 * max(abs(low), abs(high)), _TINY):
        margin = abs(low) / 2 if abs(low) > _TINY else 1.0  # a single value: leave space around it
        low, high = low - margin, high + margin
    rough = (high - low) / about
    power = math.floor(math.log10(rough))
    lead = next(lead for lead in (1, 2, 5, 10) if lead * 10.0**power >= rough * (1 - 1e-9))
    step = lead * 10.0**power
    counts = range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    # An exact quotient of integers: 3 / 10, not 3 * 0.1.
    return [i * lead / 10**-power if power < 0 else float(i * lead * 10**power) for i in counts]


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis, some of which may lie outside of it.

    They are 1, 2 and 5 times each power of ten; over many decades, powers of ten alone.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if high / low < 1e3 else (1,)
    values = [lead * 10.0**power for power in powers[:: 1 + len(powers) // 9] for lead in leads]
    return values if sum(low <= v <= high for v in values) > 1 else ticks(low, high)


def tick_labels(values: Sequence[float]) -> list[str]:
    """The ticks of one axis as text, in thousands (k), millions (M) or billions (G) where exact.

    Example:
        >>> from throughtime._svg import tick_labels
        >>> tick_labels([0, 5000, 10000])
        ['0', '5k', '10k']
    """
    top = max(map(abs, values), default=0.0)
    for unit, sign, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if least <= top < 1e12 and all(abs(round(v / unit, 1) - v / unit) < 1e-9 for v in values):
            texts = numbers([v / unit for v in values])
            return [text + sign if v else "0" for v, text in zip(values, texts, strict=True)]
    return numbers(values, digits=12)


def drawable(value: float, *, log: bool = False) -> bool:
    """Whether a chart can show the value; beyond 1e300 browsers draw nothing."""
    return abs(value) < 1e300 and (value > 0 or not log)


def extent(values: Sequence[float], *, log: bool = False) -> Range:
    """The least and the greatest value, with space around a single one."""
    low, high = min(values, default=1.0 if log else 0.0), max(values, default=10.0 if log else 1.0)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) / 2 or 1.0
    return (low / 2, low * 2) if log else (low - margin, low + margin)


def axis_range(values: Sequence[float], limits: Range | None = None, *, log: bool = False) -> Range:
    """The range of an axis: its limits, or all values up to the next ticks.

    A logarithmic axis without limits ends at powers of ten.

    Raises:
        ConfigError: limits that are not finite, not rising, or not positive on a logarithmic axis.
    """
    if limits is None and log:
        low, high = extent(values, log=True)
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    if limits is None:
        round_values = ticks(*extent(values))
        return round_values[0], round_values[-1]
    if not (drawable(limits[0], log=log) and drawable(limits[1]) and limits[0] < limits[1]):
        raise ConfigError(
            f"range {limits}: expected two finite numbers{' above 0' if log else ''}, the lower one"
            " first"
        )
    return limits


def text_width(*texts: str) -> float:
    """An upper estimate of the widest text's width; wide scripts take about twice the space."""
    return max(
        (sum(8.3 if c.isdigit() else 7.4 if ord(c) < 0x1100 else 14 for c in t) for t in texts),
        default=0.0,
    )


def shorten(text: str, most: int) -> str:
    """The text without its middle: file names share their beginning and differ at the end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}…{text[len(text) + 1 + most // 3 - most :]}"


@dataclass(frozen=True)
class Scale:
    """A map from the values of an axis, `low` to `high`, to coordinates, `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        convert = math.log if self.log else float
        low, high = convert(self.low), convert(self.high)
        # Clamped: far outside looks like infinitely far outside, and browsers can draw it.
        share = min(max((convert(value) - low) / (high - low), -9.0), 10.0)
        return self.start + share * (self.stop - self.start)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The ticks within the axis and their labels."""
        # 6: the ends of the axis stay ticks
        values = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, 6)
        slack = 1e-9 * (self.high - self.low)
        inside = [v for v in values if self.low - slack <= v <= self.high + slack]
        labels = [tick_labels([v])[0] for v in inside] if self.log else tick_labels(inside)
        return list(zip(inside, labels, strict=True))


def label_margin(y_range: Range, *, log: bool = False) -> float:
    """The width of the labels of a y axis."""
    return text_width(*(label for _, label in Scale(*y_range, 0, 0, log).ticks)) + 10


def short(value: float) -> str:
    """A coordinate as text."""
    return f"{value:.1f}".removesuffix(".0")


def text_at(x: float, y: float, text: str, attributes: str = "") -> str:
    """A text element."""
    return f'<text x="{short(x)}" y="{short(y)}" {attributes}>{clean(text)}</text>'


def faint_text_at(x: float, y: float, text: str, attributes: str = "") -> str:
    """A text element in a fainter colour."""
    return text_at(x, y, text, f'fill-opacity=".72" {attributes}')


def rule(path: str, attributes: str = 'stroke-opacity=".13"') -> str:
    """A line in the colour of the text."""
    return f'<path d="{path}" stroke="currentColor" {attributes}/>'


def vertical(x: float, top: float, bottom: float) -> str:
    """The path of a vertical line."""
    return f"M{short(x)} {short(top)}V{short(bottom)}"


def horizontal(y: float, left: float, right: float) -> str:
    """The path of a horizontal line."""
    return f"M{short(left)} {short(y)}H{short(right)}"


def rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    """A rectangle, never too narrow to show."""
    return (
        f'<rect x="{short(x)}" y="{short(y)}" width="{max(width, 0.8):.2f}"'
        f' height="{short(height)}" {attributes}/>'
    )


def colour(i: int) -> str:
    """The colour of series or class `i`; below 0, that of the text."""
    i_colour = i % len(PALETTE)
    return f"var(--series-{i_colour + 1},{PALETTE[i_colour]})" if i >= 0 else "currentColor"


def stroke(i: int, path: str, attributes: str = "") -> str:
    """A line in the colour and dashes of series `i`; below 0, a thin one in that of the text."""
    if not path:
        return ""
    dashes = _DASHES[i % len(_DASHES)] if i >= 0 else "none"
    style = f"stroke:{colour(i)};stroke-width:{2 if i >= 0 else 1};stroke-dasharray:{dashes}"
    return f'<path d="{path}" fill="none" style="{style}" stroke-linejoin="round" {attributes}/>'


def block(i: int, x: float, y: float, width: float, height: float) -> str:
    """A rectangle in the colour of class `i`, hatched once the colours are used up."""
    hatch = rect(x, y, width, height, 'fill="url(#<id>-hatch)"') if i >= len(PALETTE) else ""
    return rect(x, y, width, height, f'style="fill:{colour(i)}"') + hatch


def heading(title: str, keys: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """The title and the legend, and the y coordinate below them."""
    rows = textwrap.wrap(title, 88 if title.isascii() else 48)
    bold = 'font-size="15" font-weight="600"'
    parts = [text_at(0, 15 + 20 * i, row, bold) for i, row in enumerate(rows)]
    x, y = 0.0, 20.0 * len(rows) + 18
    for glyph, full_name in keys:
        name = shorten(full_name, _LONGEST_KEY)
        if x and x + 30 + text_width(name) > WIDTH:
            x, y = 0.0, y + 22
        parts.append(
            f'<g transform="translate({short(x)} {short(y)})">{glyph}{text_at(29, 4.5, name)}</g>'
        )
        x += 50 + text_width(name)
    return "".join(parts), y + (16 if keys else -12)


def axes(x: Scale, y: Scale, bottom: float, x_label: str) -> str:
    """Both axes: horizontal lines with their labels, and the x axis."""
    rows = (
        rule(horizontal(y(v), x.start, x.stop)) + faint_text_at(x.start - 8, y(v) + 4.5, label, END)
        for v, label in y.ticks
    )
    return "".join(rows) + x_axis(x, y.stop, bottom, x_label)


def x_axis(x: Scale, top: float, bottom: float, x_label: str) -> str:
    """Vertical lines with their labels, and the name of the axis."""
    columns = (
        rule(vertical(x(v), top, bottom + 4)) + faint_text_at(x(v), bottom + 20, label, MIDDLE)
        for v, label in x.ticks
    )
    name = faint_text_at((x.start + x.stop) / 2, bottom + 41, x_label, MIDDLE)
    return "".join(columns) + name


def no_data(x: Scale, y: float) -> str:
    """The text of a chart without data."""
    return text_at((x.start + x.stop) / 2, y, "no data", f"{MIDDLE} {HALO}")


def chart(height: float, title: str, description: str, body: Sequence[str]) -> str:
    """The SVG element with its name and description for screen readers.

    Ids are a hash of the content, so that two charts on a page differ in them.
    """
    content = "".join(body)
    digest = hashlib.blake2b(
        f"{title}\n{description}\n{content}".encode("utf-8", "replace"), digest_size=5
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="<id>-title <id>-desc"'
        f' viewBox="0 0 {short(WIDTH)} {short(height)}" width="100%" {_FONT}><title'
        f' id="<id>-title">{clean(title)}</title><desc'
        f' id="<id>-desc">{clean(description)}</desc>{content}</svg>'
    ).replace("<id>", f"chart-{digest.hexdigest()}")
