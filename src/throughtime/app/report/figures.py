"""The figures of the report: matplotlib draws them as SVG, the page colours them.

Inside the page an SVG takes its colours: each colour drawn here is replaced by a custom property
of `page.css`, which differs in light and dark. Heat maps are one translucent colour, which suits
both. A figure is 400 units wide, or 660 where it needs the whole width of a desk; a phone shows
the first whole, and scrolls the second.

Shapes: `T` steps, `D` inputs that are shown, `C` classes or outputs.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

from throughtime.stream.formats.table import Array

INK, SERIES = "#191c20", ("#2350c4", "#cf3a0a", "#0c694c", "#620b82", "#776e21", "#177b9e")
_VARIABLES = {INK: "var(--ink)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES, 1)}
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of columns may hold a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "axes.formatter.limits": (-3, 5),
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "font.size": 10.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
} | dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"),
    INK,
)
_SHADES = LinearSegmentedColormap.from_list("shades", ["#2e7de000", "#2e7de0ff"])
_COLUMNS = 600  # that a long recording is drawn in
_DECADES = 1e-6  # of the largest gradient: smaller ones have no colour
_MOST_ROWS = 8  # classes of a heat map
_MOST_CUTS = 60  # closer together, the lines would hide the cells

Points: TypeAlias = tuple[Sequence[float], Sequence[float]]
Curves: TypeAlias = Mapping[str, Points]
Marks: TypeAlias = Mapping[str, float]


def printable(text: str) -> str:
    """The text without the characters that UTF-8 or XML forbid."""
    encodable = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in encodable)


def line_chart(
    title: str,
    labels: tuple[str, str],
    lines: Curves,
    alt: str,
    *,
    points: Curves | None = None,
    marks: Marks | None = None,
    levels: Marks | None = None,
    **settings: Any,
) -> str:
    """Lines over one axis as an SVG element.

    Args:
        title: of the chart.
        labels: of the axes.
        lines: by their names.
        alt: what the chart shows, for those who do not see it.
        points: drawn as points, by their names.
        marks: vertical lines at these values, by their names.
        levels: horizontal ones.
        settings: of the axes, such as `xscale="log"`.
    """
    with mpl.rc_context(_STYLE):
        figure = _figure(400, 250)
        axes = figure.add_subplot()
        log = settings.get("yscale") == "log"
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1], **settings)
        for dashes, (name, (x, y)) in zip(cycle(["-", "--", ":", "-."]), lines.items()):
            axes.plot(x, _drawable(y, log), dashes, label=name)
        for name, (x, y) in (points or {}).items():
            axes.plot(x, _drawable(y, log), "o", color=SERIES[1], markersize=4.5, label=name)
        for line, marked in ((axes.axvline, marks or {}), (axes.axhline, levels or {})):
            for name, value in marked.items():
                line(value, color=INK, linewidth=1, linestyle="--", alpha=0.6, label=name)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":  # its own labels are formulas
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend()
        return _svg(figure, f"{title}: {alt}")


def _figure(width: float, height: float) -> Figure:
    return Figure((width / 72, height / 72), layout="constrained")


def _drawable(values: Sequence[float], log: bool) -> Array:
    """Values in float64 with NaN, a gap, for what an axis cannot show."""
    y = np.array(values, dtype=np.float64)
    y[~(np.abs(y) < 1e300) | (log & (y <= 0))] = np.nan
    return y


class PlayedRecording(NamedTuple):
    """A recording that the net has played.

    Attributes:
        columns: the names of the inputs shown.
        inputs: `(T, D)`.
        targets: `(T,)`: the first target, NaN where none; classes as numbers.
        outputs: `(T, C)`: probabilities of the classes, or `(T, 1)`: the first output.
        errors: `(T,)`: whether wrong, or the squared error; 0 where no target.
    """

    columns: Sequence[str]
    inputs: Array
    targets: Array
    outputs: Array
    errors: Array


def recording_figure(
    played: PlayedRecording, steps: range, target: str, classes: Sequence[str], alt: str
) -> str:
    """Some steps of a recording: inputs, targets, and below each other or over them predictions."""
    shown = slice(steps.start, steps.stop)
    count = len(played.columns) + (2 if classes else 1)
    with mpl.rc_context(_STYLE):
        figure = _figure(660, 40 + 85 * count)
        panels: list[Axes] = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0].tolist()
        for panel, name, values in zip(panels, played.columns, played.inputs.T, strict=False):
            _envelope(panel, steps, values[shown], INK, name)
            panel.set_title(name)
        true, outputs, last = played.targets[shown], played.outputs[shown], panels[-1]
        if classes:
            counts = np.bincount(true[~np.isnan(true)].astype(int), minlength=len(classes))
            rows = np.sort(np.argsort(-counts, kind="stable")[:_MOST_ROWS])
            names = [str(classes[int(row)]) for row in rows]
            labels = (true[:, None] == rows).T
            _heat(panels[-2], steps, labels, names, f"labels: {target}", Normalize(0, 1))
            _heat(last, steps, outputs[:, rows].T, names, "predicted probability", Normalize(0, 1))
        else:
            _envelope(last, steps, true, INK, "target", alpha=0.6)
            _envelope(last, steps, outputs[:, 0], SERIES[1], "predicted", alpha=0.6)
            last.set_title(target)
            last.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)
        last.xaxis.set_major_formatter("{x:,.0f}")
        last.set(xlabel="step", xlim=(steps.start, steps.stop))
        return _svg(figure, alt)


def _edges(count: int) -> Array:
    """The first value of each column of a drawing, and the end."""
    return np.linspace(0, count, min(_COLUMNS, count) + 1).astype(int)


def _envelope(
    axes: Axes, steps: range, values: Array, color: str, label: str, alpha: float = 0.8
) -> None:
    """A line as wide as the values of its column."""
    edges, finite = _edges(len(values)), _drawable(values, log=False)  # type: ignore[arg-type]
    low, high = (f.reduceat(finite, edges[:-1]) for f in (np.fmin, np.fmax))
    x, area = steps.start + (edges[1:] + edges[:-1]) / 2, {"color": color, "linewidth": 0.7}
    axes.fill_between(x, low, high, label=label, alpha=alpha, **area)  # type: ignore[arg-type]


def _heat(
    axes: Axes, steps: range, rows: Array, names: Sequence[str], title: str, norm: Normalize
) -> Any:
    """The mean of each row `(R, T)` over the columns as shades."""
    edges = _edges(rows.shape[1])
    finite = np.nan_to_num(rows.astype(np.float64), posinf=0.0)
    shades = np.add.reduceat(finite, edges[:-1], axis=1) / np.diff(edges)
    extent = (steps.start, steps.stop, len(rows) - 0.5, -0.5)
    how: dict[str, Any] = {"cmap": _SHADES, "interpolation": "nearest", "aspect": "auto"}
    image = axes.imshow(shades, norm=norm, extent=extent, **how)
    axes.set_yticks(range(len(names)), [*map(printable, names)])
    axes.set_title(title)
    axes.grid(visible=False)
    return image


def gradient_figure(norms: Mapping[str, Sequence[float]], cuts: Sequence[int], alt: str) -> str:
    """The norms of gradients by state or gate over the steps, in shades of their logarithm."""
    values = np.array([*norms.values()], dtype=np.float64)
    top = max(values[np.isfinite(values)].max(initial=0.0), 1e-300)
    with mpl.rc_context(_STYLE):
        figure = _figure(660, 80 + 18 * len(norms))
        axes = figure.add_subplot()
        shades = LogNorm(top * _DECADES, top, clip=True)
        steps, title = range(values.shape[1]), "Gradient of the training losses"
        image = _heat(axes, steps, values, [*norms], title, shades)
        for cut in cuts if len(cuts) <= _MOST_CUTS else ():
            axes.axvline(cut, color=INK, linewidth=0.8, linestyle=":")
        ticks = [top * _DECADES, top * _DECADES**0.5, top]
        figure.colorbar(image, ticks=ticks, format="{x:.0e}").minorticks_off()
        axes.set_xlabel("step of the recording")
        return _svg(figure, alt)


def _svg(figure: Figure, alt: str) -> str:
    """The figure in the colours and the font of the page, with a description."""
    file, label = io.StringIO(), escape(printable(alt))
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    with mpl.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that this font lacks: a browser has them
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z]+[\w.]*_\d+"', "", svg)  # of groups: each figure counts anew
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda match: _VARIABLES.get(match[0], match[0]), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
