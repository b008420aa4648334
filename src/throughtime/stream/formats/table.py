"""Tables of named columns read by rows, and the open files that they are read from.

Open files are bounded in number, and safe after a fork and after pickling.
"""

import contextlib
import importlib
import mmap
import os
import re
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from throughtime.errors import DataError, MissingExtraError, ThroughtimeError

T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
FileArray: TypeAlias = Any  # of a library: `shape`, `dtype`, and reads slices of rows

MAX_OPEN_FILES = 128  # of all recordings; a system allows a process some 1024
RELEASE_AFTER = 8 * 2**20  # bytes of a mapped file read before its pages are given back
_recent: "OrderedDict[int, weakref.ref[Handle[Any]]]" = OrderedDict()  # the last used one last


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


class Table(Protocol):
    """The columns of a file, and any rows of them.

    A table can be pickled: the copy reopens the file.
    """

    @property
    def path(self) -> Path | str:
        """The file, or in words what else has the columns, for messages."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the file.

        Every name that is `in` it can be read, also one that it does not list.
        """
        ...

    @property
    def times(self) -> tuple[str, ...]:
        """The columns of time, which are no inputs.

        Time stamps are read as `datetime64`, of whole days (`[D]`) where they are dates, and times
        of day as `timedelta64`; see `row_sources.time_rows`.
        """
        ...

    @property
    def rate(self) -> float | None:
        """Rows per second; `None` where the file does not say."""
        ...

    def __len__(self) -> int:
        """The number of rows: steps."""
        ...

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        """Rows `start` to before `stop` of `columns`, side by side: `(n, D)`, read-only."""
        ...


class FileStamp(NamedTuple):
    """The size and modification time of a file: they show whether it changed."""

    path: Path
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """The stamp of a file as it is now.

        Raises:
            DataError: the file is gone.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(
                f"{path}: is gone since it was opened ({error.strerror}); do not move a recording"
                " while it is played"
            ) from error
        return cls(path, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Refuse a file that was written since.

        Raises:
            DataError: its size or its time differ, or it is gone.

        Cost: one `stat`, a few microseconds on a local disk.
        """
        now = FileStamp.of(self.path)
        if now != self:
            grown = f" from {self.size} to {now.size} bytes" if now.size != self.size else ""
            raise DataError(
                f"{self.path}: changed since it was opened{grown}; do not write to a recording"
                " while it is played"
            )


class TableFile:
    """An open file of named columns. Its `read` gets rows that exist, at least one."""

    columns: tuple[str, ...]
    length: int
    times: tuple[str, ...] = ()
    rate: float | None = None

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        """Rows `start` to before `stop` of `columns`, side by side."""
        raise NotImplementedError


@dataclass(frozen=True)
class OpenObject:
    """An object that is open already, in the place of a `Handle` on a file."""

    path: str
    file: TableFile

    def get(self) -> TableFile:
        return self.file


@dataclass(frozen=True)
class FileTable:
    """A table of one file, which every read compares with the file that was opened.

    `names` are those that the file has for the columns, where they have others here.
    """

    handle: "Handle[TableFile] | OpenObject"
    stamps: tuple[FileStamp, ...]
    columns: tuple[str, ...]
    length: int
    times: tuple[str, ...]
    rate: float | None
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def open(
        cls, path: Path, opener: Callable[[Path], TableFile], files: Sequence[Path]
    ) -> "FileTable":
        """Open a file.

        Args:
            path: the file or folder.
            opener: see `Handle`.
            files: those that must not change while it is read.
        """
        stamps = tuple(map(FileStamp.of, files))
        handle = Handle(path, opener)
        file = handle.get()
        return cls(handle, stamps, file.columns, file.length, file.times, file.rate)

    @property
    def path(self) -> Path | str:
        return self.handle.path

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        for stamp in self.stamps:
            stamp.check()
        start, stop = rows_between(start, stop, self.length)
        if not self.length:
            return np.empty((0, len(columns)))
        columns = [self.names.get(name, name) for name in columns] if self.names else columns
        if start < stop:
            return self.handle.get().read(start, stop, columns)
        return self.handle.get().read(0, 1, columns)[:0]  # one row has the type of none


class _Format(NamedTuple):
    """Where a format is read, by names: its module, and its library, are imported when needed."""

    module: str
    opener: str
    files: str = ""  # a function: those that must not change while it is read; default: the path
    folder: bool = False


_FORMATS = {
    ".arrow": _Format("arrow", "open_arrow"),
    ".bdf": _Format("edf", "EdfFile"),
    ".csv": _Format("csv", "open_csv"),
    ".edf": _Format("edf", "EdfFile"),
    ".feather": _Format("arrow", "open_arrow"),
    ".flac": _Format("audio", "AudioFile"),
    ".h5": _Format("arrays", "open_hdf5"),
    ".hdf5": _Format("arrays", "open_hdf5"),
    ".hea": _Format("wfdb", "WfdbFile", "wfdb_files"),
    ".nc": _Format("arrays", "open_netcdf"),
    ".npy": _Format("npy", "open_npy"),
    ".npz": _Format("npy", "open_npz"),
    ".ogg": _Format("audio", "AudioFile"),
    ".parquet": _Format("arrow", "open_parquet"),
    ".wav": _Format("audio", "AudioFile"),
    ".zarr": _Format("arrays", "open_zarr", "zarr_files", folder=True),
}
_HINTS = {
    ".txt": "; text is read as tokens: throughtime.stream.text(path)",
    ".mat": "; tt.recording(scipy.io.loadmat(path), inputs=[...]), or h5py.File(path) for v7.3",
}
SUFFIXES = tuple(_FORMATS)
FOLDERS = tuple(suffix for suffix, form in _FORMATS.items() if form.folder)


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
    form = _FORMATS.get(path.suffix.lower())
    if path.is_dir() and not (form is not None and form.folder):
        raise DataError(f"{path}: is a folder, expected one file")
    if form is None:
        hint = _HINTS.get(path.suffix.lower(), "")
        raise DataError(
            f"{path}: the format '{path.suffix}' is unknown, expected one of"
            f" {', '.join(SUFFIXES)}{hint}"
        )
    if not path.exists() or not (path.is_dir() if form.folder else path.is_file()):
        raise DataError(f"{path}: no such {'folder' if form.folder else 'file'}")
    module = importlib.import_module(f"throughtime.stream.formats.{form.module}")
    files = getattr(module, form.files)(path) if form.files else (path,)
    opener = getattr(module, form.opener)
    if path.suffix.lower() == ".csv" and (delimiter is not None or decimal is not None):
        opener = partial(opener, delimiter=delimiter, decimal=decimal)
    return FileTable.open(path, opener, files)


@cache
def number_pattern(decimal: str = ".") -> str:
    """A regular expression of a number with this decimal mark; `1_000` is a label."""
    mark = re.escape(decimal)
    digits = rf"[+-]?(\d+({mark}\d*)?|{mark}\d+)([eE][+-]?\d+)?"
    return rf"{digits}|[+-]?(?i:nan|inf|infinity)"


def is_number(text: str, decimal: str = ".") -> bool:
    """Whether a field holds a number."""
    return re.fullmatch(number_pattern(decimal), text.strip(), re.ASCII) is not None


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


def refuse_shorter(path: Path, expected: int) -> None:
    """Refuse a file of fewer bytes than its header promises: libraries read what is left."""
    size = path.stat().st_size
    if size < expected:
        raise DataError(
            f"{path}: holds {size} bytes, its header promises {expected}; the file is cut short"
        )


def import_extra(library: str, path: Path, kind: str, extra: str) -> Any:
    """The library that reads a kind of file.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            f"{path}: {kind} needs {library}; pip install 'throughtime[{extra}]'"
        ) from error


def rows_between(start: int, stop: int, length: int) -> tuple[int, int]:
    """The rows `start` to before `stop`, cut to those that exist; negative ones are refused."""
    if start < 0 or stop < 0:
        raise DataError(f"rows {start} to {stop} asked for, expected numbers from 0 on")
    return min(start, length), max(min(start, length), min(stop, length))


def block_slices(starts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The blocks that hold the rows `start` to before `stop`: index, first and last row within it.

    Args:
        starts: the first row of each block, and the end of the last one.
        start: the first row.
        stop: the row after the last one.
    """
    block = bisect_right(starts, start) - 1
    while start < stop:
        first, end = starts[block], min(stop, starts[block + 1])
        if end > start:  # an empty block has no rows
            yield block, start - first, end - first
        start, block = end, block + 1


def concat_blocks(parts: Sequence[Array]) -> Array:
    """Rows one after another."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Handle(Generic[T]):
    """An open file that is opened on first use, and again after a fork or after pickling.

    Also opened again: a file that was closed because more than `MAX_OPEN_FILES` are in use.

    Args:
        path: the file.
        opener: a function of a module, so that it can be pickled. It raises DataError for a file
            that is not usable.
    """

    def __init__(self, path: Path, opener: Callable[[Path], T]) -> None:
        self.path = path
        self._opener = opener
        self._file: T | None = None
        self._process = -1

    def get(self) -> T:
        """The open file; hold it no longer than one read."""
        file = self._file
        if file is None or self._process != os.getpid():
            # Close an inherited file first: some libraries share open files by name, and a read in
            # a forked process would move the position of the parent's.
            self._file = file = None
            self._file = file = self._opener(self.path)
            self._process = os.getpid()
        _recent.pop(id(self), None)
        _recent[id(self)] = weakref.ref(self)
        while len(_recent) > MAX_OPEN_FILES:
            oldest = _recent.popitem(last=False)[1]()
            if oldest is not None:
                oldest.release()
        return file

    def release(self) -> None:
        """Drop the open file. It closes when its last reader drops it too."""
        self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opener": self._opener, "_file": None, "_process": -1}


class MappedFile:
    """A memory-mapped file whose pages return to the system after they were read.

    Memory then stays flat. Arrays that share the memory stay valid: the system reads their pages
    again where they are used.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._unreleased = 0

    def count_read(self, size: int) -> None:
        """Count bytes that were read; enough of them release the pages."""
        self._unreleased += size
        if self._unreleased > RELEASE_AFTER and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)
            self._unreleased = 0
