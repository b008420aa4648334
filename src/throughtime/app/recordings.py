"""The recordings of a run: opened from files by one layout, checked against each other, surveyed.

Statistics are collected in one pass before training. Cost: one read of every recording, memory for
one block.

Shapes: `T` steps, `D` input features, `S` static features.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughtime.app.config import Config
from throughtime.app.values import named_series, rows_ahead
from throughtime.errors import DataError, counted, did_you_mean, listed
from throughtime.stream import Recording
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import summarize_times
from throughtime.stream.layout import Label, Layout, Targets, lay_out, targets_of
from throughtime.stream.manifest import ManifestEntry, find_recordings, join_faults
from throughtime.stream.recording import (
    Moments,
    StepArrays,
    TableRecording,
    as_columns,
    checksum,
    location,
    read_blocks,
)
from throughtime.stream.rows import ColumnRows, concat_tables, time_rows
from throughtime.stream.targets import IGNORE_INDEX, SpanLabels, class_name

displays: list[Callable[[str, int, int], None]] = []


def progress(phase: str, done: int, total: int) -> None:
    """Show that `done` of `total` parts of a phase are finished; of 0, that it has begun."""
    for show in displays:
        show(phase, done, total)


_SHOWN = 3  # recordings with the same fault
_OWN = re.compile(r"('[^']*')|\S*/\S*|\d+")  # paths and numbers, but not within quotes
_CLOSE = 1e-6  # relative: a rate computed from a duration is not exact
_MEASURED = 0.02  # relative: time stamps are rounded, and clocks drift


class Rate(NamedTuple):
    """Rows per second, the file or model that says so, and by how much (relative) it may be off."""

    source: str
    value: float
    tolerance: float = _CLOSE


def layout_of(config: Config) -> Layout:
    """The layout that the settings of a run describe."""
    other: dict[str, Any] = {
        "series": named_series(config.series),
        "ahead": rows_ahead(config.ahead),
        "rate_set": config.rate is not None,
    }
    names = [field.name for field in fields(Layout) if field.name not in other]
    return Layout(**{name: getattr(config, name) for name in names}, **other)


@dataclass(frozen=True)
class SourceRecording:
    """A recording and what else its files say.

    Attributes:
        split: empty without a split.
        recording: its inputs and targets.
        rates: rows per second of those of its files that have a rate.
        left_out: rows at the end that fill no frame.
        table: its input files.
    """

    split: str
    recording: TableRecording
    rates: tuple[Rate, ...]
    left_out: int
    table: Table

    @property
    def lost(self) -> int:
        """Intervals shorter than a frame."""
        labels = self.recording.targets
        return labels.lost if isinstance(labels, SpanLabels) else 0


def find_entries(data: Path, static: Sequence[str] = ()) -> list[ManifestEntry]:
    """The recordings at a path, as `find_recordings`; where nothing is, with what to do.

    Raises:
        DataError: as `find_recordings`.
    """
    if not data.exists():
        near = did_you_mean(data.name, [path.name for path in data.parent.glob("*")])
        raise DataError(
            f"{data}: no such file or folder"
            + (near or "; write the path of the recordings: a file, a folder or a manifest as DATA")
        )
    return find_recordings(data, static)


def open_recordings(
    entries: Sequence[ManifestEntry],
    layout: Layout,
    *,
    targets: bool = True,
) -> list[SourceRecording]:
    """Open every recording with the columns and targets of the layout, in order.

    Args:
        entries: of the manifest.
        layout: of the data.
        targets: whether the recordings have targets; without, to predict.

    Raises:
        DataError: missing columns, targets of another length, an empty recording, an unreadable
            file, other columns or rates than those of the first recording; all are listed.
    """
    opened, faults = list[SourceRecording](), dict[str, str]()
    for count, entry in enumerate(entries, start=1):
        try:
            tables = [layout.open(path) for path in entry.inputs]
            opened.append(open_entry(entry, tables, layout, targets=targets))
        except DataError as error:
            faults[entry.name] = str(error)
        progress("opening recordings", count, len(entries))
    every = once(faults)
    absent = [n for n in layout.exclude if not any(n in one.table.columns for one in opened)]
    if targets and opened and absent:
        table = opened[0].table
        every.append(
            f"--exclude {listed(absent)}: no recording has it; the columns of {table.path} are"
            f" {listed(table.columns)}{did_you_mean(absent[0], table.columns)}"
        )
    return check_sources(opened, layout, every)


def once(faults: Mapping[str, str]) -> list[str]:
    """The faults of recordings, by name; one that more than three of them have is listed once.

    Texts that differ in names of recordings, paths and numbers alone are one fault.

    Example:
        >>> once({name: f"recording '{name}' is empty" for name in "abcdef"})
        ["recording 'a' is empty (6 recordings have this fault: a, b, c, ...)"]
    """
    groups = dict[str, dict[str, str]]()
    for name, text in faults.items():
        key = _OWN.sub(r"\1", text.replace(f"'{name}'", ""))
        groups.setdefault(key, {})[name] = text
    texts = list[str]()
    for group in groups.values():
        first, *others = group.values()
        names = ", ".join([*group][:_SHOWN])
        more = f" ({len(group):,} recordings have this fault: {names}, ...)"
        texts += [first + more] if len(group) > _SHOWN else [first, *others]
    return texts


def check_sources(
    opened: list[SourceRecording], layout: Layout, faults: Sequence[str] = ()
) -> list[SourceRecording]:
    """Refuse recordings that do not fit each other or the layout, beside the faults so far."""
    every, rates = [*faults], [rate for one in opened for rate in one.rates]
    if layout.rate is not None:
        rates.insert(0, Rate("what the model was trained on", layout.rate))
    for rate in [] if layout.rate_set else rates[1:]:
        first, hint = rates[0], ", or write --rate N if all have the same"
        if abs(first.value / rate.value - 1) > max(first.tolerance, rate.tolerance):
            every.append(
                f"{rate.source} has {rate.value:.12g} rows per second, {first.source} has"
                f" {first.value:.12g}; resample one of them{hint * (layout.rate is None)}"
            )
    for one in opened:
        name, other = one.recording.name, opened[0].recording
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
    if stamps is not None and not rates and (rate := summarize_times(stamps).rate) is not None:
        rates = [Rate(f"column '{stamps.columns[0]}' of {table.path}", rate, _MEASURED)]
    if file is not None and file.rate is not None and isinstance(labels, ColumnRows):
        rates.append(Rate(str(file.path), file.rate * (layout.target_every or 1)))
    left_out = len(table) % layout.frame_size
    return SourceRecording(entry.split, recording, tuple(rates), left_out, table)


def _targets(entry: ManifestEntry, table: Table, file: Table | None, layout: Layout) -> Targets:
    """The targets in whichever form the files have.

    Raises:
        DataError: a label that is missing or no number, or no column is named.
    """
    if file is not None:
        return targets_of(file, layout)
    if (label := entry.label) is not None:
        number = is_number(label) and math.isfinite(float(label))
        if not label or not (layout.classify or number):
            expected = "a class" if layout.classify else "a finite number, or --task classify"
            raise DataError(
                f"recording '{entry.name}' has the label {label!r}, expected {expected}"
            )
        return Label("the manifest", label if layout.classify else float(label))
    rows = layout.target_rows(table, ("targets",) if "targets" in table.columns else ())
    if rows is None:
        raise DataError(
            f"{table.path}: which columns are the targets? The file has {listed(table.columns)};"
            " name them with --targets"
        )
    return rows


_ROUNDING = 1e-8  # of a squared correlation: files round
_FEW = 3  # changes that may agree by chance


@dataclass
class Statistics:
    """Moments, classes and missing values of recordings.

    Attributes:
        inputs: moments of the input features.
        targets: moments of targets that are numbers or labels.
        classes: how often each class occurs.
        missing: steps with inputs that are NaN or infinite.
        missing_targets: steps without a target.
        steps: the number of steps.
        means: of the inputs of each recording.
        faults: of each recording with such inputs, by its name.
        bad_targets: of each with infinite targets, or other labels than 0 and 1.
        checksums: of the values of each recording, by its name.
    """

    inputs: Moments = field(default_factory=Moments)
    targets: Moments = field(default_factory=Moments)
    classes: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0
    missing_targets: int = 0
    steps: int = 0
    means: list[Array] = field(default_factory=list[Array])
    faults: dict[str, str] = field(default_factory=dict[str, str])
    bad_targets: dict[str, str] = field(default_factory=dict[str, str])
    checksums: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, recording: Recording, task: str) -> None:
        """Add all steps of a recording."""
        wrong, first, crc, own = 0, "", 0, Moments()
        for start, steps in read_blocks(recording):
            inputs = features(steps)
            bad = ~np.isfinite(inputs)
            if bad.any() and not wrong:
                step, column = np.argwhere(bad)[0].tolist()
                first = location(recording, start + step, column)
            wrong += int(bad.any(axis=1).sum())
            crc = checksum(steps, crc)
            self.inputs.add(inputs)
            own.add(inputs)
            if steps.targets is not None and task == "classify":
                for value, n in zip(*np.unique(steps.targets, return_counts=True), strict=True):
                    self.classes[class_name(value)] += int(n)
                self.missing_targets += self.classes.pop("", 0)
            elif steps.targets is not None:
                self._add_numbers(recording, start, steps.targets, labels=task == "multilabel")
            progress("reading recordings", start + len(inputs), len(recording))
        self.checksums[recording.name] = f"{crc:08x}"
        self.means.append(own.mean)
        self.steps += len(recording)
        self.missing += wrong
        if wrong:
            self.faults[recording.name] = (
                f"recording '{recording.name}': {counted(wrong, 'step has', 'steps have')} inputs"
                f" that are NaN or infinite, the first at {first}"
            )

    def _add_numbers(
        self, recording: Recording, start: int, targets: Array, *, labels: bool
    ) -> None:
        """Add a block of numbers, or of labels, which starts at step `start`."""
        rows = targets.reshape(len(targets), -1).astype(np.float64)
        wrong = ~np.isin(rows, (0, 1)) & ~np.isnan(rows) if labels else np.isinf(rows)
        if (steps := wrong.any(axis=1)).any():
            kind = "other" if labels else "infinite"
            count = counted(int(steps.sum()), "step has", "steps have")
            self.bad_targets.setdefault(
                recording.name,
                f"recording '{recording.name}': {count} {kind} targets,"
                f" the first is step {start + int(steps.argmax())}",
            )
        self.missing_targets += int(np.isnan(rows).any(axis=1).sum())
        self.targets.add(rows)


def collect_statistics(
    recordings: Sequence[Recording],
    *,
    task: str,
) -> Statistics:
    """Collect the statistics of all recordings in one pass.

    Args:
        recordings: those of one split.
        task: whether the targets are classes, labels or numbers.

    Raises:
        DataError: recordings with different numbers of columns.
    """
    statistics = Statistics()
    widths = {recording.name: recording.read(0, 1).inputs.size for recording in recordings}
    if len({*widths.values()}) > 1:
        raise DataError(f"all recordings need the same number of input columns, got {widths}")
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
                moments.add(targets - features(steps)[:, list(now)] if now else targets)
    return moments


def leaks(steps: StepArrays, inputs: Sequence[str]) -> list[list[str]]:
    """For each target column, the input columns that determine it.

    Such a column equals it up to a shift and a scale, or changes at the same steps and no others.

    Args:
        steps: consecutive ones, as they are trained on.
        inputs: the names of the columns of a row.
    """
    x, result = features(steps), list[list[str]]()
    for y in [] if steps.targets is None else steps.targets.reshape(len(x), -1).T:
        known = np.isfinite(y) & (y != IGNORE_INDEX) & np.isfinite(x).all(axis=1)
        pairs = known[1:] & known[:-1]
        changes = np.diff(y)[pairs] != 0
        same = ((np.diff(x, axis=0)[pairs] != 0) == changes[:, None]).all(axis=0)
        same &= _FEW < changes.sum() < len(changes) / 2
        a, b = (v[known] - v[known].sum(axis=0) / max(1, known.sum()) for v in (x, y))
        squares = (a**2).sum(axis=0) * (b**2).sum()
        equal = (squares > 0) & ((b @ a) ** 2 > (1 - _ROUNDING) * squares)
        columns = np.flatnonzero(equal | same) % len(inputs)
        result.append([inputs[i] for i in dict.fromkeys(columns.tolist())])
    return result


def features(steps: StepArrays) -> Array:
    """Inputs, static features included, `(n, D)`."""
    return as_columns(steps.inputs)
