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
from pydantic import TypeAdapter

from throughtime.app.audit import AuditReport
from throughtime.app.load import Run
from throughtime.app.optimizer import describe_policy
from throughtime.app.scores import (
    FORECASTS,
    METRIC_NAMES,
    Scores,
    is_comparison,
    number_text,
)
from throughtime.errors import DataError, RunError, counted, listed, one_line
from throughtime.files import write_atomically
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Part

Row: TypeAlias = Mapping[str, Any]
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
        titles=METRIC_NAMES,
        forecasts=FORECASTS,
        is_comparison=is_comparison,
        number=number_text,
        learning=_learning(rows, names),
        audit=audit,
        reach_chart=audit and reach_chart(audit),
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
        recording = max(recordings, key=len)
        panels, errors = play(run, recording)
    except DataError as error:
        return {"error": str(error)}
    figures, regress = list[tuple[str, str]](), run.spec.layout.task == "regress"
    for span in (slice(0, len(errors)), *_worst(errors)):
        mean = np.nan_to_num(errors[span]).sum() / max(1, np.isfinite(errors[span]).sum())
        error = f"RMSE {mean**0.5:.4g}" if regress else f"{mean:.1%} of labels wrong"
        which = "Its worst stretch" if figures else recording.name
        text = f"{which}, steps {span.start:,} to {span.stop:,}: inputs, targets, predictions;"
        shown = {
            title: {name: (s, x[span], y[span]) for name, (s, x, y) in lines.items()}
            for title, lines in panels.items()
        }
        figures.append((chart(shown, f"{text} {error}", 660, xlabel="step"), f"{text} {error}"))
    return {"split": split, "figures": figures}


def play(run: Run, recording: Recording) -> tuple[dict[str, Lines], Array]:
    """The panels that show a recording, played from its first step, and its errors.

    The errors `(T,)` are 1 where a class or label is wrong, or squared, and NaN without a target.
    """
    spec, part = run.spec, Part(recording, 0, min(len(recording), _PLAYED))
    outputs, _ = predict(run.net, part, dtype=spec.torch_dtype, missing=run.config.missing)
    values, steps = spec.probabilities(outputs).double().cpu().numpy(), part.read(0, len(part))
    inputs, true = steps.inputs.reshape(len(part), -1), np.full(len(part), np.nan)
    if steps.targets is not None:
        rows = steps.targets.reshape(len(part), -1)[:, 0].astype(np.float64)
        masked = ~np.isfinite(inputs).all(axis=1) | ((rows < 0) & bool(spec.classes))
        true = np.where(masked, np.nan, rows)

    def lines(names: Sequence[str], columns: Any) -> Lines:
        return {name: ("-", np.arange(len(y)), y) for name, y in zip(names, columns, strict=False)}

    name, columns = spec.target_names[0], spec.layout.inputs[:_INPUTS]
    panels = {column: lines([column], [x]) for column, x in zip(columns, inputs.T, strict=False)}
    if not spec.classes:
        panels[f"{name}: predicted"] = lines(("target", "predicted"), (true, values[:, 0]))
        answers = values[:, 0].round() if spec.is_multilabel else values[:, 0]
        return panels, np.square(answers - true)
    often = np.bincount(true[np.isfinite(true)].astype(int), minlength=len(spec.classes))
    shown = np.sort(np.argsort(-often, kind="stable")[:_CLASSES]).tolist()
    names = [spec.classes[i] for i in shown]
    panels[f"label: {name}"] = lines(names, [np.where(true == i, i, np.nan) for i in shown])
    panels["predicted probability"] = lines(names, values.T[shown])
    return panels, np.where(np.isnan(true), np.nan, values.argmax(axis=1) != true)


def _worst(errors: Array) -> list[slice]:
    """The steps with the largest sum of errors; none of a recording that shows them anyway."""
    length = min(_STRETCH, len(errors) // 4)
    sums = np.cumsum([0.0, *np.nan_to_num(errors)])
    if length < 20 or not sums[-1] > 0:
        return []
    start = int(np.argmax(sums[length:] - sums[:-length]))
    return [slice(start, start + length)]


def _scores(run: Run, rows: Sequence[Row], names: Sequence[str]) -> dict[str, Scores]:
    """The last validation of the model, and every split that `eval` has scored."""
    valid, scores, path = [row for row in rows if row["kind"] == "valid"], {}, run.folder
    for row in [row for row in valid if row["update"] == run.spec.update] or valid[-1:]:
        metrics = {k: v for k, v in row.items() if k in names or is_comparison(k)}
        scores["valid"] = Scores("valid", metrics, row["recordings"])
    try:
        for path in sorted(run.folder.glob("scores-*.json")):
            content = TypeAdapter(Scores).validate_json(path.read_bytes())
            scores[content.split] = content
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: not scores that `throughtime eval` wrote ({one_line(error)}); remove it, or"
            " run eval again"
        ) from error
    return scores


def _learning(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The loss, smoothed over an epoch or a tenth of the run, and a score of validations."""
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    share = min(0.1, rows[0]["steps"] / max(1, train[-1]["frames"]))
    width = max(1, round(share * len(train)))
    means = np.convolve([row["loss"] for row in train], np.full(width, 1 / width), "valid")
    losses: Lines = {"training": ("-", [row["update"] for row in train[width - 1 :]], means)}
    key = "macro_f1" if "macro_f1" in names else names[0]
    name, scored = METRIC_NAMES.get(key, key), [row["update"] for row in valid]
    scores: Lines = {"validation": ("o", scored, [row[key] for row in valid])}
    if valid:
        losses["validation"] = "o", scored, [row["loss"] for row in valid]
    alts = f"of training from {means[0]:.4g} to {means[-1]:.4g}", f"of {len(valid)} validations"
    charts = (("Loss", losses, alts[0]), (name, scores, alts[1]))[: 1 + bool(valid)]
    return [chart({title: part}, f"{title} {alt}", xlabel="update") for title, part, alt in charts]


def reach_chart(report: AuditReport) -> str:
    """The gradient by lag."""
    reach = report.reach
    shares = ", ".join(f"{share:.0%} within {lag:,}" for share, lag in sorted(reach.shares.items()))
    return chart(
        {"How far back the gradient goes": {"whole state": ("-", reach.lags, reach.norms)}},
        f"How far back the gradient goes: {shares} steps, mean of {reach.anchors} losses",
        xlabel="lag: steps before the loss",
        ylabel="gradient norm",
        xscale="log",
        yscale="log" if max(reach.norms) > 0 else "linear",
    )


def printable(text: str) -> str:
    """The text without the characters that UTF-8 or XML forbid."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def chart(panels: Mapping[str, Lines], alt: str, width: int = 400, **settings: Any) -> str:
    """Panels of lines below each other as an SVG element in the colours of the page.

    Args:
        panels: the lines of each, by its title.
        alt: what the chart shows, for those who do not see it.
        width: in units, of which a desk has 1,000.
        settings: of the axes, such as `xscale="log"`.
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
                values = np.array(y, dtype=np.float64)
                values[~(np.abs(values) < 1e300)] = np.nan  # a gap: no axis can show it
                axes.plot(x, values, marks, label=printable(name))
            axes.set(title=printable(title), **settings)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,g}")
                axis.set_minor_formatter("")
            if len(lines) > 1:
                axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(lines))
            axes.label_outer()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z]+[\w.]*_\d+"', "", svg)  # of groups: each figure counts anew
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
