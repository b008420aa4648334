"""NumPy files, memory-mapped: `.npy`, and uncompressed members of `.npz`.

Compressed members are read whole.
"""

import io
import mmap
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import ArraysFile, ArrayView, MatrixColumns, with_fields
from throughtime.stream.formats.table import Array, FileArray, MappedFile, TableFile, unreadable

_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    KeyError,
    NotImplementedError,
    RuntimeError,
)


@dataclass(frozen=True)
class MappedArray(ArrayView):
    """An array in a memory-mapped file; pages that were read return to the system."""

    file: MappedFile

    def __getitem__(self, rows: slice, /) -> Array:
        values = self.array[rows]
        self.file.count_read(values.nbytes)
        return values


def open_npy(path: Path) -> TableFile:
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ...

    The fields of a structured vector are columns by their names.
    """
    with unreadable(f"{path}: not a readable .npy file", _UNREADABLE):
        mapped = MappedFile(path)
        with path.open("rb") as file:
            array = _array(file, 0, mapped.mapping)
    if array.dtype.names or array.dtype.kind == "M":
        return ArraysFile(path, _columns(path, {"0": MappedArray(array, mapped)}))
    _check(path, "the array", array)
    if array.ndim > 2:
        raise DataError(f"{path}: has shape {array.shape}, expected (steps,) or (steps, features)")
    return MatrixColumns(MappedArray(array if array.ndim == 2 else array.reshape(-1, 1), mapped))


def open_npz(path: Path) -> ArraysFile:
    """Every array is a column under its own name; a matrix is one wide column.

    All arrays need the same number of rows. Members that `np.savez` stored are memory-mapped; those
    of `np.savez_compressed` are read whole and stay in memory.
    """
    with unreadable(f"{path}: not a readable .npz file", _UNREADABLE):
        mapped = MappedFile(path)
        with path.open("rb") as file, zipfile.ZipFile(file) as members:
            arrays = {
                info.filename.removesuffix(".npy"): MappedArray(
                    _member(file, members, info, mapped.mapping), mapped
                )
                for info in members.infolist()
            }
    arrays = _columns(path, arrays)
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{path}: arrays of different lengths, {lengths}; all need one row per step"
        )
    return ArraysFile(path, arrays)


def _columns(path: Path, arrays: Mapping[str, MappedArray]) -> dict[str, FileArray]:
    """The arrays and fields, checked."""
    columns = with_fields(arrays)
    for name, array in columns.items():
        _check(path, f"array '{name}'", array)
    return columns


def _member(
    file: BinaryIO, members: zipfile.ZipFile, info: zipfile.ZipInfo, mapping: mmap.mmap
) -> Array:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:  # compressed or encrypted
        return np.lib.format.read_array(io.BytesIO(members.read(info)), allow_pickle=False)
    with members.open(info):  # checks that the local header is there and names the same member
        pass
    header = mapping[info.header_offset : info.header_offset + 30]
    skipped = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return _array(file, info.header_offset + skipped, mapping, info.file_size)


def _array(file: BinaryIO, offset: int, mapping: mmap.mmap, size: int | None = None) -> Array:
    """The array whose `.npy` bytes begin at `offset`, as a view of the mapping.

    It need not be aligned.
    """
    file.seek(offset)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} of the .npy format is unknown")
    read_header = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("holds Python objects")
    begin, needed = file.tell(), int(np.prod(shape, dtype=object)) * dtype.itemsize
    size = len(mapping) - begin if size is None else size - (begin - offset)
    if size < needed or needed < 0:
        raise ValueError(f"its header promises {needed} bytes of shape {shape}, it holds {size}")
    return np.ndarray(shape, dtype, buffer=mapping, offset=begin, order="F" if fortran else "C")


def _check(path: Path, what: str, array: FileArray) -> None:
    if not array.shape or array.dtype.kind not in "biufUSM":
        raise DataError(
            f"{path}: {what} has shape {array.shape} and type {array.dtype}, expected numbers or"
            " labels with one row per step"
        )
