"""Tables of named columns read by rows, and the open files that they are read from.

Open files are bounded in number, and safe after a fork and after pickling.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from throughtime.errors import DataError, MissingExtraError, ThroughtimeError, listed

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
FileArray: TypeAlias = Any  # of a library: `shape`, `dtype`, and reads slices of rows

MAX_OPEN_FILES = 128  # of all recordings; a system allows a process some 1024
_recent: "WeakKeyDictionary[FileTable, None]" = WeakKeyDictionary()  # the last used one last


class RowSource(Protocol):
    """One row per step, read lazily."""

    @property
    def source(self) -> str:
        """The name of the source in error messages."""
        ...

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def read(self, start: int, stop: int) -> Array:
        """The rows `start` to before `stop`: `(n,)` or `(n, D)`."""
        ...


class Table:
    """The columns of a file or an object, and any rows of them.

    Attributes:
        path: the file, or in words what else has the columns, for messages.
        columns: their names, in the order of the file.
        length: the number of rows.
        times: the columns of time, which are no inputs, read as `datetime64[ns]`.
        rate: rows per second; `None` where the file does not say.
        files: those that must not change while it is read; the path itself if there are none.
        contents: all that it has, with types and shapes, where that is more than columns.
    """

    path: Path | str
    columns: tuple[str, ...]
    length: int
    times: tuple[str, ...] = ()
    rate: float | None = None
    files: tuple[Path, ...] = ()
    contents: str = ""

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        """Rows `start` to before `stop` of `columns`, side by side: `(n, D)`, read-only."""
        if start < 0 or stop < 0:
            raise DataError(f"{self.path}: rows {start} to {stop} asked for, expected 0 or more")
        stop = min(stop, self.length)
        if not self.length:
            return np.empty((0, len(columns)))
        if start < stop:
            return self.rows(start, stop, columns)
        return self.rows(0, 1, columns)[:0]  # one row has the type of none

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        """Rows that exist, at least one, of columns by their names in the file."""
        raise NotImplementedError

    def join(self, columns: Sequence[str], parts: Sequence[Array]) -> Array:
        """The rows of columns side by side, in a type that holds the values of all."""
        result = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        what = f"{self.path}: {listed(columns, quoted=True)}"
        for part in parts:
            check_exact(what, part, result.dtype)
        return result


def stamp(path: Path) -> tuple[int, int]:
    """The size and modification time of a file: they show whether it changed.

    Raises:
        DataError: the file is gone.

    Cost: a few microseconds on a local disk.
    """
    with unreadable(
        f"{path}: is gone since it was opened", "do not move what is played", (OSError,)
    ):
        status = path.stat()
    return status.st_size, status.st_mtime_ns


class FileTable(Table):
    """A table of one file, which every read compares with the file that was opened.

    The file is opened on first use; again after a fork or after pickling, and where it was closed
    because more than `MAX_OPEN_FILES` are in use.

    Args:
        path: the file or folder.
        opener: a function of a module, so that it can be pickled. It raises DataError for a file
            that is not usable.
    """

    def __init__(self, path: Path, opener: Callable[[Path], Table]) -> None:
        opened = stamp(path)
        self.path, self._opener = path, partial(opener, path)
        self._file, self._process = None, -1
        file = self._open()
        self._stamps = {each: stamp(each) for each in file.files} or {path: opened}
        self.columns, self.length = file.columns, file.length
        self.times, self.rate, self.contents = file.times, file.rate, file.contents

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        for path, opened in self._stamps.items():
            if stamp(path) != opened:
                raise DataError(
                    f"{path}: changed since it was opened; do not write to what is played"
                )
        return self._open().rows(start, stop, columns)

    def _open(self) -> Table:
        """The open file, held no longer than one read; opened again after a fork."""
        file = self._file
        if file is None or self._process != os.getpid():
            # Close an inherited file first: some libraries share open files by name, and a read in
            # a forked process would move the position of the parent's.
            self._file = file = None
            self._file, self._process = file, _ = self._opener(), os.getpid()
        _recent.pop(self, None)
        _recent[self] = None
        while len(_recent) > MAX_OPEN_FILES:
            oldest = next(iter(_recent))
            oldest._file = _recent.pop(oldest)
        return file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


_FORMATS = {  # where a format is read: its module, and its library, are imported when needed
    ".arrow": "arrow.open_arrow",
    ".bdf": "signals.EdfFile",
    ".csv": "csv.open_csv",
    ".edf": "signals.EdfFile",
    ".feather": "arrow.open_arrow",
    ".flac": "signals.AudioFile",
    ".h5": "arrays.open_hdf5",
    ".hdf5": "arrays.open_hdf5",
    ".hea": "signals.WfdbFile",
    ".nc": "arrays.open_netcdf",
    ".npy": "arrays.open_npy",
    ".npz": "arrays.open_npz",
    ".parquet": "arrow.open_parquet",
    ".wav": "signals.AudioFile",
    ".zarr": "arrays.open_zarr",
}
SUFFIXES = tuple(_FORMATS)
FOLDERS = (".zarr",)


def open_table(
    path: Path, *, delimiter: str | None = None, decimal: str | None = None
) -> FileTable:
    """Open the file of a recording by its suffix; where the format allows, read its header only.

    The table refuses to read a file that was written to after it was opened. It can be pickled; the
    copy reopens the file.

    Args:
        path: a file, or a folder that is one recording (`.zarr`).
        delimiter: the character between the fields of a CSV file. Default: detected. Files of
            another format have none; the setting is then unused.
        decimal: the decimal mark of a CSV file, "." or ",". Default: detected.

    Raises:
        DataError: no such file, an unknown suffix, or a file that is cut short or unreadable.
        MissingExtraError: the format needs an extra that is not installed.
    """
    suffix = path.suffix.lower()
    if not path.exists():
        raise DataError(
            f"{path}: no such file; for a pattern write the list sorted(Path('days').glob('*.csv'))"
        )
    if suffix not in SUFFIXES or path.is_dir() != (suffix in FOLDERS):
        raise DataError(
            f"{path}: expected a file of one of the formats {', '.join(SUFFIXES)}; read others with"
            " their library, and pass the array; a folder of files: tt.Stream(folder, ...)"
        )
    module, _, name = _FORMATS[suffix].partition(".")
    opener = getattr(importlib.import_module(f"throughtime.stream.formats.{module}"), name)
    if suffix == ".csv":
        opener = partial(opener, delimiter=delimiter, decimal=decimal)
    return FileTable(path, opener)


def is_number(text: str, decimal: str = ".") -> bool:
    """Whether a field holds a number with this decimal mark; `1_000` is a label."""
    mark = re.escape(decimal)
    digits = rf"[+-]?(\d+({mark}\d*)?|{mark}\d+)([eE][+-]?\d+)?"
    pattern = rf"{digits}|[+-]?(?i:nan|inf|infinity)"
    return re.fullmatch(pattern, text.strip(), re.ASCII) is not None


def check_exact(what: str, rows: Array, dtype: Any) -> None:
    """Refuse whole numbers that another type would merge or wrap."""
    if rows.dtype.kind in "iu" and rows.dtype != dtype:
        with np.errstate(invalid="ignore"):
            values = rows.astype(dtype)
            if ((values != rows) | (values.astype(rows.dtype) != rows)).any():
                raise DataError(
                    f"{what}: whole numbers have so many digits that {np.dtype(dtype)}, which other"
                    " columns, missing values or torch need, would change them; leave them out"
                )


@contextlib.contextmanager
def unreadable(
    what: str,
    hint: str = "is it cut short?",
    errors: tuple[type[Exception], ...] = (Exception,),
) -> Generator[None, None, None]:
    """Raise what a library raises on a damaged file, which is anything, as a DataError.

    Its message is `what (error); hint`. An error of ours is left as it is.
    """
    try:
        yield
    except ThroughtimeError:
        raise
    except errors as error:
        raise DataError(f"{what} ({error}); {hint}") from error


def import_extra(library: str, path: Path, extra: str) -> Any:
    """The library that reads a file.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            f"{path}: its format needs {library}; pip install 'throughtime[{extra}]'"
        ) from error
