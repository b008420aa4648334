"""Recordings of named columns: of a file, a frame, an Arrow table, a group of arrays.

Shapes: `T` steps, `D` input features, `C` target columns, `S` static features.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, did_you_mean, listed
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.objects import arrow_table, has_columns
from throughtime.stream.formats.table import Array, RowSource, Table
from throughtime.stream.layout import Layout, as_static, lay_out
from throughtime.stream.recording import Part, Recording
from throughtime.stream.rows import as_rows, as_table, is_array
from throughtime.stream.targets import horizons, shift_targets, with_classes

_BLOCK = 65_536  # rows


def recording(
    source: Any,
    *,
    inputs: str | Sequence[str | int] | None = None,
    targets: Any = None,
    static: Any = None,
    start: int = 0,
    stop: int | None = None,
    name: str | None = None,
    series: Mapping[str, str | Sequence[str]] | None = None,
    exclude: str | Sequence[str] | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    classes: Sequence[Any] | None = None,
    ahead: int | Sequence[int] = 0,
    allow_target_as_input: bool = False,
) -> Recording:
    """One recording, its columns chosen by name.

    `tt.from_frame` makes one for each group of rows, `tt.recordings` those of a folder or manifest.

    Args:
        source: the path of a file, a pandas or polars frame, an Arrow table, an `xarray.Dataset`,
            an open group of h5py, Zarr or netCDF4, an MNE `Raw`, a mapping of arrays by name, or
            an array `(T, D)`, whose columns are called "0", "1" and so on.
        inputs: columns, in this order; default: all that have no other use and are no time stamps,
            and of a forecast (`ahead`) the targets as well.
        targets: columns; or the targets themselves, `(T,)` or `(T, C)`, as an array or a series.
        static: columns with one value for the whole recording; or `(S,)` numbers. Appended to the
            inputs of every step.
        start: the first step.
        stop: the step after the last one; default: the end.
        name: in messages and reports; default: that of the file.
        series: further columns by name, one or several each, such as `{"weight": "w"}`, which
            chunks have as `chunk["weight"]`. They are no inputs by default.
        exclude: columns that are not used.
        delimiter: the character between the fields of a CSV file; default: detected.
        decimal: the decimal mark of a CSV file; default: detected.
        classes: the names of the classes in the order of their indices, where the targets are
            names. A target without a name is -100; one that is no class is an error when it is
            read.
        ahead: the target of a step is that of so many steps later, within `start` and `stop`; the
            last steps have none. Those of several, such as `range(1, 25)`, lie side by side.
        allow_target_as_input: whether an input may be the target of the same step.

    Returns:
        A recording for `tt.Stream`, which reads its rows as they are played.

    Raises:
        DataError: a column that does not exist, is named twice, holds no numbers, or is an input
            and the target of the same step; a class that is named twice; a start and stop that
            leave no step.

    Cost: the header of a file and one row; static columns are read whole.

    Example:
        >>> import pandas, throughtime as tt
        >>> frame = pandas.DataFrame({"u": [0.1, 0.2, 0.3], "v": [1.0, 2.0, 3.0], "y": [0, 0, 1]})
        >>> stream = tt.Stream(tt.recording(frame, inputs=["u", "v"], targets="y"), 1, chunk=3)
        >>> next(iter(stream))
        Chunk(inputs (3, 1, 2), targets (3, 1), valid=3, resets=1)
    """
    named: Any = series or {}
    if not isinstance(named, Mapping):
        raise DataError(
            f"series={series!r}: expected the columns of each series by its name, such as"
            " series={'weight': 'w'}"
        )
    table = as_table(source, delimiter, decimal)
    title = name or (Path(source).name if isinstance(source, (str, Path)) else "0")
    targets = str(targets) if isinstance(targets, int) else targets  # pandas has such names
    constant = names_of(static) if _is_names(static) else ()
    layout = Layout(
        inputs=names_of(inputs),
        targets=names_of(targets) if _is_names(targets) else (),
        exclude=(*_known(table, exclude, "exclude"), *constant),
        series={key: names_of(names) for key, names in named.items()},
        ahead=horizons(ahead),
        allow_target_as_input=allow_target_as_input,
    )
    labels: RowSource | None = layout.target_rows(table)
    if targets is not None and not layout.targets:
        by_name = classes is not None and is_array(targets)
        labels = ArrayRows("targets", targets) if by_name else as_rows(targets, title, "targets")
    rows = layout.input_rows(table, layout.targets)
    features = _constants(table, constant) if constant else static
    whole = lay_out(
        title,
        rows,
        layout,
        labels,
        static=None if features is None else as_static(features, title),
        series=layout.series_rows(table),
        named=classes is not None,
    )
    result = with_classes(whole, classes)
    end = len(result) if stop is None else stop
    if not 0 <= start < end <= len(result):
        raise DataError(
            f"recording '{title}': start={start}, stop={stop} of {len(result)} steps; expected"
            " 0 <= start < stop <= the number of steps"
        )
    part = result if end - start == len(result) else Part(result, start, end)
    return shift_targets(part, ahead)


def from_frame(
    frame: Any,
    *,
    by: str | Sequence[str] | None = None,
    time: str | None = None,
    inputs: str | Sequence[str] | None = None,
    targets: str | Sequence[str] | None = None,
    static: str | Sequence[str] | None = None,
    series: Mapping[str, str | Sequence[str]] | None = None,
    exclude: str | Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    ahead: int | Sequence[int] = 0,
    allow_target_as_input: bool = False,
) -> list[Recording]:
    """One recording for each group of the rows of a frame, in order of time.

    Args:
        frame: a pandas or polars frame, or an Arrow table.
        by: the column, or the columns, whose values name the groups; default: one group.
        time: the column by which the rows of each group are sorted; default: rows are in order.
        inputs: columns; default: all that are not named otherwise, nor time stamps.
        targets: columns.
        static: columns with one value for each group.
        series: as for `tt.recording`.
        exclude: as for `tt.recording`.
        classes: as for `tt.recording`.
        ahead: as for `tt.recording`.
        allow_target_as_input: as for `tt.recording`.

    Returns:
        The recordings, in the order in which their groups appear, named by the group.

    Raises:
        DataError: as for `tt.recording`; or a row without a group or a time, or two rows of a group
            with the same time.

    Cost: rows of a group that follow one another in order are not copied; others are, once.

    Example:
        >>> import pandas, throughtime as tt
        >>> rows = {"patient": ["a", "b", "a"], "day": [2, 1, 1], "u": [0.2, 0.3, 0.1]}
        >>> recordings = tt.from_frame(pandas.DataFrame(rows), by="patient", time="day")
        >>> [(r.name, r.read(0, len(r)).inputs[:, 0].tolist()) for r in recordings]
        [('a', [0.1, 0.2]), ('b', [0.3])]
    """
    if not has_columns(frame):
        raise DataError(
            f"got a {type(frame).__name__}, expected a data frame or an Arrow table; of a file make"
            " one: pandas.read_csv(path), or use tt.recording(path, ...)"
        )
    from throughtime.stream.formats.arrow import arrow_columns

    arrow = arrow_table(frame)
    whole = arrow_columns(f"the {type(frame).__name__}", arrow)
    groups, times = (_known(whole, names, "group or sort by") for names in (by, time))
    # time stamps are no inputs, and show the gaps that a forecast would cross
    used = (*groups, *(name for name in times if name not in whole.times))
    recordings: list[Recording] = []
    for rows in _groups(whole, arrow, groups, times):
        first = arrow.slice(int(rows[0]), 1)
        group = "/".join(str(first.column(column)[0].as_py()) for column in groups) or "0"
        adjacent = (np.diff(rows) == 1).all()
        part = arrow.slice(rows[0], len(rows)) if adjacent else arrow.take(rows)
        result = recording(
            arrow_columns(f"group '{group}'", part, whole.content.nullable),
            inputs=inputs,
            targets=targets,
            static=static,
            name=group,
            series=series,
            exclude=(*_known(whole, exclude, "exclude"), *used),
            classes=classes,
            ahead=ahead,
            allow_target_as_input=allow_target_as_input,
        )
        recordings.append(result)
    return recordings


def _groups(
    whole: Table, table: Any, names: tuple[str, ...], times: tuple[str, ...]
) -> list[Array]:
    """The rows of each group, in order of time; groups in order of appearance."""
    owner = np.zeros(len(whole), np.int64)
    for name in names:
        column = table.column(name).combine_chunks()
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise DataError(f"{whole.path}: row {row} has no '{name}', so it belongs to no group")
        codes = column.dictionary_encode().indices.to_numpy()
        owner = np.unique(owner * (1 + codes.max(initial=0)) + codes, return_inverse=True)[1]
    _, first, owner = np.unique(owner, return_index=True, return_inverse=True)
    owner, values = first[owner], np.arange(len(whole))
    for time in times:
        values = whole.read(0, len(whole), (time,))[:, 0]
        if values.dtype.kind not in "iufM":
            raise DataError(
                f"{whole.path}: time='{time}' holds {values.dtype}, such as '{values[0]}', expected"
                f" numbers or time stamps: pandas.to_datetime(frame['{time}'])"
            )
        if (missing := values != values).any():
            raise DataError(f"{whole.path}: row {int(missing.argmax())} has no time '{time}'")
    order = np.lexsort((values, owner))
    begins = np.diff(owner[order]) != 0
    same = (values[order][1:] == values[order][:-1]) & ~begins
    if same.any():
        one, other = order[same.argmax() :][:2]
        raise DataError(
            f"{whole.path}: rows {one} and {other} have the same '{times[0]}', {values[one]}, in"
            " one group; which is first? Name another by=, or drop one"
        )
    return np.split(order, np.flatnonzero(begins) + 1) if len(whole) else []


def _known(table: Table, names: Any, use: str) -> tuple[str, ...]:
    """Names of columns, checked."""
    names = names_of(names)
    if absent := [name for name in names if name not in table.columns]:
        raise DataError(
            f"{table.path}: there is no column {listed(absent, quoted=True)} to {use}; it has"
            f" {listed(table.columns, quoted=True)}{did_you_mean(absent[0], table.columns)}"
        )
    return names


def _is_names(value: Any) -> bool:
    """Whether a value names columns, rather than being one."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, str) for item in items)


def names_of(value: Any) -> tuple[str, ...]:
    """Names of columns; pandas also has numbers as such."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _constants(table: Table, names: tuple[str, ...]) -> Array:
    """The values of columns that do not change, `(S,)`."""
    first = table.read(0, 1, names)[0]
    for start in range(0, len(table), _BLOCK):
        rows = table.read(start, start + _BLOCK, names)
        changes = np.argwhere(rows != first)
        if len(changes):
            step, column = changes[0].tolist()
            raise DataError(
                f"{table.path}: static column '{names[column]}' is {first[column]} in row 0 and"
                f" {rows[step, column]} in row {start + step}; a value that changes is an input"
            )
    return first
