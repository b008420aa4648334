"""Odd but legal files of arrays, and what h5py, zarr and NumPy read in them."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from odd_files import BOTH, COUNTS, Reference, T, U, V, Writer, cases, matrix

LARGE = 2**53 + np.arange(T)
UNSIGNED = np.uint64(2**64 - 1) - np.arange(T, dtype=np.uint64)
RECORDS = np.zeros(T, [("u", "f8"), ("v", ">i2")])
RECORDS["u"], RECORDS["v"] = U, COUNTS
LABELS = ["N", "Größe", "N"] * 4


def fields(array: Any) -> Reference:
    return Reference({name: array[name] for name in array.dtype.names})


def hdf5(fill: Callable[[h5py.File], object] | None = None, **arrays: Any) -> Writer:
    """Arrays, and those at the root that are numbers or text."""

    def write(path: Path) -> Reference:
        with h5py.File(path, "w") as file:
            file.update(arrays)
            if fill is not None:
                fill(file)
        with h5py.File(path) as file:
            read: Any = {name: item[()] for name, item in file.items()}
        if "table" in read:
            return fields(read["table"])
        return Reference(
            {name: array for name, array in read.items() if array.dtype.kind in "biuf"},
            {
                name: [text.decode() for text in array.tolist()]
                for name, array in read.items()
                if array.dtype.kind in "SO"
            },
        )

    return write


def compressed(file: h5py.File) -> None:
    file.create_dataset("u", data=U, chunks=(5,), compression="gzip", shuffle=True)
    file.create_dataset("v", data=V, chunks=(7,), compression="lzf", fletcher32=True)


def growing(file: h5py.File) -> None:
    column = file.create_dataset("u", (4,), "f8", maxshape=(None,), chunks=(4,), fillvalue=-1)
    column[:] = U[:4]
    column.resize((T,))


def enumeration(file: h5py.File) -> None:
    kind = h5py.enum_dtype({"N": 1, "V": 5}, np.uint8)
    file.create_dataset("v", data=np.where(V > 0, 1, 5).astype(np.uint8), dtype=kind)


def external(file: h5py.File) -> None:
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        other["far"] = V
    file["v"] = h5py.ExternalLink("other.h5", "far")


def unwritten(file: h5py.File) -> None:
    file.create_dataset("v", (T,), "f4", fillvalue=-9, chunks=(4,))


def zarr_array(**options: Any) -> Writer:
    def write(path: Path) -> Reference:
        settings: dict[str, Any] = {"data": BOTH} | options
        zarr.create_array(path, **settings)
        return matrix(zarr.open_array(path, mode="r")[:])

    return write


def zarr_group(**arrays: Any) -> Writer:
    def write(path: Path) -> Reference:
        group = zarr.open_group(path, mode="w")
        for name, array in arrays.items():
            group.create_array(name, data=array, chunks=(4,))
        return Reference({name: array[:] for name, array in sorted(zarr.open_group(path).arrays())})

    return write


def zarr_unwritten(path: Path) -> Reference:
    array = zarr.create_array(path, shape=(T, 2), dtype="f4", chunks=(4, 2), fill_value=-9)
    array[:4] = BOTH[:4]
    return matrix(zarr.open_array(path, mode="r")[:])


def zarr_times(path: Path) -> Reference:
    hours = np.datetime64("2020-03-28T12:00:00") + np.arange(T) * np.timedelta64(3600, "s")
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, values in (("when", hours), ("x", BOTH)):
        group.create_array(name, shape=values.shape, dtype=values.dtype)[...] = values
    return Reference({"x": BOTH}, times=hours, refused=["when"])


def npy(array: Any) -> Writer:
    def write(path: Path) -> Reference:
        np.save(path, array)
        return fields(np.load(path)) if array.dtype.names else matrix(np.load(path))

    return write


def npz(*arrays: Any, save: Callable[..., None] = np.savez, **named: Any) -> Writer:
    def write(path: Path) -> Reference:
        save(path, *arrays, **named)
        with np.load(path) as file:
            return Reference(dict(file))

    return write


def npz_of_another_zip(path: Path) -> Reference:
    reference = npz(u=U, v=V)(path)
    plain = path.rename(path.with_suffix(".zip"))
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return reference


COMMON: dict[str, Writer] = {
    "hdf5_columns.h5": hdf5(u=U, v=V.astype(np.float32)),
    "hdf5_matrix.hdf5": hdf5(x=BOTH, y=COUNTS),
    "hdf5_compressed_chunks.h5": hdf5(compressed),
    "hdf5_growing.h5": hdf5(growing, v=V),
    "hdf5_big_endian.h5": hdf5(u=U.astype(">f8"), v=COUNTS.astype(">i2")),
    "hdf5_booleans.h5": hdf5(u=U, v=V > 0),
    "zarr_matrix.zarr": zarr_array(chunks=(5, 2)),
    "zarr_version_2.zarr": zarr_array(chunks=(5, 1), zarr_format=2, order="F"),
    "zarr_times.zarr": zarr_times,
    "zarr_group.zarr": zarr_group(u=U, v=V.astype(np.float32)),
    "npy_column.npy": npy(U),
    "npy_fortran.npy": npy(np.asfortranarray(BOTH)),
    "npy_big_endian.npy": npy(BOTH.astype(">f4")),
    "npy_float16.npy": npy(BOTH.astype(np.float16)),
    "npy_booleans.npy": npy(BOTH > 0),
    "npz_columns.npz": npz(u=U, v=V.astype(np.float32), w=COUNTS),
    "npz_compressed.npz": npz(x=np.asfortranarray(BOTH), y=COUNTS, save=np.savez_compressed),
}
ODD: dict[str, Writer] = {
    "hdf5_float16_and_large_integers.h5": hdf5(u=V.astype(np.float16), v=LARGE),
    "hdf5_uint64.h5": hdf5(u=U, v=UNSIGNED),
    "hdf5_enumeration.h5": hdf5(enumeration, u=U),
    "hdf5_compound.h5": hdf5(table=RECORDS),
    "hdf5_text_of_any_length.h5": hdf5(u=U, label=LABELS),  # h5py has no type of NumPy for it
    "hdf5_text_of_fixed_length.h5": hdf5(u=U, label=np.array(["N", "V"] * 6, "S4")),
    "hdf5_external_link.h5": hdf5(external, u=U),
    "hdf5_unwritten.h5": hdf5(unwritten, u=U),
    "zarr_shards.zarr": zarr_array(chunks=(3, 2), shards=(6, 2)),
    "zarr_unwritten_chunks.zarr": zarr_unwritten,
    "zarr_other_types.zarr": zarr_group(u=U.astype(">f4"), v=V > 0, w=V.astype(np.float16)),
    "zarr_large_integers.zarr": zarr_array(data=LARGE, chunks=(5,)),
    "npy_longdouble.npy": npy(BOTH.astype(np.longdouble)),
    "npy_large_integers.npy": npy(LARGE),
    "npy_uint64.npy": npy(UNSIGNED),
    "npy_fields.npy": npy(RECORDS),
    "npz_without_names.npz": npz(U, V),
    "npz_of_another_zip.npz": npz_of_another_zip,
}
ARRAYS = cases(COMMON, ODD)
