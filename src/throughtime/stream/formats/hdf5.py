"""HDF5 through h5py: the datasets' names and shapes when opened, then slices of rows."""

from pathlib import Path

from throughtime.errors import DataError, MissingExtraError
from throughtime.stream.formats._array_file import ArrayFileTable, Arrays, open_array_file

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_hdf5(path: Path) -> ArrayFileTable:
    """Every vector or matrix of numbers, at any depth, is a column named by its path: `u`,
    `group/y`.

    All columns have the length of the longest dataset; shorter ones are none. Each process opens
    the file for itself.

    Raises:
        MissingExtraError: h5py is not installed.
        DataError: the file is no HDF5 file, cut short, or holds no such dataset.
    """
    return open_array_file(path, _opened)


def refuse_cut_short(path: Path) -> None:
    """Compares a file with the end that its superblock names (HDF5 File Format Specification,
    II.A).

    The library does so too, but not where it has the same file open already.
    """
    with path.open("rb") as file:
        head = file.read(96)
    if head[:8] != SIGNATURE:
        return  # none, or one behind a block of the user's: the library looks for it
    if len(head) < 96:
        raise DataError(
            f"{path}: not a readable HDF5 file, for it ends after {len(head)} bytes; the file is"
            " cut short"
        )
    version = head[8]
    width, at = (head[13], 24 + 4 * version) if version < 2 else (head[9], 12)
    end = int.from_bytes(head[at + 2 * width : at + 3 * width], "little")
    if path.stat().st_size < end:
        raise DataError(
            f"{path}: holds {path.stat().st_size} bytes, its header promises {end}; the file is cut"
            " short"
        )


def _opened(path: Path) -> Arrays:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(
            f"{path}: HDF5 needs h5py; pip install 'throughtime[hdf5]'"
        ) from error
    refuse_cut_short(path)
    arrays: dict[str, h5py.Dataset] = {}

    def note(name: str, found: object) -> None:
        if isinstance(found, h5py.Dataset) and found.shape is not None:
            _ = found.dtype  # raises TypeError for a type that NumPy does not know
            arrays[name] = found

    try:
        h5py.File(path, "r").visititems(note)  # the datasets keep the file open
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a readable HDF5 file ({error}); is it cut short?") from error
    return arrays
