"""File formats, one short file each, behind one protocol: length, columns, lazy `read`."""

from pathlib import Path

from throughtime.errors import DataError
from throughtime.stream.formats import csv, npy, parquet, wav
from throughtime.stream.formats.table import Table

__all__ = ["SUFFIXES", "Table", "open_table"]

_OPENERS = {
    ".csv": csv.open_csv,
    ".npy": npy.open_npy,
    ".npz": npy.open_npz,
    ".parquet": parquet.open_parquet,
    ".wav": wav.open_wav,
}
SUFFIXES = tuple(_OPENERS)


def open_table(path: Path) -> Table:
    """Opens a recording's file by its suffix; reads no more than its header where the format allows.

    Raises:
        DataError: no such file, an unknown suffix, or a file that is cut short or unreadable.
        MissingExtraError: the format needs an extra that is not installed.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected one file")
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise DataError(f"{path}: the format '{path.suffix}' is unknown, expected one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return opener(path)
