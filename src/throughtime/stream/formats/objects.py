"""Tables of objects that the user has opened: frames, Arrow tables, groups of arrays, MNE's Raw.

An object is recognised by its type, whose library is imported already where there is such an
object. A dataset of h5py or a variable of netCDF4 is opened again, by its path.

Shapes: `n` rows read, `D` columns.
"""

import posixpath
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import (
    ArraysFile,
    arrays_of_hdf5,
    arrays_of_netcdf,
    arrays_of_xarray,
    arrays_of_zarr,
    longest_arrays,
    open_variable,
    refuse_packed,
)
from throughtime.stream.formats.table import (
    Array,
    FileArray,
    Handle,
    Table,
    import_extra,
    unreadable,
)

_GROUPS: Mapping[str, Callable[[Any], Mapping[str, FileArray]]] = {
    "xarray.Dataset": arrays_of_xarray,
    "xarray.DataTree": arrays_of_xarray,
    "h5py.Group": arrays_of_hdf5,
    "zarr.Group": arrays_of_zarr,
    "netCDF4.Dataset": arrays_of_netcdf,
}
_FRAMES = ("pandas.DataFrame", "polars.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch")
_SERIES = ("pandas.Series", "polars.Series", "pyarrow.Array", "pyarrow.ChunkedArray")
_RAW = "mne.io.BaseRaw"


def has(value: object, *names: str) -> bool:
    """Whether the type of an object has these attributes: those of the object may be columns."""
    return all(hasattr(type(value), name) for name in names)


def _type_name(value: object, names: Iterable[str]) -> str | None:
    """The first of these types that an object has, such as `h5py.Group`; `None` if none."""
    for name in names:
        module, _, kind = name.rpartition(".")
        if isinstance(value, getattr(sys.modules.get(module), kind, ())):
            return name
    return None


def has_columns(value: object) -> bool:
    """Whether an object is a table: a frame, an Arrow table, a group of arrays, an MNE `Raw`."""
    return _type_name(value, (*_GROUPS, *_FRAMES, _RAW)) is not None


def is_series(value: object) -> bool:
    """Whether an object is a single column: a pandas or polars series, or an Arrow array."""
    return _type_name(value, _SERIES) is not None


def open_object(value: Any) -> Table:
    """The columns of an object: those of a frame or a group; a series is one column.

    Raises:
        DataError: two columns of one name, or a group without a numeric array.

    Cost: the columns of a frame are its memory, or one copy where they have a stride or no Arrow
    type. All others are read row by row as they are played.
    """
    name, group = f"the {type(value).__name__}", _type_name(value, _GROUPS)
    if group is not None:
        arrays = {n: as_file_array(array) for n, array in _GROUPS[group](value).items()}
        return ArraysFile(name, longest_arrays(name, arrays))
    if _type_name(value, [_RAW]):
        return RawColumns(name, value)
    from throughtime.stream.formats.arrow import arrow_columns

    return arrow_columns(name, arrow_table(value))


def arrow_table(value: Any) -> Any:
    """A frame, series or Arrow object as a `pyarrow.Table`; a column without a name is `0`.

    An index of time stamps is the first column of a frame of pandas.

    Raises:
        DataError: a column of pandas holds Python objects of several types.
    """
    import pyarrow as pa

    if _type_name(value, ["pandas.DataFrame", "pandas.Series"]):
        frame = value.to_frame() if is_series(value) else value
        try:
            table: Any = pa.Table.from_pandas(frame, preserve_index=False)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"the {type(value).__name__}: {error}; convert the column, or leave it out:"
                " frame.drop(columns=[...])"
            ) from error
        index, name = value.index, str(value.index.name or "index")
        if index.dtype.kind == "M" and name not in table.column_names and not is_series(value):
            table = table.add_column(0, name, [pa.array(index)])
    else:
        arrow = value.to_arrow() if has(value, "to_arrow") else value  # of polars
        column = getattr(value, "name", "") or "0"
        table = pa.table({column: arrow} if is_series(value) else arrow)
    for i, field in enumerate(table.schema):
        if str(field.type) == "string_view":  # of which Arrow takes no rows
            table = table.set_column(i, field.name, table.column(i).cast(pa.large_string()))
    return table


class RawColumns(Table):
    """The channels of an MNE `Raw`, which holds them as (channels, time); read without a load."""

    def __init__(self, path: str, raw: Any) -> None:
        self.path, self._raw = path, raw
        self.columns, self.length = tuple(raw.ch_names), int(raw.n_times)
        self.rate = float(raw.info["sfreq"])

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        picks = [self.columns.index(name) for name in columns]
        return self._raw.get_data(picks=picks, start=start, stop=stop).T


class PathArray:
    """An array of an open file, read by its path: also in another process, or once it is closed.

    Args:
        array: a dataset of h5py, or a variable of netCDF4.
        path: of the file.
        name: of the array there.
        opener: a function of a module, so that it can be pickled.
    """

    def __init__(self, array: Any, path: Path, name: str, opener: Callable[..., FileArray]) -> None:
        self.shape, self.dtype, self._what = array.shape, array.dtype, f"{path}: '{name}'"
        self._handle = Handle(path, partial(opener, name=name))

    def __getitem__(self, rows: slice, /) -> Array:
        hint = "close a file that is open for writing, and keep it at its path"
        with unreadable(f"{self._what} cannot be opened again", hint):
            array = self._handle.get()
        return array[rows]


def _root(variable: Any) -> Any:
    """The file of a variable of netCDF4: a group in it does not know whether it is closed."""
    group = variable.group()
    while group.parent is not None:
        group = group.parent
    return group


def _open_dataset(path: Path, name: str) -> FileArray:
    return import_extra("h5py", path, "HDF5", "hdf5").File(path, "r")[name]


def as_file_array(value: Any, name: str = "the arrays") -> Any:
    """A `FileArray` that a process of its own can read."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise DataError(
                f"{name} are torch.bfloat16, which NumPy does not know; convert them:"
                " tensor.float()"
            )
        return value.detach().cpu().numpy()
    if _type_name(value, ["h5py.Dataset"]):
        refuse_packed(value)
        return PathArray(value, Path(value.file.filename), value.name, _open_dataset)
    if _type_name(value, ["netCDF4.Variable"]):
        path = posixpath.join(value.group().path, value.name)
        return PathArray(value, Path(_root(value).filepath()), path, open_variable)
    return value
