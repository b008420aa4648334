"""The report of a run: one HTML page without scripts, in the order in which people ask.

What the run was trained on; the longest recording of the test split, played with the state carried,
and its worst stretch; scores; learning curves; the audit, once `throughtime audit` has made one;
the settings. The page sends no request, follows the reader's choice of light or dark and fits a
phone. Importing this imports matplotlib.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from throughtime._files import write_atomically
from throughtime.app import optimizer
from throughtime.app.audit import AuditReport
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import one_thread
from throughtime.app.policy import describe_policy
from throughtime.app.report.figures import (
    PlayedRecording,
    Points,
    gradient_figure,
    line_chart,
    printable,
    recording_figure,
)
from throughtime.app.report.tables import (
    METRIC_NAMES,
    DataTable,
    audit_table,
    baseline_table,
    scores_table,
)
from throughtime.app.scores import ClassScores
from throughtime.errors import DataError, RunError, counted, listed
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.recording import Part

Row: TypeAlias = Mapping[str, Any]
_PLAYED = 100_000  # steps of the longest recording: some seconds
_STRETCH = 1_500  # steps of the worst stretch at most
_INPUTS = 3  # that are drawn
_MOST = 12  # recordings in a table of scores, classes in a confusion matrix
Block: TypeAlias = "str | Mapping[str, str] | Figures | DataTable"
Sections: TypeAlias = dict[str, list[Block]]


class Figures(NamedTuple):
    """Charts beside each other on a desk, and one below the other on a phone."""

    charts: Sequence[str]
    caption: str = ""
    wide: bool = False


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
    settings = {k: v for k, v in run.config.settings().items() if v != ()}
    texts = {k: ", ".join(v) if isinstance(v, tuple) else str(v) for k, v in settings.items()}
    sections: Sections = {
        **_recording_section(run),
        **_score_sections(run, rows, names),
        "Learning": [_learning(rows, names, run.spec.update)],
        **_audit_sections(run),
        "Settings": [texts],
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    page = environment.get_template("page.html.j2").render(
        name=folder.path.name,
        config=run.config,
        spec=run.spec,
        data=rows[0],
        last=rows[-1],
        weights=sum(weight.numel() for weight in run.net.parameters()),
        gradient=describe_policy(run.config),
        optimizer=optimizer.in_words(run.config),
        sections=sections,
        counted=counted,
        listed=listed,
    )
    write_atomically(folder.report, page.encode())
    return folder.report


def _recording_section(run: Run) -> Sections:
    """The longest recording that can be read, its worst stretch, and the scores of its classes."""
    try:
        split, recording = _longest(run)
        with one_thread(when=run.spec.is_small(lanes=1)):
            played, classes = _play(run, recording)
    except DataError as error:
        reason = f"Not shown, because the recordings of the run can no longer be read: {error}"
        return {"A recording": [reason]}
    count, target, blocks = len(played.errors), run.spec.target_names[0], list[Block]()
    for span in (range(count), *_worst(played.errors)):
        which = f"{recording.name}" if len(span) == count else "Its worst stretch"
        text = f"{which}, {_share(played, span, run)}: inputs, {target} and what the net predicts"
        svg = recording_figure(played, span, target, run.classes, f"{text}.")
        blocks.append(Figures([svg], f"{text}, the state carried.", wide=True))
    if classes is not None and not any(run.folder.glob("scores-*.json")):
        blocks += _class_tables(recording.name, classes.compute(), classes.confusion.tolist())
    return {f"The longest recording of '{split}'": blocks}


def _longest(run: Run) -> tuple[str, Recording]:
    """The longest recording of the test split, or of what was held out, or of training."""
    try:
        split, recordings = recordings_for(run.spec, run.config)
    except DataError:
        split, recordings = recordings_for(run.spec, run.config, split="train")
    return split, max(recordings, key=len)


def _play(run: Run, recording: Recording) -> tuple[PlayedRecording, ClassScores | None]:
    """The outputs of a recording from its first step, and the scores of its classes."""
    spec, part = run.spec, Part(recording, 0, min(len(recording), _PLAYED))
    outputs, _ = predict(run.net, part, dtype=spec.torch_dtype, missing=run.config.missing)
    names = spec.layout.inputs[: _INPUTS if spec.layout.frame_size == 1 else 1]
    steps = part.read(0, len(part))
    inputs, targets = steps.inputs.reshape(len(part), -1), np.full(len(part), np.nan)
    if steps.targets is not None:
        columns = steps.targets.reshape(len(part), -1).astype(np.float64)
        masked = ~np.isfinite(inputs).all(axis=1) | np.isnan(columns).any(axis=1)
        targets = np.where(
            masked | (bool(spec.classes) & (columns[:, 0] < 0)), np.nan, columns.T[0]
        )
    values, scores = spec.probabilities(outputs).double().cpu().numpy(), None
    if spec.classes:
        known, scores = np.flatnonzero(~np.isnan(targets)), ClassScores(spec.classes)
        scores.add(outputs[known], outputs.new_tensor(targets[known]))
        errors = (values.argmax(axis=1) != targets) & ~np.isnan(targets)
    else:
        values = values[:, :1]
        answers = values.round() if spec.is_multilabel else values
        errors = np.nan_to_num(np.square(answers[:, 0] - targets), posinf=0.0)
    shown = inputs[:, : len(names)]
    return PlayedRecording(names, shown, targets, values, errors.astype(np.float64)), scores


def _worst(errors: Any) -> list[range]:
    """The steps with the largest sum of errors; none of a recording that shows them anyway."""
    length = min(_STRETCH, len(errors) // 4)
    sums = np.cumsum([0.0, *errors])
    if length < 20 or not sums[-1] > 0:
        return []
    start = int(np.argmax(sums[length:] - sums[:-length]))
    return [range(start, start + length)]


def _share(played: PlayedRecording, span: range, run: Run) -> str:
    """The steps and their error, in words."""
    shown = slice(span.start, span.stop)
    mean = played.errors[shown].sum() / max(1, (~np.isnan(played.targets[shown])).sum())
    wrong = run.classes or run.spec.is_multilabel
    error = f"{mean:.1%} of labelled steps wrong" if wrong else f"RMSE {mean**0.5:.4g}"
    return f"steps {span.start:,} to {span.stop:,}, {error}"


def _score_sections(run: Run, rows: Sequence[Row], names: Sequence[str]) -> Sections:
    """The last validation of the model, and every split that `eval` has scored."""
    sections, kept = Sections(), run.spec.update
    valid = [row for row in rows if row["kind"] == "valid"]
    for row in [row for row in valid if row["update"] == kept][-1:] or valid[-1:]:
        content = {"metrics": row, "recordings": row["recordings"], "data": run.config.data}
        sections["Scores: valid"] = _scores("valid", names, content)
    for path in sorted(run.folder.glob("scores-*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            split = content["split"]
            sections[f"Scores: {split}"] = _scores(split, names, content)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path}: not scores that `throughtime eval` wrote ({error!r}); remove it, or run"
                " eval again"
            ) from error
    return sections


def _scores(split: str, names: Sequence[str], content: Row) -> list[Block]:
    """The metrics of all steps, of each recording, or the worst ones, and of each class."""
    recordings, overall = content["recordings"], content["metrics"]
    key = "macro_f1" if "macro_f1" in names else names[0]
    sign = -1 if key in {"rmse", "esr"} else 1  # an error is better if it is small
    worst = sorted(recordings, key=lambda name: (sign * recordings[name][key], name))[:_MOST]
    shown = {name: recordings[name] for name in recordings if name in worst}
    caption = f"Whole recordings of '{split}' of {Path(content['data']).name}, the state carried."
    if len(shown) < len(recordings):
        caption += f" The {_MOST} worst of {len(recordings):,} are shown."
    columns = [name for name in names if not name.startswith("f1[")] or names
    tables = [scores_table(columns, overall, shown, caption), baseline_table(overall)]
    blocks: list[Block] = [table for table in tables if table is not None]
    if "classes" in content:
        blocks += _class_tables(f"'{split}'", content["classes"], content["confusion"])
    return blocks


def _class_tables(
    where: str, classes: Mapping[str, Row], confusion: Sequence[Sequence[int]]
) -> list[Block]:
    """Scores of each class, and the confusion matrix of a few."""
    keys = ["precision", "recall", "f1", "auroc", "auprc"]
    rows = [[name, round(row["steps"]), *(row[k] for k in keys)] for name, row in classes.items()]
    names = ["class", "steps", *(METRIC_NAMES.get(key, key) for key in keys)]
    scores = DataTable(names, rows, f"Each class against all others: {where}.")
    if len(classes) > _MOST:
        return [scores]
    cells = [[name, *row] for name, row in zip(classes, confusion, strict=True)]
    caption = f"Confusion: a row for each true class, a column for each predicted one; {where}."
    return [scores, DataTable(["true", *(f"as {name}" for name in classes)], cells, caption)]


def _learning(rows: Sequence[Row], names: Sequence[str], kept: int) -> Figures:
    """The loss, and the first score of validations, over the updates."""
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    smooth, width = _smoothed(train, rows[0]["steps"])
    marks = {f"update {row['update']:,}: the best": kept for row in valid if row["update"] == kept}
    key = "macro_f1" if "macro_f1" in names else names[0]
    name, shown = METRIC_NAMES.get(key, key), valid or train
    loss = line_chart(
        "Loss",
        ("update", "loss"),
        {"training": smooth},
        f"of training from {train[0]['loss']:.4g} to {train[-1]['loss']:.4g} at the last log line",
        points={"validation": _points(valid, "loss")} if valid else {},
        marks=marks,
    )
    score = line_chart(
        f"{name} of {'validation' if valid else 'training'}",
        ("update", name),
        {},
        f"from {shown[0][key]:.4g} to {shown[-1][key]:.4g}",
        points={name: _points(shown, key)},
        marks=marks,
    )
    text = f"Training loss, the mean of {counted(width, 'log line')}. Validation plays whole"
    return Figures([loss, score], f"{text} recordings, the state carried.")


def _points(rows: Sequence[Row], key: str) -> Points:
    return [row["update"] for row in rows], [row[key] for row in rows]


def _smoothed(train: Sequence[Row], epoch: int) -> tuple[Points, int]:
    """The mean loss of the log lines of an epoch, or of a tenth of the run if that is less."""
    updates, losses = _points(train, "loss")
    share = min(0.1, epoch / max(1, train[-1]["frames"]))
    width = max(1, round(share * len(train)))
    means = np.convolve(losses, np.full(width, 1 / width), "valid")
    return (updates[width - 1 :], means.tolist()), width


def _audit_sections(run: Run) -> Sections:
    """The results of `audit`, if it has measured the run."""
    if not run.files.audit.exists():
        return {}
    report, config = AuditReport.read(run.files.audit), run.config
    source = f"Measured on the split '{report.split}' of {Path(report.data).name}"
    if report.update is not None:
        source += f", with the weights of update {report.update:,}"
        if report.update != run.spec.update:
            source += f"; the model has become that of update {run.spec.update:,} since"
    charts = audit_charts(report, config)
    trace, settling = report.trace, str(report.settling)
    sections: Sections = {
        "What truncating the gradient costs": [
            report.advice(config),
            f"{report.warning()} {source}.",
            Figures(charts[:2]),
            audit_table(report.audit),
        ],
        "After a cold start": [f"{settling[0].upper()}{settling[1:]}.", Figures(charts[2:])],
    }
    if trace is not None:
        alt = "The norm of the gradient of the training losses with respect to each state and gate,"
        alt += f" first {trace.steps:,} steps of {trace.recording}. Dotted lines: an update ends."
        figure = gradient_figure(trace.norms, trace.edges, alt)
        sections["Where the gradient goes"] = [Figures([figure], alt, wide=True)]
    return sections


def audit_charts(report: AuditReport, config: Config) -> list[str]:
    """Gradient by lag, bias by horizon, loss by context, difference after a cold start."""
    reach, audit, settling = report.reach, report.audit, report.settling
    window, own = config.credit_steps(), report.own(config)
    shares = ", ".join(f"{share:.0%} within {lag:,}" for share, lag in sorted(reach.shares.items()))
    parts = reach.by_leaf if len(reach.by_leaf) > 1 else {}
    norms = {"whole state": reach.norms, **dict(list(parts.items())[:3])}
    horizons = [*(row.horizon for row in audit.rows), audit.steps]
    biases, cosines = ([getattr(row, key) for row in audit.rows] for key in ("bias", "cosine"))
    ages = settling.remembrance
    return [
        line_chart(
            "How far back the gradient goes",
            ("lag: steps before the loss", "gradient norm"),
            {name: (reach.lags, values) for name, values in norms.items()},
            f"{shares} steps, mean of {reach.anchors} losses",
            marks={} if window is None else {f"window of training, {window:,}": window},
            xscale="log",
            yscale="log",
        ),
        line_chart(
            "Bias and cosine by horizon",
            ("horizon (steps)", "against the exact gradient"),
            {"bias": (horizons, [*biases, 0.0]), "cosine": (horizons, [*cosines, 1.0])},
            "; ".join(f"horizon {row.horizon}: bias {row.bias:.3f}" for row in audit.rows),
            marks={} if own is None else {"as trained": own.horizon},
            levels={f"tolerance {report.tolerance:g}": report.tolerance},
            xscale="log",
        ),
        line_chart(
            "Loss by context length",
            ("steps of context, from a zero state", "loss"),
            {"from a zero state": ([*reach.contexts], [*reach.contexts.values()])},
            f"with the state carried from the start of the recording: {reach.loss:.4g}",
            levels={"state carried from the start": reach.loss},
            xscale="log",
        ),
        line_chart(
            "A cold start beside the carried state",
            ("steps since the cold start", "relative difference"),
            {"outputs differ by": ([age + 1 for age in ages], [*ages.values()])},
            f"mean difference of the outputs over {len(settling.starts)} cold starts",
            levels={"counts as agreement": settling.tolerance},
            xscale="log",
        ),
    ]
