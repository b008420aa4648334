"""HDF5, by h5py: the names and shapes of datasets when opened, then slices of rows."""

from pathlib import Path
from typing import Any

from throughtime.errors import DataError
from throughtime.stream.formats._array_file import ArrayFileTable, Arrays, open_array_file
from throughtime.stream.formats.table import import_extra

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_hdf5(path: Path) -> ArrayFileTable:
    """Every vector or matrix of numbers is a column named by its path: `u`, `group/y`.

    All columns have the length of the longest dataset; shorter datasets are no columns. Each
    process opens the file for itself.

    Raises:
        MissingExtraError: h5py is not installed.
        DataError: the file is no HDF5 file, cut short, or holds no such dataset.
    """
    return open_array_file(path, _opened)


def refuse_cut_short(path: Path) -> None:
    """Refuse a file that ends before its superblock says (HDF5 File Format Specification, II.A).

    The library checks this too, but not where it has the same file open already.
    """
    with path.open("rb") as file:
        head = file.read(96)
    if head[:8] != SIGNATURE:
        return  # no HDF5, or after a block of the user's: the library searches for it
    if len(head) < 96:
        raise DataError(
            f"{path}: not a readable HDF5 file, for it ends after {len(head)} bytes; the file is"
            " cut short"
        )
    version = head[8]
    width, start = (head[13], 24 + 4 * version) if version < 2 else (head[9], 12)
    end = int.from_bytes(head[start + 2 * width : start + 3 * width], "little")
    if path.stat().st_size < end:
        raise DataError(
            f"{path}: holds {path.stat().st_size} bytes, its header promises {end}; the file is cut"
            " short"
        )


def _opened(path: Path) -> Arrays:
    h5py = import_extra("h5py", path, "HDF5", "hdf5")
    refuse_cut_short(path)
    arrays: dict[str, Any] = {}

    def add(name: str, member: Any) -> None:
        if isinstance(member, h5py.Dataset) and member.shape is not None:
            _ = member.dtype  # raises TypeError for a type that NumPy does not have
            arrays[name] = member

    try:
        h5py.File(path, "r").visititems(add)  # the datasets keep the file open
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a readable HDF5 file ({error}); is it cut short?") from error
    return arrays
