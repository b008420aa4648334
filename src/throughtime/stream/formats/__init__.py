"""File formats, one module each, behind one protocol: length, columns, lazy `read`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from throughtime.errors import DataError
from throughtime.stream.formats import (
    arrow,
    audio,
    csv,
    edf,
    hdf5,
    netcdf,
    npy,
    parquet,
    wfdb,
    zarr,
)
from throughtime.stream.formats.csv_rows import open_csv_rows
from throughtime.stream.formats.table import FileStamp, GuardedTable, Table

__all__ = ["SUFFIXES", "Table", "open_table"]


def _same(path: Path) -> tuple[Path, ...]:
    return (path,)


class _Format(NamedTuple):
    open: Callable[[Path], Table]
    files: Callable[[Path], tuple[Path, ...]] = _same  # those that must not change while it is read
    folder: bool = False


_FORMATS = {
    ".arrow": _Format(arrow.open_arrow),
    ".csv": _Format(csv.open_csv),
    ".edf": _Format(edf.open_edf),
    ".feather": _Format(arrow.open_arrow),
    ".flac": _Format(audio.open_audio),
    ".h5": _Format(hdf5.open_hdf5),
    ".hdf5": _Format(hdf5.open_hdf5),
    ".hea": _Format(wfdb.open_wfdb, wfdb.files),
    ".nc": _Format(netcdf.open_netcdf),
    ".npy": _Format(npy.open_npy),
    ".npz": _Format(npy.open_npz),
    ".ogg": _Format(audio.open_audio),
    ".parquet": _Format(parquet.open_parquet),
    ".wav": _Format(audio.open_audio),
    ".zarr": _Format(zarr.open_zarr, zarr.files, folder=True),
}
SUFFIXES = tuple(_FORMATS)


def open_table(path: Path, *, rows: bool = False) -> Table:
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
    stamps = tuple(FileStamp.of(file) for file in form.files(path))
    return GuardedTable(open_csv_rows(path) if rows else form.open(path), stamps)
