"""netCDF, by netCDF4: the names and shapes of variables when opened, then slices of steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats._array_file import ArrayFileTable, Arrays, open_array_file
from throughtime.stream.formats.hdf5 import refuse_cut_short
from throughtime.stream.formats.netcdf_classic import expected_size
from throughtime.stream.formats.table import Array, import_extra


def open_netcdf(path: Path) -> ArrayFileTable:
    """Every variable `(time,)` or `(time, features)` of numbers is a column.

    Packed values are unpacked, missing ones are NaN.

    Time is the first dimension of the longest variable; coordinates are no columns.

    Raises:
        MissingExtraError: netCDF4 is not installed.
        DataError: the file is no netCDF file, cut short, or holds no such variable.
    """
    return open_array_file(path, _opened)


@dataclass(frozen=True)
class _Variable:
    """A variable that unpacks its slices, always to the same type."""

    variable: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variable.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Floating if values are packed or may be missing."""
        stored = np.dtype(self.variable.dtype)
        marked = {"scale_factor", "add_offset", "_FillValue", "missing_value"} & set(
            self.variable.ncattrs()
        )
        return np.dtype(np.float64) if marked and stored.kind in "biu" else stored

    def __getitem__(self, rows: slice, /) -> Array:
        values = self.variable[rows]
        if self.dtype.kind == "f":
            return np.ma.filled(values.astype(self.dtype), np.nan)
        return np.ma.getdata(values)


def _refuse_cut_short(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(3) != b"CDF":
            refuse_cut_short(path)
            return
        try:
            end = expected_size(file)
        except ValueError as error:
            raise DataError(
                f"{path}: not a readable netCDF file ({error}); is it cut short?"
            ) from error
    if path.stat().st_size < end:
        raise DataError(
            f"{path}: holds {path.stat().st_size} bytes, its header promises {end}; the file is cut"
            " short"
        )


def _opened(path: Path) -> Arrays:
    netcdf = import_extra("netCDF4", path, "netCDF", "zarr")
    _refuse_cut_short(path)
    try:
        data: Any = netcdf.Dataset(path, mode="r")
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{path}: not a readable netCDF file ({error}); is it cut short?"
        ) from error
    named = " ".join(
        str(getattr(variable, "coordinates", "")) for variable in data.variables.values()
    )
    coordinates = {*data.dimensions, *named.split()}
    kinds = {
        name: variable
        for name, variable in data.variables.items()
        if isinstance(variable.dtype, np.dtype)
    }
    return {
        name: _Variable(variable) for name, variable in kinds.items() if name not in coordinates
    }
