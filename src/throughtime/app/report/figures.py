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
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias

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
_DECADES = 6  # of a gradient that are shown
_MOST_ROWS = 8  # classes of a heat map
_MOST_CUTS = 60  # closer together, the lines would hide the cells
_DASHES = ("-", "--", ":", "-.")

Points: TypeAlias = tuple[Sequence[float], Sequence[float]]


def printable(text: str) -> str:
    """The text without the characters that UTF-8 or XML forbid."""
    encodable = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in encodable)


@dataclass(frozen=True)
class Chart:
    """Lines over one axis.

    Args:
        title: of the chart.
        x, y: the labels of the axes.
        lines: by their names.
        alt: what the chart shows, for those who do not see it.
        points: drawn as points, by their names.
        faint: drawn thin and pale below the first line.
        marks: vertical lines at these values, by their names.
        levels: horizontal ones.
        settings: of the axes, such as `xscale="log"`.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    alt: str
    points: Mapping[str, Points] = field(default_factory=dict[str, Points])
    faint: Points = ((), ())
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    levels: Mapping[str, float] = field(default_factory=dict[str, float])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def draw(self) -> str:
        """The chart as an SVG element."""
        with mpl.rc_context(_STYLE):
            figure = Figure((400 / 72, 250 / 72), layout="constrained")
            axes = figure.add_subplot()
            log = self.settings.get("yscale") == "log"
            values = [_drawable(y, log) for _, y in self.lines.values()]
            if log and not any(np.isfinite(y).any() for y in values):
                axes.set_ylim(0.1, 1.0)  # no value above 0: an axis needs a range
            for (name, (x, y)), dashes in zip(self.lines.items(), _DASHES * 9, strict=False):
                axes.plot(x, _drawable(y, log), dashes, label=name)
            axes.plot(*self.faint, color=SERIES[0], alpha=0.3, linewidth=0.7)
            for name, (x, y) in self.points.items():
                axes.plot(x, _drawable(y, log), "o", color=SERIES[1], markersize=4.5, label=name)
            for line, marked in ((axes.axvline, self.marks), (axes.axhline, self.levels)):
                for dashes, (name, value) in zip(_DASHES[1:] * 9, marked.items(), strict=False):
                    line(value, color=INK, linewidth=1, linestyle=dashes, alpha=0.6, label=name)
            axes.set(title=self.title, xlabel=self.x, ylabel=self.y, **self.settings)
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_scale() == "log":  # its own labels are formulas
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter(NullFormatter())
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend()
            return _svg(figure, f"{self.title}: {self.alt}")


def _drawable(values: Sequence[float], log: bool) -> Array:
    """Values in float64 with NaN, a gap, for what an axis cannot show."""
    y = np.array(values, dtype=np.float64)
    y[~(np.abs(y) < 1e300) | (log & (y <= 0))] = np.nan
    return y


@dataclass(frozen=True)
class PlayedRecording:
    """A recording that the net has played.

    Attributes:
        name: of the recording.
        columns: the names of the inputs shown.
        inputs: `(T, D)`.
        targets: `(T,)`: the first target, NaN where none; classes as numbers.
        outputs: `(T, C)`: probabilities of the classes, or `(T, 1)`: the first output.
        errors: `(T,)`: whether wrong, or the squared error; 0 where no target.
    """

    name: str
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
    many = len(classes) > 2
    heights = [1.0] * len(played.columns) + ([1.0, 1.0] if many else [1.2])
    with mpl.rc_context(_STYLE):
        size: Any = (660 / 72, (40 + 85 * sum(heights)) / 72)
        figure = Figure(size, layout="constrained")
        options: dict[str, Any] = {"sharex": True, "squeeze": False, "height_ratios": heights}
        panels: list[Axes] = figure.subplots(len(heights), 1, **options)[:, 0].tolist()
        for column, name in enumerate(played.columns):
            _envelope(panels[column], steps, played.inputs[shown, column], INK, name)
            panels[column].set_title(name)
        true, outputs = played.targets[shown], played.outputs[shown]
        if many:
            rows = _frequent(true, len(classes))
            names: list[str] = [classes[int(row)] for row in rows]
            _heat(panels[-2], steps, (true[:, None] == rows).T, names, f"labels: {target}")
            _heat(panels[-1], steps, outputs[:, rows].T, names, "predicted probability")
        elif classes:
            label, panel = np.where(np.isnan(true), np.nan, true == 1), panels[-1]
            x, share, _ = _columns(steps, label)
            panel.fill_between(x, 0, share, color=INK, alpha=0.25, step="mid", linewidth=0)
            x, mean, _ = _columns(steps, outputs[:, 1])
            panel.plot(x, mean, color=SERIES[1], linewidth=1.2)
            panel.set(ylim=(-0.03, 1.03), title=f"label {classes[1]} (grey), probability (line)")
        else:
            _envelope(panels[-1], steps, true, INK, "target", alpha=0.6)
            _envelope(panels[-1], steps, outputs[:, 0], SERIES[1], "predicted", alpha=0.6)
            panels[-1].set_title(target)
            panels[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)
        panels[-1].xaxis.set_major_formatter("{x:,.0f}")
        panels[-1].set(xlabel="step", xlim=(steps.start, steps.stop))
        return _svg(figure, alt)


def _frequent(classes: Array, count: int) -> Array:
    """The classes that occur most, in their order."""
    counts = np.bincount(classes[~np.isnan(classes)].astype(int), minlength=count)
    return np.sort(np.argsort(-counts, kind="stable")[:_MOST_ROWS])


def _columns(steps: range, values: Array) -> tuple[Array, Array, Array]:
    """The middle of each column, and the mean and the extremes of its values."""
    edges = np.linspace(0, len(values), min(_COLUMNS, len(values)) + 1).astype(int)
    parts = np.split(values.astype(np.float64), edges[1:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # columns without a value stay NaN
        mean = np.array([np.nanmean(part) for part in parts])
        extremes = np.array([(np.nanmin(part), np.nanmax(part)) for part in parts])
    return steps.start + (edges[1:] + edges[:-1]) / 2, mean, extremes


def _envelope(
    axes: Axes, steps: range, values: Array, color: str, label: str, alpha: float = 0.8
) -> None:
    """A line as wide as the values of its column."""
    x, mean, (low, high) = (part.T for part in _columns(steps, values))
    if len(x) == len(values):
        axes.plot(x, mean, color=color, linewidth=1, label=label, alpha=alpha)
    else:
        area: dict[str, Any] = {"color": color, "linewidth": 0.6, "label": label, "alpha": alpha}
        axes.fill_between(x, low, high, **area)


def _heat(axes: Axes, steps: range, rows: Array, names: Sequence[str], title: str) -> Any:
    """The mean of each row `(R, T)` over the columns, from 0 to 1, as shades."""
    shades = np.array([_columns(steps, row)[1] for row in rows])
    extent = (steps.start, steps.stop, len(rows) - 0.5, -0.5)
    how: dict[str, Any] = {"cmap": _SHADES, "interpolation": "nearest", "aspect": "auto"}
    image = axes.imshow(shades, vmin=0, vmax=1, extent=extent, **how)
    axes.set_yticks(range(len(names)), [*map(printable, names)])
    axes.set_title(title)
    axes.grid(visible=False)
    return image


def gradient_figure(
    norms: Mapping[str, Sequence[float]], start: int, cuts: Sequence[int], alt: str
) -> str:
    """The norms of gradients by state or gate over the steps, in shades of their logarithm."""
    values = np.array([_drawable(row, log=True) for row in norms.values()])
    top = np.nanmax(values) if np.isfinite(values).any() else 1.0
    decades = np.nan_to_num(1 + np.log10(values / top) / _DECADES).clip(0, 1)
    steps = range(start, start + values.shape[1])
    with mpl.rc_context(_STYLE):
        figure = Figure((660 / 72, (80 + 18 * len(norms)) / 72), layout="constrained")
        axes = figure.add_subplot()
        image = _heat(axes, steps, decades, [*norms], "Gradient of the training losses")
        for cut in cuts if len(cuts) <= _MOST_CUTS else ():
            axes.axvline(cut, color=INK, linewidth=0.8, linestyle=":")
        bar = figure.colorbar(image, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels([f"{top * 10.0 ** (_DECADES * (x - 1)):.0e}" for x in (0, 0.5, 1)])
        axes.set_xlabel("step of the recording")
        return _svg(figure, alt)


def _svg(figure: Figure, alt: str) -> str:
    """The figure in the colours and the font of the page, with a description."""
    file = io.StringIO()
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    with mpl.rc_context({"svg.hashsalt": printable(alt)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that this font lacks: a browser has them
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z]+[\w.]*_\d+"', "", svg)  # of groups: each figure counts anew
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda match: _VARIABLES.get(match[0], match[0]), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r' height="[\d.]+pt"', "", svg))
    return svg[svg.index("<svg") :].replace(
        "<svg ", f'<svg role="img" aria-label="{escape(printable(alt))}" ', 1
    )
