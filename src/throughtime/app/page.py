"""The report of a run: one HTML page without scripts, in the order in which people ask.

What the run was trained on; the longest recording of the test split, played with the state carried,
and its worst stretch; scores; learning curves; the audit, once `throughtime audit` has made one;
the settings. The page sends no request, follows the reader's choice of light or dark and fits a
phone. `page.html.j2` has its texts. Importing this imports matplotlib.

matplotlib draws the figures as SVG by `page.mplstyle`, whose colours `page.css` replaces by others
in light and dark. A figure is 400 units wide, or 660 where it needs the whole width of a
desk; a phone shows the first whole, and scrolls the second. Of long recordings matplotlib leaves
out what no eye can see.

Shapes: `T` steps, `C` classes or outputs.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from throughtime.app.audit import AuditReport
from throughtime.app.evaluate import read_results
from throughtime.app.fit import Row
from throughtime.app.load import Run
from throughtime.app.scores import Scores
from throughtime.errors import DataError, RunError, counted, listed
from throughtime.files import write_atomically
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Part, as_columns

Lines: TypeAlias = dict[str, tuple[str, Any, Any]]
"""By their names: the style of a line, such as `-` or `o`, x and y."""
_PLAYED = 100_000  # steps of the longest recording: some seconds
_STRETCH = 1_500  # steps of the worst stretch at most
_INPUTS, _CLASSES = 3, 6  # that are drawn


def write_report(run: Run) -> Path:
    """Write `report.html` from the files of a run and its longest recording; return its path.

    Raises:
        RunError: log lines are missing, or a file holds something else.

    Cost: a forward pass over at most 100,000 steps.
    """
    folder = run.files
    rows = folder.read_metrics()
    if not {"data", "train"} <= {row["kind"] for row in rows}:
        raise RunError(
            f"{folder.metrics}: has no log lines of training, so {folder.report.name} was not"
            " written"
        )
    audit = read_results(folder.audit, AuditReport, "audit") if folder.audit.exists() else None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        run=run,
        rows=rows,
        weights=sum(weight.numel() for weight in run.net.parameters()),
        recording=_longest(run),
        scores=[
            read_results(path, Scores, "eval") for path in sorted(run.folder.glob("scores-*.json"))
        ],
        learning=_learning(rows),
        audit=audit,
        counted=counted,
        listed=listed,
    )
    write_atomically(folder.report, printable(page).encode())
    return folder.report


def _longest(run: Run) -> dict[str, Any]:
    """The longest recording of the test split, or of what was held out, or of training.

    Its figures; or why it cannot be played.
    """
    try:
        try:
            split, recordings = run.in_split()
        except DataError:
            split, recordings = run.in_split(split="train")
        whole = max(recordings, key=len)
        panels, errors = play(run, Part(whole, 0, min(len(whole), _PLAYED)))
    except DataError as error:
        return {"error": str(error)}
    figures, steps = list[tuple[str, str]](), np.arange(len(errors))
    for name, span in ((whole.name, slice(0, len(errors))), *_worst(errors)):
        text = f"{name}, steps {span.start:,} to {span.stop:,}: inputs, targets, predictions"
        shown = {
            title: {line: ("-", steps[span], y[span]) for line, y in lines.items()}
            for title, lines in panels.items()
        }
        figures.append((chart(shown, text, "step", 660), text))
    return {"split": split, "figures": figures}


def play(run: Run, recording: Recording) -> tuple[dict[str, dict[str, Array]], Array]:
    """The lines of the panels that show a recording, played from its first step, and its errors.

    The errors `(T,)` are 1 where a class or label is wrong, or squared, and NaN without a target.
    """
    spec, steps = run.spec, recording.read(0, len(recording))
    outputs, _ = predict(run.net, recording, dtype=spec.torch_dtype, missing=run.config.missing)
    values, inputs = spec.probabilities(outputs).double().cpu().numpy(), as_columns(steps.inputs)
    true = as_columns(np.asarray(steps.targets))[:, 0]
    true[~np.isfinite(inputs).all(axis=1) | ((true < 0) & bool(spec.classes))] = np.nan
    name, columns = spec.target_names[0], spec.layout.inputs[:_INPUTS]
    panels = {column: {column: x} for column, x in zip(columns, inputs.T, strict=False)}
    if not spec.classes:
        panels[f"{name}: predicted"] = {"target": true, "predicted": values[:, 0]}
        if spec.is_multilabel:
            values = values.round()
        return panels, np.square(values[:, 0] - true)
    shown = {spec.classes[i]: i for i in np.sort(np.argsort(-values.mean(axis=0))[:_CLASSES])}
    panels[f"label: {name}"] = {key: np.where(true == i, i, np.nan) for key, i in shown.items()}
    panels["predicted probability"] = {key: values[:, i] for key, i in shown.items()}
    return panels, np.where(np.isnan(true), np.nan, values.argmax(axis=1) != true)


def _worst(errors: Array) -> list[tuple[str, slice]]:
    """The steps with the largest sum of errors; none of a recording that shows them anyway."""
    length = min(_STRETCH, len(errors) // 4)
    sums = np.cumsum([0.0, *np.nan_to_num(errors)])
    if length < 20 or not sums[-1] > 0:
        return []
    start = int(np.argmax(sums[length:] - sums[:-length]))
    return [("Its worst stretch", slice(start, start + length))]


def _learning(rows: Sequence[Row]) -> str:
    """The loss of training, smoothed over an epoch or a tenth of the run, and of validations."""
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    share = min(0.1, rows[0]["steps"] / max(1, train[-1]["frames"]))
    width = max(1, round(share * len(train)))
    means = np.convolve([row["loss"] for row in train], np.full(width, 1 / width), "valid")
    losses: Lines = {"training": ("-", [row["update"] for row in train[width - 1 :]], means)}
    if valid:
        scored = [row["update"] for row in valid]
        losses["validation"] = "o", scored, [row["loss"] for row in valid]
    alt = (
        f"Loss of training from {means[0]:.4g} to {means[-1]:.4g}, and of {len(valid)} validations"
    )
    return chart({"Loss": losses}, alt, "update")


def printable(text: str) -> str:
    """The text without the characters that UTF-8 or XML forbid."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def chart(panels: Mapping[str, Lines], alt: str, xlabel: str, width: int = 400) -> str:
    """Panels of lines below each other as an SVG element in the colours of the page.

    Args:
        panels: the lines of each, by its title.
        alt: what the chart shows, for those who do not see it.
        xlabel: of the axis that all share.
        width: in units, of which a desk has 1,000.
    """
    file, label = io.StringIO(), escape(printable(alt))
    height = 250 if len(panels) == 1 else 40 + 85 * len(panels)
    style = Path(__file__).with_name("page.mplstyle")
    with mpl.rc_context({"svg.hashsalt": label}, style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that this font lacks: a browser has them
        figure = Figure((width / 72, height / 72), layout="constrained")
        every: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False).ravel()
        for axes, (title, lines) in zip(every, panels.items(), strict=True):
            for name, (marks, x, y) in lines.items():
                # an axis cannot have larger values
                axes.plot(x, np.where(np.abs(y) < 1e300, y, np.nan), marks, label=printable(name))
            axes.set_title(printable(title))
            axes.xaxis.set_major_formatter("{x:,g}")
            if len(lines) > 1:
                axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(lines))
        every[-1].set_xlabel(xlabel)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z]+[\w.]*_\d+"', "", svg)  # of groups: each figure counts anew
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
