"""NumPy files: `.npy` memory-mapped, the members of `.npz` loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import ArraysFile, MatrixColumns, with_fields
from throughtime.stream.formats.table import FileArray, TableFile, unreadable


def open_npy(path: Path) -> TableFile:
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ...

    The fields of a structured vector are columns by their names.
    """
    with unreadable(f"{path}: not a readable .npy file"):
        array: Any = np.lib.format.open_memmap(path, mode="r")
    columns = _columns(path, {"0": array})
    if array.dtype.names or array.dtype.kind == "M":
        return ArraysFile(path, columns)
    if array.ndim > 2:
        raise DataError(f"{path}: has shape {array.shape}, expected (steps,) or (steps, features)")
    return MatrixColumns(array if array.ndim == 2 else array[:, np.newaxis])


def open_npz(path: Path) -> ArraysFile:
    """Every array is a column under its own name; a matrix is one wide column.

    All arrays need the same number of rows. They are loaded: save large ones as `.npy`.
    """
    with unreadable(f"{path}: not a readable .npz file"), path.open("rb") as file:
        members: Any = np.load(file)  # of a path, it leaves a damaged file open
        columns = _columns(path, dict(members))
    lengths = {name: array.shape[0] for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{path}: arrays of different lengths, {lengths}; all need one row per step"
        )
    return ArraysFile(path, columns)


def _columns(path: Path, arrays: Mapping[str, FileArray]) -> dict[str, FileArray]:
    """The arrays and fields, checked."""
    columns = with_fields(arrays)
    for name, array in columns.items():
        if not array.shape or array.dtype.kind not in "biufUSM":
            raise DataError(
                f"{path}: array '{name}' has shape {array.shape} and type {array.dtype}, expected"
                " numbers or labels with one row per step"
            )
    return columns
