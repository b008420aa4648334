"""NumPy files: `.npy` memory-mapped, `.npz` read whole (its members are compressed or unaligned)."""

import mmap
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, ArrayTable

RELEASE_AFTER = 32 * 2**20  # bytes of a mapped file read before its pages are given back


def open_npy(path: Path) -> "MappedTable":
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ..."""
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable .npy file ({error}); is it cut short?") from error
    _check(path, "the array", array)
    if array.ndim > 2:
        raise DataError(f"{path}: has shape {array.shape}, expected (steps,) or (steps, features)")
    return MappedTable(path, array if array.ndim == 2 else array.reshape(-1, 1))


@dataclass
class MappedTable:
    """A memory-mapped matrix that gives the pages it has read back to the system, so that memory stays flat."""

    path: Path
    array: Array
    _held: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.array.shape[1])))

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        rows = self.array[start:stop]
        self._held += rows.nbytes
        if self._held > RELEASE_AFTER:
            self._release()
        return rows if tuple(columns) == self.columns else rows[:, [int(c) for c in columns]]

    def _release(self) -> None:
        """Arrays handed out before stay valid: the system reads their pages again where they are touched."""
        mapped = self.array
        while not isinstance(mapped, mmap.mmap) and mapped is not None:
            mapped = mapped.base
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
        self._held = 0


def open_npz(path: Path) -> ArrayTable:
    """Every array is a column under its own name; all need the same number of rows."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as members:
            arrays = {name: members[name] for name in members.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable .npz file ({error}); is it cut short?") from error
    for name, array in arrays.items():
        _check(path, f"array '{name}'", array)
    if len({len(array) for array in arrays.values()}) > 1:
        raise DataError(f"{path}: arrays of different lengths, { {n: len(a) for n, a in arrays.items()} }; all need one row per step")
    return ArrayTable(path, arrays)


def _check(path: Path, what: str, array: Array) -> None:
    if array.ndim == 0 or array.dtype.kind not in "biufUS":
        raise DataError(f"{path}: {what} has shape {array.shape} and type {array.dtype}, expected numbers or labels with one row per step")
