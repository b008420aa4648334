"""NumPy files, memory-mapped: `.npy`, and uncompressed members of `.npz`.

Compressed members are read whole.
"""

import io
import mmap
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import ArraysFile
from throughtime.stream.formats.table import (
    Array,
    MappedFile,
    TableFile,
    unreadable,
)

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


class NpyFile(TableFile):
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ..."""

    def __init__(self, path: Path) -> None:
        with unreadable(f"{path}: not a readable .npy file", _UNREADABLE):
            self._file = MappedFile(path)
            with path.open("rb") as file:
                array = _array(file, 0, self._file.mapping)
        _check(path, "the array", array)
        if array.ndim > 2:
            raise DataError(
                f"{path}: has shape {array.shape}, expected (steps,) or (steps, features)"
            )
        self._matrix = array if array.ndim == 2 else array.reshape(-1, 1)
        self.length, width = self._matrix.shape
        self.columns = tuple(map(str, range(width)))

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        rows = self._matrix[start:stop]
        self._file.count_read(rows.nbytes)
        return rows if tuple(columns) == self.columns else rows[:, [int(c) for c in columns]]


class NpzFile(ArraysFile):
    """Every array is a column under its own name; a matrix is one wide column.

    All arrays need the same number of rows.

    Members that `np.savez` stored are memory-mapped; those of `np.savez_compressed` are read whole
    and stay in memory.
    """

    def __init__(self, path: Path) -> None:
        with unreadable(f"{path}: not a readable .npz file", _UNREADABLE):
            self._file = MappedFile(path)
            with path.open("rb") as file, zipfile.ZipFile(file) as members:
                arrays = {
                    info.filename.removesuffix(".npy"): _member(
                        file, members, info, self._file.mapping
                    )
                    for info in members.infolist()
                }
        for name, array in arrays.items():
            _check(path, f"array '{name}'", array)
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"{path}: arrays of different lengths, {lengths}; all need one row per step"
            )
        super().__init__(path, arrays)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        rows = super().read(start, stop, columns)
        self._file.count_read(rows.nbytes)
        return rows


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
