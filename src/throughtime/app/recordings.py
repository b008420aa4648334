"""Recordings opened from files: their columns, frames and targets, checked against each other.

Targets are one per row, per N rows, per interval, or one for the whole recording. They are given
in rows of the file and become steps: `frame_size` rows form one step. A frame is complete or
dropped. Its target is that of its last row, when the net has read all of it; so an interval of rows
covers the steps whose last row it covers.

Shapes: `T` steps, `N` rows per frame, `D` input features, `S` static features.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from throughtime.app.config import Config
from throughtime.app.values import rows_ahead
from throughtime.app.views import FrameRows, LabelRows, concat_tables, with_missing_value
from throughtime.errors import DataError, counted, did_you_mean, listed
from throughtime.stream import formats
from throughtime.stream.formats import Table
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import RowSource, is_number
from throughtime.stream.formats.times import TimeSummary, summarize_times
from throughtime.stream.labels import (
    At,
    PeriodicLabels,
    interval_labels,
    periodic_labels,
)
from throughtime.stream.manifest import ManifestEntry, join_faults
from throughtime.stream.recording import (
    INTERVAL_COLUMNS,
    TableRecording,
    columns,
    interval_columns,
)
from throughtime.stream.row_sources import ColumnRows, time_rows, value_columns

OnPhase: TypeAlias = Callable[[str, int, int], None]
"""Called with a phase of the work, what is done of it, and all of it; 0 if that is unknown."""
_CLOSE = 1e-6  # relative: a rate computed from a duration is not exact
_MEASURED = 0.02  # relative: time stamps are rounded, and clocks drift
_BELONGS = {
    "target_every": "a targets file with fewer rows",
    "target_at": "labels for more than one step",
    "background_class": "a targets file with the columns start,stop,label",
}
LABEL = ("label",)


class Rate(NamedTuple):
    """Rows per second, the file or model that says so, and by how much (relative) it may be off."""

    source: str
    value: float
    tolerance: float = _CLOSE


class Targets(NamedTuple):
    """The targets of a recording, their column names and rates, and the intervals that were lost.

    An interval shorter than a frame is lost. Without rows, the recording is to be predicted.
    """

    rows: RowSource | None = None
    columns: tuple[str, ...] = ()
    rates: tuple[Rate, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class DataLayout:
    """How to read the files of a run; a part of its model. The fields are settings of `Config`.

    Attributes:
        task: classes or numbers.
        inputs: columns; empty: all that are neither targets nor time stamps nor excluded.
        targets: columns; empty: `targets`, or the whole targets file.
        exclude: columns that are not used.
        allow_target_as_input: whether a step may have its own target as an input.
        static: columns of the manifest.
        frame_size: rows of a file that form one step.
        standardise: by which statistics inputs are standardised.
        delimiter: of CSV files; `None`: detected in each.
        decimal: the decimal mark of CSV files; `None`: detected in each.
        target_every: rows of the inputs for each row of the targets file.
        target_at: which steps of a span carry its label.
        ahead: rows from a row to that of its target.
        background_class: the class between intervals.
        rate: rows per second; `None`: not known.
        rate_set: whether that is a setting; otherwise the files must agree with it.
    """

    task: Literal["classify", "multilabel", "regress"]
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_target_as_input: bool = False
    static: tuple[str, ...] = ()
    frame_size: int = 1
    standardise: str = "split"
    delimiter: str | None = None
    decimal: Literal[".", ","] | None = None
    target_every: int | None = None
    target_at: At | None = None
    ahead: int | str = 0
    background_class: str | None = None
    rate: float | None = None
    rate_set: bool = False

    @classmethod
    def from_config(cls, config: Config) -> "DataLayout":
        """The layout that the settings of a run describe."""
        names = [f.name for f in fields(cls) if f.name != "rate_set"]
        values = {name: getattr(config, name) for name in names}
        return cls(**values, rate_set=config.rate is not None)

    @property
    def steps_ahead(self) -> tuple[int, ...]:
        """Steps from a step to that of each of its targets; none without a forecast."""
        return tuple(rows // self.frame_size for rows in rows_ahead(self.ahead))

    @property
    def classify(self) -> bool:
        """Whether the targets are classes."""
        return self.task == "classify"


def _label_of_recording(entry: ManifestEntry, steps: int, layout: DataLayout) -> Targets:
    """The label that the manifest gives to the whole recording.

    Raises:
        DataError: there is none, or it is no number and the task is regression.
    """
    label, classify = entry.label or "", layout.classify
    if not label or (not classify and not (is_number(label) and math.isfinite(float(label)))):
        expected = "a class" if classify else "a finite number (or is it --task classify?)"
        raise DataError(f"recording '{entry.name}' has the label {label!r}, expected {expected}")
    values = ArrayRows("the manifest", np.array([label if classify else float(label)]))
    at = layout.target_at or "last"
    return Targets(periodic_labels(entry.name, values, steps, steps, at), LABEL)


def _labels_of_intervals(name: str, table: Table, rows: int, layout: DataLayout) -> Targets:
    """Labels of intervals in rows of the inputs.

    Raises:
        DataError: intervals that are unsorted, overlap or leave the recording, or labels of the
            wrong type.
    """
    starts, stops, labels = interval_columns(table)
    labels = with_missing_value(labels, classify=layout.classify)
    if labels.dtype.kind == "U":
        labels = np.char.strip(labels)
        if not layout.classify and len(labels):
            wrong = next((text for text in labels.tolist() if not is_number(text)), labels[0])
            raise DataError(
                f"{table.path}: the label {wrong!r} is no number, and --task regress needs one"
            )
    at, size, lost = layout.target_at or "all", layout.frame_size, 0
    spans = interval_labels(name, str(table.path), starts, stops, labels, rows, at)
    if size > 1:
        first, end = spans.starts // size, spans.stops // size
        keep = first < end
        lost = int((~keep).sum())
        parts = {"starts": first[keep], "stops": end[keep], "labels": spans.labels[keep]}
        spans = replace(spans, steps=spans.steps // size, **parts)
    return Targets(replace(spans, background=layout.background_class), LABEL, lost=lost)


def _targets_every(name: str, table: Table, rows: int, count: int, layout: DataLayout) -> Targets:
    """A row of targets for every `count` of the `rows` of the inputs.

    Raises:
        DataError: the table has more or fewer rows.
    """
    size = layout.frame_size
    every = value_columns(table, layout.exclude)
    names = columns(name, table, every, table, layout.targets or every).target_columns
    labels = LabelRows(ColumnRows(table, names, flat=True), layout.classify)
    at = periodic_labels(name, labels, count, rows, layout.target_at or "last").at
    per_step = PeriodicLabels(labels, count // size, rows // size, at)
    return Targets(per_step, names, _rates_of([table], count))


def holds_intervals(table: Table, chosen: tuple[str, ...]) -> bool:
    """Whether a targets file holds intervals: these columns, none chosen as a row target."""
    return set(table.columns) == set(INTERVAL_COLUMNS) and chosen in {(), LABEL}


@dataclass(frozen=True)
class SourceRecording:
    """A recording and what else its files say.

    Attributes:
        split: empty without a split.
        recording: its inputs and targets.
        rates: rows per second of those of its files that have a rate.
        left_out: rows at the end that fill no frame.
        lost: intervals shorter than a frame.
        copied: inputs that are the target of the same step, and must not be.
        table: its input files.
        times: the name of its column of time stamps, and what they show; `None` without one.
    """

    split: str
    recording: TableRecording
    rates: tuple[Rate, ...] = ()
    left_out: int = 0
    lost: int = 0
    copied: tuple[str, ...] = ()
    table: Table | None = None
    times: tuple[str, TimeSummary] | None = None


def open_recordings(
    entries: Sequence[ManifestEntry],
    layout: DataLayout,
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
            tables = [open_table(path, layout) for path in entry.inputs]
            opened.append(lay_out(entry, tables, layout, targets=targets))
        except DataError as error:
            faults.append(str(error))
        on_phase("opening recordings", count, len(entries))
    faults += _exclude_faults(opened, layout) if targets else []
    return check_sources(opened, layout, faults)


def check_sources(
    opened: list[SourceRecording], layout: DataLayout, faults: Sequence[str] = ()
) -> list[SourceRecording]:
    """Refuse recordings that do not fit each other or the layout, beside the faults so far."""
    every = [
        *faults,
        *rate_faults(layout, [rate for one in opened for rate in one.rates]),
        *_column_faults(opened),
        *_copy_faults(opened),
        *_time_faults(opened),
    ]
    if every:
        raise DataError(join_faults(every))
    return opened


def rate_faults(layout: DataLayout, rates: Iterable[Rate]) -> list[str]:
    """A fault for each rate other than the first, which is that of the layout if it has one.

    There is none where the rate is a setting.

    Example:
        >>> rate_faults(DataLayout("regress", rate=8e3), [Rate("b.wav", 16e3)])[0][:30]
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


def lay_out(
    entry: ManifestEntry, tables: Sequence[Table], layout: DataLayout, *, targets: bool = True
) -> SourceRecording:
    """The recording in these tables, with the columns and targets of the layout.

    Raises:
        DataError: as `open_recordings`.
    """
    table = concat_tables(entry.name, tables)
    labels = _targets(entry, table, layout) if targets else Targets()
    separate = entry.targets is not None or entry.label is not None
    # the present value of what is forecast is an input
    own = () if separate or layout.ahead else labels.columns
    others = [*layout.exclude, *own]
    inputs = layout.inputs or value_columns(table, others)
    if not inputs:
        raise DataError(
            f"{table.path}: no column is left for the inputs: {listed(table.columns)} are targets,"
            " time stamps or excluded; name the inputs with --inputs"
        )
    one_file = not separate or any(
        entry.targets is not None and path.resolve() == entry.targets.resolve()
        for path in entry.inputs
    )
    may_copy = one_file and not (layout.allow_target_as_input or layout.ahead)
    copied = set(labels.columns) if may_copy else set[str]()
    recording = _input_recording(entry, table, inputs, layout)
    times, rates = _time_summary(table, layout), _rates_of(tables)
    if times is not None and times[1].rate is not None and not rates:
        rates = (Rate(f"column '{times[0]}' of {table.path}", times[1].rate, _MEASURED),)
    return SourceRecording(
        entry.split,
        replace(recording, targets=labels.rows, target_columns=labels.columns),
        rates + labels.rates,
        len(table) % layout.frame_size,
        labels.lost,
        tuple(name for name in inputs if name in copied),
        table,
        times,
    )


def _exclude_faults(opened: Sequence[SourceRecording], layout: DataLayout) -> list[str]:
    """Excluded columns that no recording has."""
    tables = [one.table for one in opened if one.table is not None]
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


def _copy_faults(opened: Sequence[SourceRecording]) -> list[str]:
    """Inputs that hold the target of the same step: the net would learn to copy it."""
    return [
        f"recording '{one.recording.name}': {listed(one.copied, quoted=True)} are inputs and"
        " targets of the same step, so the net would only learn to copy them; name the other"
        f" columns with --inputs (it has {listed(one.recording.input_columns)}), or write"
        " --allow-target-as-input if it is meant"
        for one in opened
        if one.copied
    ]


def open_table(path: Path, layout: DataLayout) -> Table:
    """A file of a recording."""
    return formats.open_table(path, delimiter=layout.delimiter, decimal=layout.decimal)


def _rates_of(tables: Iterable[Table], every: int = 1) -> tuple[Rate, ...]:
    """The rates of the tables that have one, where a row is for `every` rows of the inputs."""
    return tuple(Rate(str(t.path), t.rate * every) for t in tables if t.rate is not None)


def _time_summary(table: Table, layout: DataLayout) -> tuple[str, TimeSummary] | None:
    """The name of the column of time stamps, and what they show; `None` without one."""
    rows = time_rows(table, layout.exclude)
    return None if rows is None else (rows.columns[0], summarize_times(rows))


def _input_recording(
    entry: ManifestEntry, table: Table, chosen: tuple[str, ...], layout: DataLayout
) -> TableRecording:
    """The inputs of a recording: columns of a table, in frames, with its static features."""
    recording = columns(entry.name, table, chosen)
    if len(table) < layout.frame_size:
        raise DataError(
            f"{table.path}: has {counted(len(table), 'row')}, too few for a single frame of"
            f" {layout.frame_size}"
        )
    inputs, times = recording.inputs, time_rows(table, layout.exclude)
    if layout.frame_size > 1:
        inputs = FrameRows(inputs, layout.frame_size)
        times = times and FrameRows(times, layout.frame_size, last=True)
    features = np.array(entry.static) if entry.static else None
    return replace(recording, inputs=inputs, times=times, static=features)


def _targets(entry: ManifestEntry, table: Table, layout: DataLayout) -> Targets:
    """The targets in whichever form the files have; settings of another form are refused."""
    rows, every = len(table), layout.target_every
    file = None if entry.targets is None else open_table(entry.targets, layout)
    if file is not None and holds_intervals(file, layout.targets):
        _refuse(entry, layout, f"{file.path} holds intervals", "target_every")
        return _labels_of_intervals(entry.name, file, rows, layout)
    if entry.label is not None:
        what = "its label is for the whole recording"
        _refuse(entry, layout, what, "target_every", "background_class")
        return _label_of_recording(entry, rows // layout.frame_size, layout)
    if file is not None and every is not None:
        what = f"{file.path} holds a row of targets for every {every} rows"
        _refuse(entry, layout, what, "background_class")
        return _targets_every(entry.name, file, rows, every, layout)
    _refuse(entry, layout, "its targets are one for each row", *_BELONGS)
    return _row_targets(entry, table, file, layout)


def _row_targets(
    entry: ManifestEntry, table: Table, file: Table | None, layout: DataLayout
) -> Targets:
    """A target for each row: columns of the inputs' table, or of a file of their own."""
    own = ("targets",) if "targets" in table.columns else ()
    chosen = layout.targets or (own if file is None else value_columns(file, layout.exclude))
    if not chosen:
        raise DataError(
            f"{table.path}: which columns are the targets? The file has {listed(table.columns)};"
            " name them with --targets"
        )
    source = table if file is None else file
    if len(source) != len(table):
        raise DataError(
            f"recording '{entry.name}': {table.path} has {counted(len(table), 'step')} and"
            f" {source.path} has {len(source):,}; targets need one row per step, or say how many"
            " rows each of them is for: --target-every N"
        )
    names = columns(entry.name, table, value_columns(table), source, chosen).target_columns
    values: RowSource = ColumnRows(source, names, flat=True)
    if layout.frame_size > 1:
        values = FrameRows(values, layout.frame_size, last=True)
    if not layout.classify:
        values = LabelRows(values, classify=False)
    return Targets(values, names, _rates_of([source]))


def _refuse(entry: ManifestEntry, layout: DataLayout, what: str, *settings: str) -> None:
    for name in settings:
        value = getattr(layout, name)
        if value is not None:
            raise DataError(
                f"recording '{entry.name}': {name}={value} belongs to {_BELONGS[name]}, but {what};"
                " leave it out"
            )
