"""Rows of steps: of arrays, of columns of a table, or of several tables side by side.

Shapes: `n` rows read, `D` columns, `N` rows per frame.
"""

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
        raise DataError(
            f"recording '{name}': its files have the columns {listed(dict(sources), quoted=True)},"
            " one of which is also the name that another one gets; rename it"
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
    if isinstance(source, (str, Path)):
        return formats.open_table(Path(source), delimiter=delimiter, decimal=decimal)
    if delimiter is not None or decimal is not None:
        raise DataError(
            f"delimiter={delimiter!r}, decimal={decimal!r} belong to a CSV file, and the source is"
            f" a {type(source).__name__}; leave them out"
        )
    path = f"the {type(source).__name__}"
    if isinstance(source, Table):
        return source
    if is_table(source):
        return open_object(path, source)
    if is_array(source) and len(source.shape) == 2:
        return MatrixColumns(path, as_file_array(source))
    source = {"0": source} if is_array(source) else source
    # scipy.io.loadmat adds '__header__' and the like
    items = source.items() if isinstance(source, Mapping) else ()
    arrays = {str(key): value for key, value in items if not str(key).startswith("__")}
    if arrays and all(map(is_array, arrays.values())):
        arrays = {key: as_file_array(value) for key, value in arrays.items()}
        return ArraysFile(path, longest_arrays(path, arrays))
    raise DataError(
        f"tt.recording got a {type(source).__name__}, expected a path, a frame, a mapping of"
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
        value = concat_tables(name, [*map(as_table, value)])
    if isinstance(value, Table) or is_table(value):
        table = as_table(value)
        return ColumnRows(table, value_columns(table), flat=role != "inputs" or is_series(value))
    if not is_array(value):
        raise DataError(
            f"recording '{name}': {role} are a {type(value).__name__}, expected an array, such as"
            f" np.array({role}), a frame, or a path; collect a lazy frame"
        )
    array = as_file_array(value, f"recording '{name}': {role}")
    dims: Any = getattr(value, "dims", ())
    # torch and others have types of their own, which are numbers
    dtype: Any = getattr(array, "dtype", None)
    is_number = getattr(dtype, "kind", "O") in "biuf" and dtype != np.longdouble
    if not array.shape or not is_number or "time" in dims[1:]:
        raise DataError(
            f"recording '{name}': {role} have shape {tuple(array.shape)}, type {dtype} and"
            f" dimensions {listed(dims) or 'without names'}, expected numbers with one row per"
            " step, time first; leave times out, map text to integers, take one field of records,"
            " and pass several recordings as a list"
        )
    return ArrayRows(role, array)


def value_columns(table: Table, exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns of a table that are not time stamps, and not excluded."""
    others = {*table.times, *exclude}
    return tuple(name for name in table.columns if name not in others)


def time_rows(table: Table, exclude: Sequence[str] = ()) -> ColumnRows | None:
    """The first column of time stamps of a table, `datetime64[ns]` `(n,)`; `None` without one."""
    names = tuple(name for name in table.times if name not in exclude)
    return ColumnRows(table, names[:1], flat=True) if names else None


def check_columns(table: Table, names: Sequence[str], role: str) -> None:
    """Refuse names of columns that are missing, named twice, or of time stamps; and no names."""
    usable = {*value_columns(table)}  # there may be a million
    wrong = [name for name in names if name not in usable]
    if wrong or not names or len({*names}) < len(names):
        hint = did_you_mean(wrong[0], usable) if wrong else ""
        raise DataError(
            f"{table.path}: {role} {listed(names, quoted=True)} asked for, the file has"
            f" {listed(value_columns(table), quoted=True)}; name one or several, each once"
            f"{', and no time stamps: ' * bool(table.times)}{', '.join(table.times)}{hint}"
        )
