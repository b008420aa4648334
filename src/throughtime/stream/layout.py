"""One layout of any object as a recording: which columns are what, and where its targets lie.

`tt.recording`, `tt.recordings`, the mappings and files of `tt.Stream` and the command line all end
in `lay_out`, so a setting has one name and one meaning, and each refusal stands once.

Targets are one per row, per interval of rows, or one for the whole recording: then its last step
has it, when the net has read all of it.

Shapes: `T` steps, `D` input features, `C` target columns, `S` static features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, RowSource, Table, is_number, open_table
from throughtime.stream.formats.times import rate_of_times
from throughtime.stream.recording import TableRecording
from throughtime.stream.rows import (
    ColumnRows,
    as_file_array,
    check_columns,
    check_lengths,
    time_rows,
    value_columns,
)
from throughtime.stream.targets import SpanLabels, interval_labels

_INTERVALS = ("start", "stop", "label")
LABEL = ("label",)


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
        delimiter: of CSV files; `None`: detected in each.
        decimal: the decimal mark of CSV files; `None`: detected in each.
        ahead: steps from a step to that of each of its targets; empty: the step itself.
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
    delimiter: str | None = None
    decimal: Literal[".", ","] | None = None
    ahead: tuple[int, ...] = ()
    rate: float | None = None
    rate_set: bool = False

    @property
    def classify(self) -> bool:
        """Whether the targets are classes."""
        return self.task == "classify"

    def open(self, path: Path) -> Table:
        """A file of a recording."""
        return open_table(path, delimiter=self.delimiter, decimal=self.decimal)

    def input_rows(self, table: Table, targets: Iterable[str] = ()) -> ColumnRows:
        """The inputs among the columns of a table.

        Args:
            table: has them.
            targets: its columns that are targets. Of a forecast they are inputs, too, unless they
                are text: the present value of what is forecast.

        Raises:
            DataError: no such column, or one that has another use as well.
        """
        used = set(self.exclude).union(*self.series.values())
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


class Labels(NamedTuple):
    """Labels of intervals of steps `[start, stop)`, in order, without overlap.

    Without starts and stops it is one label, that of the whole recording.
    """

    source: str
    labels: Any
    starts: Any = None
    stops: Any = None

    @classmethod
    def of(cls, table: Table) -> "Labels":
        """Those of a table with the columns start, stop and label."""
        check_columns(table, _INTERVALS, "intervals")
        starts, stops, labels = (table.read(0, len(table), (name,))[:, 0] for name in _INTERVALS)
        return cls(str(table.path), labels, starts, stops)


Targets: TypeAlias = RowSource | Labels


def targets_of(table: Table, layout: Layout) -> ColumnRows | Labels:
    """The targets in a table of their own: its columns, or intervals where it has just these."""
    if {*table.columns} == {*_INTERVALS} and layout.targets in {(), LABEL}:
        return Labels.of(table)
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
        layout: says what the targets are.
        targets: in any form; `None`: a recording without.
        static: `(S,)` features of the whole recording.
        series: more rows by name, as many as of the inputs.
        named: whether targets may be names of classes, as they may where the task is to classify.

    Raises:
        DataError: no rows, series or targets of another length, an input that is the target of the
            same step, or times that descend.

    Cost: one row of each, and all time stamps.
    """
    if not len(inputs):
        raise DataError(
            f"recording '{name}' ({inputs.source}) is empty, expected at least one step"
        )
    others = dict(series or {})
    check_lengths(
        name, [("inputs", len(inputs)), *((f"series '{k}'", len(v)) for k, v in others.items())]
    )
    rows = None if targets is None else _place(name, targets, inputs, layout)
    check_numbers(inputs, "inputs")
    check_numbers(None if named or layout.classify else targets, "targets")
    for key, values in others.items():
        check_numbers(values, f"series '{key}'")
    if not (layout.ahead or layout.allow_target_as_input):
        _refuse_copies(name, inputs, targets)
    times = time_rows(inputs.table, layout.exclude) if isinstance(inputs, ColumnRows) else None
    if times is not None:
        rate_of_times(name, times.columns[0], times)
    return TableRecording(
        name,
        inputs,
        rows,
        static,
        getattr(inputs, "columns", ()),
        LABEL if isinstance(targets, Labels) else getattr(targets, "columns", ()),
        times,
        tuple(others.items()),
        _unnamed(inputs, layout.inputs) + _unnamed(targets, layout.targets),
    )


def _unnamed(rows: object, names: Sequence[str]) -> tuple[str, ...]:
    """The columns, if no setting names them; none of a single one that is read as `(n,)`."""
    columns = () if names else getattr(rows, "columns", ())
    return columns[getattr(rows, "flat", False) and len(columns) == 1 :]


def _refuse_copies(name: str, inputs: RowSource, targets: Targets | None) -> None:
    """Refuse an input that has the name and the values of a target at the same step."""
    if not (isinstance(inputs, ColumnRows) and isinstance(targets, ColumnRows)):
        return
    both = [column for column in targets.columns if column in inputs.columns]
    blocks = {rows.table.read(0, 4096, both).tobytes() for rows in (inputs, targets) if both}
    if len(blocks) == 1:
        raise DataError(
            f"recording '{name}': {listed(both, quoted=True)} are inputs and targets of the same"
            " step; name other inputs=[...], use ahead=1, or write allow_target_as_input=True"
        )


def _place(name: str, targets: Targets, inputs: RowSource, layout: Layout) -> RowSource:
    """The targets as one for each step, missing where there is none."""
    count = len(inputs)
    if isinstance(targets, Labels):
        source, values, starts, stops = targets
        labels = np.asarray(values, np.int64 if np.size(values) == 0 else None)
        if labels.dtype.kind == "U" and layout.task in ("regress", "multilabel"):
            raise DataError(
                f"{source}: labels such as '{labels[0]}' are no numbers; write task='classify'"
            )
        if layout.task is not None and labels.dtype.kind in "biu":
            # a type that has a value for none
            labels = labels.astype(np.str_ if layout.classify else np.float64)
        if starts is None:
            return SpanLabels(source, np.array([count - 1]), np.array([count, 0]), labels, count)
        return interval_labels(name, source, starts, stops, labels, count)
    if len(targets) != count:
        raise DataError(
            f"recording '{name}' has {count:,} steps of {inputs.source} and {len(targets):,} of"
            f" {targets.source}; need one row each, or give intervals of steps with their labels"
        )
    if layout.task in (None, "classify") or not isinstance(targets, ColumnRows):
        return targets
    return replace(targets, whole=np.float64)


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
    excerpt = map(str, rows.table.read(0, 64, texts[:1])[:, 0])
    raise DataError(
        f"{rows.source}: column '{texts[0]}' of the {role} holds text, such as"
        f" {listed(sorted({t for t in excerpt if t and not is_number(t)}), quoted=True)},"
        f" expected numbers; leave it out: exclude={listed(texts, quoted=True)} (--exclude"
        f" {','.join(texts[:8])}); delete line 2 if it holds units; or name"
        " the classes of targets in the order of their indices: classes=[...] (--task classify)"
    )


def as_static(value: Any, name: str) -> Array | None:
    """Static features `(S,)`, checked; `None` as it is."""
    if value is None:
        return None
    static = np.asarray(as_file_array(value, "static"))
    if static.ndim != 1 or static.dtype.kind not in "biuf" or not np.isfinite(static).all():
        raise DataError(
            f"recording '{name}': static={value!r:.80}, expected (S,) finite numbers of the whole"
            " recording, such as [71.0, 1.82]; a column of the rows is an input"
        )
    return static
