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
from typing import Any, NamedTuple, TypeAlias

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
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
_MOST_ROWS = 8  # classes of a heat map
Lines: TypeAlias = Mapping[str, tuple[str, Sequence[float], Sequence[float]]]


def printable(text: str) -> str:
    """The text without the characters that UTF-8 or XML forbid."""
    encodable = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in encodable)


def line_chart(title: str, lines: Lines, alt: str, **settings: Any) -> str:
    """Lines over one axis as an SVG element.

    Args:
        title: of the chart.
        lines: by their names: the style, such as `-` or `o`, x and y.
        alt: what the chart shows, for those who do not see it.
        settings: of the axes, such as `xscale="log"`.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure((400 / 72, 250 / 72), layout="constrained")
        axes = figure.add_subplot(title=title, **settings)
        for name, (style, x, y) in lines.items():
            axes.plot(x, _finite(y), style, markersize=4.5, label=name)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":  # its own labels are formulas
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
        if len(lines) > 1:
            axes.legend()
        return _svg(figure, f"{title}: {alt}")


def _finite(values: Any) -> Array:
    """Values in float64 with NaN, a gap, for what an axis cannot show."""
    y = np.array(values, dtype=np.float64)
    return np.where(np.abs(y) < 1e300, y, np.nan)


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
    arrays = played.inputs, played.targets, played.outputs
    inputs, true, outputs = (array[steps.start : steps.stop] for array in arrays)
    count = len(played.columns) + (2 if classes else 1)
    with mpl.rc_context(_STYLE):
        figure = Figure((660 / 72, (40 + 85 * count) / 72), layout="constrained")
        panels: list[Axes] = [*np.ravel(figure.subplots(count, 1, sharex=True, squeeze=False))]
        for panel, name, values in zip(panels, played.columns, inputs.T, strict=False):
            _envelope(panel, steps, values, INK)
            panel.set_title(name)
        if classes:
            counts = np.bincount(true[~np.isnan(true)].astype(int), minlength=len(classes))
            rows = np.sort(np.argsort(-counts, kind="stable")[:_MOST_ROWS])
            names = [printable(classes[int(row)]) for row in rows]
            _heat(panels[-2], steps, true[:, None] == rows, names, f"labels: {target}")
            _heat(panels[-1], steps, outputs[:, rows], names, "predicted probability")
        else:
            _envelope(panels[-1], steps, true, INK, label="target")
            _envelope(panels[-1], steps, outputs[:, 0], SERIES[1], label="predicted")
            panels[-1].set_title(target)
            panels[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)
        panels[-1].xaxis.set_major_formatter("{x:,.0f}")
        panels[-1].set(xlabel="step", xlim=(steps.start, steps.stop))
        return _svg(figure, alt)


def _edges(count: int) -> Array:
    """The first value of each column of a drawing, and the end."""
    return np.linspace(0, count, min(_COLUMNS, count) + 1).astype(int)


def _envelope(axes: Axes, steps: range, values: Array, color: str, **options: Any) -> None:
    """A line as wide as the values of its column."""
    edges, finite = _edges(len(values)), _finite(values)
    low, high = (pick.reduceat(finite, edges[:-1]) for pick in (np.fmin, np.fmax))
    x = steps.start + (edges[1:] + edges[:-1]) / 2
    axes.fill_between(x, low, high, color=color, alpha=0.7, linewidth=0.7, **options)


def _heat(axes: Axes, steps: range, values: Array, names: Sequence[str], title: str) -> None:
    """The mean of each of the `(T, R)` values over the columns as shades."""
    edges, finite = _edges(len(values)), np.nan_to_num(values.astype(np.float64))
    shades = (np.add.reduceat(finite, edges[:-1]).T / np.diff(edges)).clip(0, 1)
    extent = (steps.start, steps.stop, len(names) - 0.5, -0.5)
    how: dict[str, Any] = {"cmap": _SHADES, "interpolation": "nearest", "aspect": "auto"}
    axes.imshow(shades, vmin=0, vmax=1, extent=extent, **how)
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title)
    axes.grid(visible=False)


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
