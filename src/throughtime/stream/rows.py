"""Rows of steps: of arrays, of columns of a table, or of several tables side by side.

Shapes: `n` rows read, `D` columns, `N` rows per frame.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, did_you_mean, listed
from throughtime.stream import formats
from throughtime.stream.formats.arrays import ArrayRows, ArraysFile, MatrixColumns, longest_arrays
from throughtime.stream.formats.objects import (
    as_file_array,
    has,
    has_columns,
    is_series,
    open_object,
)
from throughtime.stream.formats.table import Array, RowSource, Table
from throughtime.stream.formats.times import nanoseconds


@dataclass(frozen=True)
class ColumnRows:
    """Columns of a table, `(n, D)`; with `flat`, a single column is read as `(n,)`.

    `whole` is the type of whole numbers; default: theirs.
    """

    table: Table
    columns: tuple[str, ...]
    flat: bool = False
    whole: Any = None

    @property
    def source(self) -> str:
        return str(self.table.path)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, start: int, stop: int) -> Array:
        rows = self.table.read(start, stop, self.columns)
        if self.whole is not None and rows.dtype.kind in "biu":
            rows = rows.astype(self.whole)
        return rows[:, 0] if self.flat and rows.shape[1] == 1 else rows


@dataclass(frozen=True)
class FrameRows:
    """Every `frame_size` rows as one step: their `N * D` numbers, or those of the last row.

    A frame is complete or dropped.
    """

    rows: RowSource
    frame_size: int
    last: bool = False

    @property
    def source(self) -> str:
        return self.rows.source

    def __len__(self) -> int:
        return len(self.rows) // self.frame_size

    def read(self, start: int, stop: int) -> Array:
        size = self.frame_size
        rows = self.rows.read(start * size, min(stop, len(self)) * size)
        return rows[size - 1 :: size] if self.last else rows.reshape(len(rows) // size, -1)


@dataclass(frozen=True)
class TimeRows:
    """The times of rows, `datetime64[ns]` `(n,)`: of a column, or of a date and a time of day."""

    table: Table
    columns: tuple[str, ...]

    @property
    def source(self) -> str:
        return f"{self.table.path}: {' and '.join(map(repr, self.columns))}"

    def __len__(self) -> int:
        return len(self.table)

    def read(self, start: int, stop: int) -> Array:
        first, *rest = (self.table.read(start, stop, (name,))[:, 0] for name in self.columns)
        return sum(rest, nanoseconds(first, self.source))


class ConcatTable(Table):
    """Tables of equal length, their columns side by side.

    `sources` maps each column to its table and its name there.
    """

    def __init__(self, tables: Sequence[Table], sources: dict[str, tuple[Table, str]]) -> None:
        self.sources, self.columns, self.length = sources, tuple(sources), len(tables[0])
        self.path = Path("; ".join(str(table.path) for table in tables))
        self.times = tuple(n for n, (table, name) in sources.items() if name in table.times)
        self.rate = next((table.rate for table in tables if table.rate is not None), None)

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        groups = groupby((self.sources[name] for name in columns), key=itemgetter(0))
        parts = [table.read(start, stop, [name for _, name in group]) for table, group in groups]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def concat_tables(name: str, tables: Sequence[Table]) -> Table:
    """One table with the columns of all; a single one is returned as it is.

    A column name that several tables share gets the number of its file: `1.u` and `2.u`. Unlike
    the name of the file, the number is the same in all recordings.

    Raises:
        DataError: the lengths differ, or two columns would get one name.
    """
    check_lengths(name, [(str(table.path), len(table)) for table in tables])
    if len(tables) == 1:
        return tables[0]
    counts = Counter(column for table in tables for column in table.columns)
    sources = [
        (f"{i}.{column}" if counts[column] > 1 else column, (table, column))
        for i, table in enumerate(tables, 1)
        for column in table.columns
    ]
    if len(dict(sources)) < len(sources):
        repeated = Counter(column for column, _ in sources).most_common(1)[0][0]
        raise DataError(
            f"recording '{name}': its files have a column '{repeated}' and another that would get"
            " this name; rename one"
        )
    return ConcatTable(tables, dict(sources))


def check_lengths(name: str, parts: Sequence[tuple[str, int]]) -> None:
    """Refuse series of different lengths; each part is a name and a number of rows."""
    for (first, length), (second, other) in pairwise(parts):
        if length != other:
            raise DataError(
                f"recording '{name}': {first} has {length} rows and {second} has {other}; all"
                " inputs and series of a recording need one row per step"
            )


def is_array(value: object) -> bool:
    """Whether an object has `shape`, `dtype` and slices, as those of NumPy, torch and h5py do."""
    if has_columns(value) or not has(value, "__getitem__"):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_table(value: object) -> bool:
    """Whether an object is a table or a single column of one, or the path of a file."""
    return isinstance(value, (str, Path)) or has_columns(value) or is_series(value)


def is_rows(value: object) -> bool:
    """Whether `as_rows` accepts an object: an array, a series, a table or the path of a file."""
    return is_table(value) or is_array(value)


def as_table(source: Any, delimiter: str | None = None, decimal: str | None = None) -> Table:
    """The table of anything with named columns, see `tt.recording`."""
    if isinstance(source, Table):
        return source
    if isinstance(source, (str, Path)):
        return formats.open_table(Path(source), delimiter=delimiter, decimal=decimal)
    if delimiter is not None or decimal is not None:
        raise DataError(
            f"delimiter={delimiter!r}, decimal={decimal!r} belong to a CSV file, and the source is"
            f" a {type(source).__name__}; leave them out"
        )
    if is_table(source):
        return open_object(source)
    path = f"the {type(source).__name__}"
    if is_array(source) and len(source.shape) == 2:
        return MatrixColumns(path, as_file_array(source))
    # scipy.io.loadmat adds '__header__' and the like
    items = source.items() if isinstance(source, Mapping) else ()
    arrays = {str(key): value for key, value in items if not str(key).startswith("__")}
    if arrays and all(map(is_array, arrays.values())):
        arrays = {key: as_file_array(value) for key, value in arrays.items()}
        return ArraysFile(path, longest_arrays(path, arrays))
    raise DataError(
        f"tt.recording got a {type(source).__name__}, expected a path, a frame, a table or group of"
        " arrays, or an array (T, D); arrays need no names: tt.Stream((inputs, targets), ...)"
    )


def as_rows(value: Any, name: str, role: str) -> RowSource:
    """The rows of an array, or of all columns of a file or another table.

    Args:
        value: see `is_rows`; of inputs also a list of them, side by side.
        name: of the recording.
        role: inputs, targets or a series; a single column of one that is no input is `(n,)`.

    Raises:
        DataError: anything else, or an array without rows of numbers.
    """
    if role == "inputs" and isinstance(value, (list, tuple)) and value and all(map(is_rows, value)):
        parts = [as_rows(part, name, role) for part in value]
        tables = [
            part.table
            if isinstance(part, ColumnRows)
            else ArraysFile(role, {f"inputs[{i}]": part.array})
            for i, part in enumerate(parts)
            if isinstance(part, (ColumnRows, ArrayRows))
        ]
        table = concat_tables(name, tables)
        return parts[0] if len(parts) == 1 else ColumnRows(table, value_columns(table))
    if is_table(value):
        table = as_table(value)
        return ColumnRows(table, value_columns(table), flat=role != "inputs" or is_series(value))
    if not is_array(value):
        hint = ""
        if has(value, "collect"):
            hint = "; collect the lazy frame, or write it to a Parquet file and give its path"
        elif isinstance(value, (list, tuple)):
            hint = f": np.array({role})"
        raise DataError(
            f"recording '{name}': {role} are a {type(value).__name__}, expected a NumPy array or a"
            f" torch tensor, another array, a frame, or a path{hint}"
        )
    array = as_file_array(value, f"recording '{name}': {role}")
    _check_array(array, name, role)
    return ArrayRows(role, array)


def _check_array(value: Any, name: str, role: str) -> None:
    """Refuse an array without rows, one that does not hold numbers, and time that is not first."""
    try:
        dtype = np.dtype(value.dtype)
    except TypeError:
        dtype = np.dtype(object)
    fault, dims = "", tuple[Any, ...](getattr(value, "dims", ()))
    if not value.shape or dtype.kind not in "biuf" or dtype == np.longdouble:
        fault = {
            "M": "; time is no input: leave it out, or take differences in seconds",
            "V": f"; take a column: array['{(dtype.names or ('x',))[0]}']",
            "O": "; of recordings give their list: list(array). Otherwise array.astype(float)",
            "U": "; map text to integers first: np.unique(text, return_inverse=True)[1]",
        }.get(dtype.kind, " ")
    elif "time" in dims[1:]:
        fault = f"; of {listed(dims)} time is not the first: array.transpose('time', ...)"
    if fault:
        raise DataError(
            f"recording '{name}': {role} have shape {tuple(value.shape)} and type {value.dtype},"
            f" expected numbers with one row per step{fault.rstrip()}"
        )


def value_columns(table: Table, exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns of a table that are not time stamps, and not excluded."""
    others = {*table.times, *exclude}
    return tuple(name for name in table.columns if name not in others)


def time_rows(table: Table, exclude: Sequence[str] = ()) -> TimeRows | None:
    """The times of a table's rows: its first column of time stamps; `None` without one.

    To dates, the only column of times of day is added. That column alone is a time of 1970-01-01.
    """
    types = {n: table.read(0, 1, (n,)).dtype for n in table.times if n not in exclude}
    clocks = [name for name, dtype in types.items() if dtype.kind == "m"]
    chosen = next((name for name in types if name not in clocks), *clocks[:1] or [None])
    if chosen is None:
        return None
    joined = types[chosen] == "M8[D]" and len(clocks) == 1
    return TimeRows(table, (chosen, *clocks) if joined else (chosen,))


def check_columns(table: Table, names: Sequence[str], role: str) -> None:
    """Refuse names of columns that are missing, named twice, or of time stamps."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    clocks = [name for name in names if name in table.times]
    available = {*table.columns}  # there may be a million
    missing = [name for name in names if name not in available]
    what, hint = f"{listed(names, quoted=True)} asked for, the file has", ""
    if twice:
        what = f"name {listed(twice, quoted=True)} twice; name each column once of"
    elif clocks:
        what = f"hold time stamps in column '{clocks[0]}', expected numbers; leave it out of"
    elif missing:
        hint = did_you_mean(missing[0], table.columns)
        hint = f"; {listed(missing, quoted=True)} missing{hint}" if missing != [*names] else hint
        if len(available) == 1 and (signs := re.findall(r"[,;\t|]", table.columns[0])):
            hint = f": was it read without sep={signs[0]!r}?"
    elif names:
        return
    raise DataError(f"{table.path}: {role} {what} {listed(table.columns, quoted=True)}{hint}")
