"""Charts as inline SVG, drawn from plain Python numbers: curves, a stretch of signal above its classes, bars.

Numbers that are not finite break a line and are never written. Colours are the custom properties of the page. No chart
relies on colour alone: lines have dashes, bars their names, and a run of one class its name where there is room.

Lengths are in user units: a chart is `WIDTH` wide and as tall as it needs to be.
"""

import hashlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from throughtime.errors import ConfigError, DataError
from throughtime.report.page import PALETTE, Range, axis_range, clean, drawn, extent, log_ticks, numbers, shorten, tick_labels, ticks, width

WIDTH = 760.0

_DASHES = ("none", "7 4", "2 4", "10 3 2 3", "4 2", "12 4", "1 3", "7 3 2 3 2 3")
_MANY = 1500  # points beyond which a line is drawn as its envelope
_PLAIN = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13" fill="currentColor"'
_HATCH = (
    '<pattern id="<id>-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 3h6" stroke="currentColor" stroke-opacity=".45" stroke-width="2.4"/></pattern>'
)
_MIDDLE, _END = 'text-anchor="middle"', 'text-anchor="end"'
_DOTTED = 'stroke-opacity=".7" stroke-dasharray="1 3" stroke-width="1.5"'
_HALO = 'style="paint-order:stroke;stroke:var(--paper,#fff);stroke-width:4;stroke-linejoin:round"'


@dataclass(frozen=True)
class Series:
    """A line through the points `(x, y)`; a number that is not finite breaks it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y, expected as many of each")


@dataclass(frozen=True)
class Mark:
    """A labelled line of reference at `value` of the axis `"x"` (a vertical line) or `"y"` (a horizontal one)."""

    value: float
    label: str
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Band:
    """The class of each step, as positions in the list of classes; any other number is a step without a class."""

    name: str
    classes: Sequence[int]


def runs(classes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of one class each, as `(start, stop, class)`.

    Example:
        >>> from throughtime.report.svg import runs
        >>> list(runs([0, 0, 2]))
        [(0, 2, 0), (2, 3, 2)]
    """
    start = 0
    for value, run in groupby(classes):
        stop = start + sum(1 for _ in run)
        yield start, stop, value
        start = stop


def envelope(columns: Sequence[int], y: Sequence[float]) -> list[int]:
    """The points to keep of each column of the picture: first, lowest, highest, last and the first gap.

    The line through them covers the same pixels as the whole line, down to a spike of one step (Jugel et al.'s M4, 2014).

    Args:
        columns: where each point lies; neighbours in one column are taken together.
        y: as many numbers.

    Returns:
        Positions in `y`, rising.
    """
    kept: list[int] = []
    start = 0
    for _, column in groupby(columns):
        here = range(start, start + sum(1 for _ in column))
        finite = [i for i in here if drawn(y[i])]
        gap = next((i for i in here if not drawn(y[i])), here[0])
        extremes = {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)} if finite else set[int]()
        kept += sorted({here[0], here[-1], gap} | extremes)
        start = here.stop
    return kept


def lines(
    series: Sequence[Series],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    y_range: Range | None = None,
    log_x: bool = False,
    log_y: bool = False,
    dots: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """Curves over one axis, told apart by dashes and colours, each with its last value at its end.

    Args:
        series: the curves.
        title: said above the picture.
        description: what it shows, in a sentence or two, for who cannot see it.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        y_range: what of y to show, default all; what lies beyond is cut off.
        log_x: a logarithmic x axis; a point at or below zero is a gap.
        log_y: the same for y.
        dots: a dot at every point, for curves of a few.
        marks: lines of reference; the axes reach far enough to show them, unless `y_range` says otherwise.
    """
    spots = [[(a, b) for a, b in zip(s.x, s.y, strict=True) if drawn(a, log=log_x) and drawn(b, log=log_y)] for s in series]
    across = [m for m in marks if m.axis != "x" and drawn(m.value, log=log_y)]
    upright = [m for m in marks if m.axis == "x" and drawn(m.value, log=log_x)]
    y_range = axis_range([b for line in spots for _, b in line] + [m.value for m in across], y_range, log=log_y)
    x_range = extent([a for line in spots for a, _ in line] + [m.value for m in upright], log=log_x)
    head, top = _head(title, [(_stroke(i, "M0 0h22"), s.name) for i, s in enumerate(series)])
    ends = numbers([line[-1][1] for line in spots if line], 3)
    x = _Scale(*x_range, _margin(y_range, log=log_y), WIDTH - max(24.0, width(*ends) + 14), log_x)
    reference, plot_top = _upright(upright, x, top + 30, 240)
    y = _Scale(*y_range, plot_top + 240, plot_top, log_y)
    body = [head, _muted(0, top + 12, y_label), _axes(x, y, y.start, x_label), reference]
    body += [_clip(x, y), *(_stroke(i, _path(s.x, s.y, x, y), clip=True) for i, s in enumerate(series)), _across(across, x, y)]
    body += [_dot(i, a, b, x, y) for i, line in enumerate(spots) for a, b in line[: -1 if dots else 0]]
    body += [_ends([line[-1] for line in spots if line], [i for i, line in enumerate(spots) if line], ends, x, y)]
    return _chart(y.start + 46, title, description, body if any(spots) else [*body, _empty(x, y)])


def strip(
    signal: Sequence[float],
    bands: Sequence[Band],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    classes: Sequence[str] = (),
    start: int = 0,
    overlays: Sequence[Series] = (),
) -> str:
    """A stretch of signal above rows of the classes of its steps, say the labels and what was predicted.

    Args:
        signal: one number for each step, in ink; may be empty when the overlays say all.
        bands: the rows of classes.
        title: said above the picture.
        description: what it shows, in a sentence or two, for who cannot see it.
        x_label: what a step is, with its unit.
        y_label: what the signal is, with its unit.
        classes: the names of the classes, in the order of their numbers.
        start: the number of the first step.
        overlays: lines on the axis of the signal, their x in steps: for regression, target and predicted.
    """
    # The step i is the stretch from i to i + 1, and its value stands in the middle.
    own = Series(y_label, range(start, start + len(signal)), signal)
    every = [Series(s.name, [a + 0.5 for a in s.x], s.y) for s in (own, *overlays)]
    steps = [1, *(len(b.classes) for b in bands), *(math.ceil(a) - start for s in every for a in s.x if drawn(a))]
    y_range = axis_range([v for s in every for v in s.y if drawn(v)])
    keys = [(_stroke(i, "M0 0h22"), s.name) for i, s in enumerate(every, -1) if overlays and len(s.y)]
    head, top = _head(title, keys + [(_block(i, 0, -6, 22, 12), name) for i, name in enumerate(classes)])
    left = max(_margin(y_range), width(*(shorten(b.name, 26) for b in bands)) + 10)
    x, y = _Scale(start, start + max(steps), left, WIDTH - 24), _Scale(*y_range, top + 200, top + 30)
    floor = y.start + 32 * len(bands) + 4
    body = [_HATCH, head, _muted(0, top + 12, y_label), _axes(x, y, floor, x_label)]
    body += [_stroke(i, _path(s.x, s.y, x, y)) for i, s in enumerate(every, -1)]
    body += [_band(band, classes, x, y.start + 10 + 32 * i) for i, band in enumerate(bands)]
    return _chart(floor + 46, title, description, body if len(signal) or overlays or bands else [*body, _empty(x, y)])


def bars(
    rows: Sequence[tuple[str, float]], *, title: str, description: str, x_label: str, x_range: Range | None = None, colour: int = 0
) -> str:
    """A bar for each named value, with the value before it, in the order given.

    Args:
        rows: names and values; one that is not finite has no bar.
        title: said above the picture.
        description: what it shows, in a sentence or two, for who cannot see it.
        x_label: what the values are, with their unit.
        x_range: where the axis begins and ends, default all values and zero; a bar ends there, its value does not.
        colour: which of the colours of the page, counted from 0.
    """
    names, texts = [shorten(name, 32) for name, _ in rows], numbers([value for _, value in rows], 3)
    head, top = _head(title, [])
    low, high = axis_range([0.0, *([value for _, value in rows if drawn(value)] or [1.0])], x_range)
    left = width(*names) + 14
    x = _Scale(low, high, left + width(*texts) + 12, WIDTH - 24)
    floor, zero = top + 14 + 26 * max(1, len(rows)), x(min(max(0.0, low), high))
    body = [head, _x_axis(x, top + 8, floor, x_label)]
    for i, ((full, value), name, text) in enumerate(zip(rows, names, texts, strict=True)):
        middle = top + 24 + 26 * i
        end = x(min(max(value, low), high)) if drawn(value) else zero
        bar = _block(colour, min(zero, end), middle - 8, abs(end - zero), 16) if end != zero else ""
        # Beside the name, not at the far end of the bar, the value is in sight on a phone, too.
        label = _text(left - 14, middle + 4.5, name, _END) + _text(x.start - 12, middle + 4.5, text, _END)
        body.append(f"<g><title>{clean(full)}: {text}</title>{label}{bar}</g>")
    body.append(_rule(f"M{_n(zero)} {_n(top + 8)}V{_n(floor)}", 'stroke-opacity=".6"'))
    return _chart(floor + 46, title, description, body if rows else [*body, _text(x.start + 12, top + 30, "no data", _HALO)])


@dataclass(frozen=True)
class _Scale:
    """From the numbers of one axis, `low` to `high`, to the picture, `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        # Far outside is as good as infinitely far, and browsers draw it.
        return self.start + min(max((at - low) / (high - low), -9.0), 10.0) * (self.stop - self.start)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Where the ticks within the axis are, and what they say."""
        every = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, 6)  # 6: the ends stay ticks
        slack = 1e-9 * (self.high - self.low)
        inside = [t for t in every if self.low - slack <= t <= self.high + slack]
        says = [tick_labels([t])[0] for t in inside] if self.log else tick_labels(inside)
        return list(zip(inside, says, strict=True))


def _margin(y_range: Range, *, log: bool = False) -> float:
    """The room that the labels of a y axis need."""
    return width(*(label for _, label in _Scale(*y_range, 0, 0, log).ticks)) + 10


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" {more}>{clean(text)}</text>'


def _muted(x: float, y: float, text: str, more: str = "") -> str:
    return _text(x, y, text, f'fill-opacity=".72" {more}')


def _colour(i: int) -> str:
    return f"var(--series-{i % len(PALETTE) + 1},{PALETTE[i % len(PALETTE)]})" if i >= 0 else "currentColor"


def _stroke(i: int, path: str, *, clip: bool = False) -> str:
    """A line in the colour and dashes of series `i`, in thin ink below 0."""
    look = f"stroke:{_colour(i)};stroke-width:{2 if i >= 0 else 1};stroke-dasharray:{_DASHES[i % len(_DASHES)] if i >= 0 else 'none'}"
    clipped = ' clip-path="url(#<id>-clip)"' if clip else ""
    return f'<path d="{path}" fill="none" style="{look}" stroke-linejoin="round"{clipped}/>' if path else ""


def _block(i: int, x: float, y: float, wide: float, height: float) -> str:
    """A rectangle in the colour of class `i`, hatched once the colours are used up."""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{max(wide, 0.8):.2f}" height="{_n(height)}"'
    hatch = f'<rect {place} fill="url(#<id>-hatch)"/>' if i >= len(PALETTE) else ""
    return f'<rect {place} style="fill:{_colour(i)}"/>{hatch}'


def _path(xs: Sequence[float], ys: Sequence[float], x: _Scale, y: _Scale) -> str:
    """The `d` of a line; beyond `_MANY` points, of its envelope. A point between two gaps is a dot."""
    places = [x(a) if drawn(a, log=x.log) else math.inf for a in xs]
    ys = [b if drawn(b, log=y.log) else math.nan for b in ys]
    kept = envelope([int(p) if drawn(p) else -1 for p in places], ys) if len(xs) > _MANY else range(len(xs))
    parts, pen = list[str](), "M"
    for i in kept:
        if drawn(places[i]) and drawn(ys[i]):
            parts.append(f"{pen}{_n(places[i])} {_n(y(ys[i]))}" + ("h0" if pen == "M" else ""))
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _head(title: str, keys: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """The title and the legend, and where they end."""
    rows = textwrap.wrap(title, 88 if title.isascii() else 48)
    parts = [_text(0, 15 + 20 * i, row, 'font-size="15" font-weight="600"') for i, row in enumerate(rows)]
    x, y = 0.0, 20.0 * len(rows) + 18
    for glyph, full in keys:
        name = shorten(full, 60)
        if x and x + 30 + width(name) > WIDTH:
            x, y = 0.0, y + 22
        parts.append(f'<g transform="translate({_n(x)} {_n(y)})">{glyph}{_text(29, 4.5, name)}</g>')
        x += 50 + width(name)
    return "".join(parts), y + (16 if keys else -12)


def _axes(x: _Scale, y: _Scale, floor: float, x_label: str) -> str:
    rows = (_rule(f"M{_n(x.start)} {_n(y(v))}H{_n(x.stop)}") + _muted(x.start - 8, y(v) + 4.5, label, _END) for v, label in y.ticks)
    return "".join(rows) + _x_axis(x, y.stop, floor, x_label)


def _x_axis(x: _Scale, top: float, floor: float, x_label: str) -> str:
    columns = (_rule(f"M{_n(x(v))} {_n(top)}V{_n(floor + 4)}") + _muted(x(v), floor + 20, label, _MIDDLE) for v, label in x.ticks)
    return "".join(columns) + _muted((x.start + x.stop) / 2, floor + 41, x_label, _MIDDLE)


def _rule(path: str, more: str = 'stroke-opacity=".13"') -> str:
    return f'<path d="{path}" stroke="currentColor" {more}/>'


def _upright(marks: Sequence[Mark], x: _Scale, top: float, height: float) -> tuple[str, float]:
    """Vertical lines, their labels in as many rows above the plot as keep them apart; and where the plot begins."""
    taken: list[float] = []  # how far to the right each row is full
    spots: list[tuple[float, float, int, str]] = []
    for mark in sorted(marks, key=lambda m: m.value):
        half = width(mark.label) / 2
        centre = max(min(x(mark.value), x.stop - half), x.start + half)
        row = next((i for i, end in enumerate(taken) if centre - half > end), len(taken))
        taken[row : row + 1] = [centre + half + 8]
        spots.append((x(mark.value), centre, row, mark.label))
    plot = top + 17 * len(taken) + (4 if taken else 0)
    lines = (_rule(f"M{_n(at)} {_n(top + 8 + 17 * row)}V{_n(plot + height)}", _DOTTED) for at, _, row, _ in spots)
    labels = (_text(centre, top + 4 + 17 * row, label, f"{_MIDDLE} {_HALO}") for _, centre, row, label in spots)
    return "".join([*lines, *labels]), plot


def _across(marks: Sequence[Mark], x: _Scale, y: _Scale) -> str:
    """Horizontal lines within the plot, with their labels above them at the left."""
    inside = [m for m in marks if y.low <= m.value <= y.high]
    heights = _spread([y(m.value) - 6 for m in inside], 16, y.stop + 13, y.start - 4)
    lines = (_rule(f"M{_n(x.start)} {_n(y(m.value))}H{_n(x.stop)}", _DOTTED) for m in inside)
    return "".join([*lines, *(_text(x.start + 8, at, m.label, _HALO) for at, m in zip(heights, inside, strict=True))])


def _ends(spots: Sequence[tuple[float, float]], colours: Sequence[int], texts: Sequence[str], x: _Scale, y: _Scale) -> str:
    """The last value of each line, beside its last point."""
    heights = _spread([y(min(max(b, y.low), y.high)) + 4.5 for _, b in spots], 16, y.stop + 4, y.start + 4)
    return "".join(
        _dot(i, a, b, x, y) + _text(x(a) + 8, at, text, _HALO.replace('style="', f'style="fill:{_colour(i)};'))
        for (a, b), i, text, at in zip(spots, colours, texts, heights, strict=True)
    )


def _dot(i: int, a: float, b: float, x: _Scale, y: _Scale) -> str:
    """A point of series `i`, unless it lies above or below the picture."""
    return f'<circle cx="{_n(x(a))}" cy="{_n(y(b))}" r="3.2" style="fill:{_colour(i)}"/>' if y.low <= b <= y.high else ""


def _spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved as little as keeps them `gap` apart, within `low` to `high`."""
    order = sorted(range(len(places)), key=places.__getitem__)
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    moved, least, most = list(places), low, high
    for i in order:
        moved[i] = max(moved[i], least)
        least = moved[i] + gap
    for i in reversed(order):
        moved[i] = min(moved[i], most)
        most = moved[i] - gap
    return moved


def _band(band: Band, classes: Sequence[str], x: _Scale, top: float) -> str:
    """One row: a block for each run of a known class, a thin line where there is none."""
    if not classes:
        raise ConfigError(f"band {band.name!r} without names for its classes. Add classes=(...), a name for each number.")
    parts = [_text(x.start - 8, top + 15.5, shorten(band.name, 26), _END)]
    for start, stop, i in runs(band.classes):
        left, right = x(x.low + start), x(x.low + stop)
        if not 0 <= i < len(classes):
            parts.append(_rule(f"M{_n(left)} {_n(top + 11)}H{_n(right)}", 'stroke-opacity=".5"'))
            continue
        parts.append(_block(i, left, top, right - left, 22))
        if right - left > width(classes[i]) + 8:
            parts.append(_text((left + right) / 2, top + 15.5, classes[i], f'{_MIDDLE} style="fill:var(--on-series,#fff)"'))
    return f"<g>{''.join(parts)}</g>"


def _clip(x: _Scale, y: _Scale) -> str:
    place = f'x="{_n(x.start)}" y="{_n(y.stop - 2)}" width="{_n(x.stop - x.start + 2)}" height="{_n(y.start - y.stop + 4)}"'
    return f'<clipPath id="<id>-clip"><rect {place}/></clipPath>'


def _empty(x: _Scale, y: _Scale) -> str:
    return _text((x.start + x.stop) / 2, (y.start + y.stop) / 2, "no data", f"{_MIDDLE} {_HALO}")


def _chart(height: float, title: str, description: str, body: Sequence[str]) -> str:
    """The picture with its name and description; ids are made of what it shows, so that two pictures differ in them."""
    inside = "".join(body)
    name = "chart-" + hashlib.blake2b(f"{title}\n{description}\n{inside}".encode("utf-8", "replace"), digest_size=5).hexdigest()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="<id>-title <id>-desc" viewBox="0 0 {_n(WIDTH)} {_n(height)}" '
        f'width="100%" {_PLAIN}><title id="<id>-title">{clean(title)}</title><desc id="<id>-desc">{clean(description)}</desc>{inside}</svg>'
    ).replace("<id>", name)
