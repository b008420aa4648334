"""The report of a run: how it went, how well it does, what it looks like."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from throughtime import files
from throughtime.errors import DataError
from throughtime.gradient import Truncated
from throughtime.report.page import Facts, Figure, Page, Section, Table, Text, render
from throughtime.report.svg import Band, Series, bars, lines, strip
from throughtime.run.assess import recordings_for
from throughtime.run.config import Config
from throughtime.run.folder import Folder
from throughtime.run.model import Spec, load_model
from throughtime.run.stretch import Stretch, stretch

Row = dict[str, Any]


def write_report(folder: Folder) -> Path:
    """Writes `report.html` from what is in the folder; a split's scores appear once `eval` has made them."""
    config, rows = folder.read_config(), folder.read_metrics()
    net, spec = load_model(folder.model)
    names = tuple(spec.score().figures())
    sections = [
        Section("The run", [_facts(config, rows), Text(_in_words(config, spec))]),
        Section("Learning", list(_curves(rows, names))),
        *_scores(folder, rows, names),
    ]
    try:
        splits = ("valid", "train") if any(row["kind"] == "valid" for row in rows) else ("train",)
        recording = recordings_for(spec, Path(config.data), splits[0], config)[0]
        sections.append(Section("A stretch of signal", [_stretch(stretch(net, spec, recording, config), spec)]))
    except DataError as error:
        sections.append(Section("A stretch of signal", [Text(f"Not shown: {error}")]))
    sections.append(Section("Settings", [_settings(config)]))
    lead = f"{spec.model.upper()} trained on {Path(config.data).name}, {'unbroken recordings, state carried' if config.train_on == 'stream' else f'windows of {config.stride} steps from a zero state'}."
    files.write_atomically(folder.report, render(Page(f"throughtime: {folder.path.name}", lead, sections)).encode())
    return folder.report


def _facts(config: Config, rows: Sequence[Row]) -> Facts:
    last = rows[-1]
    memory = last["peak_memory"]
    return Facts([
        ("updates", f"{last['update']:,}"),
        ("frames trained on", f"{last['frames']:,}"),
        ("frames per second", f"{last['frames'] / max(last['seconds'], 1e-9):,.0f}"),
        ("training time", f"{last['seconds']:.0f} s"),
        ("peak memory", "not measured" if memory is None else f"{memory / 1e6:.0f} MB"),
        ("lanes", f"{config.lanes}"),
    ])  # fmt: skip


def _in_words(config: Config, spec: Spec) -> str:
    """The gradient setting and what it means, in sentences."""
    start = (
        "Every lane plays whole recordings one after another and carries its state from update to update; only the start of a recording resets it."
        if config.train_on == "stream"
        else f"Recordings were cut into windows of {config.stride} steps, shuffled, each starting from a zero state: the usual way, for comparison."
    )
    warm = (
        f" The first {config.warm_up} steps of each recording only warm the state up; their loss does not count." if config.warm_up else ""
    )
    policy = Truncated(config.stride, config.horizon).describe()
    scored = (
        "Scores are those of whole recordings, played from their first step to their last with the state carried, as the model is deployed."
    )
    return f"Gradient: {policy}. {start}{warm} {scored} Inputs are standardised with the training split's mean and deviation, kept in the model ({spec.features} input columns, {spec.outputs} outputs)."


def _curves(rows: Sequence[Row], names: Sequence[str]) -> Sequence[Figure]:
    train, valid = ([row for row in rows if row["kind"] == kind] for kind in ("train", "valid"))
    steps = [float(row["update"]) for row in train]
    first, last = (train[0]["loss"], train[-1]["loss"]) if train else (math.nan, math.nan)
    loss = lines(
        [Series("training loss", steps, [row["loss"] for row in train])],
        title="Loss", description=f"Mean training loss between log lines, from {first:.4g} to {last:.4g}.", x_label="update", y_label="loss",
    )  # fmt: skip
    name = names[1] if len(names) > 1 and names[0] == "accuracy" else names[0]
    series = [Series("training, last update", steps, [row[name] for row in train])]
    if valid:
        series.append(Series("validation, whole recordings", [float(row["update"]) for row in valid], [row[name] for row in valid]))
    metric = lines(
        series, title=_title(name), description=f"{_title(name)} of the training steps of one update and of the validation recordings, over the run.",
        x_label="update", y_label=_title(name),
    )  # fmt: skip
    return [
        Figure(loss, "The loss that is minimised, averaged over the updates since the last log line."),
        Figure(metric, "Training figures are those of a single update and therefore noisy; validation plays whole recordings."),
    ]


def _title(name: str) -> str:
    return {"rmse": "RMSE", "r2": "R²", "esr": "ESR", "macro_f1": "macro-F1"}.get(name, name)


def _scores(folder: Folder, rows: Sequence[Row], names: Sequence[str]) -> list[Section]:
    """A section for the last validation and for every split that `eval` has scored."""
    found: dict[str, tuple[Row, Row]] = {}
    for row in rows:
        if row["kind"] == "valid":
            found["valid"] = ({name: row[name] for name in names}, row["recordings"])
    for path in sorted(folder.path.glob("scores-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found[content["split"]] = (content["figures"], content["recordings"])
    return [Section(f"Scores: {split}", _score_parts(split, names, *figures)) for split, figures in found.items()]


def _score_parts(split: str, names: Sequence[str], together: Row, recordings: Row) -> list[Table | Figure]:
    cells = [[name, *(figures[n] for n in names)] for name, figures in recordings.items()]
    table = Table(
        ["recording", *map(_title, names)],
        [*cells, ["all steps together", *(together[n] for n in names)]],
        f"Whole recordings of the split '{split}'.",
    )
    name = "macro_f1" if "macro_f1" in names else names[0]
    if len(recordings) < 2:
        return [table]
    picture = bars(
        [(recording, figures[name]) for recording, figures in recordings.items()],
        title=f"{_title(name)} by recording", description=f"{_title(name)} of each of the {len(recordings)} recordings of the split {split}.", x_label=_title(name),
        x_range=(0.0, 1.0) if name == "macro_f1" else None,
    )  # fmt: skip
    return [table, Figure(picture, "Recordings differ: a mean over all steps hides the ones on which a model fails.")]


def _stretch(shown: Stretch, spec: Spec) -> Figure:
    stop = shown.start + len(shown.signal)
    if spec.task == "classify":
        wrong = float(((shown.predicted != shown.targets) & (shown.targets >= 0)).mean())
        svg = strip(
            shown.signal.tolist(),
            [Band("labels", shown.targets.astype(int).tolist()), Band("predicted", shown.predicted.astype(int).tolist())],
            title=f"Recording {shown.recording}", description=f"Steps {shown.start} to {stop}: the signal, its labels and the predictions, which differ on {wrong:.1%} of the steps.",
            x_label="step", y_label=spec.inputs[0], classes=spec.classes, start=shown.start,
        )  # fmt: skip
    else:
        x = [float(i) for i in range(shown.start, stop)]
        svg = lines(
            [Series("target", x, shown.targets.tolist()), Series("predicted", x, shown.predicted.tolist())],
            title=f"Recording {shown.recording}", description=f"Steps {shown.start} to {stop}: the first target column and its prediction.",
            x_label="step", y_label=spec.targets[0] if spec.targets else "target",
        )  # fmt: skip
    return Figure(svg, f"Steps {shown.start:,} to {stop:,} of recording {shown.recording}, the state carried from its first step.")


def _settings(config: Config) -> Table:
    rows = [
        [key, ", ".join(value) if isinstance(value, tuple) else str(value)]
        for key, value in asdict(config).items()
        if value not in (None, ())
    ]
    return Table(["setting", "value"], rows, "config.toml of this run; every key is also a flag of throughtime train.", numeric=())
