"""Joined: several files of one recording as one table, their columns side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import Array
from throughtime.stream.rows import check_lengths


@dataclass(frozen=True)
class Joined:
    """Tables of equal length.

    `places` tells of every column which of them has it, and what it is called there.
    """

    tables: tuple[Table, ...]
    places: dict[str, tuple[int, str]]

    @property
    def path(self) -> Path:
        return Path("; ".join(str(table.path) for table in self.tables))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.places)

    @property
    def rate(self) -> float | None:
        return next((table.rate for table in self.tables if table.rate is not None), None)

    def __len__(self) -> int:
        return len(self.tables[0])

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        groups = groupby((self.places[name] for name in columns), key=lambda place: place[0])
        parts = [
            self.tables[index].read(start, stop, [column for _, column in places])
            for index, places in groups
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def joined(name: str, tables: Sequence[Table]) -> Table:
    """One table as it is; several side by side.

    A column that several of them have is called by its file's place too, `1.u` and `2.u`: unlike
    the name of the file, that is the same in all recordings.

    Raises:
        DataError: their lengths differ.
    """
    check_lengths(name, [(str(table.path), len(table)) for table in tables])
    if len(tables) == 1:
        return tables[0]
    shared = {
        column
        for column, count in Counter(c for table in tables for c in table.columns).items()
        if count > 1
    }
    places = [
        (f"{i + 1}.{c}" if c in shared else c, (i, c))
        for i, table in enumerate(tables)
        for c in table.columns
    ]
    if len(dict(places)) < len(places):
        twice = next(
            column for column, count in Counter(column for column, _ in places).items() if count > 1
        )
        raise DataError(
            f"recording '{name}': its files have a column '{twice}' and another that would be"
            " called so; rename one"
        )
    return Joined(tuple(tables), dict(places))
