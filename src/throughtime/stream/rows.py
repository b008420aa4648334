"""Rows of steps, of whatever holds them: arrays, columns of tables, or several tables side by side.

An *array* has `shape`, `dtype` and slices of rows (NumPy, torch, Zarr, xarray, Dask). A *table* has
named columns (a file, a frame, an Arrow table, a group of arrays). An object is recognised by its
type, whose library is imported already where there is such an object.

Shapes: `n` rows read, `D` columns.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from throughtime.errors import DataError, did_you_mean, listed
from throughtime.stream.formats.arrays import (
    ArrayRows,
    ArraysFile,
    MatrixColumns,
    arrays_of_xarray,
    arrays_of_zarr,
)
from throughtime.stream.formats.table import (
    Array,
    RowSource,
    Table,
    check_exact,
    open_table,
    unreadable,
)

_FRAMES = ("pandas.DataFrame", "polars.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch")
_SERIES = ("pandas.Series", "polars.Series", "pyarrow.Array", "pyarrow.ChunkedArray")


def is_any(value: object, names: Sequence[str]) -> bool:
    """Whether an object has one of these types, such as `zarr.Group`."""
    parts = (name.rpartition(".") for name in names)
    return any(
        isinstance(value, getattr(sys.modules.get(module), kind, ())) for module, _, kind in parts
    )


def has_columns(value: object) -> bool:
    """Whether an object is a table: a frame, an Arrow table, a group of arrays."""
    return is_any(value, ("xarray.Dataset", "zarr.Group", *_FRAMES))


def is_series(value: object) -> bool:
    """Whether an object is a single column: a pandas or polars series, or an Arrow array."""
    return is_any(value, _SERIES)


def is_array(value: object) -> bool:
    """Whether an object has `shape`, `dtype` and slices, as those of NumPy, torch and h5py do."""
    # of the type: attributes of a frame may be columns
    slices = hasattr(type(value), "__getitem__") and not has_columns(value)
    return slices and hasattr(value, "shape") and hasattr(value, "dtype")


def is_rows(value: object) -> bool:
    """Whether `as_rows` accepts an object: an array, a series, a table or the path of a file."""
    is_table = isinstance(value, (str, Path, Table)) or has_columns(value)
    return is_table or is_series(value) or is_array(value)


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
        if self.whole and rows.dtype.kind in "biu":
            check_exact(self.source, rows, self.whole)
            rows = rows.astype(self.whole)
        return rows[:, 0] if self.flat and rows.shape[1] == 1 else rows


class ConcatTable(Table):
    """Tables of equal length, their columns side by side.

    `sources` maps each column to its table and its name there.
    """

    def __init__(self, tables: Sequence[Table], sources: dict[str, tuple[Table, str]]) -> None:
        self.sources, self.columns, self.length = sources, tuple(sources), len(tables[0])
        self.path = Path("; ".join(str(table.path) for table in tables))
        self.times = tuple(n for n, (table, name) in sources.items() if name in table.times)

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        groups = groupby((self.sources[name] for name in columns), key=itemgetter(0))
        parts = [table.read(start, stop, [name for _, name in group]) for table, group in groups]
        return self.join(columns, parts)


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


def as_table(source: Any, delimiter: str | None = None, decimal: str | None = None) -> Table:
    """The table of anything with named columns, see `tt.recording`.

    Raises:
        DataError: two columns of one name, no numeric array, or another kind of object.

    Cost: the columns of a frame are its memory, or one copy where they have a stride or no Arrow
    type. All others are read row by row as they are played.
    """
    if isinstance(source, (str, Path)):
        return open_table(Path(source), delimiter=delimiter, decimal=decimal)
    path = f"the {type(source).__name__}"
    items: Any = {}
    if isinstance(source, Table):
        return source
    if is_any(source, (*_FRAMES, *_SERIES)):
        from throughtime.stream.formats.arrow import arrow_columns

        return arrow_columns(path, arrow_table(path, source))
    if is_array(source):
        if len(source.shape) == 2:
            return MatrixColumns(path, as_file_array(source))
        items = {"0": source}
    elif has_columns(source):
        items = arrays_of_xarray(source) if isinstance(source, Mapping) else arrays_of_zarr(source)
    elif isinstance(source, Mapping):
        # scipy.io.loadmat adds '__header__' and the like
        items = {key: value for key, value in source.items() if not str(key).startswith("__")}
    if items and all(map(is_array, items.values())):
        arrays = {str(key): as_file_array(value) for key, value in items.items()}
        return ArraysFile(path, arrays)
    raise DataError(
        f"tt.recording got a {type(source).__name__}, expected a path, a frame, a mapping of"
        " arrays, or an array (T, D); collect a lazy frame; a pair: tt.Stream((x, y), ...)"
    )


def arrow_table(what: str, value: Any) -> Any:
    """A frame, series or Arrow object as a `pyarrow.Table`; a column without a name is `0`.

    An index of time stamps is the first column of a frame of pandas.

    Raises:
        DataError: a column of pandas holds Python objects of several types.
    """
    import pyarrow as pa

    if is_any(value, ["pandas.DataFrame", "pandas.Series"]):
        frame = value.to_frame() if is_series(value) else value
        try:
            table: Any = pa.Table.from_pandas(frame, preserve_index=False)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"{what}: {error}; convert the column, or leave it out: frame.drop(columns=[...])"
            ) from error
        index, name = value.index, str(value.index.name or "index")
        if index.dtype.kind == "M" and name not in table.column_names and not is_series(value):
            table = table.add_column(0, name, [pa.array(index)])
    else:
        arrow = value.to_arrow() if hasattr(type(value), "to_arrow") else value  # of polars
        column = getattr(value, "name", "") or "0"
        table = pa.table({column: arrow} if is_series(value) else arrow)
    return table


def as_file_array(value: Any, name: str = "the arrays") -> Any:
    """The array of a tensor; any other array as it is.

    Raises:
        DataError: a type that NumPy does not know, or an array of an open file that cannot be read
            in another process.
    """
    if isinstance(value, torch.Tensor):
        with unreadable(f"{name} are {value.dtype}", "convert: .float(), .to_dense()"):
            return value.detach().cpu().numpy()
    if is_any(value, ["h5py.Dataset", "netCDF4.Variable"]):
        raise DataError(
            f"{name} belong to an open file; give its path, and the names of the arrays in it:"
            " tt.recording('data.h5', inputs=['group/x'], targets='group/y')"
        )
    return value


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
    if is_series(value) or (is_rows(value) and not is_array(value)):
        table = as_table(value)
        return ColumnRows(table, value_columns(table), flat=role != "inputs" or is_series(value))
    array = as_file_array(value, f"recording '{name}': {role}") if is_array(value) else None
    # torch and others have types of their own, which are numbers
    dtype: Any = getattr(array, "dtype", None)
    if (
        array is None
        or not array.shape
        or getattr(dtype, "kind", "O") not in "biuf"
        or dtype == np.longdouble
        or "time" in getattr(value, "dims", ())[1:]
    ):
        raise DataError(
            f"recording '{name}': {role} are a {type(value).__name__} of shape"
            f" {getattr(value, 'shape', None)} and type {dtype}, expected an array of numbers with"
            " one row per step, time first, a frame, or a path; leave times out, take one field"
            " of records, map text to integers, collect a lazy frame, and pass several as a list"
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


def check_columns(
    table: Table, names: Sequence[str], role: str, columns: Sequence[str] = ()
) -> None:
    """Refuse names of columns that are missing or named twice, and no names.

    The columns are those that are no time stamps, by default.
    """
    usable = {*(columns or value_columns(table))}  # there may be a million
    wrong = [name for name in names if name not in usable]
    if wrong or not names or len({*names}) < len(names):
        raise DataError(
            f"{table.path}: {role} {listed(names, quoted=True)} asked for, it has"
            f" {table.contents or listed(columns or value_columns(table), quoted=True)}; name"
            f" each once{', and no time stamps: ' * bool(table.times)}{', '.join(table.times)}"
            f"{did_you_mean(wrong[0], usable) if wrong else ''}"
        )
