"""Odd but legal files of arrays, and what h5py, zarr and NumPy read in them."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from odd_files import BOTH, COUNTS, Reference, Register, T, U, V, matrix

ARRAYS = Register()

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


@ARRAYS.odd(".h5")
def hdf5_compound(path: Path) -> Reference:
    table = np.zeros(T, [("u", "f8"), ("v", "<i2")])
    table["u"], table["v"] = U, COUNTS
    with h5py.File(path, "w") as file:
        file["table"] = table
    with h5py.File(path) as file:
        values: Any = {name: item[()] for name, item in file.items()}["table"]
    return Reference({"u": values["u"], "v": values["v"]})


@ARRAYS.odd(".h5")  # h5py has no type of NumPy for it
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


@ARRAYS.odd(".npy")
def npy_header_3(path: Path) -> Reference:
    table = np.zeros(T, [("Größe", "f8"), ("温度", "i2")])
    table["Größe"], table["温度"] = U, COUNTS
    with path.open("wb") as file:
        np.lib.format.write_array(file, table, version=(3, 0))
    values = np.load(path)
    return Reference({name: values[name] for name in ("Größe", "温度")})


@ARRAYS.odd(".npy")
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
