"""Tables: named columns of equal length, read by rows; and the check that a file did not change."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from throughtime.errors import DataError, MissingExtraError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Table(Protocol):
    """The columns of a file, and any rows of them.

    A table can be pickled: the copy reopens the file.
    """

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the file.

        Every name that is `in` it can be read, also one that it does not list.
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


@dataclass(frozen=True)
class GuardedTable:
    """A table that checks at every read that its files are as they were when it was opened."""

    table: Table
    stamps: tuple[FileStamp, ...]

    @property
    def path(self) -> Path:
        return self.table.path

    @property
    def columns(self) -> tuple[str, ...]:
        return self.table.columns

    @property
    def rate(self) -> float | None:
        return self.table.rate

    def __len__(self) -> int:
        return len(self.table)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        for stamp in self.stamps:
            stamp.check()
        return self.table.read(start, stop, columns)


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
