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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime.errors import DataError, counted, listed
from throughtime.stream import formats
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import Array, RowSource, Table, is_number
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
from throughtime.stream.targets import At, class_names, interval_labels, periodic_labels

_COMPARED, _EXCERPT, _BLOCK = 1000, 64, 65_536  # rows
_CLASSES = 20  # different values at most, which two columns may share by chance
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

    def open(self, path: Path) -> Table:
        """A file of a recording."""
        return formats.open_table(path, delimiter=self.delimiter, decimal=self.decimal)

    def input_rows(self, table: Table, targets: Iterable[str] = ()) -> ColumnRows:
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

    def target_rows(self, table: Table, default: tuple[str, ...] = ()) -> ColumnRows | None:
        """The targets among the columns of a table; `None` if none are named."""
        names = self.targets or default
        if not names:
            return None
        check_columns(table, names, "targets")
        return ColumnRows(table, names, flat=True)

    def series_rows(self, table: Table) -> dict[str, RowSource]:
        """The series among the columns of a table, by name."""
        for key, names in self.series.items():
            check_columns(table, names, f"series '{key}'")
        return {key: ColumnRows(table, names, flat=True) for key, names in self.series.items()}


def _is_text(table: Table, column: str) -> bool:
    return table.read(0, 1, (column,)).dtype.kind not in "biuf"


class Intervals(NamedTuple):
    """Labels of intervals of rows `[start, stop)`, in order, without overlap."""

    source: str
    starts: Any
    stops: Any
    labels: Any

    @classmethod
    def of(cls, table: Table) -> "Intervals":
        """Those of a table with the columns start, stop and label."""
        check_columns(table, _INTERVALS, "intervals")
        columns = (table.read(0, len(table), (name,))[:, 0] for name in _INTERVALS)
        return cls(str(table.path), *columns)


class Label(NamedTuple):
    """The label of a whole recording."""

    source: str
    value: Any


Targets: TypeAlias = RowSource | Intervals | Label


def targets_of(table: Table, layout: Layout) -> ColumnRows | Intervals:
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
    return TableRecording(
        name,
        FrameRows(inputs, size) if size > 1 else inputs,
        labels,
        static,
        _columns(inputs),
        LABEL if isinstance(targets, (Intervals, Label)) else _columns(targets),
        times and _last_rows(times, size),
        tuple((key, _last_rows(rows, size)) for key, rows in others.items()),
    )


def _last_rows(rows: RowSource, size: int) -> RowSource:
    """The last row of each frame."""
    return FrameRows(rows, size, last=True) if size > 1 else rows


def _place(name: str, targets: Targets, inputs: RowSource, layout: Layout) -> RowSource:
    """The targets as one for each step, missing where there is none."""
    size, every, at, rows = layout.frame_size, layout.target_every, layout.target_at, len(inputs)
    if isinstance(targets, Intervals):
        _refuse(name, layout, f"{targets.source} holds intervals", "target_every")
        labels = _interval_labels(targets, layout)
        spans = interval_labels(
            name, targets.starts, targets.stops, labels, rows, at or "all", size
        )
        spans.background = layout.background_class
        return spans
    if isinstance(targets, Label):
        what = "its label is for the whole recording"
        _refuse(name, layout, what, "target_every", "background_class")
        labels = ArrayRows(targets.source, np.asarray(targets.value).reshape(1))
        return periodic_labels(name, labels, rows // size, rows // size, at or "last")
    if every is not None:
        what = f"{targets.source} holds a row of targets for every {every} rows"
        _refuse(name, layout, what, "background_class")
        labels = _typed(targets, layout)
        return periodic_labels(name, labels, every, rows, at or "last", size)
    _refuse(name, layout, "its targets are one for each row", *_BELONGS)
    if len(targets) != rows:
        raise DataError(
            f"recording '{name}' has {counted(rows, 'step')} of {inputs.source} and"
            f" {len(targets):,} of {targets.source}; both need one row per step, or say by"
            " target_every=N (--target-every N) how many rows each target is for"
        )
    frames = _last_rows(targets, size)
    return frames if layout.classify else _typed(frames, layout)


def _interval_labels(intervals: Intervals, layout: Layout) -> RowSource:
    """The labels of intervals; of a regression they are numbers."""
    labels = np.asarray(intervals.labels)
    if labels.dtype.kind == "U" and len(labels) and layout.task not in {None, "classify"}:
        texts = [text.strip() for text in labels.tolist()]
        wrong = next((text for text in texts if not is_number(text)), texts[0])
        raise DataError(
            f"{intervals.source}: the label {wrong!r} is no number; are they classes?"
            " task='classify' (--task classify)"
        )
    return _typed(ArrayRows(intervals.source, labels), layout)


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
    """Refuse a column that is an input and the target of the same step."""
    if not isinstance(targets, (ColumnRows, ArrayRows)) or not (copied := _copies(inputs, targets)):
        return
    pairs = [c if c == target else f"{c} = {target}" for c, target in copied.items()]
    own = _columns(targets)
    others = [c for r in _parts(inputs) for c in _columns(r) if c not in copied] or own[:-1]
    choice = f"inputs={listed(others, quoted=True)}"
    if task is None:
        choice = f"tt.recording(..., {choice}, targets='{own[-1] if own else 'y'}')"
    advice = f"name other inputs: {choice}" if others else "take them out of the inputs"
    raise DataError(
        f"recording '{name}': {listed(pairs, quoted=True)} are inputs and targets of the same"
        f" step, so the net would only learn to copy them; {advice}, predict"
        " later values: ahead=1, or write allow_target_as_input=True (--allow-target-as-input)"
    )


def _copies(inputs: RowSource, targets: RowSource) -> dict[str, str]:
    """The columns of the inputs that repeat one of the targets.

    A column of a file is known by the file and its name there. One in memory is known by its
    values, whatever its name and type; under another name it needs more values than classes have,
    which may agree by chance.
    """
    own = {_key(known): target for target, known in _known(targets, 0, _COMPARED).items()}
    copies = dict[str, str]()
    for column, known in _known(inputs, 0, _COMPARED).items():
        target = own.get(_key(known))
        if target is None:
            continue
        if isinstance(known, tuple) or (
            (column == target or len(np.unique(known)) > _CLASSES)
            and _agree(inputs, column, targets, target)
        ):
            copies[column] = target
    return copies


def _agree(inputs: RowSource, column: str, targets: RowSource, target: str) -> bool:
    """Whether two columns in memory, equal so far, are equal to their ends."""
    return all(
        _key(_known(inputs, start, start + _BLOCK)[column])
        == _key(_known(targets, start, start + _BLOCK)[target])
        for start in range(_COMPARED, len(inputs), _BLOCK)
    )


def _key(known: tuple[Path, str] | Array) -> object:
    return known if isinstance(known, tuple) else known.tobytes()


def _known(rows: RowSource, start: int, stop: int) -> dict[str, tuple[Path, str] | Array]:
    """By name, where a column of a file is, and of one in memory the numbers, in one type."""
    result, blocks = dict[str, tuple[Path, str] | Array](), dict[tuple[str, ...], Array]()
    parts = _parts(rows)
    for i, part in enumerate(parts):
        if isinstance(part, ColumnRows):
            origins = {column: _origin(part, column) for column in part.columns}
            paths = {table.path for table, _ in origins.values()}
            files = {path: path.resolve() for path in paths if isinstance(path, Path)}
            result |= {c: (files[t.path], n) for c, (t, n) in origins.items() if t.path in files}
            memory = tuple(c for c, (t, _) in origins.items() if t.path not in files)
            if memory:
                blocks[memory] = part.table.read(start, stop, memory)
        elif isinstance(part, ArrayRows) and isinstance(part.array, np.ndarray):
            blocks[(part.source + f"[{i}]" * (len(parts) > 1),)] = part.read(start, stop)
    for names, values in blocks.items():
        if values.dtype.kind in "biuf" and values.size <= _COMPARED * len(values):
            columns = values.reshape(len(values), -1).T.astype(np.float64)
            wide = (f"{'/'.join(names)}[:, {i}]" for i in range(len(columns)))
            each = names if len(names) == len(columns) else wide
            result.update(zip(each, columns, strict=True))
    return result


def _parts(rows: RowSource) -> tuple[RowSource, ...]:
    return rows.parts if isinstance(rows, ConcatRows) else (rows,)


def _columns(rows: RowSource | None) -> tuple[str, ...]:
    return rows.columns if isinstance(rows, ColumnRows) else ()


def _origin(rows: ColumnRows, column: str) -> tuple[Table, str]:
    """The table that a column comes from, and its name there."""
    table = rows.table
    if isinstance(table, ConcatTable):
        index, column = table.sources[column]
        table = table.tables[index]
    return table, getattr(table, "names", {}).get(column, column)


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
    table = rows.table
    fields = {n: table.read(start, start + _EXCERPT, (n,))[:, 0] for n in rows.columns}
    texts = {n: [*map(str, v.tolist())] for n, v in fields.items() if v.dtype.kind not in "biuf"}
    words = {n: [t for t in v if t.strip() and not is_number(t)] for n, v in texts.items()}
    name, several = next(iter(texts)), len(texts) > 1
    which = f"columns {listed(texts, quoted=True)}" if several else f"column '{name}'"
    head = f"{rows.source}: {which} of the {role} hold{'s' * (not several)} text, such as"
    head += f" {next(iter(words[name]), '')!r}" + f" in '{name}'" * several
    if start == 0 and any(len(v) > 1 and words[n] == v[:1] for n, v in texts.items()):
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
    """Whole numbers in a type that has a value for "none": text for classes, floats otherwise."""

    rows: RowSource
    dtype: Any

    @property
    def source(self) -> str:
        return self.rows.source

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Array:
        labels = self.rows.read(start, stop)
        return labels.astype(self.dtype) if labels.dtype.kind in "biu" else labels


def _typed(rows: RowSource, layout: Layout) -> RowSource:
    if layout.task is None:
        return rows
    return TypedLabels(rows, np.str_ if layout.classify else np.float64)


def as_static(value: Any, name: str) -> Array:
    """Static features `(S,)`, checked."""
    static = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if static.ndim != 1 or static.dtype.kind not in "biuf" or not np.isfinite(static).all():
        raise DataError(
            f"recording '{name}': static has shape {static.shape} and type {static.dtype}, expected"
            " (S,) finite numbers"
        )
    return static
