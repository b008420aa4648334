"""The recordings of a run, opened from files by one layout, and checked against each other.

Shapes: `T` steps, `S` static features.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from throughtime.app.config import Config
from throughtime.app.values import named_series, rows_ahead
from throughtime.errors import DataError, did_you_mean, listed
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import is_number
from throughtime.stream.formats.times import TimeSummary, summarize_times
from throughtime.stream.layout import (
    Label,
    Layout,
    Targets,
    check_numbers,
    lay_out,
    targets_of,
)
from throughtime.stream.manifest import ManifestEntry, join_faults
from throughtime.stream.recording import TableRecording
from throughtime.stream.rows import ColumnRows, concat_tables, time_rows
from throughtime.stream.targets import SpanLabels

OnPhase: TypeAlias = Callable[[str, int, int], None]
"""Called with a phase of the work, what is done of it, and all of it; 0 if that is unknown."""
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
        times: the name of its column of time stamps, and what they show; `None` without one.
    """

    split: str
    recording: TableRecording
    rates: tuple[Rate, ...]
    left_out: int
    table: Table
    times: tuple[str, TimeSummary] | None = None

    @property
    def lost(self) -> int:
        """Intervals shorter than a frame."""
        labels = self.recording.targets
        return labels.lost if isinstance(labels, SpanLabels) else 0


def open_recordings(
    entries: Sequence[ManifestEntry],
    layout: Layout,
    on_phase: OnPhase | None = None,
    *,
    targets: bool = True,
) -> list[SourceRecording]:
    """Open every recording with the columns and targets of the layout, in order.

    Args:
        entries: of the manifest.
        layout: of the data.
        on_phase: called after each recording.
        targets: whether the recordings have targets; without, to predict.

    Raises:
        DataError: missing columns, targets of another length, an empty recording, an unreadable
            file, other columns or rates than those of the first recording; all are listed.
    """
    opened, faults = list[SourceRecording](), list[str]()
    on_phase = on_phase or (lambda *_: None)
    on_phase("opening recordings", 0, len(entries))
    for count, entry in enumerate(entries, start=1):
        try:
            tables = [layout.open(path) for path in entry.inputs]
            opened.append(open_entry(entry, tables, layout, targets=targets))
        except DataError as error:
            faults.append(str(error))
        on_phase("opening recordings", count, len(entries))
    faults += _exclude_faults(opened, layout) if targets else []
    return check_sources(opened, layout, faults)


def check_sources(
    opened: list[SourceRecording], layout: Layout, faults: Sequence[str] = ()
) -> list[SourceRecording]:
    """Refuse recordings that do not fit each other or the layout, beside the faults so far."""
    every = [
        *faults,
        *rate_faults(layout, [rate for one in opened for rate in one.rates]),
        *_column_faults(opened),
        *_time_faults(opened),
    ]
    if every:
        raise DataError(join_faults(every))
    return opened


def rate_faults(layout: Layout, rates: Iterable[Rate]) -> list[str]:
    """A fault for each rate other than the first, which is that of the layout if it has one.

    There is none where the rate is a setting.

    Example:
        >>> rate_faults(Layout("regress", rate=8e3), [Rate("b.wav", 16e3)])[0][:30]
        'b.wav has 16000 rows per secon'
    """
    known = [] if layout.rate is None else [Rate("what the model was trained on", layout.rate)]
    all_rates = [] if layout.rate_set else [*known, *rates]
    hint = "" if known else ", or write --rate N if all have the same"
    return [
        f"{other.source} has {other.value:.12g} rows per second, {first.source} has"
        f" {first.value:.12g}; resample one of them{hint}"
        for first in all_rates[:1]
        for other in all_rates[1:]
        if abs(first.value / other.value - 1) > max(first.tolerance, other.tolerance)
    ]


def _column_faults(opened: Sequence[SourceRecording]) -> list[str]:
    """Columns without a setting may have other names, or another order, in another file."""
    faults: list[str] = []
    for role in ("input", "target"):
        named = [(one.recording.name, getattr(one.recording, f"{role}_columns")) for one in opened]
        faults += [
            f"recording '{name}' has the {role} columns {listed(names)}, '{named[0][0]}' has"
            f" {listed(named[0][1])}; name them with --{role}s, or rename them"
            for name, names in named
            if names != named[0][1]
        ]
    return faults


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
    check_numbers(inputs, "inputs", layout.task)
    if not layout.classify:
        check_numbers(labels, "targets", layout.task)
    times, rates = _time_summary(table, layout), _rates_of(tables)
    if times is not None and times[1].rate is not None and not rates:
        rates = (Rate(f"column '{times[0]}' of {table.path}", times[1].rate, _MEASURED),)
    if file is not None and isinstance(labels, ColumnRows):
        rates += _rates_of([file], layout.target_every or 1)
    left_out = len(table) % layout.frame_size
    return SourceRecording(entry.split, recording, rates, left_out, table, times)


def _targets(entry: ManifestEntry, table: Table, file: Table | None, layout: Layout) -> Targets:
    """The targets in whichever form the files have.

    Raises:
        DataError: a label that is missing or no number, or no column is named.
    """
    if file is not None:
        return targets_of(file, layout)
    if entry.label is not None:
        return _label_of(entry, layout)
    own = ("targets",) if "targets" in table.columns else ()
    rows = layout.target_rows(table, own)
    if rows is None:
        raise DataError(
            f"{table.path}: which columns are the targets? The file has {listed(table.columns)};"
            " name them with --targets"
        )
    return rows


def _label_of(entry: ManifestEntry, layout: Layout) -> Label:
    """The label that the manifest gives to the whole recording."""
    label, classify = entry.label or "", layout.classify
    if not label or (not classify and not (is_number(label) and math.isfinite(float(label)))):
        expected = "a class" if classify else "a finite number (or is it --task classify?)"
        raise DataError(f"recording '{entry.name}' has the label {label!r}, expected {expected}")
    return Label("the manifest", label if classify else float(label))


def _exclude_faults(opened: Sequence[SourceRecording], layout: Layout) -> list[str]:
    """Excluded columns that no recording has."""
    tables = [one.table for one in opened]
    absent = [n for n in layout.exclude if not any(n in table.columns for table in tables)]
    if not tables or not absent:
        return []
    hint = did_you_mean(absent[0], tables[0].columns)
    of = f"the columns of {tables[0].path} are {listed(tables[0].columns)}"
    return [f"--exclude {listed(absent)}: no recording has it; {of}{hint}"]


def _time_faults(opened: Sequence[SourceRecording]) -> list[str]:
    """Rows that are not in the order of time."""
    named = [(one.recording.name, *one.times) for one in opened if one.times is not None]
    return [
        f"recording '{name}': row {row} of '{column}', {after}, is earlier than the row before it,"
        f" {before}; sort the file, split it where another recording begins, or write --exclude"
        f" {column} if the order of the rows is right"
        for name, column, summary in named
        if summary.backward is not None
        for row, before, after in [summary.backward]
    ]


def _rates_of(tables: Iterable[Table], every: int = 1) -> tuple[Rate, ...]:
    """The rates of the tables that have one, where a row is for `every` rows of the inputs."""
    return tuple(Rate(str(t.path), t.rate * every) for t in tables if t.rate is not None)


def _time_summary(table: Table, layout: Layout) -> tuple[str, TimeSummary] | None:
    """The name of the column of time stamps, and what they show; `None` without one."""
    rows = time_rows(table, layout.exclude)
    return None if rows is None else (rows.columns[0], summarize_times(rows))
