"""Zarr folders: the names and shapes of arrays when opened, then the pieces with the rows."""

from pathlib import Path
from typing import Any

from throughtime.errors import DataError
from throughtime.stream.formats._array_file import ArrayFileTable, Arrays, open_array_file
from throughtime.stream.formats.table import import_extra

METADATA = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def open_zarr(path: Path) -> ArrayFileTable:
    """Every vector or matrix of numbers is a column named by its path; a single array is `0`.

    All columns have the length of the longest array; shorter arrays (coordinates of features) are
    no columns. A piece without a file reads as the array's fill value, as the format defines it: a
    lost piece cannot be told from an empty one.

    Raises:
        MissingExtraError: zarr is not installed.
        DataError: the folder is no Zarr group or array, or holds no such array.

    Cost: a whole piece of an array is decoded for any row in it: write pieces of some 100,000
    numbers.
    """
    return open_array_file(path, _opened)


def files(path: Path) -> tuple[Path, ...]:
    """The files that must not change: the metadata of the group and of its own arrays."""
    metadata = (
        folder / name
        for folder in (path, *sorted(p for p in path.iterdir() if p.is_dir()))
        for name in METADATA
    )
    return tuple(file for file in metadata if file.is_file())


def _opened(path: Path) -> Arrays:
    zarr = import_extra("zarr", path, "Zarr", "zarr")
    try:
        root: Any = zarr.open(path, mode="r")
        if isinstance(root, zarr.Array):
            return {"0": root}
        members = root.members(max_depth=None)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{path}: not a readable Zarr folder ({error}); is it cut short?"
        ) from error
    return {name: member for name, member in members if isinstance(member, zarr.Array)}
