"""Tables of objects that the user has in memory or opened: frames, Arrow tables, groups of arrays.

An object is recognised by its type, whose library is imported already where there is such an
object.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import (
    ArraysFile,
    arrays_of_xarray,
    arrays_of_zarr,
    longest_arrays,
)
from throughtime.stream.formats.table import FileArray, Table

_GROUPS: Mapping[str, Callable[[Any], Mapping[str, FileArray]]] = {
    "xarray.Dataset": arrays_of_xarray,
    "zarr.Group": arrays_of_zarr,
}
_FRAMES = ("pandas.DataFrame", "polars.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch")
_SERIES = ("pandas.Series", "polars.Series", "pyarrow.Array", "pyarrow.ChunkedArray")
_OPEN_FILES = ("h5py.Dataset", "netCDF4.Variable")  # no other process can read them


def has(value: object, *names: str) -> bool:
    """Whether the type of an object has these attributes: those of the object may be columns."""
    return all(hasattr(type(value), name) for name in names)


def _type_name(value: object, names: Iterable[str]) -> str | None:
    """The first of these types that an object has, such as `zarr.Group`; `None` if none."""
    for name in names:
        module, _, kind = name.rpartition(".")
        if isinstance(value, getattr(sys.modules.get(module), kind, ())):
            return name
    return None


def has_columns(value: object) -> bool:
    """Whether an object is a table: a frame, an Arrow table, a group of arrays."""
    return _type_name(value, (*_GROUPS, *_FRAMES)) is not None


def is_series(value: object) -> bool:
    """Whether an object is a single column: a pandas or polars series, or an Arrow array."""
    return _type_name(value, _SERIES) is not None


def open_object(name: str, value: Any) -> Table:
    """The columns of an object: those of a frame or a group; a series is one column.

    Args:
        name: for messages.
        value: the object.

    Raises:
        DataError: two columns of one name, or a group without a numeric array.

    Cost: the columns of a frame are its memory, or one copy where they have a stride or no Arrow
    type. All others are read row by row as they are played.
    """
    group = _type_name(value, _GROUPS)
    if group is not None:
        return ArraysFile(name, longest_arrays(name, _GROUPS[group](value)))
    from throughtime.stream.formats.arrow import arrow_columns

    return arrow_columns(name, arrow_table(name, value))


def arrow_table(what: str, value: Any) -> Any:
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
                f"{what}: {error}; convert the column, or leave it out: frame.drop(columns=[...])"
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


def as_file_array(value: Any, name: str = "the arrays") -> Any:
    """The array of a tensor; any other array as it is.

    Raises:
        DataError: a type that NumPy does not know, or an array of an open file that cannot be read
            in another process.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise DataError(
                f"{name} are torch.bfloat16, which NumPy does not know; convert them:"
                " tensor.float()"
            )
        return value.detach().cpu().numpy()
    if _type_name(value, _OPEN_FILES):
        raise DataError(
            f"{name} belong to an open file; give its path, and the names of the arrays in it:"
            " tt.recording('data.h5', inputs=['group/x'], targets='group/y')"
        )
    return value
