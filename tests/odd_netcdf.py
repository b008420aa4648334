"""Odd but legal netCDF files, and what netCDF4 reads in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

from odd_files import BOTH, COUNTS, Reference, T, U, V, Writer, cases

Fill = Callable[[netCDF4.Dataset], object]
CLASSIC = "NETCDF3_CLASSIC"
AT_2 = COUNTS == 2


def netcdf(*fills: Fill, kind: Any = "NETCDF4", length: int | None = T, **others: Any) -> Writer:
    """Variables over the axis time, as netCDF4 reads them: masked values are NaN."""

    def write(path: Path) -> Reference:
        with netCDF4.Dataset(path, "w", format=kind) as file:
            file.createDimension("time", length)
            for fill in (variable("u", "f8", U), *fills):
                fill(file)
        with netCDF4.Dataset(path) as file:
            numbers = {
                name: _filled(item[:])
                for name, item in file.variables.items()
                if name not in file.dimensions and item.ndim and item.dtype != str
            }
        return Reference(numbers, **others)

    return write


def _filled(values: Any) -> Any:
    if not np.ma.is_masked(values):
        return np.asarray(values)
    floating = values if values.dtype.kind == "f" else values.astype(np.float64)
    return floating.filled(np.nan)


def variable(name: str, kind: Any, values: Any, *, fill: Any = None, **attributes: Any) -> Fill:
    """A variable over time; its values are stored as they are."""

    def add(file: netCDF4.Dataset) -> None:
        item = file.createVariable(name, kind, ("time",), fill_value=fill)
        item.setncatts(attributes)
        item.set_auto_maskandscale(False)
        item[:] = values

    return add


def v(kind: Any, values: Any = COUNTS, **options: Any) -> Fill:
    return variable("v", kind, values, **options)


def unwritten(file: netCDF4.Dataset) -> None:
    file.createVariable("v", "i2", ("time",))[:5] = COUNTS[:5]


def unwritten_bytes(file: netCDF4.Dataset) -> None:
    file.createVariable("w", "u1", ("time",))[:5] = COUNTS[:5] + 4


def stations(file: netCDF4.Dataset) -> None:
    file.createDimension("station", 2)
    file.createVariable("x", "f4", ("time", "station"), zlib=True)[:] = BOTH


def scalar(file: netCDF4.Dataset) -> None:
    file.createVariable("height", "f8", ())[:] = 2.0


LABELS = ["N", "Größe", "N"] * 4
COMMON: dict[str, Writer] = {
    "netcdf_classic.nc": netcdf(v("f4", V), kind=CLASSIC),
    "netcdf_offset_64.nc": netcdf(v("f4", V), kind="NETCDF3_64BIT_OFFSET"),
    "netcdf_4.nc": netcdf(v("f4", V)),
    "netcdf_4_classic.nc": netcdf(v("f4", V), kind="NETCDF4_CLASSIC"),
    "netcdf_classic_records.nc": netcdf(
        v("i2"), variable("w", "i1", COUNTS), kind=CLASSIC, length=None
    ),
    "netcdf_packed.nc": netcdf(v("i2", scale_factor=0.01, add_offset=273.15)),
    "netcdf_packed_with_fill_value.nc": netcdf(
        v("i2", np.where(AT_2, -32768, COUNTS), fill=-32768, scale_factor=0.5, add_offset=100.0),
        kind=CLASSIC,
    ),
    "netcdf_packed_float32.nc": netcdf(
        v("i2", scale_factor=np.float32(0.1), add_offset=np.float32(7))
    ),
    "netcdf_fill_value.nc": netcdf(
        variable("w", "f8", np.where(AT_2, -999.0, U), fill=-999.0),
        v("i4", np.where(AT_2, -999, COUNTS), fill=-999),
    ),
    "netcdf_missing_value.nc": netcdf(
        variable("w", "f8", np.where(AT_2, 1e20, U), missing_value=1e20),
        v("i2", np.where(AT_2, -99, COUNTS), missing_value=np.int16(-99)),
    ),
    "netcdf_fill_value_nan.nc": netcdf(
        variable("w", "f8", np.where(AT_2, np.nan, U), fill=np.nan),
        v("f4", V, fill=np.float32(1e20), missing_value=np.float32(1e20)),
    ),
    "netcdf_unsigned_types.nc": netcdf(
        v("u1", COUNTS + 240), variable("w", "u2", np.arange(T) + 60_000)
    ),
    "netcdf_times.nc": netcdf(  # they are no column; xarray reads them
        variable("time", "f8", np.arange(T) / 2, units="hours since 2020-01-01 00:00:00"),
        refused=["time"],
    ),
    "netcdf_coordinate_of_numbers.nc": netcdf(variable("time", "f8", np.arange(T) * 0.1)),
    "netcdf_stations.nc": netcdf(stations),
}
ODD: dict[str, Writer] = {
    "netcdf_data_64.nc": netcdf(v("f4", V), kind="NETCDF3_64BIT_DATA"),
    "netcdf_scale_alone.nc": netcdf(v("i4", scale_factor=0.25)),
    "netcdf_default_fill_of_integers.nc": netcdf(
        v("i4", np.where(AT_2, netCDF4.default_fillvals["i4"], COUNTS))
    ),
    "netcdf_default_fill_of_floats.nc": netcdf(
        v("f8", np.where(AT_2, netCDF4.default_fillvals["f8"], U)), kind=CLASSIC
    ),
    "netcdf_unwritten.nc": netcdf(unwritten),
    "netcdf_default_fill_of_bytes.nc": netcdf(
        v("i1", np.where(AT_2, -127, COUNTS)), unwritten_bytes
    ),
    "netcdf_missing_values.nc": netcdf(v("i2", missing_value=np.array([2, 5], np.int16))),
    "netcdf_valid_range.nc": netcdf(v("i2", valid_range=np.array([-2, 4], np.int16))),
    "netcdf_valid_min_of_packed.nc": netcdf(
        variable("w", "f8", U, valid_max=7.5),
        v("i2", valid_min=np.int16(-1), scale_factor=0.5),
        kind=CLASSIC,
    ),
    "netcdf_unsigned.nc": netcdf(v("i1", _Unsigned="true"), kind=CLASSIC),
    "netcdf_unsigned_packed.nc": netcdf(v("i2", fill=-1, _Unsigned="true", scale_factor=0.5)),
    "netcdf_large_integers.nc": netcdf(v("i8", 2**53 + np.arange(T))),
    "netcdf_times_that_are_no_coordinate.nc": netcdf(
        variable("date", "i4", COUNTS, units="days since 2020-02-27", calendar="noleap"),
        refused=["date"],
    ),
    "netcdf_scalar_beside.nc": netcdf(scalar),
    "netcdf_text.nc": netcdf(
        variable("label", str, np.array(LABELS, object)), texts={"label": LABELS}
    ),
}
NETCDF = cases(COMMON, ODD)
