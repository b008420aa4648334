"""The recordings of a run, opened from files by one layout, and checked against each other.

Shapes: `T` steps, `S` static features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from throughtime.app.config import Config
from throughtime.app.values import named_series, rows_ahead
from throughtime.errors import DataError, did_you_mean, listed
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import is_number
from throughtime.stream.formats.times import TimeSummary, summarize_times
from throughtime.stream.layout import Label, Layout, Targets, check_numbers, lay_out, targets_of
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
    for count, entry in enumerate(entries, start=1):
        try:
            tables = [layout.open(path) for path in entry.inputs]
            opened.append(open_entry(entry, tables, layout, targets=targets))
        except DataError as error:
            faults.append(str(error))
        if on_phase is not None:
            on_phase("opening recordings", count, len(entries))
    absent = [n for n in layout.exclude if not any(n in one.table.columns for one in opened)]
    if targets and opened and absent:
        table = opened[0].table
        faults.append(
            f"--exclude {listed(absent)}: no recording has it; the columns of {table.path} are"
            f" {listed(table.columns)}{did_you_mean(absent[0], table.columns)}"
        )
    return check_sources(opened, layout, faults)


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
        for role in (
            "input",
            "target",
        ):  # may differ, or be in another order, if no setting names them
            columns, expected = (getattr(r, f"{role}_columns") for r in (one.recording, other))
            if columns != expected:
                every.append(
                    f"recording '{name}' has the {role} columns {listed(columns)}, '{other.name}'"
                    f" has {listed(expected)}; name them with --{role}s, or rename them"
                )
        if one.times is not None and one.times[1].backward is not None:
            row, before, after = one.times[1].backward
            every.append(
                f"recording '{name}': row {row} of '{one.times[0]}', {after}, is earlier than the"
                f" row before it, {before}; sort the file, split it where another recording begins,"
                f" or write --exclude {one.times[0]} if the order of the rows is right"
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
    check_numbers(inputs, "inputs", layout.task)
    if not layout.classify:
        check_numbers(labels, "targets", layout.task)
    rates = [Rate(str(t.path), t.rate) for t in tables if t.rate is not None]
    stamps = time_rows(table, layout.exclude)
    times = None if stamps is None else (stamps.columns[0], summarize_times(stamps))
    if times is not None and times[1].rate is not None and not rates:
        rates = [Rate(f"column '{times[0]}' of {table.path}", times[1].rate, _MEASURED)]
    if file is not None and file.rate is not None and isinstance(labels, ColumnRows):
        rates.append(Rate(str(file.path), file.rate * (layout.target_every or 1)))
    left_out = len(table) % layout.frame_size
    return SourceRecording(entry.split, recording, tuple(rates), left_out, table, times)


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
