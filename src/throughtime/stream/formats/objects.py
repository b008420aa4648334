"""Tables of objects that the user has opened: frames, Arrow tables, groups of arrays, MNE's Raw.

An object is recognised by the attributes of its type, so no optional library is imported. A group
or a dataset of h5py is opened again, by path, in another process or after the user has closed it.

Shapes: `n` rows read, `D` columns.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import (
    ArraysFile,
    NetcdfVariable,
    PackedArray,
    arrays_of_hdf5,
    arrays_of_netcdf,
    arrays_of_zarr,
    longest_arrays,
)
from throughtime.stream.formats.arrow import named_columns, stack_columns
from throughtime.stream.formats.table import (
    Array,
    FileArray,
    FileTable,
    OpenObject,
    TableFile,
    import_extra,
    unreadable,
)

_CLOSED = (OSError, KeyError, ValueError, RuntimeError)  # of libraries, for a closed file


def has(value: object, *names: str) -> bool:
    """Whether the type of an object has these attributes: those of the object may be columns."""
    return all(hasattr(type(value), name) for name in names)


_GROUPS = (
    ("get_data", "ch_names", "n_times"),  # MNE
    ("data_vars",),  # xarray
    ("visititems",),  # h5py
    ("members", "array_keys"),  # Zarr
    ("variables", "ncattrs"),  # netCDF4
)
_ARROW = ("iloc", "__arrow_c_stream__", "__arrow_c_array__")


def has_columns(value: object) -> bool:
    """Whether an object is a table: a frame, an Arrow table, a group of arrays, an MNE `Raw`."""
    frame = has(value, "columns") or has(value, "column_names")
    return _is_group(value) or (frame and any(has(value, name) for name in _ARROW))


def is_series(value: object) -> bool:
    """Whether an object is a single column: a pandas or polars series, or an Arrow array."""
    if has_columns(value) or not any(has(value, name) for name in _ARROW):
        return False
    return has(value, "iloc") or has(value, "to_frame") or not has(value, "shape")


def _is_group(value: object) -> bool:
    return any(has(value, *names) for names in _GROUPS)


def open_object(value: Any) -> FileTable:
    """The columns of an object: those of a frame or a group; a series is one column.

    Raises:
        DataError: two columns of one name, or a group without a numeric array.

    Cost: the columns of a frame are its memory, or one copy where they have a stride or no Arrow
    type. All others are read row by row as they are played.
    """
    name = f"the {type(value).__name__}"
    file = _group(value, Path(name)) if _is_group(value) else ArrowColumns.of(value)
    return opened(name, file)


def opened(name: str, file: TableFile) -> FileTable:
    """The table of a file that is open already; `name` is for messages."""
    return FileTable(OpenObject(name, file), (), file.columns, file.length, file.times, file.rate)


def _group(value: Any, path: Path) -> TableFile:
    if has(value, "get_data"):
        return RawColumns(value)
    arrays: Mapping[str, Any] = (
        {**value.data_vars, **{n: c for n, c in value.coords.items() if c.dtype.kind == "M"}}
        if has(value, "data_vars")
        else arrays_of_hdf5(value)
        if has(value, "visititems")
        else arrays_of_zarr(value)
        if has(value, "members")
        else arrays_of_netcdf(value)
    )
    return ArraysFile(
        path, longest_arrays(path, {name: as_file_array(array) for name, array in arrays.items()})
    )


class ArrowColumns(TableFile):
    """The columns of a frame or an Arrow table; one without a name is called `0`.

    Args:
        path: for messages.
        table: a `pyarrow.Table`.
        nullable: columns with a missing value, here or in the table that this one is a part of:
            their integers are float64.
        faults: why columns cannot be read, by name.
    """

    def __init__(
        self, path: Path, table: Any, nullable: frozenset[str], faults: Mapping[str, str]
    ) -> None:
        self.path, self.table, self.length = path, table, table.num_rows
        self.columns, self.times = named_columns(path, table.schema)
        self._nullable, self._faults = nullable, faults

    @classmethod
    def of(cls, value: Any) -> "ArrowColumns":
        """The columns of an object that has them in Arrow's layout, or is of pandas."""
        import pyarrow as pa

        path, faults = Path(f"the {type(value).__name__}"), dict[str, str]()
        if has(value, "iloc"):
            table, faults = _from_pandas(value)
        elif isinstance(value, (pa.Array, pa.ChunkedArray)):
            table = pa.table({"0": value})
        elif has(value, "to_arrow"):  # of polars, which has text in another layout otherwise
            arrow = value.to_arrow()
            table = pa.table({value.name or "0": arrow}) if is_series(value) else arrow
        else:
            table = pa.table(value)
        for i, field in enumerate(table.schema):
            if str(field.type) == "string_view":  # of which Arrow takes no rows
                table = table.set_column(i, field.name, table.column(i).cast(pa.large_string()))
        named = zip(table.column_names, table.columns, strict=True)
        nullable = frozenset(name for name, column in named if column.null_count)
        return cls(path, table, nullable, faults)

    def take(self, rows: Array) -> "ArrowColumns":
        """Some rows; not copied where they follow one another."""
        import pyarrow as pa

        start, count = (int(rows[0]) if len(rows) else 0), len(rows)
        adjacent = bool((rows == np.arange(start, start + count)).all())
        table = self.table.slice(start, count) if adjacent else self.table.take(pa.array(rows))
        return ArrowColumns(self.path, table, self._nullable, self._faults)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        fault = next((name for name in columns if name in self._faults), None)
        if fault is not None:
            raise DataError(
                f"{self.path}: column '{fault}' holds Python objects ({self._faults[fault]}),"
                " expected numbers; convert it, or leave it out: tt.recording(..., inputs=[...])"
            )
        rows = self.table.slice(start, stop - start).select(list(columns))
        return stack_columns(
            self.path, rows.combine_chunks().to_batches()[0], columns, self._nullable
        )


def _from_pandas(value: Any) -> tuple[Any, dict[str, str]]:
    """A frame or series as an Arrow table, and its columns of mixed Python objects with the reason.

    Column by column: one that cannot be converted is an error only where it is read. An index of
    time stamps is the first column of a frame.
    """
    import pyarrow as pa

    faults = dict[str, str]()
    columns = (
        [(str(name), value.iloc[:, i]) for i, name in enumerate(value.columns)]
        if has(value, "columns")
        else [("0" if value.name is None else str(value.name), value)]
    )
    index = "index" if value.index.name is None else str(value.index.name)
    clock = has(value, "columns") and value.index.dtype.kind == "M"
    if clock and index not in (name for name, _ in columns):
        columns.insert(0, (index, value.index))
    arrays: list[Any] = []
    for name, column in columns:
        try:
            if str(column.dtype).startswith("Sparse"):
                column = column.sparse.to_dense()  # noqa: PLW2901
            arrays.append(pa.array(column, from_pandas=True))
        except (pa.ArrowException, TypeError, ValueError) as error:
            faults[name] = str(error)
            arrays.append(pa.nulls(len(column)))
    return pa.table(arrays, names=[name for name, _ in columns]), faults


class RawColumns(TableFile):
    """The channels of an MNE `Raw`, which holds them as (channels, time); read without a load."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.columns, self.length = tuple(raw.ch_names), int(raw.n_times)
        self.rate = float(raw.info["sfreq"])

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        picks = [self.columns.index(name) for name in columns]
        return self._raw.get_data(picks=picks, start=start, stop=stop).T


class ReopenedArray:
    """An array of an open file, opened again by its path in another process, or once it is closed.

    Args:
        array: `shape`, `dtype` and slices of rows.
        path: of the file.
        name: of the array there.
        opener: a function of a module, so that it can be pickled.
    """

    def __init__(
        self, array: Any, path: Path, name: str, opener: Callable[[Path, str], FileArray]
    ) -> None:
        self.path, self.name, self.shape, self.dtype = path, name, array.shape, array.dtype
        self._array, self._opener, self._process = array, opener, os.getpid()

    def __getitem__(self, rows: slice, /) -> Array:
        if self._process == os.getpid():
            with contextlib.suppress(*_CLOSED):
                return self._array[rows]
        what = f"{self.path}: '{self.name}' cannot be opened again"
        hint = "close a file that is open for writing, and keep it at its path"
        with unreadable(what, _CLOSED, hint):
            self._array = self._opener(self.path, self.name)
        self._process = os.getpid()
        return self._array[rows]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_array": None, "_process": -1}


def _hdf5_array(path: Path, name: str) -> FileArray:
    return import_extra("h5py", path, "HDF5", "hdf5").File(path, "r")[name]


def _netcdf_array(path: Path, name: str) -> FileArray:
    return NetcdfVariable(import_extra("netCDF4", path, "netCDF", "netcdf").Dataset(path)[name])


def as_file_array(value: Any, name: str = "the arrays") -> Any:
    """A `FileArray` that a process of its own can read, and that marks missing values as NaN."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise DataError(
                f"{name} are torch.bfloat16, which NumPy does not know; convert them:"
                " tensor.float()"
            )
        return value.detach().cpu().numpy()
    if isinstance(value, PackedArray):
        return replace(value, array=as_file_array(value.array))
    if has(value, "read_direct", "file"):
        return ReopenedArray(value, Path(value.file.filename), str(value.name), _hdf5_array)
    if has(value, "ncattrs"):
        value = NetcdfVariable(value)
    if isinstance(value, NetcdfVariable):
        group = value.array.group()
        name = f"{group.path.rstrip('/')}/{value.array.name}"
        return ReopenedArray(value, Path(group.filepath()), name, _netcdf_array)
    return value
