"""One layout of any object as a recording: which columns are what, and where its targets lie.

`tt.recording`, `tt.recordings`, the mappings and files of `tt.Stream` and the command line all end
in `lay_out`, so a setting has one name and one meaning, and each refusal stands once.

Targets are one per row, per so many rows, per interval of rows, or one for the whole recording.
They are given in rows and become steps: `frame_size` rows form one step, a frame is complete or
dropped, and its target is that of its last row, when the net has read all of it. So an interval of
rows covers the steps whose last row it covers.

Shapes: `T` steps, `N` rows per frame, `D` input features, `C` target columns, `S` static features.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime.errors import DataError, counted, listed
from throughtime.stream import formats
from throughtime.stream.classes import class_names
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import Array, RowSource, is_number
from throughtime.stream.labels import At, PeriodicLabels, interval_labels, periodic_labels
from throughtime.stream.recording import TableRecording, innermost
from throughtime.stream.row_sources import (
    ColumnRows,
    ConcatRows,
    ConcatTable,
    FrameRows,
    check_columns,
    check_lengths,
    time_rows,
    value_columns,
)

_COMPARED, _EXCERPT, _BLOCK = 1000, 64, 65_536  # rows
_INTERVALS = ("start", "stop", "label")
LABEL = ("label",)
_BELONGS = {
    "target_every": "targets with fewer rows than the inputs",
    "target_at": "labels for more than one step",
    "background_class": "intervals with the columns start,stop,label",
}


@dataclass(frozen=True)
class Layout:
    """How a source becomes a recording; a part of a trained model.

    The names are those of the arguments of `tt.recording` and `tt.recordings`, of the keys of a
    recording as a mapping, and of the flags of `throughtime train`.

    Attributes:
        task: classes, several labels of 0 and 1, or numbers; `None`: targets as they are.
        inputs: columns; empty: all that have no other use, and are no time stamps.
        targets: columns; empty: `targets`, or the whole targets file.
        exclude: columns that are not used.
        series: further columns of each step by name, such as a weight.
        allow_target_as_input: whether a step may have its own target as an input.
        static: columns of a manifest.
        frame_size: rows of a file that form one step.
        standardise: by which statistics inputs are standardised.
        delimiter: of CSV files; `None`: detected in each.
        decimal: the decimal mark of CSV files; `None`: detected in each.
        target_every: rows of the inputs for each row of the targets.
        target_at: which steps of a span carry its label.
        ahead: rows from a row to that of each of its targets; empty: the row itself.
        background_class: the class between intervals.
        rate: rows per second; `None`: not known.
        rate_set: whether that is a setting; otherwise the files must agree with it.
    """

    task: Literal["classify", "multilabel", "regress"] | None = None
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    series: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    allow_target_as_input: bool = False
    static: tuple[str, ...] = ()
    frame_size: int = 1
    standardise: str = "split"
    delimiter: str | None = None
    decimal: Literal[".", ","] | None = None
    target_every: int | None = None
    target_at: At | None = None
    ahead: tuple[int, ...] = ()
    background_class: str | None = None
    rate: float | None = None
    rate_set: bool = False

    @property
    def steps_ahead(self) -> tuple[int, ...]:
        """Steps from a step to that of each of its targets; none without a forecast."""
        return tuple(rows // self.frame_size for rows in self.ahead)

    @property
    def classify(self) -> bool:
        """Whether the targets are classes."""
        return self.task == "classify"

    def open(self, path: Path) -> formats.Table:
        """A file of a recording."""
        return formats.open_table(path, delimiter=self.delimiter, decimal=self.decimal)

    def input_rows(self, table: formats.Table, targets: Iterable[str] = ()) -> ColumnRows:
        """The inputs among the columns of a table.

        Args:
            table: has them.
            targets: its columns that are targets. Of a forecast they are inputs, too, unless they
                are text: the present value of what is forecast.

        Raises:
            DataError: no such column, or one that has another use as well.
        """
        used = {*self.exclude, *(name for names in self.series.values() for name in names)}
        present = self.ahead or self.allow_target_as_input
        own = [] if self.inputs else [n for n in targets if not present or _is_text(table, n)]
        names = self.inputs or value_columns(table, [*used, *own])
        if not names:
            raise DataError(
                f"{table.path}: no column is left for the inputs: {listed(table.columns)}"
                " are targets, time stamps or excluded; name the inputs"
                if table.columns
                else f"{table.path}: it has no columns, expected those of the inputs"
            )
        check_columns(table, names, "inputs")
        if both := [name for name in names if name in used]:
            raise DataError(
                f"{table.path}: {listed(both, quoted=True)} are inputs and named as by, time,"
                " static, series or exclude as well; name each column once"
            )
        return ColumnRows(table, names)

    def target_rows(self, table: formats.Table, default: tuple[str, ...] = ()) -> ColumnRows | None:
        """The targets among the columns of a table; `None` if none are named."""
        names = self.targets or default
        if not names:
            return None
        check_columns(table, names, "targets")
        return ColumnRows(table, names, flat=True)

    def series_rows(self, table: formats.Table) -> dict[str, RowSource]:
        """The series among the columns of a table, by name."""
        for key, names in self.series.items():
            check_columns(table, names, f"series '{key}'")
        return {key: ColumnRows(table, names, flat=True) for key, names in self.series.items()}


def _is_text(table: formats.Table, column: str) -> bool:
    return table.read(0, 1, (column,)).dtype.kind not in "biuf"


class Intervals(NamedTuple):
    """Labels of intervals of rows `[start, stop)`, in order, without overlap."""

    source: str
    starts: Any
    stops: Any
    labels: Any

    @classmethod
    def of(cls, table: formats.Table) -> "Intervals":
        """Those of a table with the columns start, stop and label."""
        check_columns(table, _INTERVALS, "intervals")
        columns = (table.read(0, len(table), (name,))[:, 0] for name in _INTERVALS)
        return cls(str(table.path), *columns)


class Label(NamedTuple):
    """The label of a whole recording."""

    source: str
    value: Any


Targets: TypeAlias = RowSource | Intervals | Label


def targets_of(table: formats.Table, layout: Layout) -> ColumnRows | Intervals:
    """The targets in a table of their own: its columns, or intervals where it has just these."""
    if {*table.columns} == {*_INTERVALS} and layout.targets in {(), LABEL}:
        return Intervals.of(table)
    every = value_columns(table, layout.exclude)
    return layout.target_rows(table, every) or ColumnRows(table, every)


def lay_out(
    name: str,
    inputs: RowSource,
    layout: Layout,
    targets: Targets | None = None,
    *,
    static: Array | None = None,
    series: Mapping[str, RowSource] | None = None,
) -> TableRecording:
    """The recording of these rows.

    Args:
        name: in messages and reports.
        inputs: a row of numbers for each row of the source.
        layout: says where the targets lie, and how many rows are a step.
        targets: in any form; `None`: a recording without.
        static: `(S,)` features of the whole recording.
        series: more rows by name, as many as of the inputs.

    Raises:
        DataError: no rows, series or targets of another length, an input that is the target of the
            same step, text where numbers are expected, or a setting that belongs to targets of
            another form.

    Cost: a row of the columns whose types are checked.
    """
    size, others = layout.frame_size, dict(series or {})
    if len(inputs) < size:
        fault = (
            f"has {counted(len(inputs), 'row')}, too few for a single frame of {size}"
            if len(inputs)
            else "is empty, expected at least one step"
        )
        raise DataError(f"recording '{name}' ({inputs.source}) {fault}")
    lengths = [(f"series '{key}'", len(rows)) for key, rows in others.items()]
    check_lengths(name, [("inputs", len(inputs)), *lengths])
    labels = None if targets is None else _place(name, targets, inputs, layout)
    if not (layout.ahead or layout.allow_target_as_input):
        _refuse_copies(name, inputs, targets, layout.task)
    table = inputs.table if isinstance(inputs, ColumnRows) else None
    times: RowSource | None = None if table is None else time_rows(table, layout.exclude)
    if size > 1:
        times = times and FrameRows(times, size, last=True)
        others = {key: FrameRows(rows, size, last=True) for key, rows in others.items()}
    return TableRecording(
        name,
        FrameRows(inputs, size) if size > 1 else inputs,
        labels,
        static,
        inputs.columns if isinstance(inputs, ColumnRows) else (),
        targets.columns
        if isinstance(targets, ColumnRows)
        else LABEL * isinstance(targets, (Intervals, Label)),
        times,
        tuple(others.items()),
    )


def _place(name: str, targets: Targets, inputs: RowSource, layout: Layout) -> RowSource:
    """The targets as one for each step, missing where there is none."""
    size, every, rows = layout.frame_size, layout.target_every, len(inputs)
    if isinstance(targets, Intervals):
        _refuse(name, layout, f"{targets.source} holds intervals", "target_every")
        return _interval_rows(name, targets, rows, layout)
    if isinstance(targets, Label):
        what = "its label is for the whole recording"
        _refuse(name, layout, what, "target_every", "background_class")
        values = ArrayRows(targets.source, np.asarray(targets.value).reshape(1))
        steps = rows // size
        return periodic_labels(name, values, steps, steps, layout.target_at or "last")
    if every is not None:
        what = f"{targets.source} holds a row of targets for every {every} rows"
        _refuse(name, layout, what, "background_class")
        labels = targets if layout.task is None else TypedLabels(targets, layout.classify)
        at = periodic_labels(name, labels, every, rows, layout.target_at or "last").at
        return PeriodicLabels(labels, every // size, rows // size, at)
    _refuse(name, layout, "its targets are one for each row", *_BELONGS)
    if len(targets) != rows:
        raise DataError(
            f"recording '{name}' has {counted(rows, 'step')} of {inputs.source} and"
            f" {len(targets):,} of {targets.source}; both need one row per step, or say by"
            " target_every=N (--target-every N) how many rows each target is for"
        )
    frames = FrameRows(targets, size, last=True) if size > 1 else targets
    return frames if layout.task in {None, "classify"} else TypedLabels(frames, classify=False)


def _interval_rows(name: str, intervals: Intervals, rows: int, layout: Layout) -> RowSource:
    """Labels of intervals in rows, for steps."""
    labels = intervals.labels
    if layout.task is not None:
        labels = typed(np.asarray(labels), classify=layout.classify)
        if labels.dtype.kind == "U":
            labels = np.char.strip(labels)
            if len(labels) and not layout.classify:
                wrong = next((text for text in labels.tolist() if not is_number(text)), labels[0])
                raise DataError(
                    f"{intervals.source}: the label {wrong!r} is no number; are they classes?"
                    " task='classify' (--task classify)"
                )
    at, size, lost = layout.target_at or "all", layout.frame_size, 0
    spans = interval_labels(
        name, intervals.source, intervals.starts, intervals.stops, labels, rows, at
    )
    if size > 1:
        first, end = spans.starts // size, spans.stops // size
        keep = first < end
        lost = int((~keep).sum())
        parts = {"starts": first[keep], "stops": end[keep], "labels": spans.labels[keep]}
        spans = replace(spans, steps=spans.steps // size, **parts)
    return replace(spans, background=layout.background_class, lost=lost)


def _refuse(name: str, layout: Layout, what: str, *settings: str) -> None:
    """Refuse settings that belong to targets of another form."""
    for setting in settings:
        value = getattr(layout, setting)
        if value is not None:
            raise DataError(
                f"recording '{name}': {setting}={value!r} belongs to {_BELONGS[setting]}, but"
                f" {what}; leave it out"
            )


def _refuse_copies(name: str, inputs: RowSource, targets: Targets | None, task: str | None) -> None:
    """Refuse a column that is an input and the target of the same step.

    A column of a file is known by the file and its name there, whatever it is called here; one in
    memory by its name, type and first values. Arrays have no names, and are not compared.
    """
    if not isinstance(targets, ColumnRows):
        return
    names = {_origin(targets.table, column)[1] for column in targets.columns}
    own = {_identity(targets, column) for column in targets.columns}
    parts = inputs.parts if isinstance(inputs, ConcatRows) else (inputs,)
    rows = [part for part in parts if isinstance(part, ColumnRows)]
    copied = [
        column
        for part in rows
        for column in part.columns
        if _origin(part.table, column)[1] in names and _identity(part, column) in own
    ]
    if copied:
        others = [c for r in rows for c in r.columns if c not in copied] or targets.columns[:-1]
        choice = f"inputs={listed(others, quoted=True)}" if others else "there are none"
        if others and task is None:
            choice = f"tt.recording(..., {choice}, targets='{targets.columns[-1]}')"
        raise DataError(
            f"recording '{name}': {listed(copied, quoted=True)} are inputs and targets of the same"
            f" step, so the net would only learn to copy them; name other inputs: {choice}, predict"
            " later values: ahead=1, or write allow_target_as_input=True (--allow-target-as-input)"
        )


def _origin(table: formats.Table, column: str) -> tuple[formats.Table, str]:
    """The table that a column comes from, and its name there."""
    if isinstance(table, ConcatTable):
        index, column = table.sources[column]
        table = table.tables[index]
    return table, getattr(table, "names", {}).get(column, column)


def _identity(rows: ColumnRows, column: str) -> tuple[object, ...]:
    """What a column has in common with itself in another table."""
    table, name = _origin(rows.table, column)
    if isinstance(table.path, Path):
        return table.path.resolve(), name
    values = rows.table.read(0, _COMPARED, (column,))
    return name, values.dtype.str, values.tobytes()


def check_numbers(rows: object, role: str, task: str | None = None) -> None:
    """Refuse columns of text; the message says how to leave them out.

    Args:
        rows: of columns of a table; others are not looked at.
        role: inputs or targets.
        task: of the layout.

    Cost: one row of the columns.
    """
    if isinstance(rows, ColumnRows) and rows.read(0, 1).dtype.kind not in "biuf":
        raise DataError(text_fault(rows, role, 0, task))


def text_hint(recording: object, role: str) -> str:
    """The fault of `text_fault` in a recording that a stream plays; empty where it is unknown."""
    table, start = innermost(recording)
    rows = getattr(table, role, None)
    if not isinstance(rows, ColumnRows) or rows.read(start, start + 1).dtype.kind in "biuf":
        return ""
    return text_fault(rows, role, start)


def text_fault(rows: ColumnRows, role: str, start: int = 0, task: str | None = None) -> str:
    """Which columns hold text where numbers are expected, and what to do about it."""
    table, stop = rows.table, start + _EXCERPT
    fields = {name: table.read(start, stop, (name,))[:, 0] for name in rows.columns}
    texts = {
        name: list(map(str, values.tolist()))
        for name, values in fields.items()
        if values.dtype.kind not in "biuf"
    }
    wrong = {n: [is_number(text) or not text.strip() for text in v] for n, v in texts.items()}
    name, values = next(iter(texts.items()))
    example = next((t for t, number in zip(values, wrong[name], strict=True) if not number), "")
    several = len(texts) > 1
    which = f"columns {listed(texts, quoted=True)}" if several else f"column '{name}'"
    head = f"{rows.source}: {which} of the {role} hold{'s' * (not several)} text, such as"
    head += f" {example!r}" + f" in '{name}'" * several
    if start == 0 and any(len(v) > 1 and not v[0] and all(v[1:]) for v in wrong.values()):
        return (
            f"{head} in the first row and numbers after it; is the line after the header one of"
            " units? Delete it"
        )
    exclude = f"exclude={listed(texts, quoted=True)} (--exclude {','.join([*texts][:8])})"
    if task is None:
        exclude = f"tt.recording(..., exclude={listed(texts, quoted=True)})"
    head += f", expected numbers; leave {'them' if several else 'it'} out: {exclude}"
    if task is not None:
        return f"{head} (or is '{name}' a class? --targets {name} --task classify)"
    if role != "targets":
        return head
    names = class_names([table.read(0, min(_BLOCK, len(table)), (name,))])
    return (
        f"{head}, or name the classes in the order of their indices:"
        f" classes={listed(names, quoted=True)}"
    )


@dataclass(frozen=True)
class TypedLabels:
    """Labels in a type that has a value for "none": text for classes, floats for a regression."""

    rows: RowSource
    classify: bool

    @property
    def source(self) -> str:
        return self.rows.source

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Array:
        return typed(self.rows.read(start, stop), classify=self.classify)


def typed(labels: Array, *, classify: bool) -> Array:
    """Whole numbers as text for classes and as floats otherwise; other types unchanged."""
    if labels.dtype.kind not in "biu":
        return labels
    return labels.astype(np.str_ if classify else np.float64)


def as_static(value: Any, name: str) -> Array:
    """Static features `(S,)`, checked."""
    static = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if static.ndim != 1 or static.dtype.kind not in "biuf" or not np.isfinite(static).all():
        raise DataError(
            f"recording '{name}': static has shape {static.shape} and type {static.dtype}, expected"
            " (S,) finite numbers"
        )
    return static
