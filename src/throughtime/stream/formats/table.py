"""Table: named columns of equal length, read by rows.

And the guard that notices a file that changed meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from throughtime.errors import DataError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Table(Protocol):
    """What a format gives: the file's columns, and any rows of them.

    Every table can be pickled: it reopens its file.
    """

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the file.

        A name `in` it can be read, also one that it does not list.
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
        """Rows `start` to before `stop` of `columns`: `(n, len(columns))`, a wide column taking its width. Not to be written to."""
        ...


class FileStamp(NamedTuple):
    """What tells that a file is still the one that was opened: its size, and when it was last written."""

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
            found = path.stat()
        except OSError as error:
            raise DataError(
                f"{path}: is gone since it was opened ({error.strerror}); do not move a recording"
                " while it is played"
            ) from error
        return cls(path, found.st_size, found.st_mtime_ns)

    def check(self) -> None:
        """Refuses a file that was written since.

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
    """A table whose files must stay as they were when it was opened; checked at every read."""

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


def rows_between(start: int, stop: int, length: int) -> tuple[int, int]:
    """The rows asked for, as far as there are such.

    Refused where they count from the end, which no table does.
    """
    if start < 0 or stop < 0:
        raise DataError(f"rows {start} to {stop} asked for, expected numbers from 0 on")
    return min(start, length), max(min(start, length), min(stop, length))
