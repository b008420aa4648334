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
from throughtime.app.audit import AuditReport, extent
from throughtime.app.baselines import baseline_table
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.evaluate import ClassScores
from throughtime.app.load import Run
from throughtime.app.model import one_thread
from throughtime.app.policy import describe_policy
from throughtime.app.report.figures import (
    Chart,
    PlayedRecording,
    Points,
    gradient_figure,
    printable,
    recording_figure,
)
from throughtime.app.report.tables import (
    METRIC_NAMES,
    DataTable,
    audit_table,
    scores_table,
)
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
    recording, classes = _recording_section(run)
    sections: Sections = {
        **recording,
        **_score_sections(run, rows, names, classes),
        "Learning": [_learning(rows, names, run.spec.update)],
        **_audit_sections(run),
        "Settings": [_settings(run.config)],
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    functions: dict[str, Any] = {"counted": counted, "listed": listed}
    environment.globals.update(functions)
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
    )
    write_atomically(folder.report, page.encode())
    return folder.report


def _settings(config: Config) -> dict[str, str]:
    values = {k: v for k, v in config.settings().items() if v != ()}
    return {k: ", ".join(v) if isinstance(v, tuple) else str(v) for k, v in values.items()}


def _recording_section(run: Run) -> tuple[Sections, tuple[str, ClassScores] | None]:
    """The longest recording that can be read and its worst stretch; the scores of its classes."""
    try:
        split, recording = _longest(run)
        with one_thread(when=run.spec.is_small(lanes=1)):
            played, classes = _play(run, recording)
    except DataError as error:
        reason = f"Not shown, because the recordings of the run can no longer be read: {error}"
        return {"A recording": [reason]}, None
    count, target = len(played.errors), run.spec.target_names[0]
    steps = "all steps" if count == len(recording) else f"the first {count:,} steps"
    where = f"{steps} of {recording.name}, the longest recording of split '{split}'"
    stretch = _worst(played.errors)
    parts = [
        (range(count), where),
        *((span, f"Its worst stretch, {_share(played, span, run)}") for span in stretch),
    ]
    figures: list[Block] = []
    for span, text in parts:
        words = f"{text[0].upper()}{text[1:]}: inputs, {target} and what the net predicts."
        alt = f"{words} {_share(played, span, run)}."
        svg = recording_figure(played, span, target, run.classes, alt)
        figures.append(Figures([svg], f"{words} The state is carried.", wide=True))
    scores = None if classes is None else (where, classes)
    return {f"The longest recording of '{split}'": figures}, scores


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
    inputs, targets = np.empty((len(part), len(names))), np.full(len(part), np.nan)
    for start in range(0, len(part), 8192):
        steps = part.read(start, min(start + 8192, len(part)))
        flat = steps.inputs.reshape(len(steps.inputs), -1)
        inputs[start : start + len(flat)] = flat[:, : len(names)]
        if steps.targets is not None:
            columns = steps.targets.reshape(len(flat), -1).astype(np.float64)
            masked = ~np.isfinite(flat).all(axis=1) | np.isnan(columns).any(axis=1)
            targets[start : start + len(flat)] = np.where(masked, np.nan, columns[:, 0])
    if not spec.classes:
        first = spec.probabilities(outputs)[:, :1].double().cpu().numpy()
        errors = np.nan_to_num(np.square(first[:, 0] - targets), posinf=0.0)
        if spec.is_multilabel:
            errors = np.square(np.round(first[:, 0]) - targets)
            errors = np.nan_to_num(errors)
        return PlayedRecording(recording.name, names, inputs, targets, first, errors), None
    targets[targets < 0] = np.nan
    labelled = ~np.isnan(targets)
    wrong = labelled & (outputs.argmax(dim=1).cpu().numpy() != targets)
    scores = ClassScores(spec.classes)
    rows = np.flatnonzero(labelled)
    scores.add(outputs[rows], outputs.new_tensor(targets[rows]))
    shares = outputs.double().softmax(dim=1).cpu().numpy()
    return PlayedRecording(
        recording.name, names, inputs, targets, shares, wrong.astype(float)
    ), scores


def _worst(errors: Any) -> list[range]:
    """The steps with the largest sum of errors; none of a recording that shows them anyway."""
    length = min(_STRETCH, len(errors) // 4)
    sums = np.concatenate([[0.0], np.cumsum(errors)])
    if length < 20 or not sums[-1] > 0:
        return []
    start = int(np.argmax(sums[length:] - sums[:-length]))
    return [range(start, start + length)]


def _share(played: PlayedRecording, span: range, run: Run) -> str:
    """The error of these steps, in words."""
    errors = played.errors[span.start : span.stop]
    count = max(1, int((~np.isnan(played.targets[span.start : span.stop])).sum()))
    mean = float(errors.sum()) / count
    error = (
        f"{mean:.1%} of labelled steps wrong"
        if run.classes or run.spec.is_multilabel
        else f"RMSE {mean**0.5:.4g}"
    )
    return f"steps {span.start:,} to {span.stop:,}, {error}"


def _score_sections(
    run: Run, rows: Sequence[Row], names: Sequence[str], played: tuple[str, ClassScores] | None
) -> Sections:
    """The last validation of the model, and every split that `eval` has scored."""
    scores: Sections = {}
    data, kept = Path(run.config.data).name, run.spec.update
    valid = [row for row in rows if row["kind"] == "valid"]
    for row in [row for row in valid if row["update"] == kept][-1:] or valid[-1:]:
        scores["valid"] = _scores("valid", names, row, row["recordings"], data)
    detailed = False
    for path in sorted(run.folder.glob("scores-*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            split, source = content["split"], Path(content["data"]).name
            scores[split] = _scores(split, names, content["metrics"], content["recordings"], source)
            if "classes" in content:
                where = f"all recordings of split '{split}'"
                scores[split] += _class_tables(where, content["classes"], content["confusion"])
                detailed = True
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path}: not scores that `throughtime eval` wrote ({error!r}); remove it, or run"
                " eval again"
            ) from error
    sections = {f"Scores: {split}": blocks for split, blocks in scores.items()}
    if played is not None and not detailed:
        where, classes = played
        tables = _class_tables(where, classes.compute(), classes.confusion.tolist())
        sections["Scores by class"] = tables
    return sections


def _scores(
    split: str, names: Sequence[str], overall: Row, recordings: Mapping[str, Row], data: str
) -> list[Block]:
    """The metrics of all steps and of each recording, the worst ones if they are many."""
    key = "macro_f1" if "macro_f1" in names else names[0]
    sign = -1 if key in {"rmse", "esr"} else 1  # an error is better if it is small
    worst = sorted(recordings, key=lambda name: (sign * recordings[name][key], name))[:_MOST]
    shown = {name: recordings[name] for name in recordings if name in worst}
    caption = f"Whole recordings of the split '{split}' of {data}, the state carried."
    if len(shown) < len(recordings):
        caption += f" The {_MOST} worst of {len(recordings):,} are shown."
    columns = [name for name in names if not name.startswith("f1[")] or names
    tables = [scores_table(columns, overall, shown, caption), baseline_table(overall)]
    return [table for table in tables if table is not None]


def _class_tables(
    where: str, classes: Mapping[str, Row], confusion: Sequence[Sequence[int]]
) -> list[Block]:
    """Scores of each class, and the confusion matrix of a few."""
    keys = ["precision", "recall", "f1", "auroc", "auprc"]
    rows = [
        [name, f"{row['steps']:,.0f}", *(row[k] for k in keys)] for name, row in classes.items()
    ]
    names = [METRIC_NAMES.get(key, key) for key in keys]
    caption = f"Each class against all others: {where}."
    scores = DataTable(["class", "steps", *names], rows, caption, range(1, 7))
    if len(classes) > _MOST:
        return [scores]
    cells = [[n, *(f"{c:,}" for c in row)] for n, row in zip(classes, confusion, strict=True)]
    caption = f"Confusion: a row for each true class, a column for each predicted one; {where}."
    columns = ["true", *(f"as {name}" for name in classes)]
    return [scores, DataTable(columns, cells, caption, range(1, len(columns)))]


def _learning(rows: Sequence[Row], names: Sequence[str], kept: int) -> Figures:
    """The loss, and the first score of validations, over the updates."""
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    smooth, width = _smoothed(train, rows[0]["steps"])
    best = [row for row in valid[:-1] if row["update"] == kept]
    marks = {f"update {kept:,}: the best": kept} if best else {}
    key = "macro_f1" if "macro_f1" in names else names[0]
    name, shown = METRIC_NAMES.get(key, key), valid or train
    alt = f"from {train[0]['loss']:.4g} to {train[-1]['loss']:.4g}"
    loss = Chart(
        "Loss",
        "update",
        "loss",
        {"training": smooth},
        f"of training {alt} at the last log line",
        {"validation": _points(valid, "loss")} if valid else {},
        _points(train, "loss"),
        marks,
    )
    score = Chart(
        f"{name} of {'validation' if valid else 'training'}",
        "update",
        name,
        {},
        f"from {shown[0][key]:.4g} to {shown[-1][key]:.4g}",
        {name: _points(shown, key)},
        marks=marks,
    )
    mean = f", the mean of {width} log lines, over which it is drawn pale" * (width > 1)
    text = f"Training loss{mean}. Validation plays whole recordings, the state carried."
    return Figures([loss.draw(), score.draw()], text)


def _points(rows: Sequence[Row], key: str) -> Points:
    return [row["update"] for row in rows], [row[key] for row in rows]


def _smoothed(train: Sequence[Row], epoch: int) -> tuple[Points, int]:
    """The mean loss of the log lines of an epoch, or of a tenth of the run if that is less."""
    updates, losses = _points(train, "loss")
    share = min(0.1, epoch / max(1, train[-1]["frames"]))
    width = max(1, round(share * len(train)))
    sums = np.cumsum([0.0, *losses])
    means = (sums[width:] - sums[:-width]) / width
    return (updates[width - 1 :], means.tolist()), width


def _audit_sections(run: Run) -> Sections:
    """The results of `audit`, if it has measured the run."""
    if not run.files.audit.exists():
        return {}
    report, config = AuditReport.read(run.files.audit), run.config
    measured = extent(report.audit.steps, report.epoch, report.audit.lanes)
    source = f"Measured on {measured} of the split '{report.split}' of {Path(report.data).name}"
    if report.update is not None:
        source += f", with the weights of update {report.update:,}"
        if report.update != run.spec.update:
            source += f"; the model has become that of update {run.spec.update:,} since"
    charts = [chart.draw() for chart in audit_charts(report, config)]
    trace, settling = report.trace, str(report.settling)
    costs = [report.advice(config), report.warning(), f"{source}."]
    sections: Sections = {
        "What truncating the gradient costs": [
            *filter(None, costs),
            Figures(charts[:2]),
            audit_table(report.audit),
        ],
        "After a cold start": [f"{settling[0].upper()}{settling[1:]}.", Figures(charts[2:])],
    }
    if trace is None:
        return sections
    where = f"the first {trace.steps:,} steps of recording {trace.recording}"
    alt = "The norm of the gradient of the training losses, added up, with respect to each state"
    alt += f" and gate, {where}. Dotted lines: an update ends."
    figure = gradient_figure(trace.norms, 0, trace.edges, alt)
    sections["Where the gradient goes"] = [Figures([figure], alt, wide=True)]
    return sections


def audit_charts(report: AuditReport, config: Config) -> list[Chart]:
    """Gradient by lag, bias by horizon, loss by context, difference after a cold start."""
    reach, audit, settling = report.reach, report.audit, report.settling
    window, own = config.credit_steps(), report.own(config)
    shares = ", ".join(f"{share:.0%} within {lag:,}" for share, lag in sorted(reach.shares.items()))
    parts = reach.by_leaf if len(reach.by_leaf) > 1 else {}
    norms = {"whole state": reach.norms, **dict(list(parts.items())[:3])}
    log = {"xscale": "log"}
    horizons = [*(row.horizon for row in audit.rows), audit.steps]
    biases, cosines = ([getattr(row, key) for row in audit.rows] for key in ("bias", "cosine"))
    contexts, ages = reach.contexts, settling.remembrance
    return [
        Chart(
            "How far back the gradient goes",
            "lag: steps before the loss",
            "gradient norm",
            {name: (reach.lags, values) for name, values in norms.items()},
            f"{shares} steps, mean of {reach.anchors} losses",
            marks={} if window is None else {f"window of training, {window:,}": window},
            settings=log | {"yscale": "log"},
        ),
        Chart(
            "Bias and cosine by horizon",
            "horizon (steps)",
            "against the exact gradient",
            {"bias": (horizons, [*biases, 0.0]), "cosine": (horizons, [*cosines, 1.0])},
            "; ".join(f"horizon {row.horizon}: bias {row.bias:.3f}" for row in audit.rows),
            marks={} if own is None else {"as trained": own.horizon},
            levels={f"tolerance {report.tolerance:g}": report.tolerance},
            settings=log,
        ),
        Chart(
            "Loss by context length",
            "steps of context, from a zero state",
            "loss",
            {"from a zero state": ([*contexts], [*contexts.values()])},
            f"with the state carried from the start of the recording: {reach.loss:.4g}",
            levels={"state carried from the start": reach.loss},
            settings=log,
        ),
        Chart(
            "A cold start beside the carried state",
            "steps since the cold start",
            "relative difference",
            {"outputs differ by": ([age + 1 for age in ages], [*ages.values()])},
            f"mean difference of the outputs over {len(settling.starts)} cold starts",
            levels={"counts as agreement": settling.tolerance},
            settings=log,
        ),
    ]
