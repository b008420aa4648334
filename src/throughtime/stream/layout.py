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
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime.errors import DataError, counted, listed, warn_caller
from throughtime.stream import formats
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import Array, RowSource, Table, is_number
from throughtime.stream.formats.times import summarize_times
from throughtime.stream.recording import TableRecording
from throughtime.stream.rows import (
    ColumnRows,
    FrameRows,
    check_columns,
    check_lengths,
    time_rows,
    value_columns,
)
from throughtime.stream.targets import At, interval_labels, periodic_labels

_COMPARED, _EXCERPT = 4096, 64  # rows
_WIDE = 1000  # columns at most that are compared with the targets
_CLASSES, _FEW = 20, 7  # different values that two columns, of few rows, may share by chance
_INTERVALS = ("start", "stop", "label")
LABEL = ("label",)
_warn_once = cache(warn_caller)  # a run opens its recordings several times


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
        check_columns(table, names, "inputs")
        if both := used.intersection(names):
            raise DataError(
                f"{table.path}: {listed(sorted(both), quoted=True)} are inputs, and series or"
                " excluded as well; name each column once"
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
    named: bool = False,
) -> TableRecording:
    """The recording of these rows.

    Args:
        name: in messages and reports.
        inputs: a row of numbers for each row of the source.
        layout: says where the targets lie, and how many rows are a step.
        targets: in any form; `None`: a recording without.
        static: `(S,)` features of the whole recording.
        series: more rows by name, as many as of the inputs.
        named: whether targets may be names of classes, as they may where the task is to classify.

    Raises:
        DataError: no rows, series or targets of another length, an input that is the target of the
            same step, times that descend, or a setting that belongs to targets of another form.

    Cost: 4,096 rows of up to 1,000 input columns and of the targets, and all time stamps.
    """
    size, others = layout.frame_size, dict(series or {})
    if len(inputs) < size:
        fault = f"has {counted(len(inputs), 'row')}, too few for a single frame of {size}"
        fault = fault if len(inputs) else "is empty, expected at least one step"
        raise DataError(f"recording '{name}' ({inputs.source}) {fault}")
    lengths = [(f"series '{key}'", len(rows)) for key, rows in others.items()]
    check_lengths(name, [("inputs", len(inputs)), *lengths])
    labels = None if targets is None else _place(name, targets, inputs, layout)
    check_numbers(inputs, "inputs")
    check_numbers(None if named or layout.classify else targets, "targets")
    for key, rows in others.items():
        check_numbers(rows, f"series '{key}'")
    if not (layout.ahead or layout.allow_target_as_input):
        _refuse_copies(name, inputs, targets)
    times = time_rows(inputs.table, layout.exclude) if isinstance(inputs, ColumnRows) else None
    if times is not None:
        _check_times(name, times, layout)

    def last(rows: RowSource) -> RowSource:
        return FrameRows(rows, size, last=True) if size > 1 else rows

    return TableRecording(
        name,
        FrameRows(inputs, size) if size > 1 else inputs,
        labels,
        static,
        _columns(inputs),
        LABEL if isinstance(targets, (Intervals, Label)) else _columns(targets),
        times and last(times),
        tuple((key, last(rows)) for key, rows in others.items()),
    )


def _check_times(name: str, times: ColumnRows, layout: Layout) -> None:
    """Refuse times that descend, and warn of gaps that a forecast would cross."""
    summary, column = summarize_times(times), times.columns[0]
    if summary.backward is not None:
        row, before, after = summary.backward
        raise DataError(
            f"recording '{name}': row {row} of '{column}', {after}, is earlier than the row before"
            f" it, {before}; sort the rows, pass those of each recording by themselves, or exclude"
            f" the column if their order is right: exclude='{column}' (--exclude {column})"
        )
    if layout.ahead and summary.gaps:
        _warn_once(
            f"recording '{name}': '{column}' has {counted(summary.gaps, 'gap')}, and 'ahead' counts"
            " rows: across a gap a target is later than that. Split the recording there, or fill"
            " the rows that are missing"
        )


def _place(name: str, targets: Targets, inputs: RowSource, layout: Layout) -> RowSource:
    """The targets as one for each step, missing where there is none."""
    size, every, rows, at = layout.frame_size, layout.target_every, len(inputs), layout.target_at
    is_label, is_cut = isinstance(targets, Label), isinstance(targets, Intervals)
    usable = {
        "target_every": (not (is_label or is_cut), "targets with fewer rows than the inputs"),
        "target_at": (is_label or is_cut or every, "labels for more than one step"),
        "background_class": (is_cut, "intervals with the columns start,stop,label"),
    }
    form = "intervals" if is_cut else f"a target for {'the recording' if is_label else 'each row'}"
    for key, (suits, owner) in usable.items():
        if (value := getattr(layout, key)) is not None and not suits:
            raise DataError(
                f"recording '{name}': {key}={value!r} (--{key.replace('_', '-')}) belongs to"
                f" {owner}, but {targets.source} holds {form}; leave it out"
            )
    if at not in (None, "all", "last"):
        raise DataError(
            f"recording '{name}': target_at={at!r}, expected 'all' (every step of a span carries"
            " its label) or 'last'"
        )
    if isinstance(targets, Intervals):
        none = isinstance(targets.labels, list) and not targets.labels  # of classes, likely
        labels = np.asarray(targets.labels, np.int64 if none else None)
        if labels.dtype.kind == "U" and layout.task in ("regress", "multilabel"):
            raise DataError(
                f"{targets.source}: labels such as '{labels[0]}' are no numbers; are they classes?"
                " task='classify' (--task classify)"
            )
        if layout.task is not None and labels.dtype.kind in "biu":
            labels = labels.astype(_whole(layout))
        own = ArrayRows(targets.source, labels)
        spans = interval_labels(name, targets.starts, targets.stops, own, rows, at or "all", size)
        spans.background = layout.background_class
        return spans
    if isinstance(targets, Label):
        own = ArrayRows(targets.source, np.asarray(targets.value).reshape(1))
        return periodic_labels(name, own, rows // size, rows // size, at or "last")
    if every is not None:
        return periodic_labels(name, _typed(targets, layout), every, rows, at or "last", size)
    if len(targets) != rows:
        raise DataError(
            f"recording '{name}' has {counted(rows, 'step')} of {inputs.source} and"
            f" {len(targets):,} of {targets.source}; both need one row per step, or say by"
            " target_every=N (--target-every N) how many rows each target is for"
        )
    rows = targets if layout.classify else _typed(targets, layout)
    return FrameRows(rows, size, last=True) if size > 1 else rows


def _refuse_copies(name: str, inputs: RowSource, targets: Targets | None) -> None:
    """Refuse an input that has the values of a target at the same step.

    Under another name it needs more values than classes have, which may agree by chance.
    """
    pairs: list[tuple[str, str]] | None = None
    for start in range(0, len(inputs), _COMPARED):
        values, own = _values(inputs, start), _values(targets, start)
        if pairs is None:
            same = _source(inputs) == _source(targets)
            pairs = [
                (column, target)
                for column, rows in values.items()
                for target in own
                if (same and column == target)
                or len(np.unique(rows)) > min(_CLASSES, max(_FEW, len(rows) // 2))
            ]
        pairs = [(c, t) for c, t in pairs if np.array_equal(values[c], own[t], equal_nan=True)]
        if not pairs:
            return
    texts = [c if c == target else f"{c} = {target}" for c, target in pairs or ()]
    raise DataError(
        f"recording '{name}': {listed(texts, quoted=True)} are inputs and targets of the same"
        " step, so the net would only learn to copy them; name other inputs: inputs=[...]"
        " (--inputs), predict later values: ahead=1, or in Python allow_target_as_input=True"
    )


def _values(rows: Any, start: int) -> dict[str, Array]:
    """The numbers of the next rows as float64 by the name of the column; none of what is lazy."""
    is_memory = isinstance(rows, ArrayRows) and isinstance(rows.array, np.ndarray)
    if not (is_memory or isinstance(rows, ColumnRows)):
        return {}
    first = rows.read(0, 1)
    if first.dtype.kind not in "biuf" or first.size > _WIDE:
        return {}
    names = _columns(rows)
    if len(names) != first.size:
        names = [f"{rows.source}[:, {i}]" for i in range(first.size)]
    columns = rows.read(start, start + _COMPARED).reshape(-1, first.size).T
    return dict(zip(names, columns.astype(np.float64), strict=True))


def _source(rows: object) -> object:
    return rows.source if isinstance(rows, ColumnRows) else None


def _columns(rows: object) -> tuple[str, ...]:
    return rows.columns if isinstance(rows, ColumnRows) else ()


def check_numbers(rows: object, role: str) -> None:
    """Refuse columns of text; the message says how to leave them out.

    Args:
        rows: of columns of a table; others are not checked.
        role: inputs, targets or a series.

    Cost: one row of the columns.
    """
    if not isinstance(rows, ColumnRows) or rows.read(0, 1).dtype.kind in "biuf":
        return
    texts = [name for name in rows.columns if _is_text(rows.table, name)]
    words = rows.table.read(0, _EXCERPT, texts[:1])[:, 0].tolist()
    word = next((w for w in map(str, words) if w.strip() and not is_number(w)), "")
    raise DataError(
        f"{rows.source}: column '{texts[0]}' of the {role} holds text, such as {word!r}, expected"
        f" numbers; leave it out: exclude={listed(texts, quoted=True)} (--exclude"
        f" {','.join(texts[:8])}); delete the line below the header if it is one of units; or name"
        " the classes of targets: classes=[...] in the order of their indices (--task classify)"
    )


def _typed(rows: RowSource, layout: Layout) -> RowSource:
    if layout.task is None or not isinstance(rows, ColumnRows):
        return rows
    return replace(rows, whole=_whole(layout))


def _whole(layout: Layout) -> Any:
    """The type of whole numbers as targets, which has a value for "none"."""
    return np.str_ if layout.classify else np.float64


def as_static(value: Any, name: str) -> Array:
    """Static features `(S,)`, checked."""
    static = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if static.ndim != 1 or static.dtype.kind not in "biuf" or not np.isfinite(static).all():
        raise DataError(
            f"recording '{name}': static has shape {static.shape} and type {static.dtype}, expected"
            " (S,) finite numbers"
        )
    return static
