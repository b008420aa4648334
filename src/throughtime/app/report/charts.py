"""Charts as inline SVG from plain Python numbers: curves, signals with classes, bars, heat maps.

Non-finite numbers break a line and are never written. Colours are the custom properties of the
page. No chart relies on colour alone: lines have dashes, bars have names, and a run of one class
has its name where it fits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, TypeVar

from throughtime._svg import (
    DOTTED,
    END,
    HALO,
    HATCH,
    MIDDLE,
    WIDTH,
    Range,
    Scale,
    axes,
    axis_range,
    block,
    chart,
    clean,
    colour,
    drawable,
    extent,
    faint_text_at,
    heading,
    horizontal,
    label_margin,
    no_data,
    numbers,
    rect,
    rule,
    short,
    shorten,
    stroke,
    text_at,
    text_width,
    vertical,
    x_axis,
)
from throughtime.errors import ConfigError, DataError

_MANY_POINTS = 1500  # beyond it a line is drawn as its envelope
_MANY_CUTS = 16  # beyond it cuts are drawn above the cells, which they would hide
_LONGEST_NAME = 26  # characters of the name of a row

_Point: TypeAlias = tuple[float, float]
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Series:
    """A line through the points `(x, y)`; a non-finite number breaks it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(
                f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y, expected as many of"
                " each"
            )


@dataclass(frozen=True)
class Mark:
    """A labelled reference line at `value` of an axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Band:
    """The class of each step, as an index into the classes; any other number is no class."""

    name: str
    classes: Sequence[int]


def runs(values: Sequence[_Number]) -> Iterator[tuple[int, int, _Number]]:
    """Runs of equal values, as `(start, stop, value)`.

    Example:
        >>> from throughtime.app.report.charts import runs
        >>> list(runs([0, 0, 2]))
        [(0, 2, 0), (2, 3, 2)]
    """
    start = 0
    for value, run in groupby(values):
        stop = start + sum(1 for _ in run)
        yield start, stop, value
        start = stop


def envelope(columns: Sequence[int], y: Sequence[float]) -> list[int]:
    """Indices of the points to keep: first, lowest, highest, last and first gap of each column.

    The line through them covers the same pixels as the whole line, down to a spike of one step
    (M4 of Jugel et al., 2014).

    Args:
        columns: the pixel column of each point; neighbours in one column are taken together.
        y: as many numbers.
    """
    indices: list[int] = []
    for start, stop, _ in runs(columns):
        inside = range(start, stop)
        finite = [i for i in inside if drawable(y[i])]
        gap = next((i for i in inside if not drawable(y[i])), start)
        keep = {start, stop - 1, gap}
        if finite:
            keep |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
        indices += sorted(keep)
    return indices


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
    x_marks: Sequence[Mark] = (),
    y_marks: Sequence[Mark] = (),
) -> str:
    """Curves over one axis, distinguished by dashes and colours, each with its last value.

    Args:
        series: the curves.
        title: the heading of the chart.
        description: what the chart shows, in a sentence or two, for screen readers.
        x_label: name and unit of x.
        y_label: name and unit of y.
        y_range: limits of the y axis, which clip the curves; default: all values.
        log_x: a logarithmic x axis; points at or below zero become gaps.
        log_y: the same for y.
        dots: whether to draw a dot at every point.
        x_marks: vertical reference lines; the x axis includes them.
        y_marks: horizontal ones; the y axis includes them, unless `y_range` excludes them.
    """
    points = [
        [
            (a, b)
            for a, b in zip(s.x, s.y, strict=True)
            if drawable(a, log=log_x) and drawable(b, log=log_y)
        ]
        for s in series
    ]
    x_marks = [mark for mark in x_marks if drawable(mark.value, log=log_x)]
    y_marks = [mark for mark in y_marks if drawable(mark.value, log=log_y)]
    x_values = [a for line in points for a, _ in line] + [m.value for m in x_marks]
    y_values = [b for line in points for _, b in line] + [m.value for m in y_marks]
    y_range = axis_range(y_values, y_range, log=log_y)
    ends = {i: line[-1] for i, line in enumerate(points) if line}
    end_labels = numbers([value for _, value in ends.values()], 3)

    head, top = heading(title, [(stroke(i, "M0 0h22"), s.name) for i, s in enumerate(series)])
    right = WIDTH - max(24.0, text_width(*end_labels) + 14)
    x = Scale(*extent(x_values, log=log_x), label_margin(y_range, log=log_y), right, log_x)
    vertical_marks, plot_top = _vertical_marks(x_marks, x, top + 30, 240)
    y = Scale(*y_range, plot_top + 240, plot_top, log_y)
    clip = rect(x.start, y.stop - 2, x.stop - x.start + 2, y.start - y.stop + 4, "")
    body = [
        head,
        faint_text_at(0, top + 12, y_label),
        axes(x, y, y.start, x_label),
        vertical_marks,
        f'<clipPath id="<id>-clip">{clip}</clipPath>',
        *(stroke(i, _path(s, x, y), 'clip-path="url(#<id>-clip)"') for i, s in enumerate(series)),
        _horizontal_marks(y_marks, x, y),
        *(_dot(i, p, x, y) for i, line in enumerate(points) for p in line[: -1 if dots else 0]),
        _end_labels(ends, end_labels, x, y),
        "" if ends else no_data(x, plot_top + 120),
    ]
    return chart(y.start + 46, title, description, body)


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
) -> str:
    """An excerpt of a signal above rows of classes, such as labels and predictions.

    Args:
        signal: one number for each step.
        bands: the rows of classes.
        title: the heading of the chart.
        description: what the chart shows, in a sentence or two, for screen readers.
        x_label: name and unit of a step.
        y_label: name and unit of the signal.
        classes: the names of the classes, in the order of their numbers.
        start: the number of the first step.

    Raises:
        ConfigError: bands without names of classes.
    """
    y_range = axis_range([value for value in signal if drawable(value)])
    head, top = heading(title, [(block(i, 0, -6, 22, 12), name) for i, name in enumerate(classes)])
    left = max(label_margin(y_range), _name_width([band.name for band in bands]) - 2)
    steps = max([1, len(signal), *(len(band.classes) for band in bands)])
    x, y = Scale(start, start + steps, left, WIDTH - 24), Scale(*y_range, top + 200, top + 30)
    bottom = y.start + 32 * len(bands) + 4
    # Step i extends from i to i + 1; its value is drawn in the middle.
    curve = Series(y_label, [start + i + 0.5 for i in range(len(signal))], signal)
    body = [
        HATCH,
        head,
        faint_text_at(0, top + 12, y_label),
        axes(x, y, bottom, x_label),
        stroke(-1, _path(curve, x, y)),
        *(_band(band, classes, x, y.start + 10 + 32 * i) for i, band in enumerate(bands)),
        "" if len(signal) or bands else no_data(x, top + 115),
    ]
    return chart(bottom + 46, title, description, body)


def bars(
    rows: Sequence[tuple[str, float]],
    *,
    title: str,
    description: str,
    x_label: str,
    x_range: Range | None = None,
) -> str:
    """A bar for each named value, with the value before it.

    Args:
        rows: names and values; a non-finite value has no bar.
        title: the heading of the chart.
        description: what the chart shows, in a sentence or two, for screen readers.
        x_label: name and unit of the values.
        x_range: limits of the axis, at which bars end; default: all values and zero.
    """
    names, texts = [shorten(name, 32) for name, _ in rows], numbers([value for _, value in rows], 3)
    head, top = heading(title, [])
    low, high = axis_range([0.0, *([v for _, v in rows if drawable(v)] or [1.0])], x_range)
    left = text_width(*names) + 14
    x = Scale(low, high, left + text_width(*texts) + 12, WIDTH - 24)
    bottom, zero = top + 14 + 26 * max(1, len(rows)), x(min(max(0.0, low), high))
    body = [head, x_axis(x, top + 8, bottom, x_label)]
    for i, ((full_name, value), name, text) in enumerate(zip(rows, names, texts, strict=True)):
        middle = top + 24 + 26 * i
        end = x(min(max(value, low), high)) if drawable(value) else zero
        bar = block(0, min(zero, end), middle - 8, abs(end - zero), 16) if end != zero else ""
        # Beside the name rather than at the end of the bar, the value is visible on a phone.
        label = text_at(left - 14, middle + 4.5, name, END)
        label += text_at(x.start - 12, middle + 4.5, text, END)
        body.append(f"<g><title>{clean(full_name)}: {text}</title>{label}{bar}</g>")
    body.append(rule(vertical(zero, top + 8, bottom), 'stroke-opacity=".6"'))
    body.append("" if rows else no_data(x, top + 30))
    return chart(bottom + 46, title, description, body)


def heat(
    rows: Sequence[tuple[str, Sequence[float]]],
    edges: Sequence[float],
    *,
    title: str,
    description: str,
    x_label: str,
    decades: int = 6,
    log_x: bool = False,
    marks: Sequence[Mark] = (),
    cuts: tuple[str, Sequence[float]] = ("", ()),
    above: Series | None = None,
) -> str:
    """Rows of cells, the larger the value the stronger the colour, on a logarithmic scale.

    The largest value of each row is written at its end.

    Args:
        rows: names and positive values; any other value leaves its cell empty.
        edges: boundaries of the cells, rising, one more than there are values.
        title: the heading of the chart.
        description: what the chart shows, in a sentence or two, for screen readers.
        x_label: name and unit of the edges.
        decades: powers of ten below the largest value that have a colour.
        log_x: a logarithmic x axis; the edges are positive.
        marks: vertical reference lines.
        cuts: many vertical lines with one name in the legend, and their positions; more than 16
            are drawn above the cells only.
        above: a curve above the cells, over the same x, such as the signal.

    Raises:
        DataError: a row without a value for every cell.
    """
    for name, values in rows:
        if len(values) != len(edges) - 1:
            raise DataError(
                f"row {name!r} has {len(values)} values for {len(edges) - 1} cells, expected one"
                " for each"
            )
    maxima = [max((v for v in row if drawable(v, log=True)), default=math.nan) for _, row in rows]
    largest = max((v for v in maxima if drawable(v)), default=1.0)
    ends = numbers(maxima, 2)
    cut_name, cut_positions = cuts
    keys = [
        (_cell(0, -6, 22, 12, fill), numbers([largest / 10 ** (decades * (1 - fill))], 1)[0])
        for fill in (0.25, 0.5, 0.75, 1.0)
    ]
    keys += [(_cut(11, -9, 9), cut_name)] if cut_positions else []

    head, top = heading(title, keys)
    left = _name_width([*(name for name, _ in rows), *([above.name] if above else [])])
    x = Scale(*extent(edges, log=log_x), left, WIDTH - text_width(*ends) - 14, log_x)
    inside = [mark for mark in marks if x.low <= mark.value <= x.high]
    reference, plot_top = _vertical_marks(inside, x, top + 18, 32 * len(rows))
    curve, plot_top = _curve_above(above, x, plot_top)
    bottom = plot_top + 32 * max(1, len(rows))
    body = [head, x_axis(x, plot_top, plot_top + 32 * len(rows), x_label), curve]
    for i, ((name, values), end) in enumerate(zip(rows, ends, strict=True)):
        row_top = plot_top + 32 * i
        cells = _cells(edges, [_fill(v, largest, decades) for v in values], x, row_top + 2)
        texts = _row_name(name, x, row_top + 20) + text_at(x.stop + 8, row_top + 20, end)
        body.append(
            f'<g shape-rendering="crispEdges"><title>{clean(name)}: at most'
            f" {end}</title>{cells}{texts}</g>"
        )
    cut_bottom = bottom + 2 if len(cut_positions) <= _MANY_CUTS else plot_top
    body += [_cut(x(p), plot_top - 6, cut_bottom) for p in cut_positions if x.low <= p <= x.high]
    body.append(reference if rows else no_data(x, plot_top + 20))
    return chart(bottom + 46, title, description, body)


def _cells(edges: Sequence[float], fills: Sequence[float], x: Scale, top: float) -> str:
    """A row of cells; equal neighbours become one."""
    parts: list[str] = []
    for start, stop, fill in runs([round(fill, 2) for fill in fills]):
        # Rounded as they are written, so that neighbours meet.
        left, right = round(x(edges[start]), 1), round(x(edges[stop]), 1)
        parts.append(_cell(left, top, right - left, 28, fill))
    return "".join(parts)


def _cell(x: float, y: float, width: float, height: float, fill: float) -> str:
    """A rectangle whose opacity is its fill."""
    attributes = f'fill-opacity="{fill:.2f}" style="fill:{colour(0)}"'
    return rect(x, y, width, height, attributes) if fill > 0 else ""


def _fill(value: float, largest: float, decades: int) -> float:
    """The fill of a cell: 1 for the largest value, 0 for values `decades` or more below it."""
    if not drawable(value, log=True):
        return 0.0
    return min(1.0, max(0.0, 1 + (math.log10(value) - math.log10(largest)) / decades))


def _cut(x: float, top: float, bottom: float) -> str:
    """A vertical line with a halo, visible on cells of any colour."""
    path = vertical(x, top, bottom)
    halo = f'<path d="{path}" style="stroke:var(--paper,#fff);stroke-width:4"/>'
    return halo + rule(path, 'stroke-width="1.4"')


def _curve_above(series: Series | None, x: Scale, top: float) -> tuple[str, float]:
    """A curve and its name, and the y coordinate at which the cells below it begin."""
    if series is None:
        return "", top
    y = Scale(*extent([v for v in series.y if drawable(v)]), top + 58, top + 4)
    return stroke(-1, _path(series, x, y)) + _row_name(series.name, x, top + 36), top + 72


def _row_name(name: str, x: Scale, y: float) -> str:
    return text_at(x.start - 8, y, shorten(name, _LONGEST_NAME), END)


def _name_width(names: Sequence[str]) -> float:
    return text_width(*(shorten(name, _LONGEST_NAME) for name in names)) + 12


def _path(series: Series, x: Scale, y: Scale) -> str:
    """The path of a line, of its envelope where it has many points.

    A point between two gaps becomes a dot.
    """
    xs = [x(a) if drawable(a, log=x.log) else math.inf for a in series.x]
    ys = [b if drawable(b, log=y.log) else math.nan for b in series.y]
    indices: Sequence[int] = range(len(xs))
    if len(xs) > _MANY_POINTS:
        indices = envelope([int(a) if drawable(a) else -1 for a in xs], ys)
    parts, connected = list[str](), False
    for i in indices:
        visible = drawable(xs[i]) and drawable(ys[i])
        if visible:
            point = f"{short(xs[i])} {short(y(ys[i]))}"
            parts.append(f"L{point}" if connected else f"M{point}h0")
        connected = visible
    return "".join(parts)


def _vertical_marks(
    marks: Sequence[Mark], x: Scale, top: float, height: float
) -> tuple[str, float]:
    """Vertical reference lines, and the y coordinate at which the plot begins.

    Their labels are above the plot, in as many rows as keep them from overlapping.
    """
    row_ends: list[float] = []
    labels: list[tuple[Mark, float, int]] = []  # the centre of each and its row
    for mark in sorted(marks, key=lambda m: m.value):
        half = text_width(mark.label) / 2
        centre = max(min(x(mark.value), x.stop - half), x.start + half)
        row = next((i for i, end in enumerate(row_ends) if centre - half > end), len(row_ends))
        row_ends[row : row + 1] = [centre + half + 8]
        labels.append((mark, centre, row))
    plot_top = top + 17 * len(row_ends) + (4 if row_ends else 0)
    rules, texts = "", ""  # a text covers the rules of other marks
    for mark, centre, row in labels:
        row_top = top + 17 * row
        rules += rule(vertical(x(mark.value), row_top + 8, plot_top + height), DOTTED)
        texts += text_at(centre, row_top + 4, mark.label, f"{MIDDLE} {HALO}")
    return rules + texts, plot_top


def _horizontal_marks(marks: Sequence[Mark], x: Scale, y: Scale) -> str:
    """Horizontal reference lines within the plot, with their labels above them at the left."""
    inside = [m for m in marks if y.low <= m.value <= y.high]
    heights = _spread([y(m.value) - 6 for m in inside], 16, y.stop + 13, y.start - 4)
    rules, texts = "", ""
    for height, mark in zip(heights, inside, strict=True):
        rules += rule(horizontal(y(mark.value), x.start, x.stop), DOTTED)
        texts += text_at(x.start + 8, height, mark.label, HALO)
    return rules + texts


def _end_labels(ends: dict[int, _Point], labels: Sequence[str], x: Scale, y: Scale) -> str:
    """The last value of each series, beside its last point."""
    heights = [y(min(max(value, y.low), y.high)) + 4.5 for _, value in ends.values()]
    heights = _spread(heights, 16, y.stop + 4, y.start + 4)
    parts: list[str] = []
    for (i, point), label, height in zip(ends.items(), labels, heights, strict=True):
        halo = HALO.replace('style="', f'style="fill:{colour(i)};')
        parts.append(_dot(i, point, x, y) + text_at(x(point[0]) + 8, height, label, halo))
    return "".join(parts)


def _dot(i: int, point: _Point, x: Scale, y: Scale) -> str:
    """A point of series `i`, unless it lies above or below the plot."""
    if not y.low <= point[1] <= y.high:
        return ""
    centre = f'cx="{short(x(point[0]))}" cy="{short(y(point[1]))}"'
    return f'<circle {centre} r="3.2" style="fill:{colour(i)}"/>'


def _spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions, moved as little as keeps them `gap` apart, within `low` to `high`."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    gap = min(gap, (high - low) / max(1, len(positions) - 1))
    result, least, most = list(positions), low, high
    for i in order:
        result[i] = max(result[i], least)
        least = result[i] + gap
    for i in reversed(order):
        result[i] = min(result[i], most)
        most = result[i] - gap
    return result


def _band(band: Band, classes: Sequence[str], x: Scale, top: float) -> str:
    """A row of classes: a block for each run of a known class, a thin line elsewhere."""
    if not classes:
        raise ConfigError(
            f"band {band.name!r} without names for its classes. Add classes=(...), a name for each"
            " number."
        )
    parts = [_row_name(band.name, x, top + 15.5)]
    for start, stop, i in runs(band.classes):
        left, right = x(x.low + start), x(x.low + stop)
        if not 0 <= i < len(classes):
            parts.append(rule(horizontal(top + 11, left, right), 'stroke-opacity=".5"'))
            continue
        parts.append(block(i, left, top, right - left, 22))
        if right - left > text_width(classes[i]) + 8:
            style = f'{MIDDLE} style="fill:var(--on-series,#fff)"'
            parts.append(text_at((left + right) / 2, top + 15.5, classes[i], style))
    return f"<g>{''.join(parts)}</g>"
