"""NumPy files: `.npy` memory-mapped, `.npz` read whole (its members are compressed or unaligned)."""

import zipfile
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, ArrayTable


def open_npy(path: Path) -> ArrayTable:
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ..."""
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable .npy file ({error}); is it cut short?") from error
    _check(path, "the array", array)
    if array.ndim > 2:
        raise DataError(f"{path}: has shape {array.shape}, expected (steps,) or (steps, features)")
    if array.ndim == 1:
        return ArrayTable(path, {"0": array})
    return ArrayTable(path, {str(i): array[:, i] for i in range(array.shape[1])})


def open_npz(path: Path) -> ArrayTable:
    """Every array is a column under its own name; all need the same number of rows."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as members:
            arrays = {name: members[name] for name in members.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz file ({error}); is it cut short?") from error
    for name, array in arrays.items():
        _check(path, f"array '{name}'", array)
    if len({len(array) for array in arrays.values()}) > 1:
        raise DataError(f"{path}: arrays of different lengths, { {n: len(a) for n, a in arrays.items()} }; all need one row per step")
    return ArrayTable(path, arrays)


def _check(path: Path, what: str, array: Array) -> None:
    if array.ndim == 0 or array.dtype.kind not in "biufUS":
        raise DataError(f"{path}: {what} has shape {array.shape} and type {array.dtype}, expected numbers or labels with one row per step")
