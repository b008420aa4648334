"""The report of a run: one HTML page without scripts, in the order in which people ask.

What the run was trained on; the longest recording of the test split, played with the state carried,
and its worst stretch; scores; learning curves; the audit, once `throughtime audit` has made one;
the settings. The page sends no request, follows the reader's choice of light or dark and fits a
phone. `page.html.j2` has its texts. Importing this imports matplotlib.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from throughtime.app.audit import AuditReport
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.figures import (
    PlayedRecording,
    line_chart,
    printable,
    recording_figure,
)
from throughtime.app.load import Run
from throughtime.app.model import one_thread
from throughtime.app.optimizer import describe_policy
from throughtime.app.scores import METRIC_NAMES, baseline_table, scores_table
from throughtime.errors import DataError, RunError, counted, listed
from throughtime.files import write_atomically
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.recording import Part

Row: TypeAlias = Mapping[str, Any]
_PLAYED = 100_000  # steps of the longest recording: some seconds
_STRETCH = 1_500  # steps of the worst stretch at most
_INPUTS = 3  # that are drawn
_MOST = 12  # recordings in a table of scores


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
        with one_thread(when=spec.is_small(lanes=1)):
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
            tables = scores_table(columns, metrics, shown, caption), baseline_table(metrics)
            content["tables"] = [table for table in tables if table is not None]
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
