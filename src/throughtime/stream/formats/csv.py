"""CSV: scanned once when it is opened, then parsed block by block where it is read."""

import csv
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import csv_scan
from throughtime.stream.formats._handle import BLOCK_CACHE, CacheKey
from throughtime.stream.formats.csv_fields import column_values, is_number, plain, rows_of
from throughtime.stream.formats.table import Array, rows_between

__all__ = ["CsvTable", "is_number", "open_csv", "read_columns"]


def open_csv(path: Path) -> "CsvTable":
    r"""Scans the file: every line is checked, none is kept.

    A column whose first filled field is text is text, even where other fields look like numbers;
    any other column is numbers (float64, an empty field is NaN), and a field of it that is none is
    an error where it is read. A first line of nothing but numbers is no header: the columns are
    then called `0`, `1`, ...

    Args:
        path: a file in UTF-8, its fields separated by commas, its lines ended by `\n` or `\r\n`.

    Raises:
        DataError: duplicate or empty column names, a line with more or fewer fields, an open quote,
            a NUL, or bytes that are not UTF-8; the line is named.

    Cost: one pass, some 100 MB/s without quotes and less with; 24 bytes for each 120 kB of the
    file. Reading parses the blocks of the rows asked for and keeps the last ones.
    """
    return CsvTable(path, csv_scan.scan(path))


@dataclass(frozen=True)
class CsvTable:
    """Where the rows are, and what the columns hold."""

    path: Path
    layout: csv_scan.Layout
    cache_key: CacheKey = field(default_factory=CacheKey, repr=False)
    rate: float | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return self.layout.columns

    def __len__(self) -> int:
        return self.layout.rows

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, len(self))
        indices = tuple(self.columns.index(c) for c in columns)
        parts: list[Array] = []
        block = bisect_right(self.layout.starts, start) - 1
        while start < stop:
            first, end = self.layout.starts[block], self.layout.starts[block + 1]
            if end > start:  # a block of blank lines has no rows
                parts.append(self._block(block, indices)[start - first : min(stop, end) - first])
            start, block = max(start, min(stop, end)), block + 1
        if not parts:
            return np.empty((0, len(columns)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _block(self, block: int, indices: tuple[int, ...]) -> Array:
        """Of a file of numbers the whole block is kept, whatever the columns: it is parsed in one go."""
        if any(self.layout.text):
            return BLOCK_CACHE.get(
                (self.cache_key, block, indices), lambda: self._decoded(block, indices)
            )
        rows = BLOCK_CACHE.get((self.cache_key, block), lambda: self._matrix(block))
        if rows is None:
            return BLOCK_CACHE.get(
                (self.cache_key, block, indices), lambda: self._decoded(block, indices)
            )
        return rows if indices == tuple(range(len(self.columns))) else rows[:, list(indices)]

    def _bytes(self, block: int) -> bytes:
        offset, end = self.layout.offsets[block : block + 2]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(end - offset)

    def _matrix(self, block: int) -> Array | None:
        """All columns, if all are plainly written numbers."""
        width = len(self.columns)
        text = plain(self._bytes(block), width)
        if text is None:
            return None
        values = column_values(text.replace("\n", ","), width * (text.count("\n") + 1))
        return None if values is None else values.reshape(-1, width)

    def _decoded(self, block: int, indices: tuple[int, ...]) -> Array:
        data, width = self._bytes(block), len(self.columns)
        text = plain(data, width)
        fields = rows_of(data, width) if text is None else text.replace("\n", ",").split(",")
        return np.stack(
            [self._column(block, index, fields[index::width]) for index in indices], axis=1
        )

    def _column(self, block: int, index: int, fields: list[str]) -> Array:
        if self.layout.text[index]:
            longest = max(map(len, fields))
            if longest > csv_scan.LABEL:
                raise DataError(
                    f"{self.path}: column '{self.columns[index]}' holds a text of {longest}"
                    " characters, expected labels"
                )
            return np.array(fields, dtype=np.str_)
        values = (
            column_values(",".join(fields), len(fields))
            if not any("," in f for f in fields)
            else None
        )
        if values is None:
            filled = [f if f.strip() else "nan" for f in fields]
            wrong = next((row for row, f in enumerate(filled) if not is_number(f)), None)
            if wrong is not None:
                raise self._no_number(block, index, wrong, fields[wrong])
            values = np.array([float(f) for f in filled])
        return values

    def _no_number(self, block: int, index: int, row: int, text: str) -> DataError:
        line = csv_scan.line_of(self.path, self.layout, block, row)
        return DataError(
            f"{self.path}: line {line}, column '{self.columns[index]}' holds {text[:40]!r},"
            " expected a number as in the lines before it; correct the line, or leave the"
            " column out"
        )


def read_columns(path: Path) -> dict[str, list[str]]:
    """The fields of every column of a small file with a header line, as text.

    Raises:
        DataError: no header, duplicate column names, a line with more or fewer fields, or bytes
            that are not UTF-8; the line is named.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = csv_scan.names(path, next(reader, []))
            rows: list[list[str]] = [[] for _ in header]
            # lines without a field: missing values of a single column, unless nothing follows
            blank = 0
            for fields in reader:
                if not fields:
                    blank += len(header) == 1
                    continue
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}: line {reader.line_num} has {len(fields)} fields, the header has"
                        f" {len(header)}"
                    )
                for column, text in zip(rows, fields, strict=True):
                    column.extend([""] * blank)
                    column.append(text)
                blank = 0
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path}: not a readable CSV file ({error}); expected UTF-8 text with a header line"
        ) from error
    return dict(zip(header, rows, strict=True))
