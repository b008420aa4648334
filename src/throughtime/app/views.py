"""Views of the files of a recording: several as one table, rows as frames, labels with a gap.

Shapes: `N` rows per frame, `D` input features.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import Table
from throughtime.stream.formats.table import Array, RowSource
from throughtime.stream.row_sources import check_lengths


@dataclass(frozen=True)
class ConcatTable:
    """Tables of equal length, their columns side by side.

    `sources` maps each column to the index of its table and its name there.
    """

    tables: tuple[Table, ...]
    sources: dict[str, tuple[int, str]]

    @property
    def path(self) -> Path:
        return Path("; ".join(str(table.path) for table in self.tables))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.sources)

    @property
    def times(self) -> tuple[str, ...]:
        return tuple(n for n, (i, name) in self.sources.items() if name in self.tables[i].times)

    @property
    def rate(self) -> float | None:
        return next((table.rate for table in self.tables if table.rate is not None), None)

    def __len__(self) -> int:
        return len(self.tables[0])

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        groups = groupby((self.sources[name] for name in columns), key=lambda source: source[0])
        parts = [
            self.tables[index].read(start, stop, [column for _, column in sources])
            for index, sources in groups
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def concat_tables(name: str, tables: Sequence[Table]) -> Table:
    """One table with the columns of all; a single one is returned as it is.

    A column name that several tables share gets the number of its file: `1.u` and `2.u`. Unlike
    the name of the file, the number is the same in all recordings.

    Raises:
        DataError: the lengths differ, or two columns would get one name.
    """
    check_lengths(name, [(str(table.path), len(table)) for table in tables])
    if len(tables) == 1:
        return tables[0]
    counts = Counter(column for table in tables for column in table.columns)
    sources = [
        (f"{i + 1}.{column}" if counts[column] > 1 else column, (i, column))
        for i, table in enumerate(tables)
        for column in table.columns
    ]
    if len(dict(sources)) < len(sources):
        repeated = Counter(column for column, _ in sources).most_common(1)[0][0]
        raise DataError(
            f"recording '{name}': its files have a column '{repeated}' and another that would get"
            " this name; rename one"
        )
    return ConcatTable(tuple(tables), dict(sources))


class RowsView(ABC):
    """Rows computed from the rows of a file."""

    rows: RowSource

    @property
    def source(self) -> str:
        return self.rows.source

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """The rows `start` to before `stop`."""


@dataclass(frozen=True)
class FrameRows(RowsView):
    """Every `frame_size` rows as one step: their `N * D` numbers, or those of the last row."""

    rows: RowSource
    frame_size: int
    last: bool = False

    def __len__(self) -> int:
        return len(self.rows) // self.frame_size

    def read(self, start: int, stop: int) -> Array:
        size = self.frame_size
        rows = self.rows.read(start * size, min(stop, len(self)) * size)
        return rows[size - 1 :: size] if self.last else rows.reshape(len(rows) // size, -1)


@dataclass(frozen=True)
class LabelRows(RowsView):
    """Labels in a type that has a value for "none": text for classes, floats for a regression."""

    rows: RowSource
    classify: bool

    def read(self, start: int, stop: int) -> Array:
        return with_missing_value(self.rows.read(start, stop), classify=self.classify)


def with_missing_value(labels: Array, *, classify: bool) -> Array:
    """Whole numbers as text for classes and as floats otherwise; other types unchanged."""
    if labels.dtype.kind not in "biu":
        return labels
    return labels.astype(np.str_ if classify else np.float64)
