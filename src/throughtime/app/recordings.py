"""The recordings of a run: opened from files by one layout, checked against each other, surveyed.

Statistics are collected in one pass before training. Cost: one read of every recording, memory for
one block.

Shapes: `T` steps, `D` input features with the static ones, `C` target columns.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughtime.app.config import Config
from throughtime.app.values import rows_ahead
from throughtime.errors import DataError, counted, did_you_mean, listed
from throughtime.stream import Recording
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import rate_of_times
from throughtime.stream.layout import Labels, Layout, Targets, lay_out, targets_of
from throughtime.stream.manifest import ManifestEntry, find_recordings, join_faults
from throughtime.stream.recording import (
    Moments,
    StepArrays,
    TableRecording,
    as_columns,
    location,
    read_blocks,
)
from throughtime.stream.rows import ColumnRows, concat_tables, time_rows
from throughtime.stream.targets import IGNORE_INDEX, class_name

_CLOSE = 1e-6  # relative: a rate computed from a duration is not exact
_MEASURED = 0.02  # relative: time stamps are rounded, and clocks drift
_ROUNDING = 1e-8  # of a squared correlation: files round
_FEW = 3  # changes that may agree by chance


class Rate(NamedTuple):
    """Rows per second, the file or model that says so, and by how much (relative) it may be off."""

    source: str
    value: float
    tolerance: float = _CLOSE


def layout_of(config: Config) -> Layout:
    """The layout that the settings of a run describe."""
    names = [one.name for one in fields(Layout) if one.name in Config.model_fields]
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    settings |= {"ahead": rows_ahead(config.ahead), "rate_set": config.rate is not None}
    return Layout(**settings)


@dataclass(frozen=True)
class SourceRecording:
    """A recording and what else its files say.

    Attributes:
        split: empty without a split.
        recording: its inputs and targets.
        rates: rows per second of those of its files that have a rate.
        table: its input files.
    """

    split: str
    recording: TableRecording
    rates: tuple[Rate, ...]
    table: Table


def find_entries(data: Path, static: Sequence[str] = ()) -> list[ManifestEntry]:
    """The recordings at a path, as `find_recordings`; where nothing is, with what to do.

    Raises:
        DataError: as `find_recordings`.
    """
    if not data.exists():
        near = did_you_mean(data.name, [path.name for path in data.parent.glob("*")])
        raise DataError(
            f"{data}: no such file or folder{near}; write the path of the recordings: a file, a"
            " folder or a manifest as DATA"
        )
    return find_recordings(data, static)


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
    opened, faults = list[SourceRecording](), list[str]()
    for entry in entries:
        try:
            tables = [layout.open(path) for path in entry.inputs]
            opened.append(open_entry(entry, tables, layout, targets=targets))
        except DataError as error:
            faults.append(str(error))
    columns = [*dict.fromkeys(name for one in opened for name in one.table.columns)]
    absent = [name for name in layout.exclude if name not in columns]
    if targets and opened and absent:
        faults.append(
            f"--exclude {listed(absent)}: no recording has it; they have the columns"
            f" {listed(columns)}{did_you_mean(absent[0], columns)}"
        )
    return check_sources(opened, layout, faults, width)


def check_sources(
    opened: list[SourceRecording],
    layout: Layout,
    faults: Sequence[str] = (),
    width: int | None = None,
) -> list[SourceRecording]:
    """Refuse recordings that do not fit each other, the layout or the width of a model.

    The faults so far are listed, too.
    """
    every, rates = [*faults], [rate for one in opened for rate in one.rates]
    if layout.rate is not None:
        rates.insert(0, Rate("what the model was trained on", layout.rate))
    for rate in [] if layout.rate_set else rates[1:]:
        first = rates[0]
        if abs(first.value / rate.value - 1) > max(first.tolerance, rate.tolerance):
            every.append(
                f"{rate.source} has {rate.value:.12g} rows per second, {first.source} has"
                f" {first.value:.12g}; resample one of them, or train with --rate N if all have the"
                " same"
            )
    for one in opened:
        name, other = one.recording.name, opened[0].recording
        size = one.recording.read(0, 1).inputs.size
        width = width or size
        if size != width:
            every.append(f"recording '{name}' has {size} input columns, expected {width}")
        for role in ("input", "target"):  # may differ, if no setting names them
            columns, expected = (getattr(r, f"{role}_columns") for r in (one.recording, other))
            if columns != expected:
                every.append(
                    f"recording '{name}' has the {role} columns {listed(columns)}, '{other.name}'"
                    f" has {listed(expected)}; name them with --{role}s, or rename them"
                )
    if every:
        raise DataError(join_faults(every))
    return opened


def open_entry(
    entry: ManifestEntry, tables: Sequence[Table], layout: Layout, *, targets: bool = True
) -> SourceRecording:
    """The recording in these tables, with the columns and targets of the layout.

    Raises:
        DataError: as `open_recordings`.
    """
    table = concat_tables(entry.name, tables)
    file = layout.open(entry.targets) if targets and entry.targets is not None else None
    labels = _targets(entry, table, file, layout) if targets else None
    own = labels.columns if isinstance(labels, ColumnRows) and file is None else ()
    inputs = layout.input_rows(table, own)
    recording = lay_out(
        entry.name,
        inputs,
        layout,
        labels,
        static=np.array(entry.static) if entry.static else None,
        series=layout.series_rows(table) if targets else None,
    )
    rates = [Rate(str(t.path), t.rate) for t in tables if t.rate is not None]
    stamps = time_rows(table, layout.exclude)
    if stamps is not None and not rates:
        rate = rate_of_times(entry.name, stamps.columns[0], stamps)
        source = f"column '{stamps.columns[0]}' of {table.path}"
        rates = [] if rate is None else [Rate(source, rate, _MEASURED)]
    if file is not None and file.rate is not None and isinstance(labels, ColumnRows):
        rates.append(Rate(str(file.path), file.rate))
    return SourceRecording(entry.split, recording, tuple(rates), table)


def _targets(entry: ManifestEntry, table: Table, file: Table | None, layout: Layout) -> Targets:
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


@dataclass
class Statistics:
    """Moments, classes and missing values of recordings.

    Attributes:
        inputs: moments of the input features.
        targets: moments of targets that are numbers or labels.
        classes: how often each class occurs.
        missing: steps with inputs that are NaN or infinite.
        missing_targets: steps without a target.
        means: of the inputs of each recording.
        faults: of each recording with such inputs.
        bad_targets: of blocks with infinite targets, or other labels than 0 and 1.
    """

    inputs: Moments = field(default_factory=Moments)
    targets: Moments = field(default_factory=Moments)
    classes: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0
    missing_targets: int = 0
    means: list[Array] = field(default_factory=list[Array])
    faults: list[str] = field(default_factory=list[str])
    bad_targets: list[str] = field(default_factory=list[str])

    def add(self, recording: Recording, task: str) -> None:
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
            if steps.targets is not None:
                self._add_targets(f"recording '{recording.name}'", start, steps.targets, task)
        self.means.append(own.mean)
        self.missing += wrong
        if wrong:
            self.faults.append(
                f"recording '{recording.name}': {counted(wrong, 'step has', 'steps have')} inputs"
                f" that are NaN or infinite, the first at {first}"
            )

    def _add_targets(self, name: str, start: int, targets: Array, task: str) -> None:
        """Add the targets of a block, which starts at step `start`."""
        if task == "classify":
            for value, count in zip(*np.unique(targets, return_counts=True), strict=True):
                self.classes[class_name(value)] += int(count)
            self.missing_targets += self.classes.pop("", 0)
            return
        rows = as_columns(targets)
        absent, labels = np.isnan(rows), task == "multilabel"
        wrong = (~np.isin(rows, (0, 1)) & ~absent if labels else np.isinf(rows)).any(axis=1)
        if wrong.any():
            expected = "0 or 1" if labels else "finite"
            self.bad_targets.append(
                f"{name}: the targets of step {start + int(wrong.argmax())} must be {expected}, or"
                " NaN where there are none"
            )
        self.missing_targets += int(absent.any(axis=1).sum())
        self.targets.add(rows)


def collect_statistics(recordings: Sequence[Recording], *, task: str) -> Statistics:
    """Collect the statistics of the recordings of a split, whose columns are equal, in one pass."""
    statistics = Statistics()
    for recording in recordings:
        statistics.add(recording, task)
    return statistics


def target_moments(recordings: Sequence[Recording], now: Sequence[int] = ()) -> Moments:
    """The moments of the targets; with the input columns `now`, of their changes from these.

    Cost: one read of every recording.
    """
    moments = Moments()
    for recording in recordings:
        for _, steps in read_blocks(recording):
            if steps.targets is not None:
                targets = steps.targets.reshape(len(steps.targets), -1)
                moments.add(targets - as_columns(steps.inputs)[:, list(now)] if now else targets)
    return moments


def leaks(steps: StepArrays, inputs: Sequence[str]) -> list[list[str]]:
    """For each target column, the input columns that determine it.

    Such a column equals it up to a shift and a scale, or changes at the same steps and no others.

    Args:
        steps: consecutive ones, as they are trained on.
        inputs: the names of the columns of a row.
    """
    x, result = as_columns(steps.inputs), list[list[str]]()
    for y in [] if steps.targets is None else as_columns(steps.targets).T:
        known = np.isfinite(y) & (y != IGNORE_INDEX) & np.isfinite(x).all(axis=1)
        a, b, count = x[known], y[known], max(1, known.sum())
        changes = np.diff(b) != 0
        same = ((np.diff(a, axis=0) != 0) == changes[:, None]).all(axis=0)
        same &= _FEW < changes.sum() < len(changes) / 2
        a, b = a - a.sum(axis=0) / count, b - b.sum() / count
        squares = (a**2).sum(axis=0) * (b**2).sum()
        equal = (squares > 0) & ((b @ a) ** 2 > (1 - _ROUNDING) * squares)
        columns = np.flatnonzero(equal | same) % len(inputs)
        result.append([inputs[i] for i in dict.fromkeys(columns.tolist())])
    return result
