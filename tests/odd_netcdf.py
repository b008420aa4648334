"""Odd but legal netCDF files, and what netCDF4 reads in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

from odd_files import BOTH, COUNTS, Reference, Register, T, U, V

NETCDF = Register()


def netcdf(
    path: Path, fill: Callable[[netCDF4.Dataset], None], kind: Any = "NETCDF4", **others: Any
) -> Reference:
    """Write variables over the axis time, and read them as netCDF4 does: masked values are NaN."""
    with netCDF4.Dataset(path, "w", format=kind) as file:
        file.createDimension("time", T)
        fill(file)
    with netCDF4.Dataset(path) as file:
        numbers = {
            name: _filled(variable[:])
            for name, variable in file.variables.items()
            if name not in file.dimensions and variable.ndim and variable.dtype != str
            if variable.dtype.kind in "iuf"
        }
    return Reference(numbers, **others)


def _filled(values: Any) -> Any:
    if not np.ma.is_masked(values):
        return np.asarray(values)
    floating = values if values.dtype.kind == "f" else values.astype(np.float64)
    return floating.filled(np.nan)


def variable(
    file: netCDF4.Dataset, name: str, kind: Any, values: Any, *, fill: Any = None, **attributes: Any
) -> None:
    """Add a variable over time; its values are stored as they are."""
    item = file.createVariable(name, kind, ("time",), fill_value=fill)
    item.setncatts(attributes)
    item.set_auto_maskandscale(False)
    item[:] = values


def pair(file: netCDF4.Dataset) -> None:
    """Two plain variables."""
    variable(file, "u", "f8", U)
    variable(file, "v", "f4", V)


@NETCDF.common(".nc")
def netcdf_classic(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF3_CLASSIC")


@NETCDF.common(".nc")
def netcdf_offset_64(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF3_64BIT_OFFSET")


@NETCDF.odd(".nc")
def netcdf_data_64(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF3_64BIT_DATA")


@NETCDF.common(".nc")
def netcdf_4(path: Path) -> Reference:
    return netcdf(path, pair)


@NETCDF.common(".nc")
def netcdf_4_classic(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF4_CLASSIC")


@NETCDF.common(".nc")
def netcdf_classic_records(path: Path) -> Reference:
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("time", None)
        file.createVariable("u", "f8", ("time",))[:] = U
        file.createVariable("v", "i2", ("time",))[:] = COUNTS
        file.createVariable("w", "i1", ("time",))[:] = COUNTS
    with netCDF4.Dataset(path) as file:
        return Reference({name: _filled(file[name][:]) for name in ("u", "v", "w")})


@NETCDF.common(".nc")
def netcdf_packed(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, scale_factor=0.01, add_offset=273.15)

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_packed_with_fill_value(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        values = np.where(COUNTS == 2, -32768, COUNTS)
        variable(file, "v", "i2", values, fill=-32768, scale_factor=0.5, add_offset=100.0)

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@NETCDF.common(".nc")
def netcdf_packed_float32(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, scale_factor=np.float32(0.1), add_offset=np.float32(7))

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_scale_alone(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i4", COUNTS, scale_factor=0.25)

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_fill_value(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 1, -999.0, U), fill=-999.0)
        variable(file, "v", "i4", np.where(COUNTS == 2, -999, COUNTS), fill=-999)

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_default_fill_of_integers(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i4", np.where(COUNTS == 2, netCDF4.default_fillvals["i4"], COUNTS))

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_default_fill_of_floats(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 2, netCDF4.default_fillvals["f8"], U))
        variable(file, "v", "f4", V)

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@NETCDF.odd(".nc")
def netcdf_unwritten(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        file.createVariable("v", "i2", ("time",))[:5] = COUNTS[:5]

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_default_fill_of_bytes(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i1", np.where(COUNTS == 2, -127, COUNTS))
        file.createVariable("w", "u1", ("time",))[:5] = COUNTS[:5] + 4

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_missing_value(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 1, 1e20, U), missing_value=1e20)
        variable(file, "v", "i2", np.where(COUNTS == 2, -99, COUNTS), missing_value=np.int16(-99))

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_fill_value_nan(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 1, np.nan, U), fill=np.nan)
        variable(file, "v", "f4", V, fill=np.float32(1e20), missing_value=np.float32(1e20))

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_missing_values(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, missing_value=np.array([2, 5], np.int16))

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_valid_range(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, valid_range=np.array([-2, 4], np.int16))

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_valid_min_of_packed(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U, valid_max=7.5)
        variable(file, "v", "i2", COUNTS, valid_min=np.int16(-1), scale_factor=0.5)

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@NETCDF.odd(".nc")
def netcdf_unsigned(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i1", COUNTS, _Unsigned="true")

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@NETCDF.odd(".nc")
def netcdf_unsigned_packed(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, fill=-1, _Unsigned="true", scale_factor=0.5)

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_unsigned_types(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "u1", COUNTS + 240)
        variable(file, "v", "u2", np.arange(T) + 60_000)

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_large_integers(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i8", 2**53 + np.arange(T))

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_times(path: Path) -> Reference:
    """They are no column; xarray reads them."""

    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        variable(file, "time", "f8", np.arange(T) / 2, units="hours since 2020-01-01 00:00:00")

    return netcdf(path, fill, refused=["time"])


@NETCDF.odd(".nc")
def netcdf_times_that_are_no_coordinate(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        units = "days since 2020-02-27"
        variable(file, "date", "i4", np.arange(T), units=units, calendar="noleap")

    return netcdf(path, fill, refused=["date"])


@NETCDF.common(".nc")
def netcdf_coordinate_of_numbers(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        variable(file, "time", "f8", np.arange(T) * 0.1)

    return netcdf(path, fill)


@NETCDF.common(".nc")
def netcdf_stations(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        file.createDimension("station", 2)
        file.createVariable("x", "f4", ("time", "station"), zlib=True)[:] = BOTH

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_scalar_beside(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        file.createVariable("height", "f8", ())[:] = 2.0

    return netcdf(path, fill)


@NETCDF.odd(".nc")
def netcdf_text(path: Path) -> Reference:
    labels = ["N", "Größe", "N"] * 4

    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "label", str, np.array(labels, object))

    return netcdf(path, fill, texts={"label": labels})
