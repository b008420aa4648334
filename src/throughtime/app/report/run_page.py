"""The report of a run: its settings, curves, scores, audit and an excerpt of its predictions."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from throughtime._files import write_atomically
from throughtime.app import optimizer
from throughtime.app.baselines import baseline_table
from throughtime.app.config import Config
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec
from throughtime.app.policy import describe_policy
from throughtime.app.report.charts import Band, Mark, Series, bars, lines, strip
from throughtime.app.report.page import (
    DataTable,
    Facts,
    Figure,
    Page,
    Paragraphs,
    Part,
    Section,
    render,
)
from throughtime.app.run_folder import RunFolder
from throughtime.app.trace import busiest_excerpt
from throughtime.carry.carried import Carried
from throughtime.errors import DataError, RunError, counted

Row: TypeAlias = dict[str, Any]

_FEWEST_LOG_LINES = 3  # of a curve
_MOST_NAMES = 6  # of classes or outputs
_METRIC_NAMES = {"rmse": "RMSE", "r2": "R²", "esr": "ESR", "macro_f1": "macro-F1"}


def write_report(run: Run) -> Path:
    """Write `report.html` from the files of a run; return its path.

    Scores and audit appear once `eval` and `audit` have made them.

    Raises:
        RunError: log lines are missing, or a file holds something else.
    """
    folder, config, spec = run.files, run.config, run.spec
    names = tuple(spec.metrics().compute())
    rows = folder.read_metrics(names)
    if not any(row["kind"] == "train" for row in rows) or rows[0]["kind"] != "data":
        raise RunError(
            f"{folder.metrics}: has no log lines of training, so {folder.report.name} was not"
            " written"
        )
    split = "valid" if rows[0]["valid"] else "train"
    sections = [
        Section(
            "The run",
            [_facts(config, rows, run.net, spec), Paragraphs(_in_words(config, spec, rows[0]))],
        ),
        Section("Learning", _learning_curves(rows, names, spec.update)),
        *_score_sections(folder, config, rows, names, spec.update),
        *_audit_sections(folder, config, spec.update),
        *_speed_sections(rows),
        Section("A stretch of signal", [_excerpt(run, split)]),
        Section("Settings", [_settings(config)]),
    ]
    how = "unbroken recordings, the state carried"
    if config.train_on == "windows":
        how = config.windows_in_words()
    lead = f"{spec.title} trained on {Path(config.data).name}: {how}."
    page = Page(f"throughtime: {folder.path.name}", lead, sections)
    write_atomically(folder.report, render(page).encode())
    return folder.report


def _facts(config: Config, rows: Sequence[Row], net: Carried, spec: ModelSpec) -> Facts:
    last = rows[-1]
    memory = last["peak_memory"]
    return Facts(
        [
            ("updates", f"{last['update']:,}"),
            ("frames trained on", f"{last['frames']:,}"),
            ("frames per second", f"{last['frames'] / max(last['training_seconds'], 1e-9):,.0f}"),
            ("training time", f"{last['training_seconds']:.0f} s"),
            ("peak memory", "not measured" if memory is None else f"{memory / 1e6:.0f} MB"),
            ("lanes", f"{config.lanes}"),
            ("waiting for data", f"{last.get('waiting', 0.0):.0%}"),
            ("update of the model", f"{spec.update:,}"),
            ("weights", f"{sum(weight.numel() for weight in net.parameters()):,}"),
        ]
    )


def _in_words(config: Config, spec: ModelSpec, data: Row) -> str:
    """The model, the data, the gradient setting and the scoring."""
    recordings, lanes = data["train"], config.lanes
    if config.train_on == "windows":
        start = f"For comparison, they were cut into shuffled {config.windows_in_words()}."
    elif lanes > recordings:
        start = (
            f"They were cut into {lanes} contiguous parts, one for each lane. Within a part the"
            " state is carried from update to update."
        )
    else:
        start = (
            f"Each of {counted(lanes, 'lane')} plays whole recordings one after another. The"
            " state is carried and reset only at the start of a recording."
        )
    if config.warm_up:
        start += (
            f" The first {config.warm_up} steps after a reset only warm up the state; their loss"
            " does not count."
        )
    weights = ""
    if config.class_weights == "balanced":
        weights = " In the loss each class has the inverse of its frequency as weight."
    elif config.class_weights != "none":
        weights = f" Class weights in the loss: {config.class_weights}; others 1."
    standardised = "The input is" if spec.features == 1 else f"The {spec.features} inputs are"
    return (
        f"{_model_in_words(config, spec)}\n\n{counted(recordings, 'recording')} with"
        f" {data['steps']:,} steps for training, {data['valid']:,} held out:"
        f" {'; '.join(data['remarks'])}. {start}\n\nGradient: {describe_policy(config)}."
        f" {optimizer.in_words(config)}.{weights}{_model_choice(config)}\n\nScores are those of"
        " whole recordings, from first to last step with the state carried, as the model is"
        f" deployed.\n\n{standardised} standardised with the mean and deviation of"
        " the training split, which are stored in the model."
    )


def _model_choice(config: Config) -> str:
    """Which weights the model has, and when the run stops early."""
    stop = ""
    if config.patience is not None:
        stop = f" Training stops after {counted(config.patience, 'validation')} without a better."
    best = " The model has the weights of the best validation." if config.keep == "best" else ""
    return best + stop


def _model_in_words(config: Config, spec: ModelSpec) -> str:
    layers = f"{counted(config.layers, 'layer')} of {config.hidden} units"
    model = f"{spec.title} with {layers}"
    if spec.sha256:
        model = f"{spec.title} (SHA-256 {spec.sha256})"
    if config.dropout:
        model += f", dropout {config.dropout:g}"
    names = spec.classes or spec.layout.targets
    listed = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        listed += f" and {len(names) - _MOST_NAMES} more"
    outputs = f"one of {len(names)} classes ({listed})" if spec.classes else listed
    return (
        f"{model}. At every step it reads"
        f" {counted(spec.features, 'number')} and predicts {outputs}. Seed {config.seed} sets the"
        f" weights and the order of the recordings; numbers are {config.dtype} on {config.device}."
    )


def _learning_curves(rows: Sequence[Row], names: Sequence[str], kept: int) -> list[Part]:
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    first, last = train[0]["loss"], train[-1]["loss"]
    losses = [_series("training loss", train, "loss")]
    if valid:
        losses.append(_series("validation loss", valid, "loss"))
    best = [row for row in valid[:-1] if row["update"] == kept]
    marks = [Mark(kept, f"update {kept:,}: the best")] if best else []
    loss = lines(
        losses,
        title="Loss",
        description=f"Mean training loss between log lines, from {first:.4g} to {last:.4g}.",
        x_label="update",
        y_label="loss",
        x_marks=marks,
    )
    name = names[1] if len(names) > 1 and names[0] == "accuracy" else names[0]
    curves = [_series("training, last chunk", train, name)]
    if valid:
        curves.append(_series("validation, whole recordings", valid, name))
    metric = lines(
        curves,
        title=_metric_name(name),
        description=(
            f"{_metric_name(name)} of the training steps of one update and of the validation"
            " recordings, over the run."
        ),
        x_label="update",
        y_label=_metric_name(name),
        x_marks=marks,
    )
    return [
        Figure(
            loss,
            "The training loss, averaged over the updates since the last log line, and that of the"
            " recordings held out.",
        ),
        Figure(
            metric,
            "The training curve covers only the last chunk of an update and is therefore noisy."
            " Validation plays whole recordings.",
        ),
        *(_best_and_last(row, valid[-1], names) for row in best),
    ]


def _series(label: str, rows: Sequence[Row], name: str) -> Series:
    return Series(label, [row["update"] for row in rows], [row[name] for row in rows])


def _metric_name(name: str) -> str:
    return _METRIC_NAMES.get(name, name)


def _score_sections(
    folder: RunFolder, config: Config, rows: Sequence[Row], names: Sequence[str], kept: int
) -> list[Section]:
    """A section for the validation of the model, and for every split that `eval` has scored."""
    scores: dict[str, list[Part]] = {}
    valid = [row for row in rows if row["kind"] == "valid"]
    for row in [row for row in valid if row["update"] == kept][-1:] or valid[-1:]:
        data = Path(config.data).name
        scores["valid"] = _score_parts("valid", names, row, row["recordings"], data)
    for path in sorted(folder.path.glob("scores-*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            split, data = content["split"], Path(content["data"]).name
            scores[split] = _score_parts(
                split, names, content["metrics"], content["recordings"], data
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path}: not scores that `throughtime eval` wrote ({error!r}); remove it, or run"
                " eval again"
            ) from error
    return [Section(f"Scores: {split}", parts) for split, parts in scores.items()]


def _best_and_last(best: Row, last: Row, names: Sequence[str]) -> DataTable:
    columns = ["loss", *names]
    rows = [
        [f"{name}, update {row['update']:,}", *(row[column] for column in columns)]
        for name, row in (("the best, which is the model", best), ("the last", last))
    ]
    caption = "Scores of all recordings held out together."
    return DataTable(["", "loss", *map(_metric_name, names)], rows, caption)


def scores_table(
    names: Sequence[str],
    overall: Mapping[str, float],
    recordings: Mapping[str, Mapping[str, float]],
    caption: str = "",
) -> DataTable:
    """The metrics of these names, of each recording and of all steps together."""
    rows = {**recordings, "all steps together": overall}
    cells = [[name, *(row[n] for n in names)] for name, row in rows.items()]
    return DataTable(["recording", *map(_metric_name, names)], cells, caption)


def _score_parts(
    split: str, names: Sequence[str], overall: Row, recordings: Row, data: str
) -> list[Part]:
    caption = f"Whole recordings of the split '{split}' of {data}."
    baselines = baseline_table(overall)
    tables: list[Part] = [scores_table(names, overall, recordings, caption)]
    tables += [] if baselines is None else [baselines]
    if len(recordings) < 2:
        return tables
    name = "macro_f1" if "macro_f1" in names else names[0]
    chart = bars(
        [(recording, row[name]) for recording, row in recordings.items()],
        title=f"{_metric_name(name)} by recording",
        description=(
            f"{_metric_name(name)} of each of the {len(recordings)} recordings of the split"
            f" {split}."
        ),
        x_label=_metric_name(name),
        x_range=(0.0, 1.0) if name == "macro_f1" else None,
    )
    return [
        *tables,
        Figure(
            chart,
            "Recordings differ. A mean over all steps hides those on which a model fails.",
        ),
    ]


def _audit_sections(folder: RunFolder, config: Config, update: int) -> list[Section]:
    """The results of `audit`, if it has measured the run."""
    if not folder.audit.exists():
        return []
    from throughtime.app.audit import AuditReport
    from throughtime.app.report.audit_section import (
        audit_figures,
        audit_table,
        settling_parts,
        trace_parts,
    )

    report = AuditReport.read(folder.audit)
    source = (
        f"Measured on {report.extent()} of the split '{report.split}' of {Path(report.data).name}"
    )
    if report.update is not None:
        source += f", with the weights of update {report.update:,}"
        if report.update != update:
            source += f"; the model has become that of update {update:,} since"
    parts = [
        Paragraphs(f"{report.advice(config)}\n\n{report.warning()}\n\n{source}."),
        *audit_figures(report, report.own(config), config.credit_steps()),
        audit_table(report.audit),
    ]
    sections = [
        Section("Where the gradient goes", parts),
        Section("After a cold start", settling_parts(report.settling)),
    ]
    if report.trace is not None:
        sections.append(Section("The gradient, step by step", trace_parts(report.trace, config)))
    return sections


def _speed_sections(rows: Sequence[Row]) -> list[Section]:
    """Throughput and memory over the run; none for the first log lines."""
    pairs = list(pairwise(row for row in rows if row["kind"] != "valid"))
    if len(pairs) < _FEWEST_LOG_LINES:
        return []
    rates = [_frames_per_second(before, row) for before, row in pairs]
    finite = sorted(rate for rate in rates if math.isfinite(rate))
    median = finite[len(finite) // 2] if finite else math.nan
    speed = lines(
        [Series("frames per second", [row["update"] for _, row in pairs], rates)],
        title="Throughput",
        description=(
            f"Frames trained on per second between two log lines; half of them above {median:,.0f}."
        ),
        x_label="update",
        y_label="frames per second",
        y_range=(0.0, 1.1 * finite[-1]) if finite else None,
    )
    waiting = rows[-1].get("waiting", 0.0)
    caption = (
        "Frames of all lanes between two log lines, without the time of validations. Training"
        f" waited for data {waiting:.0%} of the time."
    )
    figures = [Figure(speed, caption)]
    measured = [row for row in rows if row["peak_memory"] is not None]
    if measured:
        figures.append(_memory(measured))
    return [Section("Speed and memory", figures)]


def _frames_per_second(before: Row, row: Row) -> float:
    """Validation and checkpoints left out; NaN for the first line, which warms up."""
    seconds = row["training_seconds"] - before["training_seconds"]
    if before["kind"] != "train" or seconds <= 0:
        return math.nan
    return (row["frames"] - before["frames"]) / seconds


def _memory(rows: Sequence[Row]) -> Figure:
    sizes = [row["peak_memory"] / 1e6 for row in rows]
    svg = lines(
        [Series("peak memory", [row["update"] for row in rows], sizes)],
        title="Memory",
        description=(
            f"Peak memory of the process so far, from {sizes[0]:,.0f} MB to {sizes[-1]:,.0f} MB."
        ),
        x_label="update",
        y_label="MB",
        y_range=(0.0, 1.1 * max(sizes)),
    )
    return Figure(
        svg,
        "Peak memory of the process up to each log line. No graph outlives its update, so a curve"
        " that keeps rising has another cause.",
    )


def _excerpt(run: Run, split: str) -> Part:
    """The busiest part of the first recording of a split, if it can still be read."""
    spec = run.spec
    try:
        excerpt = busiest_excerpt(run.net, spec, run.recordings(split=split)[0], run.config)
    except DataError as error:
        return Paragraphs(
            f"Not shown, because the recordings of the run can no longer be read: {error}"
        )
    targets, predicted = excerpt.targets, excerpt.predicted
    stop = excerpt.start + len(excerpt.signal)
    location = (
        f"Steps {excerpt.start:,} to {stop:,} of recording {excerpt.recording} ({split} split)"
    )
    title = f"Recording {excerpt.recording}"
    if spec.classes:
        labelled = targets >= 0
        wrong = float((predicted != targets)[labelled].mean()) if labelled.any() else 0.0
        svg = strip(
            excerpt.signal.tolist(),
            [
                Band("labels", targets.astype(int).tolist()),
                Band("predicted", predicted.astype(int).tolist()),
            ],
            title=title,
            description=(
                f"{location}: the signal, its labels and the predictions; {wrong:.1%} of these are"
                " wrong."
            ),
            x_label="step",
            y_label=f"input {spec.layout.inputs[0]}",
            classes=spec.classes,
            start=excerpt.start,
        )
    else:
        steps = range(excerpt.start, stop)
        svg = lines(
            [
                Series("target", steps, targets.tolist()),
                Series("predicted", steps, predicted.tolist()),
            ],
            title=title,
            description=f"{location}: the target and its prediction.",
            x_label="step",
            y_label=f"target {spec.layout.targets[0]}",
        )
    return Figure(svg, f"{location}, the state carried from its first step.")


def _settings(config: Config) -> DataTable:
    rows = [
        [key, ", ".join(value) if isinstance(value, tuple) else str(value)]
        for key, value in config.settings().items()
        if value != ()
    ]
    return DataTable(
        ["setting", "value"],
        rows,
        "config.toml of this run. Every key is also a flag of throughtime train.",
        numeric=(),
    )
