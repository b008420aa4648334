"""Odd but legal files of arrays and signals, and what the library of each format reads in them.

HDF5 by h5py, netCDF by netCDF4, Zarr by zarr, NPY and NPZ by NumPy, sound by soundfile, EDF and BDF
by edfio, WFDB by wfdb.
"""

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edfio
import h5py
import netCDF4
import numpy as np
import soundfile
import zarr

from odd_files import MATRIX, Reference, Register

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # wfdb uses what pandas deprecates
    import wfdb

ARRAYS = Register()
T = 12
U = np.arange(T) * 1.5 - 3
V = np.sin(np.arange(T) * 0.7)
COUNTS = np.arange(T, dtype=np.int32) - 4
BOTH = np.column_stack([U, V])


def matrix(values: Any, **others: Any) -> Reference:
    """All inputs of a file whose columns have no names."""
    return Reference({MATRIX: np.asarray(values)}, **others)


# HDF5


def hdf5(path: Path, fill: Callable[[h5py.File], None], **others: Any) -> Reference:
    """Write arrays, and read those at the root that are numbers."""
    with h5py.File(path, "w") as file:
        fill(file)
    with h5py.File(path) as file:
        arrays = {name: item[()] for name, item in file.items() if isinstance(item, h5py.Dataset)}
    numbers = {name: array for name, array in arrays.items() if array.dtype.kind in "biuf"}
    return Reference({name: array for name, array in numbers.items() if array.ndim}, **others)


@ARRAYS.common(".h5")
def hdf5_columns(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(u=U, v=V.astype(np.float32)))


@ARRAYS.common(".hdf5")
def hdf5_matrix(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(x=BOTH))


@ARRAYS.common(".h5")
def hdf5_matrix_and_column(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(x=BOTH, y=COUNTS))


@ARRAYS.common(".h5")
def hdf5_compressed_chunks(path: Path) -> Reference:
    def fill(file: h5py.File) -> None:
        file.create_dataset("u", data=U, chunks=(5,), compression="gzip", shuffle=True)
        file.create_dataset("v", data=V, chunks=(7,), compression="lzf", fletcher32=True)

    return hdf5(path, fill)


@ARRAYS.common(".h5")
def hdf5_growing(path: Path) -> Reference:
    def fill(file: h5py.File) -> None:
        growing = file.create_dataset("u", (4,), "f8", maxshape=(None,), chunks=(4,), fillvalue=-1)
        growing[:] = U[:4]
        growing.resize((T,))
        file["v"] = V

    return hdf5(path, fill)


@ARRAYS.common(".h5")
def hdf5_big_endian(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(u=U.astype(">f8"), v=COUNTS.astype(">i2")))


@ARRAYS.odd(".h5")
def hdf5_float16_and_large_integers(path: Path) -> Reference:
    large = 2**53 + np.arange(T)
    return hdf5(path, lambda file: file.update(u=V.astype(np.float16), v=large))


@ARRAYS.odd(".h5")
def hdf5_uint64(path: Path) -> Reference:
    large = np.uint64(2**64 - 1) - np.arange(T, dtype=np.uint64)
    return hdf5(path, lambda file: file.update(u=U, v=large))


@ARRAYS.common(".h5")
def hdf5_booleans(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(u=U, v=V > 0))


@ARRAYS.odd(".h5")
def hdf5_enumeration(path: Path) -> Reference:
    def fill(file: h5py.File) -> None:
        kind = h5py.enum_dtype({"N": 1, "V": 5}, np.uint8)
        file["u"] = U
        file.create_dataset("v", data=np.where(V > 0, 1, 5).astype(np.uint8), dtype=kind)

    return hdf5(path, fill)


@ARRAYS.common(".h5")
def hdf5_compound(path: Path) -> Reference:
    table = np.zeros(T, [("u", "f8"), ("v", "<i2")])
    table["u"], table["v"] = U, COUNTS
    with h5py.File(path, "w") as file:
        file["table"] = table
    with h5py.File(path) as file:
        values: Any = {name: item[()] for name, item in file.items()}["table"]
    return Reference({"u": values["u"], "v": values["v"]})


@ARRAYS.common(".h5")
def hdf5_text_of_any_length(path: Path) -> Reference:
    labels = ["N", "Größe", "N"] * 4
    return hdf5(path, lambda file: file.update(u=U, label=labels), texts={"label": labels})


@ARRAYS.odd(".h5")
def hdf5_text_of_fixed_length(path: Path) -> Reference:
    labels = ["N", "V", "N"] * 4
    return hdf5(
        path, lambda file: file.update(u=U, label=np.array(labels, "S4")), texts={"label": labels}
    )


@ARRAYS.odd(".h5")
def hdf5_scalar_beside(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(rate=250.0, u=U, v=V))


@ARRAYS.odd(".h5")
def hdf5_group(path: Path) -> Reference:
    with h5py.File(path, "w") as file:
        file["g/u"], file["g/v"] = U, V
    return Reference({"g/u": U, "g/v": V})


@ARRAYS.odd(".h5")
def hdf5_three_axes(path: Path) -> Reference:
    return hdf5(path, lambda file: file.update(x=np.arange(T * 6.0).reshape(T, 2, 3)))


@ARRAYS.odd(".h5")
def hdf5_external_link(path: Path) -> Reference:
    with h5py.File(path.with_name("other.h5"), "w") as other:
        other["far"] = V
    with h5py.File(path, "w") as file:
        file["u"], file["v"] = U, h5py.ExternalLink("other.h5", "far")
    return Reference({"u": U, "v": V})


@ARRAYS.odd(".h5")
def hdf5_unwritten(path: Path) -> Reference:
    def fill(file: h5py.File) -> None:
        file["u"] = U
        file.create_dataset("v", (T,), "f4", fillvalue=-9, chunks=(4,))

    return hdf5(path, fill)


# netCDF


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


@ARRAYS.common(".nc")
def netcdf_classic(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF3_CLASSIC")


@ARRAYS.common(".nc")
def netcdf_offset_64(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF3_64BIT_OFFSET")


@ARRAYS.odd(".nc")
def netcdf_data_64(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF3_64BIT_DATA")


@ARRAYS.common(".nc")
def netcdf_4(path: Path) -> Reference:
    return netcdf(path, pair)


@ARRAYS.common(".nc")
def netcdf_4_classic(path: Path) -> Reference:
    return netcdf(path, pair, "NETCDF4_CLASSIC")


@ARRAYS.common(".nc")
def netcdf_classic_records(path: Path) -> Reference:
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("time", None)
        file.createVariable("u", "f8", ("time",))[:] = U
        file.createVariable("v", "i2", ("time",))[:] = COUNTS
        file.createVariable("w", "i1", ("time",))[:] = COUNTS
    with netCDF4.Dataset(path) as file:
        return Reference({name: _filled(file[name][:]) for name in ("u", "v", "w")})


@ARRAYS.common(".nc")
def netcdf_packed(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, scale_factor=0.01, add_offset=273.15)

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_packed_with_fill_value(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        values = np.where(COUNTS == 2, -32768, COUNTS)
        variable(file, "v", "i2", values, fill=-32768, scale_factor=0.5, add_offset=100.0)

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@ARRAYS.common(".nc")
def netcdf_packed_float32(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, scale_factor=np.float32(0.1), add_offset=np.float32(7))

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_scale_alone(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i4", COUNTS, scale_factor=0.25)

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_fill_value(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 1, -999.0, U), fill=-999.0)
        variable(file, "v", "i4", np.where(COUNTS == 2, -999, COUNTS), fill=-999)

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_default_fill_of_integers(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i4", np.where(COUNTS == 2, netCDF4.default_fillvals["i4"], COUNTS))

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_default_fill_of_floats(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 2, netCDF4.default_fillvals["f8"], U))
        variable(file, "v", "f4", V)

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@ARRAYS.odd(".nc")
def netcdf_unwritten(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        file.createVariable("v", "i2", ("time",))[:5] = COUNTS[:5]

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_default_fill_of_bytes(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i1", np.where(COUNTS == 2, -127, COUNTS))

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_missing_value(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 1, 1e20, U), missing_value=1e20)
        variable(file, "v", "i2", np.where(COUNTS == 2, -99, COUNTS), missing_value=np.int16(-99))

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_fill_value_nan(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", np.where(COUNTS == 1, np.nan, U), fill=np.nan)
        variable(file, "v", "f4", V, fill=np.float32(1e20), missing_value=np.float32(1e20))

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_missing_values(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, missing_value=np.array([2, 5], np.int16))

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_valid_range(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, valid_range=np.array([-2, 4], np.int16))

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_valid_min_of_packed(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U, valid_max=7.5)
        variable(file, "v", "i2", COUNTS, valid_min=np.int16(-1), scale_factor=0.5)

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@ARRAYS.odd(".nc")
def netcdf_unsigned(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i1", COUNTS, _Unsigned="true")

    return netcdf(path, fill, "NETCDF3_CLASSIC")


@ARRAYS.odd(".nc")
def netcdf_unsigned_packed(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i2", COUNTS, fill=-1, _Unsigned="true", scale_factor=0.5)

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_unsigned_types(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "u1", COUNTS + 240)
        variable(file, "v", "u2", np.arange(T) + 60_000)

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_large_integers(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "v", "i8", 2**53 + np.arange(T))

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_times(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        variable(file, "time", "f8", np.arange(T) / 2, units="hours since 2020-01-01 00:00:00")

    start = np.datetime64("2020-01-01", "m")
    return netcdf(path, fill, times=start + 30 * np.arange(T), refused=["time"])


@ARRAYS.odd(".nc")
def netcdf_times_in_days_with_zone(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        variable(file, "time", "i4", np.arange(T), units="days since 1899-12-31 00:00:00 +01:00")

    start = np.datetime64("1899-12-30T23", "h")
    return netcdf(path, fill, "NETCDF3_CLASSIC", times=start + 24 * np.arange(T), refused=["time"])


@ARRAYS.odd(".nc")
def netcdf_calendar_without_leap_days(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        units = "days since 2020-02-27"
        variable(file, "time", "i4", np.arange(T), units=units, calendar="noleap")

    days = ["2020-02-27", "2020-02-28", *(f"2020-03-{day:02}" for day in range(1, 11))]
    return netcdf(path, fill, times=np.array(days, "datetime64[D]"), refused=["time"])


@ARRAYS.common(".nc")
def netcdf_coordinate_of_numbers(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        variable(file, "time", "f8", np.arange(T) * 0.1)

    return netcdf(path, fill)


@ARRAYS.common(".nc")
def netcdf_stations(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        file.createDimension("station", 2)
        file.createVariable("x", "f4", ("time", "station"), zlib=True)[:] = BOTH

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_scalar_beside(path: Path) -> Reference:
    def fill(file: netCDF4.Dataset) -> None:
        pair(file)
        file.createVariable("height", "f8", ())[:] = 2.0

    return netcdf(path, fill)


@ARRAYS.odd(".nc")
def netcdf_text(path: Path) -> Reference:
    labels = ["N", "Größe", "N"] * 4

    def fill(file: netCDF4.Dataset) -> None:
        variable(file, "u", "f8", U)
        variable(file, "label", str, np.array(labels, object))

    return netcdf(path, fill, texts={"label": labels})


# Zarr


def zarr_columns(path: Path) -> Reference:
    """The arrays of a group by their names."""
    return Reference({name: array[:] for name, array in sorted(zarr.open_group(path).arrays())})


@ARRAYS.common(".zarr")
def zarr_matrix(path: Path) -> Reference:
    zarr.create_array(path, data=BOTH, chunks=(5, 2))
    return matrix(zarr.open_array(path, mode="r")[:])


@ARRAYS.common(".zarr")
def zarr_version_2(path: Path) -> Reference:
    zarr.create_array(path, data=BOTH, chunks=(5, 1), zarr_format=2, order="F")
    return matrix(zarr.open_array(path, mode="r")[:])


@ARRAYS.common(".zarr")
def zarr_group(path: Path) -> Reference:
    group = zarr.open_group(path, mode="w")
    group.create_array("u", data=U, chunks=(4,))
    group.create_array("v", data=V.astype(np.float32), chunks=(7,))
    return zarr_columns(path)


@ARRAYS.odd(".zarr")
def zarr_shards(path: Path) -> Reference:
    zarr.create_array(path, data=BOTH, chunks=(3, 2), shards=(6, 2))
    return matrix(zarr.open_array(path, mode="r")[:])


@ARRAYS.odd(".zarr")
def zarr_unwritten_chunks(path: Path) -> Reference:
    array = zarr.create_array(path, shape=(T, 2), dtype="f4", chunks=(4, 2), fill_value=-9)
    array[:4] = BOTH[:4]
    return matrix(zarr.open_array(path, mode="r")[:])


@ARRAYS.odd(".zarr")
def zarr_big_endian_booleans_and_float16(path: Path) -> Reference:
    group = zarr.open_group(path, mode="w")
    group.create_array("u", data=U.astype(">f4"))
    group.create_array("v", data=V > 0)
    group.create_array("w", data=V.astype(np.float16))
    return zarr_columns(path)


@ARRAYS.odd(".zarr")
def zarr_large_integers(path: Path) -> Reference:
    zarr.create_array(path, data=2**53 + np.arange(T), chunks=(5,))
    return matrix(zarr.open_array(path, mode="r")[:])


# NumPy


def npy(path: Path, array: Any) -> Reference:
    """Write and read an array by NumPy."""
    np.save(path, array)
    return matrix(np.load(path))


@ARRAYS.common(".npy")
def npy_column(path: Path) -> Reference:
    return npy(path, U)


@ARRAYS.common(".npy")
def npy_fortran(path: Path) -> Reference:
    return npy(path, np.asfortranarray(BOTH))


@ARRAYS.common(".npy")
def npy_big_endian(path: Path) -> Reference:
    return npy(path, BOTH.astype(">f4"))


@ARRAYS.common(".npy")
def npy_float16(path: Path) -> Reference:
    return npy(path, BOTH.astype(np.float16))


@ARRAYS.common(".npy")
def npy_booleans(path: Path) -> Reference:
    return npy(path, BOTH > 0)


@ARRAYS.odd(".npy")
def npy_longdouble(path: Path) -> Reference:
    return npy(path, BOTH.astype(np.longdouble))


@ARRAYS.odd(".npy")
def npy_large_integers(path: Path) -> Reference:
    return npy(path, 2**53 + np.arange(T))


@ARRAYS.odd(".npy")
def npy_uint64(path: Path) -> Reference:
    return npy(path, np.uint64(2**64 - 1) - np.arange(T, dtype=np.uint64))


@ARRAYS.common(".npy")
def npy_header_3(path: Path) -> Reference:
    table = np.zeros(T, [("Größe", "f8"), ("温度", "i2")])
    table["Größe"], table["温度"] = U, COUNTS
    with path.open("wb") as file:
        np.lib.format.write_array(file, table, version=(3, 0))
    values = np.load(path)
    return Reference({name: values[name] for name in ("Größe", "温度")})


@ARRAYS.common(".npy")
def npy_fields(path: Path) -> Reference:
    table = np.zeros(T, [("u", "f4"), ("v", ">i4")])
    table["u"], table["v"] = U, COUNTS
    np.save(path, table)
    values = np.load(path)
    return Reference({"u": values["u"], "v": values["v"]})


@ARRAYS.common(".npz")
def npz_columns(path: Path) -> Reference:
    np.savez(path, u=U, v=V.astype(np.float32), w=COUNTS)
    with np.load(path) as file:
        return Reference({name: file[name] for name in ("u", "v", "w")})


@ARRAYS.common(".npz")
def npz_compressed(path: Path) -> Reference:
    np.savez_compressed(path, x=np.asfortranarray(BOTH), y=COUNTS)
    with np.load(path) as file:
        return Reference({name: file[name] for name in ("x", "y")})


@ARRAYS.odd(".npz")
def npz_without_names(path: Path) -> Reference:
    np.savez(path, U, V)
    with np.load(path) as file:
        return Reference({name: file[name] for name in ("arr_0", "arr_1")})


@ARRAYS.odd(".npz")
def npz_of_another_zip(path: Path) -> Reference:
    np.savez(path, u=U, v=V)
    plain = path.with_suffix(".zip")
    path.rename(plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with np.load(path) as file:
        return Reference({name: file[name] for name in ("u", "v")})


# Sound


def sound(path: Path, subtype: str, *, channels: int = 1, form: str | None = None) -> Reference:
    """Write a sound, and read it in float64."""
    samples = 0.7 * np.sin(np.outer(np.arange(400), np.arange(1, channels + 1)) * 0.05)
    soundfile.write(path, samples, 8000, subtype=subtype, format=form)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@ARRAYS.common(".wav")
def wav_pcm_16(path: Path) -> Reference:
    return sound(path, "PCM_16")


@ARRAYS.common(".wav")
def wav_pcm_16_stereo(path: Path) -> Reference:
    return sound(path, "PCM_16", channels=2)


@ARRAYS.common(".wav")
def wav_pcm_24(path: Path) -> Reference:
    return sound(path, "PCM_24", channels=3)


@ARRAYS.common(".wav")
def wav_pcm_32(path: Path) -> Reference:
    return sound(path, "PCM_32")


@ARRAYS.common(".wav")
def wav_float(path: Path) -> Reference:
    return sound(path, "FLOAT")


@ARRAYS.common(".wav")
def wav_double(path: Path) -> Reference:
    return sound(path, "DOUBLE")


@ARRAYS.common(".wav")
def wav_u8(path: Path) -> Reference:
    return sound(path, "PCM_U8")


@ARRAYS.odd(".wav")
def wav_ulaw(path: Path) -> Reference:
    return sound(path, "ULAW")


@ARRAYS.odd(".wav")
def wav_extensible(path: Path) -> Reference:
    return sound(path, "PCM_24", channels=6, form="WAVEX")


@ARRAYS.odd(".wav")
def wav_of_unknown_length(path: Path) -> Reference:
    sound(path, "PCM_16")
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"  # as programs write to a pipe
    path.write_bytes(content)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@ARRAYS.odd(".wav")
def wav_with_an_odd_chunk_first(path: Path) -> Reference:
    sound(path, "PCM_16")
    content = bytearray(path.read_bytes())
    content[12:12] = b"note\x03\x00\x00\x00abc\x00"
    content[4:8] = (len(content) - 8).to_bytes(4, "little")
    path.write_bytes(content)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@ARRAYS.odd(".wav")
def wav_rf64(path: Path) -> Reference:
    return sound(path, "PCM_16", form="RF64")


@ARRAYS.odd(".wav")
def wav_with_a_chunk_after_the_data(path: Path) -> Reference:
    sound(path, "PCM_16")
    content = bytearray(path.read_bytes()) + b"LIST\x04\x00\x00\x00INFO"
    content[4:8] = (len(content) - 8).to_bytes(4, "little")
    path.write_bytes(content)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@ARRAYS.common(".flac")
def flac_16(path: Path) -> Reference:
    return sound(path, "PCM_16", channels=2)


@ARRAYS.common(".flac")
def flac_24(path: Path) -> Reference:
    return sound(path, "PCM_24")


@ARRAYS.odd(".ogg")
def ogg_vorbis(path: Path) -> Reference:
    return sound(path, "VORBIS", channels=2)


# EDF and BDF


def edf(path: Path, *signals: Any, **options: Any) -> Reference:
    """Write signals, and read them in their physical units."""
    kind = edfio.Bdf if path.suffix == ".bdf" else edfio.Edf
    kind(signals, **options).write(path)
    return edf_values(path)


def edf_values(path: Path) -> Reference:
    """The signals of a file by their labels."""
    read = edfio.read_bdf if path.suffix == ".bdf" else edfio.read_edf
    return Reference({signal.label: np.array(signal.data) for signal in read(path).signals})


def wave(kind: Any = edfio.EdfSignal, **options: Any) -> Any:
    """A signal of four seconds at 100 samples a second."""
    samples = 80 * np.sin(np.arange(400) * 0.11)
    return kind(samples, 100, **{"label": "EEG Fpz-Cz", "physical_dimension": "uV"} | options)


@ARRAYS.common(".edf")
def edf_two_signals(path: Path) -> Reference:
    return edf(path, wave(), wave(label="EOG", physical_range=(-250, 250)))


@ARRAYS.odd(".edf")
def edf_inverted_range(path: Path) -> Reference:
    edf(path, wave(physical_range=(-250, 250)), wave(label="EOG"))
    content = bytearray(path.read_bytes())
    content[464:472], content[480:488] = content[480:488], content[464:472]
    path.write_bytes(content)
    return edf_values(path)


@ARRAYS.common(".edf")
def edf_with_annotations(path: Path) -> Reference:
    notes = [edfio.EdfAnnotation(1.5, 0.5, "blink"), edfio.EdfAnnotation(3, None, "Größe")]
    return edf(path, wave(), wave(label="EOG"), annotations=notes)


@ARRAYS.common(".edf")
def edf_anonymised_date(path: Path) -> Reference:
    reference = edf(path, wave(), wave(label="EOG"))
    content = bytearray(path.read_bytes())
    content[168:184] = b"xx.xx.xx00.00.00"
    path.write_bytes(content)
    return reference


@ARRAYS.odd(".edf")
def edf_unknown_number_of_records(path: Path) -> Reference:
    reference = edf(path, wave(), wave(label="EOG"))
    content = bytearray(path.read_bytes())
    content[236:244] = b"-1      "
    path.write_bytes(content)
    return reference


@ARRAYS.odd(".edf")
def edf_records_of_half_a_second(path: Path) -> Reference:
    signals = wave(digital_range=(0, 255)), wave(label="EOG", digital_range=(-100, 32767))
    return edf(path, *signals, data_record_duration=0.5)


@ARRAYS.common(".bdf")
def bdf_two_signals(path: Path) -> Reference:
    return edf(path, wave(edfio.BdfSignal), wave(edfio.BdfSignal, label="Status"))


# WFDB


def record(path: Path, form: str, *, gain: float = 200, baseline: int = 0) -> Reference:
    """Write two signals of a record, and read them in their physical units."""
    signals = np.column_stack([np.sin(np.arange(60) * 0.3), np.cos(np.arange(60) * 0.2)]) * 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wfdb.wrsamp(
            path.stem,
            360,
            ["mV", "mV"],
            ["MLII", "V5"],
            p_signal=signals,
            fmt=[form, form],
            adc_gain=[gain, 100],
            baseline=[baseline, 0],
            write_dir=str(path.parent),
        )
    return record_values(path)


def record_values(path: Path) -> Reference:
    """The physical signals of a record by their names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values: Any = wfdb.rdrecord(str(path.with_suffix("")))
    return Reference(dict(zip(values.sig_name, values.p_signal.T, strict=True)))


@ARRAYS.common(".hea")
def wfdb_16(path: Path) -> Reference:
    return record(path, "16")


@ARRAYS.common(".hea")
def wfdb_212(path: Path) -> Reference:
    return record(path, "212")


@ARRAYS.odd(".hea")
def wfdb_80(path: Path) -> Reference:
    return record(path, "80", gain=100)


@ARRAYS.odd(".hea")
def wfdb_24_baseline(path: Path) -> Reference:
    return record(path, "24", gain=1234.5, baseline=1024)


@ARRAYS.odd(".hea")
def wfdb_32(path: Path) -> Reference:
    return record(path, "32", gain=100_000)


@ARRAYS.common(".hea")
def wfdb_invalid_samples(path: Path) -> Reference:
    record(path, "16")
    samples = np.fromfile(path.with_suffix(".dat"), "<i2")
    samples[[4, 7, 31]] = -32768
    samples.tofile(path.with_suffix(".dat"))
    return record_values(path)


@ARRAYS.odd(".hea")
def wfdb_comments_and_no_rate_in_signals(path: Path) -> Reference:
    record(path, "16")
    header = path.read_text().splitlines()
    path.write_text("\r\n".join(["# Größe", *header, "# age: 71", ""]))
    return record_values(path)


@ARRAYS.common(".hea")
def wfdb_two_signal_files(path: Path) -> Reference:
    record(path, "16")
    samples = np.fromfile(path.with_suffix(".dat"), "<i2").reshape(-1, 2)
    for number in range(2):
        samples[:, number].tofile(path.with_name(f"part{number}.dat"))
    first, *signals = path.read_text().splitlines()
    for number, line in enumerate(signals):
        signals[number] = f"part{number}.dat {line.split(' ', 1)[1]}"
    path.write_text("\n".join([first, *signals, ""]))
    return record_values(path)


@ARRAYS.odd(".hea")
def wfdb_segments(path: Path) -> Reference:
    for name in ("one", "two"):
        record(path.with_name(f"{name}.hea"), "16")
    path.write_text(f"{path.stem}/2 2 360 120\none 60\ntwo 60\n")
    return record_values(path)
