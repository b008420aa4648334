"""Table: named columns of equal length, read by rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Table(Protocol):
    """What a format gives: the file's columns, and any rows of them."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the file."""
        ...

    def __len__(self) -> int:
        """The number of rows: steps."""
        ...

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        """Rows `start` to before `stop` of `columns`: `(n, len(columns))`, a wide column taking its width."""
        ...


@dataclass(frozen=True)
class ArrayTable:
    """A table of arrays, in memory or memory-mapped; a matrix is one column as wide as it is."""

    path: Path
    arrays: dict[str, Array]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values()))) if self.arrays else 0

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        parts = [self.arrays[c][start:stop].reshape(max(0, min(stop, len(self)) - start), -1) for c in columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
