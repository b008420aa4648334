"""Charts as inline SVG, drawn from plain Python numbers: curves, a stretch of signal above its
classes, bars.

Numbers that are not finite break a line and are never written. Colours are the custom properties of
the page. No chart relies on colour alone: lines have dashes, bars their names, and a run of one
class its name where there is room.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

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
    colour_of,
    drawn,
    empty,
    extent,
    faint,
    heading,
    margin,
    numbers,
    ruled,
    short,
    shorten,
    stroke,
    width,
    written,
    x_axis,
)
from throughtime.errors import ConfigError, DataError

_THROUGH = 16  # cuts beyond which they are marked above the cells, which they would hide
_MANY = 1500  # points beyond which a line is drawn as its envelope


@dataclass(frozen=True)
class Series:
    """A line through the points `(x, y)`; a number that is not finite breaks it."""

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
    """A labelled line of reference at `value` of the axis `"x"` (a vertical line) or `"y"` (a horizontal one)."""

    value: float
    label: str
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Band:
    """The class of each step, as positions in the list of classes.

    Any other number is a step without a class.
    """

    name: str
    classes: Sequence[int]


def runs(classes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of one class each, as `(start, stop, class)`.

    Example:
        >>> from throughtime.app.report.charts import runs
        >>> list(runs([0, 0, 2]))
        [(0, 2, 0), (2, 3, 2)]
    """
    start = 0
    for value, run in groupby(classes):
        stop = start + sum(1 for _ in run)
        yield start, stop, value
        start = stop


def envelope(columns: Sequence[int], y: Sequence[float]) -> list[int]:
    """The points to keep of each column of the picture: first, lowest, highest, last and the first
    gap.

    The line through them covers the same pixels as the whole line, down to a spike of one step
    (Jugel et al.'s M4, 2014).

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
        extremes = (
            {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
            if finite
            else set[int]()
        )
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
        marks: lines of reference; the axes reach far enough to show them, unless `y_range` says
            otherwise.
    """
    spots = [
        [
            (a, b)
            for a, b in zip(s.x, s.y, strict=True)
            if drawn(a, log=log_x) and drawn(b, log=log_y)
        ]
        for s in series
    ]
    across = [m for m in marks if m.axis != "x" and drawn(m.value, log=log_y)]
    upright = [m for m in marks if m.axis == "x" and drawn(m.value, log=log_x)]
    y_range = axis_range(
        [b for line in spots for _, b in line] + [m.value for m in across], y_range, log=log_y
    )
    x_range = extent([a for line in spots for a, _ in line] + [m.value for m in upright], log=log_x)
    head, top = heading(title, [(stroke(i, "M0 0h22"), s.name) for i, s in enumerate(series)])
    ends = numbers([line[-1][1] for line in spots if line], 3)
    x = Scale(*x_range, margin(y_range, log=log_y), WIDTH - max(24.0, width(*ends) + 14), log_x)
    reference, plot_top = _upright(upright, x, top + 30, 240)
    y = Scale(*y_range, plot_top + 240, plot_top, log_y)
    body = [head, faint(0, top + 12, y_label), axes(x, y, y.start, x_label), reference]
    body += [
        _clip(x, y),
        *(stroke(i, _path(s.x, s.y, x, y), clip=True) for i, s in enumerate(series)),
        _across(across, x, y),
    ]
    body += [
        _dot(i, a, b, x, y) for i, line in enumerate(spots) for a, b in line[: -1 if dots else 0]
    ]
    body += [
        _ends(
            [line[-1] for line in spots if line],
            [i for i, line in enumerate(spots) if line],
            ends,
            x,
            y,
        )
    ]
    return chart(y.start + 46, title, description, body if any(spots) else [*body, empty(x, y)])


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
    """A stretch of signal above rows of the classes of its steps, say the labels and what was
    predicted.

    Args:
        signal: one number for each step, in ink; may be empty when the overlays say all.
        bands: the rows of classes.
        title: said above the picture.
        description: what it shows, in a sentence or two, for who cannot see it.
        x_label: what a step is, with its unit.
        y_label: what the signal is, with its unit.
        classes: the names of the classes, in the order of their numbers.
        start: the number of the first step.
        overlays: lines on the axis of the signal, their x in steps: for regression, target and
            predicted.
    """
    # The step i is the stretch from i to i + 1, and its value stands in the middle.
    own = Series(y_label, range(start, start + len(signal)), signal)
    every = [Series(s.name, [a + 0.5 for a in s.x], s.y) for s in (own, *overlays)]
    steps = [
        1,
        *(len(b.classes) for b in bands),
        *(math.ceil(a) - start for s in every for a in s.x if drawn(a)),
    ]
    y_range = axis_range([v for s in every for v in s.y if drawn(v)])
    keys = [
        (stroke(i, "M0 0h22"), s.name) for i, s in enumerate(every, -1) if overlays and len(s.y)
    ]
    head, top = heading(
        title, keys + [(block(i, 0, -6, 22, 12), name) for i, name in enumerate(classes)]
    )
    left = max(margin(y_range), width(*(shorten(b.name, 26) for b in bands)) + 10)
    x, y = Scale(start, start + max(steps), left, WIDTH - 24), Scale(*y_range, top + 200, top + 30)
    floor = y.start + 32 * len(bands) + 4
    body = [HATCH, head, faint(0, top + 12, y_label), axes(x, y, floor, x_label)]
    body += [stroke(i, _path(s.x, s.y, x, y)) for i, s in enumerate(every, -1)]
    body += [_band(band, classes, x, y.start + 10 + 32 * i) for i, band in enumerate(bands)]
    return chart(
        floor + 46,
        title,
        description,
        body if len(signal) or overlays or bands else [*body, empty(x, y)],
    )


def bars(
    rows: Sequence[tuple[str, float]],
    *,
    title: str,
    description: str,
    x_label: str,
    x_range: Range | None = None,
    colour: int = 0,
) -> str:
    """A bar for each named value, with the value before it, in the order given.

    Args:
        rows: names and values; one that is not finite has no bar.
        title: said above the picture.
        description: what it shows, in a sentence or two, for who cannot see it.
        x_label: what the values are, with their unit.
        x_range: where the axis begins and ends, default all values and zero; a bar ends there, its
            value does not.
        colour: which of the colours of the page, counted from 0.
    """
    names, texts = [shorten(name, 32) for name, _ in rows], numbers([value for _, value in rows], 3)
    head, top = heading(title, [])
    low, high = axis_range([0.0, *([value for _, value in rows if drawn(value)] or [1.0])], x_range)
    left = width(*names) + 14
    x = Scale(low, high, left + width(*texts) + 12, WIDTH - 24)
    floor, zero = top + 14 + 26 * max(1, len(rows)), x(min(max(0.0, low), high))
    body = [head, x_axis(x, top + 8, floor, x_label)]
    for i, ((full, value), name, text) in enumerate(zip(rows, names, texts, strict=True)):
        middle = top + 24 + 26 * i
        end = x(min(max(value, low), high)) if drawn(value) else zero
        bar = block(colour, min(zero, end), middle - 8, abs(end - zero), 16) if end != zero else ""
        # Beside the name, not at the far end of the bar, the value is in sight on a phone, too.
        label = written(left - 14, middle + 4.5, name, END) + written(
            x.start - 12, middle + 4.5, text, END
        )
        body.append(f"<g><title>{clean(full)}: {text}</title>{label}{bar}</g>")
    body.append(ruled(f"M{short(zero)} {short(top + 8)}V{short(floor)}", 'stroke-opacity=".6"'))
    return chart(
        floor + 46,
        title,
        description,
        body if rows else [*body, written(x.start + 12, top + 30, "no data", HALO)],
    )


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
    """Rows of cells, the fuller the larger, on a logarithmic scale; the largest value of each row
    stands at its end.

    Args:
        rows: names and values above zero; one that is not, or is not finite, leaves its cell empty.
        edges: where the cells begin, and where the last one ends: one more than there are values,
            rising.
        title: said above the picture.
        description: what it shows, in a sentence or two, for who cannot see it.
        x_label: what the edges are, with their unit.
        decades: values so many powers of ten below the largest are as good as nothing.
        log_x: a logarithmic x axis; the edges are above zero.
        marks: upright lines of reference.
        cuts: many of them at once: what all of them are, said in the legend, and where; beyond 16
            marked above the cells only.
        above: a curve over the same x, between its own extremes, such as the signal that is looked
            at.

    Raises:
        DataError: a row that has not a value for every cell.
    """
    for name, values in rows:
        if len(values) != len(edges) - 1:
            raise DataError(
                f"row {name!r} has {len(values)} values for {len(edges) - 1} cells, expected one"
                " for each"
            )
    top_value = max((v for _, values in rows for v in values if drawn(v, log=True)), default=1.0)
    shades = [
        (fill / 4, numbers([top_value / 10 ** (decades * (1 - fill / 4))], 1)[0])
        for fill in range(1, 5)
    ]
    keys = [(_cell(0, -6, 22, 12, fill), label) for fill, label in shades]
    head, top = heading(title, [*keys, (_cut(11, -9, 9), cuts[0])] if cuts[1] else keys)
    ends = numbers(
        [max((v for v in values if drawn(v, log=True)), default=math.nan) for _, values in rows], 2
    )
    names = [*(name for name, _ in rows), *([above.name] if above else [])]
    x = Scale(
        *extent(edges, log=log_x),
        width(*(shorten(name, 26) for name in names)) + 12,
        WIDTH - width(*ends) - 14,
        log_x,
    )
    upright = [
        m
        for m in marks
        if m.axis == "x" and drawn(m.value, log=log_x) and x.low <= m.value <= x.high
    ]
    reference, plot = _upright(upright, x, top + 18, 32 * len(rows))
    lifted, plot = _lifted(above, x, plot)
    body = [head, x_axis(x, plot, plot + 32 * len(rows), x_label), lifted]
    for i, ((name, values), end) in enumerate(zip(rows, ends, strict=True)):
        cells = _cells(edges, [_share(v, top_value, decades) for v in values], x, plot + 32 * i + 2)
        texts = written(x.start - 8, plot + 32 * i + 20, shorten(name, 26), END) + written(
            x.stop + 8, plot + 32 * i + 20, end
        )
        body.append(
            f'<g shape-rendering="crispEdges"><title>{clean(name)}: at most'
            f" {end}</title>{cells}{texts}</g>"
        )
    floor = plot + 32 * max(1, len(rows))
    foot = floor + 2 if len(cuts[1]) <= _THROUGH else plot
    body += [_cut(x(at), plot - 6, foot) for at in cuts[1] if x.low <= at <= x.high]
    return chart(
        floor + 46,
        title,
        description,
        [*body, reference] if rows else [*body, written(x.start, plot + 20, "no data", HALO)],
    )


def _cells(edges: Sequence[float], fills: Sequence[float], x: Scale, top: float) -> str:
    """A row of cells; neighbours alike are one."""
    parts, start = list[str](), 0
    for fill, run in groupby(round(fill, 2) for fill in fills):
        stop = start + sum(1 for _ in run)
        left, right = (
            round(x(edge), 1) for edge in (edges[start], edges[stop])
        )  # as written: neighbours meet
        parts.append(_cell(left, top, right - left, 28, fill))
        start = stop
    return "".join(parts)


def _lifted(above: Series | None, x: Scale, top: float) -> tuple[str, float]:
    """A curve and its name above the cells, and where these begin."""
    if above is None:
        return "", top
    y = Scale(*extent([v for v in above.y if drawn(v)]), top + 58, top + 4)
    name = written(x.start - 8, top + 36, shorten(above.name, 26), END)
    return stroke(-1, _path(above.x, above.y, x, y)) + name, top + 72


def _cut(x: float, top: float, floor: float) -> str:
    """An upright line that is seen on cells of any colour."""
    path = f"M{short(x)} {short(top)}V{short(floor)}"
    return (
        f'<path d="{path}" style="stroke:var(--paper,#fff);stroke-width:4"/><path d="{path}"'
        ' stroke="currentColor" stroke-width="1.4"/>'
    )


def _share(value: float, top: float, decades: int) -> float:
    """How full a cell is: 1 for the largest value, 0 for one so many powers of ten below."""
    return (
        min(1.0, max(0.0, 1 + (math.log10(value) - math.log10(top)) / decades))
        if drawn(value, log=True)
        else 0.0
    )


def _cell(x: float, y: float, wide: float, height: float, fill: float) -> str:
    """A rectangle as strong in colour as it is full."""
    if fill <= 0:
        return ""
    place = f'x="{short(x)}" y="{short(y)}" width="{max(wide, 0.8):.2f}" height="{short(height)}"'
    return f'<rect {place} fill-opacity="{fill:.2f}" style="fill:{colour_of(0)}"/>'


def _path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    """The `d` of a line; beyond `_MANY` points, of its envelope.

    A point between two gaps is a dot.
    """
    places = [x(a) if drawn(a, log=x.log) else math.inf for a in xs]
    ys = [b if drawn(b, log=y.log) else math.nan for b in ys]
    kept = (
        envelope([int(p) if drawn(p) else -1 for p in places], ys)
        if len(xs) > _MANY
        else range(len(xs))
    )
    parts, pen = list[str](), "M"
    for i in kept:
        if drawn(places[i]) and drawn(ys[i]):
            parts.append(
                f"{pen}{short(places[i])} {short(y(ys[i]))}" + ("h0" if pen == "M" else "")
            )
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _upright(marks: Sequence[Mark], x: Scale, top: float, height: float) -> tuple[str, float]:
    """Vertical lines, their labels in as many rows above the plot as keep them apart.

    And where the plot begins.
    """
    taken: list[float] = []  # how far to the right each row is full
    spots: list[tuple[float, float, int, str]] = []
    for mark in sorted(marks, key=lambda m: m.value):
        half = width(mark.label) / 2
        centre = max(min(x(mark.value), x.stop - half), x.start + half)
        row = next((i for i, end in enumerate(taken) if centre - half > end), len(taken))
        taken[row : row + 1] = [centre + half + 8]
        spots.append((x(mark.value), centre, row, mark.label))
    plot = top + 17 * len(taken) + (4 if taken else 0)
    lines = (
        ruled(f"M{short(at)} {short(top + 8 + 17 * row)}V{short(plot + height)}", DOTTED)
        for at, _, row, _ in spots
    )
    labels = (
        written(centre, top + 4 + 17 * row, label, f"{MIDDLE} {HALO}")
        for _, centre, row, label in spots
    )
    return "".join([*lines, *labels]), plot


def _across(marks: Sequence[Mark], x: Scale, y: Scale) -> str:
    """Horizontal lines within the plot, with their labels above them at the left."""
    inside = [m for m in marks if y.low <= m.value <= y.high]
    heights = _spread([y(m.value) - 6 for m in inside], 16, y.stop + 13, y.start - 4)
    lines = (
        ruled(f"M{short(x.start)} {short(y(m.value))}H{short(x.stop)}", DOTTED) for m in inside
    )
    return "".join(
        [
            *lines,
            *(
                written(x.start + 8, at, m.label, HALO)
                for at, m in zip(heights, inside, strict=True)
            ),
        ]
    )


def _ends(
    spots: Sequence[tuple[float, float]],
    colours: Sequence[int],
    texts: Sequence[str],
    x: Scale,
    y: Scale,
) -> str:
    """The last value of each line, beside its last point."""
    heights = _spread(
        [y(min(max(b, y.low), y.high)) + 4.5 for _, b in spots], 16, y.stop + 4, y.start + 4
    )
    return "".join(
        _dot(i, a, b, x, y)
        + written(x(a) + 8, at, text, HALO.replace('style="', f'style="fill:{colour_of(i)};'))
        for (a, b), i, text, at in zip(spots, colours, texts, heights, strict=True)
    )


def _dot(i: int, a: float, b: float, x: Scale, y: Scale) -> str:
    """A point of series `i`, unless it lies above or below the picture."""
    return (
        f'<circle cx="{short(x(a))}" cy="{short(y(b))}" r="3.2" style="fill:{colour_of(i)}"/>'
        if y.low <= b <= y.high
        else ""
    )


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


def _band(band: Band, classes: Sequence[str], x: Scale, top: float) -> str:
    """One row: a block for each run of a known class, a thin line where there is none."""
    if not classes:
        raise ConfigError(
            f"band {band.name!r} without names for its classes. Add classes=(...), a name for each"
            " number."
        )
    parts = [written(x.start - 8, top + 15.5, shorten(band.name, 26), END)]
    for start, stop, i in runs(band.classes):
        left, right = x(x.low + start), x(x.low + stop)
        if not 0 <= i < len(classes):
            parts.append(
                ruled(f"M{short(left)} {short(top + 11)}H{short(right)}", 'stroke-opacity=".5"')
            )
            continue
        parts.append(block(i, left, top, right - left, 22))
        if right - left > width(classes[i]) + 8:
            parts.append(
                written(
                    (left + right) / 2,
                    top + 15.5,
                    classes[i],
                    f'{MIDDLE} style="fill:var(--on-series,#fff)"',
                )
            )
    return f"<g>{''.join(parts)}</g>"


def _clip(x: Scale, y: Scale) -> str:
    place = (
        f'x="{short(x.start)}" y="{short(y.stop - 2)}" width="{short(x.stop - x.start + 2)}"'
        f' height="{short(y.start - y.stop + 4)}"'
    )
    return f'<clipPath id="<id>-clip"><rect {place}/></clipPath>'
