"""The report of a run: how it went, how well it does, what it looks like."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from throughtime._files import write_atomically
from throughtime.app.assess import recordings_for
from throughtime.app.audit_report import AuditReport
from throughtime.app.config import Config
from throughtime.app.excerpt import Excerpt, busiest_excerpt
from throughtime.app.folder import Folder
from throughtime.app.model import Spec, load_model
from throughtime.app.policy import policy_of
from throughtime.app.report import audit_section, trace_section
from throughtime.app.report.charts import Band, Series, bars, lines, strip
from throughtime.app.report.page import Facts, Figure, Page, Section, Table, Text, render
from throughtime.carry.carried import Carried
from throughtime.errors import DataError, RunError

Row = dict[str, Any]

_FEWEST = 3  # log lines of a curve
_NAMES = 6  # classes or outputs that are told by name


def write_report(folder: Folder) -> Path:
    """Writes `report.html` from what is in the folder.

    Scores and audit appear once `eval` and `audit` have made them.
    """
    config, rows = folder.read_config(), folder.read_metrics()
    if not any(row["kind"] == "train" for row in rows) or rows[0]["kind"] != "data":
        raise RunError(
            f"{folder.metrics}: the lines that a report is made of are missing;"
            f" {folder.report.name} was not written"
        )
    net, spec = load_model(folder.model)
    names = tuple(spec.score().compute())
    sections = [
        Section(
            "The run", [_facts(config, rows, net), *map(Text, _in_words(config, spec, rows[0]))]
        ),
        Section("Learning", list(_curves(config, rows, names))),
        *_scores(folder, rows, names),
        *_audited(folder, config, rows[-1]["update"]),
        *_course(rows),
        Section(
            "A stretch of signal",
            [_stretch(net, spec, config, "valid" if rows[0]["valid"] else "train")],
        ),
        Section("Settings", [_settings(config)]),
    ]
    how = (
        "unbroken recordings, the state carried"
        if config.train_on == "stream"
        else f"windows of {config.stride} steps from a zero state"
    )
    page = Page(
        f"throughtime: {folder.path.name}",
        f"{spec.model.upper()} trained on {Path(config.data).name}: {how}.",
        sections,
    )
    write_atomically(folder.report, render(page).encode())
    return folder.report


def _facts(config: Config, rows: Sequence[Row], net: Carried) -> Facts:
    last = rows[-1]
    memory = last["peak_memory"]
    return Facts(
        [
            ("updates", f"{last['update']:,}"),
            ("frames trained on", f"{last['frames']:,}"),
            ("frames per second", f"{last['frames'] / max(last['seconds'], 1e-9):,.0f}"),
            ("training time", f"{last['seconds']:.0f} s"),
            ("peak memory", "not measured" if memory is None else f"{memory / 1e6:.0f} MB"),
            ("lanes", f"{config.lanes}"),
            ("waiting for data", f"{last.get('waiting', 0.0):.0%}"),
            ("weights", f"{sum(weight.numel() for weight in net.parameters()):,}"),
        ]
    )


def _in_words(config: Config, spec: Spec, data: Row) -> list[str]:
    """The model, the data, the gradient setting and the scoring, in sentences."""
    recordings, lanes = data["train"], config.lanes
    found = (
        f"{recordings:,} recordings with {data['steps']:,} steps to train on, {data['valid']:,}"
        f" held out: {'; '.join(data['remarks'])}."
    )
    if config.train_on == "windows":
        start = (
            f"They were cut into shuffled windows of {config.stride} steps, each starting from a"
            " zero state: for comparison."
        )
    elif lanes > recordings:
        start = (
            f"They were cut into {lanes} contiguous parts, one for each lane; within a part the"
            " state is carried from update to update."
        )
    else:
        start = (
            f"Each of {lanes} lanes plays whole recordings one after another, its state carried;"
            " only a recording's start resets it."
        )
    warm = (
        f" The first {config.warm_up} steps after a reset only warm the state up; their loss does"
        " not count."
        if config.warm_up
        else ""
    )
    return [
        _model_in_words(config, spec),
        f"{found} {start}{warm}",
        (
            f"Gradient: {policy_of(config).describe()}. Adam at {config.lr:g}, clipped to norm"
            f" {config.clip:g}.{_weighed(config)}"
        ),
        (
            "Scores are those of whole recordings, played from first step to last with the state"
            " carried, as the model is deployed."
        ),
        (
            f"Inputs ({spec.features}) are standardised with the training split's mean and"
            " deviation, which are kept in the model."
        ),
    ]


def _model_in_words(config: Config, spec: Spec) -> str:
    """What reads what and names what."""
    layers = f"{config.layers} layer{'' if config.layers == 1 else 's'} of {config.hidden} units"
    names = spec.classes if spec.task == "classify" else spec.targets
    some = ", ".join(names[:_NAMES]) + (
        f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    )
    makes = (
        f"names one of {len(names)} classes ({some})"
        if spec.task == "classify"
        else f"tells {some}"
    )
    numbers = (
        f"Weights and the order of the recordings are drawn with seed {config.seed}; numbers are"
        f" {config.dtype} on {config.device}."
    )
    read = f"{spec.features:,} number{'' if spec.features == 1 else 's'}"
    return f"{spec.model.upper()} of {layers}. At every step it reads {read} and {makes}. {numbers}"


def _weighed(config: Config) -> str:
    """What counts how much in the loss, if not all alike."""
    if config.class_weights == "none":
        return ""
    how = (
        "the inverse of its frequency"
        if config.class_weights == "balanced"
        else f"what was said ({config.class_weights}), others 1"
    )
    return f" In the loss each class weighs {how}."


def _course(rows: Sequence[Row]) -> list[Section]:
    """Throughput and memory over the run; nothing before a second log line."""
    train = [(before, row) for before, row in pairwise(rows) if row["kind"] == "train"]
    if len(train) < _FEWEST:
        return []
    updates = [float(row["update"]) for _, row in train]
    # The clock runs on while a validation plays whole recordings: what follows one is no pace of
    # training.
    paces = [_pace(before, row) if before["kind"] == "train" else math.nan for before, row in train]
    known = sorted(pace for pace in paces if math.isfinite(pace))
    usual = known[len(known) // 2] if known else math.nan
    speed = lines(
        [Series("frames per second", updates, paces)],
        title="Throughput",
        description=(
            f"Frames trained on per second between two log lines; half of them above {usual:,.0f}."
        ),
        x_label="update",
        y_label="frames per second",
        y_range=(0.0, 1.1 * known[-1]) if known else None,
    )
    waited = f"{rows[-1].get('waiting', 0.0):.0%} of the time was spent waiting for data."
    figures = [
        Figure(
            speed,
            "Frames of all lanes between two log lines, where no validation lies between."
            f" {waited}",
        )
    ]
    held = [
        (float(row["update"]), row["peak_memory"] / 1e6)
        for row in rows
        if row["peak_memory"] is not None
    ]
    return [Section("Speed and memory", [*figures, *([_memory(held)] if held else [])])]


def _pace(before: Row, row: Row) -> float:
    spent = row["seconds"] - before["seconds"]
    return (row["frames"] - before["frames"]) / spent if spent > 0 else math.nan


def _memory(held: Sequence[tuple[float, float]]) -> Figure:
    first, last = held[0][1], held[-1][1]
    svg = lines(
        [Series("peak memory", [update for update, _ in held], [size for _, size in held])],
        title="Memory",
        description=(
            f"The most memory that the process has held so far, from {first:,.0f} MB to"
            f" {last:,.0f} MB."
        ),
        x_label="update",
        y_label="MB",
        y_range=(0.0, 1.1 * max(size for _, size in held)),
    )
    return Figure(
        svg,
        "The most memory that the process has held up to each log line. No graph outlives its"
        " update, so one that goes on rising has another cause.",
    )


def _curves(config: Config, rows: Sequence[Row], names: Sequence[str]) -> Sequence[Figure]:
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    steps = [float(row["update"]) for row in train]
    first, last = (train[0]["loss"], train[-1]["loss"]) if train else (math.nan, math.nan)
    loss = lines(
        [Series("training loss", steps, [row["loss"] for row in train])],
        title="Loss",
        description=f"Mean training loss between log lines, from {first:.4g} to {last:.4g}.",
        x_label="update",
        y_label="loss",
    )
    name = names[1] if len(names) > 1 and names[0] == "accuracy" else names[0]
    series = [Series("training, last update", steps, [row[name] for row in train])]
    if valid:
        series.append(
            Series(
                "validation, whole recordings",
                [float(row["update"]) for row in valid],
                [row[name] for row in valid],
            )
        )
    metric = lines(
        series,
        title=_title(name),
        description=(
            f"{_title(name)} of the training steps of one update and of the validation recordings,"
            " over the run."
        ),
        x_label="update",
        y_label=_title(name),
    )
    return [
        Figure(
            loss, "The loss that is minimised, averaged over the updates since the last log line."
        ),
        Figure(
            metric,
            "Training figures are those of"
            f" {'the last chunk of an update' if config.exact else 'a single update'} and therefore"
            " noisy; validation plays whole recordings.",
        ),
    ]


def _title(name: str) -> str:
    return {"rmse": "RMSE", "r2": "R²", "esr": "ESR", "macro_f1": "macro-F1"}.get(name, name)


def _scores(folder: Folder, rows: Sequence[Row], names: Sequence[str]) -> list[Section]:
    """A section for the last validation and for every split that `eval` has scored."""
    found: dict[str, tuple[Row, Row, str]] = {}
    for row in rows:
        if row["kind"] == "valid":
            found["valid"] = (
                {name: row[name] for name in names},
                row["recordings"],
                Path(folder.read_config().data).name,
            )
    for path in sorted(folder.path.glob("scores-*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found[content["split"]] = (
                content["figures"],
                content["recordings"],
                Path(content["data"]).name,
            )
        except (json.JSONDecodeError, KeyError) as error:
            raise RunError(
                f"{path}: not scores that `throughtime eval` wrote ({error!r}); remove it, or run"
                " eval again"
            ) from error
    return [
        Section(f"Scores: {split}", _score_parts(split, names, *figures))
        for split, figures in found.items()
    ]


def _score_parts(
    split: str, names: Sequence[str], together: Row, recordings: Row, data: str
) -> list[Table | Figure]:
    cells = [[name, *(figures[n] for n in names)] for name, figures in recordings.items()]
    table = Table(
        ["recording", *map(_title, names)],
        [*cells, ["all steps together", *(together[n] for n in names)]],
        f"Whole recordings of the split '{split}' of {data}.",
    )
    name = "macro_f1" if "macro_f1" in names else names[0]
    if len(recordings) < 2:
        return [table]
    picture = bars(
        [(recording, figures[name]) for recording, figures in recordings.items()],
        title=f"{_title(name)} by recording",
        description=(
            f"{_title(name)} of each of the {len(recordings)} recordings of the split {split}."
        ),
        x_label=_title(name),
        x_range=(0.0, 1.0) if name == "macro_f1" else None,
    )
    return [
        table,
        Figure(
            picture,
            "Recordings differ: a mean over all steps hides the ones on which a model fails.",
        ),
    ]


def _audited(folder: Folder, config: Config, updates: int) -> list[Section]:
    """What `audit` found, if it has looked at the run."""
    if not folder.audit.is_file():
        return []
    found = AuditReport.read(folder.audit)
    where = (
        f"Measured on {found.looked_at()} of the split '{found.split}' of {Path(found.data).name}"
    )
    if found.update is not None:
        where += f", with the weights of update {found.update:,}"
        where += (
            f"; the run has gone on to update {updates:,} since" if found.update < updates else ""
        )
    parts = [
        Text(f"{found.advice(config)}\n\n{found.warning()}\n\n{where}."),
        *audit_section.pictures(found, found.own(config), _window(config)),
    ]
    sections = [Section("Where the gradient goes", [*parts, audit_section.table(found.audit)])]
    if found.trace is not None:
        sections.append(
            Section("The gradient, step by step", trace_section.parts(found.trace, config))
        )
    return sections


def _window(config: Config) -> int | None:
    """How many steps back credit went in training, if it was cut."""
    if config.exact:
        return config.segment
    return config.stride if config.train_on == "windows" else config.horizon or config.stride


def _stretch(net: Carried, spec: Spec, config: Config, split: str) -> Figure | Text:
    """The liveliest part of the first recording of a split, if it is still there."""
    try:
        shown = busiest_excerpt(
            net, spec, recordings_for(spec, Path(config.data), split, config)[0], config
        )
    except DataError as error:
        return Text(f"Not shown, since the recordings of the run cannot be read any more: {error}")
    where = (
        f"Steps {shown.start:,} to {shown.start + len(shown.signal):,} of recording"
        f" {shown.recording} ({split} split)"
    )
    draw = _classes_drawn if spec.task == "classify" else _values_drawn
    return Figure(draw(shown, spec, where), f"{where}, the state carried from its first step.")


def _classes_drawn(shown: Excerpt, spec: Spec, where: str) -> str:
    counts = shown.targets >= 0
    wrong = (
        float((shown.predicted[counts] != shown.targets[counts]).mean()) if counts.any() else 0.0
    )
    bands = [
        Band("labels", shown.targets.astype(int).tolist()),
        Band("predicted", shown.predicted.astype(int).tolist()),
    ]
    described = (
        f"{where}: the signal, its labels and the predictions, which differ on {wrong:.1%} of the"
        " steps."
    )
    return strip(
        shown.signal.tolist(),
        bands,
        title=f"Recording {shown.recording}",
        description=described,
        x_label="step",
        y_label=f"input {spec.inputs[0]}",
        classes=spec.classes,
        start=shown.start,
    )


def _values_drawn(shown: Excerpt, spec: Spec, where: str) -> str:
    x = [float(i) for i in range(shown.start, shown.start + len(shown.signal))]
    series = [
        Series("target", x, shown.targets.tolist()),
        Series("predicted", x, shown.predicted.tolist()),
    ]
    described = f"{where}: the target and its prediction."
    return lines(
        series,
        title=f"Recording {shown.recording}",
        description=described,
        x_label="step",
        y_label=f"target {spec.targets[0]}",
    )


def _settings(config: Config) -> Table:
    rows = [
        [key, ", ".join(value) if isinstance(value, tuple) else str(value)]
        for key, value in config.settings().items()
        if value != ()
    ]
    return Table(
        ["setting", "value"],
        rows,
        "config.toml of this run; every key is also a flag of throughtime train.",
        numeric=(),
    )
