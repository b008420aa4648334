"""NumPy files, memory-mapped: `.npy`, and uncompressed members of `.npz`.

Compressed members are read whole.
"""

import io
import mmap
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, Handle, MappedFile, rows_between

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


class NpyFile(NamedTuple):
    """The arrays of a file, as views of its mapped memory; that of an `.npy` file has no name."""

    arrays: dict[str, Array]
    file: MappedFile


def open_npy(path: Path) -> "NpyTable":
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ..."""
    handle = Handle(path, _map_npy)
    matrix = handle.get().arrays[""]
    return NpyTable(path, handle, tuple(map(str, range(matrix.shape[1]))), len(matrix))


def open_npz(path: Path) -> "NpyTable":
    """Every array is a column under its own name; a matrix is one wide column.

    All arrays need the same number of rows.

    Members that `np.savez` stored are memory-mapped; those of `np.savez_compressed` are read whole
    and stay in memory.
    """
    handle = Handle(path, _map_npz)
    lengths = {name: len(array) for name, array in handle.get().arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{path}: arrays of different lengths, {lengths}; all need one row per step"
        )
    return NpyTable(path, handle, tuple(lengths), next(iter(lengths.values()), 0))


@dataclass(frozen=True)
class NpyTable:
    """Rows of memory-mapped arrays."""

    path: Path
    handle: Handle[NpyFile]
    columns: tuple[str, ...]
    length: int
    rate: float | None = None

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.length)
        mapped = self.handle.get()
        matrix = mapped.arrays.get("")
        if matrix is not None:
            rows = matrix[start:stop]
            rows = rows if tuple(columns) == self.columns else rows[:, [int(c) for c in columns]]
        else:
            parts = [
                array[start:stop].reshape(stop - start, _width(array))
                for array in (mapped.arrays[c] for c in columns)
            ]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        arrays = mapped.arrays.values()
        mapped.file.count_read((stop - start) * sum(_width(a) * a.itemsize for a in arrays))
        return rows


def _width(array: Array) -> int:
    return int(np.prod(array.shape[1:]))


def _map_npy(path: Path) -> NpyFile:
    try:
        mapped = MappedFile(path)
        with path.open("rb") as file:
            array = _array(file, 0, mapped.mapping)
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a readable .npy file ({error}); is it cut short?") from error
    _check(path, "the array", array)
    if array.ndim > 2:
        raise DataError(f"{path}: has shape {array.shape}, expected (steps,) or (steps, features)")
    return NpyFile({"": array if array.ndim == 2 else array.reshape(-1, 1)}, mapped)


def _map_npz(path: Path) -> NpyFile:
    try:
        mapped = MappedFile(path)
        with path.open("rb") as file, zipfile.ZipFile(file) as members:
            arrays = {
                info.filename.removesuffix(".npy"): _member(file, members, info, mapped.mapping)
                for info in members.infolist()
            }
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a readable .npz file ({error}); is it cut short?") from error
    for name, array in arrays.items():
        _check(path, f"array '{name}'", array)
    return NpyFile(arrays, mapped)


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


def _check(path: Path, what: str, array: Array) -> None:
    if array.ndim == 0 or array.dtype.kind not in "biufUS":
        raise DataError(
            f"{path}: {what} has shape {array.shape} and type {array.dtype}, expected numbers or"
            " labels with one row per step"
        )
