"""Numbers with one row per step: arrays, columns of files, or several of them side by side.

Shapes: `n` steps read, `D` columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from throughtime.errors import DataError
from throughtime.stream import formats
from throughtime.stream.formats.table import Array


class Rows(Protocol):
    """One row per step, read lazily."""

    @property
    def where(self) -> str:
        """The name of the source in messages."""
        ...

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def read(self, start: int, stop: int) -> Array:
        """The rows `start` to before `stop`: `(n,)` or `(n, D)`."""
        ...


@dataclass(frozen=True)
class ArrayRows:
    """The rows of an array; only those that are read leave a memory-mapped one."""

    where: str
    array: Array

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


@dataclass(frozen=True)
class ColumnRows:
    """Columns of a table, `(n, D)`; with `flat` a single one is `(n,)`."""

    table: formats.Table
    columns: tuple[str, ...]
    flat: bool = False

    @property
    def where(self) -> str:
        return str(self.table.path)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, start: int, stop: int) -> Array:
        rows = self.table.read(start, stop, self.columns)
        return rows[:, 0] if self.flat and rows.shape[1] == 1 else rows


@dataclass(frozen=True)
class ConcatRows:
    """The columns of several rows, side by side."""

    parts: tuple[Rows, ...]

    @property
    def where(self) -> str:
        return ", ".join(part.where for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def read(self, start: int, stop: int) -> Array:
        return np.concatenate(
            [(rows := part.read(start, stop)).reshape(len(rows), -1) for part in self.parts], axis=1
        )


def check_lengths(name: str, parts: Sequence[tuple[str, int]]) -> None:
    """Refuse inputs of different lengths; each is a name for messages and its number of rows."""
    for (first, length), (second, other) in pairwise(parts):
        if length != other:
            raise DataError(
                f"recording '{name}': {first} has {length} rows and {second} has {other}; all"
                " inputs of a recording need one row per step"
            )


def concat_rows(name: str, parts: Sequence[Rows]) -> Rows:
    """One source of rows, or several of equal length side by side.

    Raises:
        DataError: their lengths differ.
    """
    check_lengths(name, [(part.where, len(part)) for part in parts])
    return parts[0] if len(parts) == 1 else ConcatRows(tuple(parts))
