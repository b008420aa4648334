"""File formats, one module each, behind one protocol: length, columns, lazy `read`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from throughtime.errors import DataError
from throughtime.stream.formats.arrays import open_hdf5, open_netcdf, open_zarr, zarr_files
from throughtime.stream.formats.arrow import ArrowFile
from throughtime.stream.formats.audio import AudioFile
from throughtime.stream.formats.csv import CsvFile
from throughtime.stream.formats.csv_rows import CsvRowsFile
from throughtime.stream.formats.edf import EdfFile
from throughtime.stream.formats.npy import NpyFile, NpzFile
from throughtime.stream.formats.parquet import ParquetFile
from throughtime.stream.formats.table import FileTable, Table, TableFile
from throughtime.stream.formats.wfdb import WfdbFile, wfdb_files

__all__ = ["SUFFIXES", "Table", "open_table"]


def _same(path: Path) -> tuple[Path, ...]:
    return (path,)


class _Format(NamedTuple):
    open: Callable[[Path], TableFile]
    files: Callable[[Path], tuple[Path, ...]] = _same  # those that must not change while it is read
    folder: bool = False


_FORMATS = {
    ".arrow": _Format(ArrowFile),
    ".csv": _Format(CsvFile),
    ".edf": _Format(EdfFile),
    ".feather": _Format(ArrowFile),
    ".flac": _Format(AudioFile),
    ".h5": _Format(open_hdf5),
    ".hdf5": _Format(open_hdf5),
    ".hea": _Format(WfdbFile, wfdb_files),
    ".nc": _Format(open_netcdf),
    ".npy": _Format(NpyFile),
    ".npz": _Format(NpzFile),
    ".ogg": _Format(AudioFile),
    ".parquet": _Format(ParquetFile),
    ".wav": _Format(AudioFile),
    ".zarr": _Format(open_zarr, zarr_files, folder=True),
}
SUFFIXES = tuple(_FORMATS)


def open_table(path: Path, *, rows: bool = False) -> FileTable:
    """Open the file of a recording by its suffix; where the format allows, read its header only.

    The table refuses to read a file that was written to after it was opened. It can be pickled; the
    copy reopens the file.

    Args:
        path: a file, or a folder that is one recording (`.zarr`).
        rows: each line of a CSV file is a signal, and time runs along it. The columns are then
            `0`, `1`, ..., or `-1`, `-2`, ... from the last line.

    Raises:
        DataError: no such file, an unknown suffix, or a file that is cut short or unreadable.
        MissingExtraError: the format needs an extra that is not installed.
    """
    form = _FORMATS.get(path.suffix.lower())
    if path.is_dir() and not (form is not None and form.folder):
        raise DataError(f"{path}: is a folder, expected one file")
    if form is None:
        hint = (
            "; text is read as tokens: throughtime.stream.text(path)"
            if path.suffix.lower() == ".txt"
            else ""
        )
        raise DataError(
            f"{path}: the format '{path.suffix}' is unknown, expected one of"
            f" {', '.join(SUFFIXES)}{hint}"
        )
    if not path.exists() or not (path.is_dir() if form.folder else path.is_file()):
        raise DataError(f"{path}: no such {'folder' if form.folder else 'file'}")
    if rows and path.suffix.lower() != ".csv":
        raise DataError(
            f"{path}: rows=True is for .csv, whose lines may be signals; got '{path.suffix}'"
        )
    return FileTable.open(path, CsvRowsFile if rows else form.open, form.files(path))
