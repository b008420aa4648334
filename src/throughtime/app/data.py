"""Recordings of files by split, as a run reads them: opened by one layout, checked, surveyed.

Statistics are collected in one pass before training. Cost: one read of every recording, memory for
one block.

Shapes: `T` steps, `D` input features with the static ones, `C` target columns.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughtime.app.settings import Config
from throughtime.errors import DataError, counted, did_you_mean, join_faults, listed
from throughtime.stream import Recording
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import rate_of_times
from throughtime.stream.layout import Labels, Layout, Targets, lay_out, targets_of
from throughtime.stream.manifest import (
    ManifestEntry,
    find_recordings,
    is_folder,
    manifest_of,
    read_folder,
)
from throughtime.stream.recording import (
    Moments,
    Part,
    TableRecording,
    as_columns,
    location,
    read_blocks,
    standardised,
)
from throughtime.stream.rows import ColumnRows, concat_tables
from throughtime.stream.targets import (
    IGNORE_INDEX,
    ClassRecording,
    class_name,
    class_names,
    shift_targets,
    sorted_classes,
)

_CLOSE = 1e-6  # relative: a rate computed from a duration is not exact
_MEASURED = 0.02  # relative: time stamps are rounded, and clocks drift
_ROUNDING = 1e-8  # of a squared correlation: files round
_FEW = 3  # changes that may agree by chance
_COMPARED = 4  # recordings: fewer may differ by chance
_MAX_CLASSES = 1000
_MOST_NUMBERS = 20  # whole ones that are classes; text may have more
_REASONS = {
    "classify": "text or few whole numbers, each a class",
    "multilabel": "several columns of 0 and 1, each a label by itself",
    "regress": "numbers",
}
_RECORDINGS, _BLOCKS = 8, 16  # read at most to find the task


class SourceRecording(NamedTuple):
    """A recording, its split (empty without one), and the rows per second that its files have."""

    split: str
    recording: TableRecording
    rates: tuple[float, ...]


def targets_in(recording: Recording) -> Iterable[Any]:
    """The targets of the blocks of a recording that has some."""
    return (steps.targets for _, steps in read_blocks(recording))


def layout_of(config: Config) -> Layout:
    """The layout that the settings of a run describe."""
    settings: dict[str, Any] = {k: v for k, v in config if k in Layout.__annotations__}
    return Layout(**settings, rate_set=config.rate is not None)


def task_of(layout: Layout, entries: Sequence[ManifestEntry]) -> Any:
    """The task of a layout, or else the one that fits the targets.

    Text is classes, and so are at most 20 different whole numbers, in a single column. Several
    columns of 0 and 1 are labels, each by itself. Other numbers are numbers.

    Raises:
        DataError: as `open_recordings`.

    Cost: the targets of up to 8 recordings, some blocks of each, until one decides.
    """
    if layout.task is not None:
        return layout.task
    names, width = set[str](), 1
    first = entries_of(entries, "train")[:_RECORDINGS]
    for source in open_recordings(first, replace(layout, task="classify")):
        for targets in islice(targets_in(source.recording), _BLOCKS):
            names |= {*class_names([targets])}
            width = targets[:1].size
            if not all(map(is_number, names)):
                return "classify"
            if len(names) > _MOST_NUMBERS:
                return "regress"
    values = {*map(float, names)}
    if width > 1:
        return "multilabel" if values <= {0.0, 1.0} else "regress"
    return "classify" if all(map(float.is_integer, values)) else "regress"


def open_recordings(
    entries: Sequence[ManifestEntry],
    layout: Layout,
    *,
    targets: bool = True,
    width: int | None = None,
) -> list[SourceRecording]:
    """Open every recording with the columns and targets of the layout, in order.

    Args:
        entries: of the manifest.
        layout: of the data.
        targets: whether the recordings have targets; without, to predict.
        width: numbers of a step that a model takes; default: those of the first recording.

    Raises:
        DataError: missing columns, targets of another length, an empty recording, an unreadable
            file, other columns or rates than those of the first recording; all are listed.
    """
    opened, faults, columns = list[SourceRecording](), list[str](), set[str]()
    for entry in entries:
        try:
            tables = [layout.open(path) for path in entry.inputs]
            columns.update(*(table.columns for table in tables))
            opened.append(open_entry(entry, tables, layout, targets=targets))
        except DataError as error:
            faults.append(str(error))
    absent = {*layout.exclude} - columns
    if targets and opened and absent:
        faults.append(
            f"--exclude {listed(sorted(absent))}: no recording has it; they have the columns"
            f" {listed(sorted(columns))}{did_you_mean(min(absent), columns)}"
        )
    faults += _differences(opened, layout, width)
    if faults:
        raise DataError(join_faults(faults))
    return opened


def _differences(
    opened: Sequence[SourceRecording], layout: Layout, width: int | None
) -> Iterator[str]:
    """How recordings differ from each other, the layout or the width of a model."""
    rates = [(one.recording, rate) for one in opened for rate in one.rates]
    first, expected = "what the model was trained on", layout.rate or 0.0
    if rates and not expected:
        first, expected = f"recording '{rates[0][0].name}'", rates[0][1]
    for recording, rate in [] if layout.rate_set else rates:
        tolerance = _CLOSE if recording.times is rates[0][0].times is None else _MEASURED
        if abs(rate / expected - 1) > tolerance:
            yield (
                f"recording '{recording.name}' has {rate:.12g} rows per second, {first} has"
                f" {expected:.12g}; resample one of them, or train with --rate N if all have the"
                " same"
            )
    for _, recording, _ in opened:
        name, other = recording.name, opened[0].recording
        size = recording.read(0, 1).inputs.size
        width = width or size
        if size != width:
            yield f"recording '{name}' has {size} input columns, expected {width}"
        for role in ("input", "target"):  # may differ, if no setting names them
            columns, expected = (getattr(r, f"{role}_columns") for r in (recording, other))
            if columns != expected:
                yield (
                    f"recording '{name}' has the {role} columns {listed(columns)}, '{other.name}'"
                    f" has {listed(expected)}; name them with --{role}s, or rename them"
                )


def open_entry(
    entry: ManifestEntry, tables: Sequence[Table], layout: Layout, *, targets: bool = True
) -> SourceRecording:
    """The recording in these tables, with the columns and targets of the layout.

    Raises:
        DataError: as `open_recordings`.
    """
    table = concat_tables(entry.name, tables)
    file = layout.open(entry.targets) if targets and entry.targets is not None else None
    labels = _labels(entry, table, file, layout) if targets else None
    own = labels.columns if isinstance(labels, ColumnRows) and file is None else ()
    static = np.array(entry.static) if entry.static else None
    inputs = layout.input_rows(table, own)
    series = layout.series_rows(table) if targets else None
    recording = lay_out(entry.name, inputs, layout, labels, static=static, series=series)
    rates = [getattr(one, "rate", None) for one in (*tables, file)]
    if recording.times is not None and not any(rates):
        rates = [rate_of_times(entry.name, "time", recording.times)]
    return SourceRecording(entry.split, recording, tuple(filter(None, rates)))


def _labels(entry: ManifestEntry, table: Table, file: Table | None, layout: Layout) -> Targets:
    """The targets in whichever form the files have.

    Raises:
        DataError: a label that is missing or no number, or no column is named.
    """
    if file is not None:
        return targets_of(file, layout)
    if (label := entry.label) is not None:
        if label and layout.classify:
            return Labels("the manifest", [label])
        if is_number(label) and math.isfinite(float(label)):
            return Labels("the manifest", [float(label)])
        expected = "a class" if layout.classify else "a finite number, or --task classify"
        raise DataError(f"recording '{entry.name}' has the label {label!r}, expected {expected}")
    rows = layout.target_rows(table, ("targets",) if "targets" in table.columns else ())
    if rows is None:
        raise DataError(
            f"{table.path}: which columns are the targets? The file has {listed(table.columns)};"
            " name them with --targets"
        )
    return rows


def entries_of(entries: Sequence[ManifestEntry], *splits: str) -> list[ManifestEntry]:
    """The entries of some splits and those without a split; all entries if there are none."""
    chosen = [entry for entry in entries if entry.split in {*splits, ""}]
    return chosen or list(entries)


def in_splits(
    sources: Sequence[SourceRecording], holdout: float, standardise: str = "split"
) -> tuple[dict[str, list[Recording]], str]:
    """Recordings by split, and in words where the splits come from.

    Without splits in a manifest or by sub-folders, the last recordings by name are held out as
    `valid`; of a single recording, its end. With `standardise` "recording" each is standardised by
    itself, as a whole.
    """
    splits = dict[str, list[Recording]]()
    for split, recording, _ in sources:
        played = standardised(recording) if standardise == "recording" else recording
        splits.setdefault(split or "train", []).append(played)
    if any(one.split for one in sources):
        return splits, f"splits as in the data ({_sizes(splits)})"
    train = splits["train"]
    whole = train[0]
    if holdout == 0:
        return splits, "nothing held out (--holdout 0): the scores are those of the training data"
    count, remark = 1, f"the last {holdout:.0%} of the recording held out"
    if len(train) > 1:
        count = max(1, round(len(train) * holdout))
        remark = f"{count} of {len(train)} recordings held out, the last by name"
    elif 0 < (cut := round(len(whole) * (1 - holdout))) < len(whole):
        train[:] = Part(whole, 0, cut), Part(whole, cut, len(whole))
    else:
        raise DataError(
            f"recording '{whole.name}' has {counted(len(whole), 'step')}, too few to hold out a"
            f" share of {holdout}; take --holdout 0"
        )
    return {"train": train[:-count], "valid": train[-count:]}, remark


def _sizes(splits: Mapping[str, Sequence[Recording]]) -> str:
    return listed(f"{name} {len(part)}" for name, part in sorted(splits.items()))


def choose_split(splits: Mapping[str, list[Recording]], name: str) -> list[Recording]:
    """The recordings of one split; `all` is every one.

    Raises:
        DataError: there is no such split.
    """
    chosen = [r for rs in splits.values() for r in rs] if name == "all" else splits.get(name, [])
    if not chosen:
        raise DataError(
            f"no recordings in split '{name}'; there are {_sizes(splits)}: name one of them with"
            " --split, give other data, or write the split into the manifest"
        )
    return chosen


def as_played(
    recordings: Sequence[Recording], layout: Layout, classes: tuple[str, ...]
) -> list[Recording]:
    """The recordings of one split: classes as indices; of a forecast the targets of later steps."""
    if classes:
        owner = "the training split has"
        recordings = [ClassRecording(recording, classes, owner) for recording in recordings]
    return [shift_targets(recording, layout.ahead or 0) for recording in recordings]


@dataclass
class Statistics:
    """Moments, classes and missing values of the recordings of a split.

    Args:
        task: what the targets are.
        missing: "error" where inputs that are NaN or infinite are a fault.

    Attributes:
        inputs: moments of the input features.
        targets: moments of targets that are numbers or labels.
        classes: how often each class occurs.
        without_inputs: steps with inputs that are NaN or infinite.
        without_target: steps without a target.
        means: of the inputs of each recording.
        faults: of each recording, and of each block of targets.
    """

    task: str
    missing: str
    inputs: Moments = field(default_factory=Moments)
    targets: Moments = field(default_factory=Moments)
    classes: Counter[str] = field(default_factory=Counter[str])
    without_inputs: int = 0
    without_target: int = 0
    means: list[Array] = field(default_factory=list[Array])
    faults: list[str] = field(default_factory=list[str])

    def add(self, recording: Recording) -> None:
        """Add all steps of a recording."""
        wrong, first, own = 0, "", Moments()
        for start, steps in read_blocks(recording):
            inputs = as_columns(steps.inputs)
            bad = ~np.isfinite(inputs)
            if bad.any() and not wrong:
                step, column = np.argwhere(bad)[0].tolist()
                first = location(recording, start + step, column)
            wrong += int(bad.any(axis=1).sum())
            self.inputs.add(inputs)
            own.add(inputs)
            self._add_targets(f"recording '{recording.name}'", start, steps.targets)
        self.means.append(own.mean)
        self.without_inputs += wrong
        if wrong and self.missing == "error":
            self.faults.append(
                f"recording '{recording.name}': {counted(wrong, 'step has', 'steps have')} inputs"
                f" that are NaN or infinite, the first at {first}; clean the file, or mask steps"
                " without inputs: --missing mask"
            )

    def _add_targets(self, name: str, start: int, targets: Any) -> None:
        """Add the targets of a block, which starts at step `start`."""
        if self.task == "classify":
            for value, count in zip(*np.unique(targets, return_counts=True), strict=True):
                self.classes[class_name(value)] += int(count)
            self.without_target += self.classes.pop("", 0)
            return
        rows = as_columns(targets)
        absent, labels = np.isnan(rows), self.task == "multilabel"
        wrong = (~np.isin(rows, (0, 1)) & ~absent if labels else np.isinf(rows)).any(axis=1)
        if wrong.any():
            expected = "0 or 1" if labels else "finite"
            self.faults.append(
                f"{name}: the targets of step {start + int(wrong.argmax())} must be {expected}, or"
                " NaN where there are none"
            )
        self.without_target += int(absent.any(axis=1).sum())
        self.targets.add(rows)


@dataclass(frozen=True)
class Dataset:
    """The recordings of a run, in splits.

    Attributes:
        train: recordings to train on.
        valid: recordings held out.
        statistics: of the training split.
        layout: how to read files; its columns and its rate are those of the files.
        classes: their names, in order; empty for labels and numbers.
        remarks: facts that a user should know before training.
    """

    train: list[Recording]
    valid: list[Recording]
    statistics: Statistics
    layout: Layout
    classes: tuple[str, ...]
    remarks: tuple[str, ...]


def open_dataset(config: Config) -> Dataset:
    """Open the recordings, and read them once for statistics.

    Args:
        config: the settings of the run.

    Raises:
        DataError: every fault of the files, or else every fault of the values.
    """
    data = Path(config.data)
    entries = find_recordings(data, config.static)
    layout = layout_of(config)
    layout = replace(layout, task=task_of(layout, entries))
    sources = open_recordings(entries_of(entries, "train", "valid"), layout)
    splits, remark = in_splits(sources, config.holdout, config.standardise)
    parts = choose_split(splits, "train"), splits.get("valid", [])
    statistics = [Statistics(str(layout.task), config.missing) for _ in parts]
    # of unshifted targets: those without a later step are values of the same column
    for survey, part in zip(statistics, parts, strict=True):
        for recording in part:
            survey.add(recording)
    _check_values(*statistics)
    files = [entry.targets for entry in entries if entry.targets is not None]
    if config.difference and files:
        raise DataError(
            "--difference adds to the present values of the targets, which it finds among the"
            " columns of the inputs: put the targets into the files of the inputs, or leave"
            " --difference out"
        )
    first, rates = sources[0].recording, [rate for one in sources for rate in one.rates]
    layout = replace(
        layout,
        inputs=first.input_columns,
        targets=first.target_columns,
        rate=layout.rate if layout.rate_set else next(iter(rates), None),
    )
    classes = sorted_classes(statistics[0].classes) if layout.classify else ()
    train, valid = (as_played(part, layout, classes) for part in parts)
    remarks = [remark]
    if config.task is None:
        remarks.append(f"the targets are {_REASONS[str(layout.task)]}: --task {layout.task}")
    remarks += _left_out(data, statistics[0])
    if len(train) < config.lanes:
        whole = f"--lanes {len(train)} keeps recordings whole"
        remarks.append(f"cut into {config.lanes} parts, one a lane ({whole})")
    if config.standardise == "split":
        remarks += _levels(statistics[0], layout)
    copied = layout.open(files[0]).columns if files and not layout.ahead else ()
    remarks += leaks(max(train, key=len), layout, copied)
    return Dataset(train, valid, statistics[0], layout, classes, tuple(remarks))


def _check_values(train: Statistics, valid: Statistics) -> None:
    """Refuse missing inputs that are not masked, and targets that the task cannot have."""
    faults = [*train.faults, *valid.faults]
    if train.task == "classify":
        if not 2 <= len(train.classes) <= _MAX_CLASSES:
            faults.append(
                f"the training split has {counted(len(train.classes), 'class', 'classes')}"
                f" ({listed(train.classes)}), expected 2 to {_MAX_CLASSES}. Name another column"
                " with --targets, or is it --task regress?"
            )
        if unknown := sorted({*valid.classes} - {*train.classes}):
            faults.append(
                f"the recordings held out (valid) have the classes {listed(unknown)}, which the"
                f" training split has not ({listed(train.classes)}); hold out others, or name a"
                " split"
            )
    elif not train.targets.count.all():
        faults.append("a target column of the training split has no value at all")
    if faults:
        raise DataError(join_faults(faults))


def _left_out(data: Path, statistics: Statistics) -> Iterator[str]:
    """The files and steps that are not trained on."""
    is_list = manifest_of(data) is not None or not is_folder(data)
    others = () if is_list else read_folder(data)[1]
    for count, noun, why in (
        (len(others), "file", f"of no known format: {listed(others)}"),
        (statistics.without_inputs, "step", "the inputs are NaN or infinite"),
        (statistics.without_target, "step", "there is no target"),
    ):
        if count:
            yield f"{counted(count, noun)} left out: {why}"


def _levels(statistics: Statistics, layout: Layout) -> Iterator[str]:
    """The inputs whose level is another in each recording: it makes half of their variance."""
    far = 2 * np.var(statistics.means, axis=0) > statistics.inputs.scale**2
    differ = [name for name, is_far in zip(layout.inputs, far, strict=False) if is_far]
    if differ and len(statistics.means) >= _COMPARED:
        yield (
            f"input {listed(differ)} differs more between recordings than within them; if its level"
            " is of no meaning, --standardise first:400 takes that of the first steps of each"
        )


def leaks(recording: Recording, layout: Layout, copied: Sequence[str] = ()) -> Iterator[str]:
    """The inputs that determine a target, in the first block, or that a targets file has as well.

    Args:
        recording: as it is played.
        layout: with the names of its inputs.
        copied: the columns of a targets file.
    """
    inputs, targets, _ = next(read_blocks(recording))[1]
    x, y = (as_columns(np.asarray(rows)).T for rows in (inputs, targets))
    pairs = zip(layout.inputs, x, strict=False)
    named = {
        "determines a target": [name for name, a in pairs if any(_determines(a, b) for b in y)],
        "is a column of the targets files": [
            name for name in layout.inputs if name in copied and not name.isdecimal()
        ],
    }
    for what, names in named.items():
        if names:
            yield (
                f"input {listed(names)} {what}; if it is not known when the net runs, leave it out"
                " of --inputs"
            )


def _determines(inputs: Array, targets: Array) -> bool:
    """Whether a column is another one up to a shift and a scale, or changes where that does."""
    known = np.isfinite(inputs) & np.isfinite(targets) & (targets != IGNORE_INDEX)
    pair = np.stack([inputs[known], targets[known]])
    if known.sum() < 3 or not np.ptp(pair, axis=1).all():
        return False
    own, changes = np.diff(pair) != 0
    same = _FEW < changes.sum() < len(changes) / 2 and np.array_equal(own, changes)
    return bool(same or np.corrcoef(pair)[0, 1] ** 2 > 1 - _ROUNDING)


def target_moments(recordings: Sequence[Recording], now: Sequence[int] = ()) -> Moments:
    """The moments of the targets; with the input columns `now`, of their changes from these.

    Cost: one read of every recording.
    """
    moments = Moments()
    for recording in recordings:
        for _, steps in read_blocks(recording):
            targets = as_columns(np.asarray(steps.targets))
            moments.add(targets - as_columns(steps.inputs)[:, list(now)] if now else targets)
    return moments
