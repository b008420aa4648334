"""The report of a run: one HTML page without scripts, in the order in which people ask.

What the run was trained on; the longest recording of the test split, played with the state carried,
and its worst stretch; scores; learning curves; the audit, once `throughtime audit` has made one;
the settings. The page sends no request, follows the reader's choice of light or dark and fits a
phone. `page.html.j2` has its texts. Importing this imports matplotlib.

matplotlib draws the figures as SVG, whose colours become the custom properties of `page.css`, which
differ in light and dark. Heat maps are one translucent colour, which suits both. A figure is 400
units wide, or 660 where it needs the whole width of a desk; a phone shows the first whole, and
scrolls the second. Of long recordings matplotlib leaves out what no eye can see.

Shapes: `T` steps, `D` inputs that are shown, `C` classes or outputs.
"""

import io
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib as mpl
import numpy as np
from cycler import cycler
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

from throughtime.app.audit import AuditReport
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import one_thread
from throughtime.app.optimizer import describe_policy
from throughtime.app.scores import METRIC_NAMES, score_tables
from throughtime.errors import DataError, RunError, counted, listed
from throughtime.files import write_atomically
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Part

Row: TypeAlias = Mapping[str, Any]
_PLAYED = 100_000  # steps of the longest recording: some seconds
_STRETCH = 1_500  # steps of the worst stretch at most
_INPUTS = 3  # that are drawn
_MOST = 12  # recordings in a table of scores
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
_MOST_ROWS = 8  # classes of a heat map
Lines: TypeAlias = Mapping[str, tuple[str, Sequence[float], Sequence[float]]]


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


def write_report(run: Run) -> Path:
    """Write `report.html` from the files of a run and its longest recording; return its path.

    Raises:
        RunError: log lines are missing, or a file holds something else.

    Cost: a forward pass over at most 100,000 steps.
    """
    folder, names = run.files, list(run.spec.metrics().compute())
    rows = folder.read_metrics()
    if not any(row["kind"] == "train" for row in rows) or rows[0]["kind"] != "data":
        raise RunError(
            f"{folder.metrics}: has no log lines of training, so {folder.report.name} was not"
            " written"
        )
    audit = AuditReport.read(folder.audit) if folder.audit.exists() else None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    page = environment.get_template("page.html.j2").render(
        run=run,
        config=run.config,
        spec=run.spec,
        data=rows[0],
        last=rows[-1],
        weights=sum(weight.numel() for weight in run.net.parameters()),
        gradient=describe_policy(run.config),
        recording=_longest(run),
        scores=_scores(run, rows, names),
        learning=_learning(rows, names, run.spec.update),
        audit=audit,
        reach_chart=audit and reach_chart(audit, run.config),
        counted=counted,
        listed=listed,
    )
    write_atomically(folder.report, page.encode())
    return folder.report


def _longest(run: Run) -> dict[str, Any]:
    """The longest recording of the test split, or of what was held out, or of training.

    Its figures, and the scores of its classes; or why it cannot be played.
    """
    spec = run.spec
    try:
        try:
            split, recordings = recordings_for(spec, run.config)
        except DataError:
            split, recordings = recordings_for(spec, run.config, split="train")
        recording = max(recordings, key=len)
        with one_thread(spec):
            played = _play(run, recording)
    except DataError as error:
        return {"error": str(error)}
    figures, unit, target = list[tuple[str, str]](), spec.layout.task, spec.target_names[0]
    for span in (range(len(played.errors)), *_worst(played.errors)):
        shown = slice(span.start, span.stop)
        mean = played.errors[shown].sum() / max(1, (~np.isnan(played.targets[shown])).sum())
        error = f"RMSE {mean**0.5:.4g}" if unit == "regress" else f"{mean:.1%} of labels wrong"
        which = "Its worst stretch" if figures else recording.name
        text = f"{which}, steps {span.start:,} to {span.stop:,}: inputs, {target}, predictions;"
        svg = recording_figure(played, span, target, run.classes, f"{text} {error}")
        figures.append((svg, f"{text} {error}"))
    return {"split": split, "figures": figures}


def _play(run: Run, recording: Recording) -> PlayedRecording:
    """The outputs of a recording from its first step."""
    spec, part = run.spec, Part(recording, 0, min(len(recording), _PLAYED))
    outputs, _ = predict(run.net, part, dtype=spec.torch_dtype, missing=run.config.missing)
    names = spec.layout.inputs[: _INPUTS if spec.layout.frame_size == 1 else 1]
    steps = part.read(0, len(part))
    inputs, targets = steps.inputs.reshape(len(part), -1), np.full(len(part), np.nan)
    if steps.targets is not None:
        columns = steps.targets.reshape(len(part), -1).astype(np.float64)
        masked = ~np.isfinite(np.c_[inputs, columns]).all(axis=1)
        masked |= bool(spec.classes) & (columns[:, 0] < 0)
        targets = np.where(masked, np.nan, columns[:, 0])
    values = spec.probabilities(outputs).double().cpu().numpy()
    if spec.classes:
        errors = (values.argmax(axis=1) != targets) & ~np.isnan(targets)
    else:
        values = values[:, :1]
        answers = values.round() if spec.is_multilabel else values
        errors = np.nan_to_num(np.square(answers[:, 0] - targets))
    shown = inputs[:, : len(names)]
    return PlayedRecording(names, shown, targets, values, errors.astype(np.float64))


def _worst(errors: Any) -> list[range]:
    """The steps with the largest sum of errors; none of a recording that shows them anyway."""
    length = min(_STRETCH, len(errors) // 4)
    sums = np.cumsum([0.0, *errors])
    if length < 20 or not sums[-1] > 0:
        return []
    start = int(np.argmax(sums[length:] - sums[:-length]))
    return [range(start, start + length)]


def _scores(run: Run, rows: Sequence[Row], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The last validation of the model, and every split that `eval` has scored, with tables."""
    valid = [row for row in rows if row["kind"] == "valid"]
    kept = [row for row in valid if row["update"] == run.spec.update] or valid
    scores = {"valid": {"metrics": kept[-1], **kept[-1]}} if kept else dict[str, dict[str, Any]]()
    columns = [name for name in names if not name.startswith("f1[")] or names
    path = run.folder
    try:
        for path in sorted(run.folder.glob("scores-*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            scores[content["split"]] = content
        for content in scores.values():
            metrics, many = content["metrics"], content["recordings"]
            numbers = [row["steps"] for row in content.get("classes", {}).values()]
            sum(numbers, start=sum(n for row in content.get("confusion", ()) for n in row))
            shown = many if len(many) <= _MOST else {}
            caption = f"{counted(len(many), 'whole recording')}, the state carried."
            content["tables"] = score_tables(caption, columns, metrics, shown)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}: not scores that `throughtime eval` wrote ({error!r}); remove it, or run"
            " eval again"
        ) from error
    return scores


def _learning(rows: Sequence[Row], names: Sequence[str], kept: int) -> list[str]:
    """The loss, and the first score of validations, over the updates."""
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    key, shown = "macro_f1" if "macro_f1" in names else names[0], valid or train
    losses: dict[str, Any] = {"training": ("-", *_smoothed(train, rows[0]["steps"]))}
    losses |= {"validation": ("o", *_points(valid, "loss"))} if valid else {}
    name, best = METRIC_NAMES.get(key, key), [row for row in valid if row["update"] == kept]
    scores: dict[str, Any] = {"validation" if valid else "training": ("o", *_points(shown, key))}
    scores |= {f"kept: update {kept:,}": ("*", *_points(best, key))} if best else {}
    alts = [f"from {m[0][k]:.4g} to {m[-1][k]:.4g}" for m, k in ((train, "loss"), (shown, key))]
    return [
        line_chart("Loss", losses, f"of training {alts[0]} at the last log line", xlabel="update"),
        line_chart(name, scores, alts[1], xlabel="update"),
    ]


def _points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    return [row["update"] for row in rows], [row[key] for row in rows]


def _smoothed(train: Sequence[Row], epoch: int) -> tuple[list[int], list[float]]:
    """The mean loss of the log lines of an epoch, or of a tenth of the run if that is less."""
    share = min(0.1, epoch / max(1, train[-1]["frames"]))
    width = max(1, round(share * len(train)))
    losses = [row["loss"] for row in train]
    means = np.convolve(losses, np.full(width, 1 / width), "valid")
    return [row["update"] for row in train[width - 1 :]], means.tolist()


def reach_chart(report: AuditReport, config: Config) -> str:
    """The gradient by lag."""
    reach, window = report.reach, config.credit_steps()
    shares = ", ".join(f"{share:.0%} within {lag:,}" for share, lag in sorted(reach.shares.items()))
    lines: dict[str, Any] = {"whole state": ("-", reach.lags, reach.norms)}
    if window is not None:
        ends = [min(reach.norms), max(reach.norms)]
        lines[f"window of training, {window:,}"] = (":", [window, window], ends)
    return line_chart(
        "How far back the gradient goes",
        lines,
        f"{shares} steps, mean of {reach.anchors} losses",
        xlabel="lag: steps before the loss",
        ylabel="gradient norm",
        xscale="log",
        yscale="log" if max(reach.norms) > 0 else "linear",
    )


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


def recording_figure(
    played: PlayedRecording, steps: range, target: str, classes: Sequence[str], alt: str
) -> str:
    """Some steps of a recording: inputs, targets, and below each other or over them predictions."""
    arrays = played.inputs, played.targets, played.outputs
    inputs, true, outputs = (array[steps.start : steps.stop] for array in arrays)
    count = len(played.columns) + (2 if classes else 1)
    with mpl.rc_context(_STYLE):
        figure = Figure((660 / 72, (40 + 85 * count) / 72), layout="constrained")
        panels: Any = figure.subplots(count, 1, sharex=True, squeeze=False).ravel()
        for panel, name, values in zip(panels, played.columns, inputs.T, strict=False):
            panel.plot(steps, _finite(values), color=INK, linewidth=0.8)
            panel.set_title(name)
        last = panels[-1]
        if classes:
            counts = np.bincount(true[~np.isnan(true)].astype(int), minlength=len(classes))
            rows = np.sort(np.argsort(-counts, kind="stable")[:_MOST_ROWS])
            extent = steps.start, steps.stop, len(rows), 0
            names = [printable(classes[int(row)]) for row in rows]
            heats = {f"labels: {target}": true[:, None] == rows}
            heats["predicted probability"] = outputs[:, rows]
            for panel, (title, values) in zip(panels[-2:], heats.items(), strict=True):
                how: dict[str, Any] = {"cmap": _SHADES, "extent": extent, "aspect": "auto"}
                panel.imshow(values.T.astype(np.float64), vmin=0, vmax=1, **how)
                panel.set_yticks(np.arange(len(rows)) + 0.5, names)
                panel.set_title(title)
                panel.grid(visible=False)
        else:
            last.plot(steps, _finite(true), linewidth=0.8, label="target")
            last.plot(steps, _finite(outputs[:, 0]), linewidth=0.8, label="predicted")
            last.set_title(target)
            last.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)
        last.xaxis.set_major_formatter("{x:,.0f}")
        last.set(xlabel="step", xlim=(steps.start, steps.stop))
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
