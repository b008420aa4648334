"""Rows: numbers with one row per step, read where they are needed, from arrays, from columns of
files, or side by side.

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
    """Something with a row per step."""

    @property
    def where(self) -> str:
        """How messages call it."""
        ...

    def __len__(self) -> int:
        """Its number of rows."""
        ...

    def read(self, start: int, stop: int) -> Array:
        """The rows `start` to before `stop`: `(n,)` or `(n, D)`."""
        ...


@dataclass(frozen=True)
class ArrayRows:
    """An array at hand, in memory or memory-mapped and then read only where it is played."""

    where: str
    array: Array

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


@dataclass(frozen=True)
class ColumnRows:
    """Columns of a table, always `(n, D)`; a single one is `(n,)` on request."""

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
    """The columns of several, each as a matrix."""

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
    """Refuses inputs of different lengths, each told by where it is and how many rows it has."""
    for (first, many), (second, others) in pairwise(parts):
        if many != others:
            raise DataError(
                f"recording '{name}': {first} has {many} rows and {second} has {others}; all inputs"
                " of a recording need one row per step"
            )


def concat_rows(name: str, parts: Sequence[Rows]) -> Rows:
    """One, or several of equal length side by side.

    Raises:
        DataError: their lengths differ.
    """
    check_lengths(name, [(part.where, len(part)) for part in parts])
    return parts[0] if len(parts) == 1 else ConcatRows(tuple(parts))
