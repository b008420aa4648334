"""Parquet through pyarrow: the footer when opened, then the row groups that are played."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, MissingExtraError
from throughtime.stream.formats._handle import BLOCK_CACHE, CacheKey, Handle
from throughtime.stream.formats.arrow import stacked
from throughtime.stream.formats.table import Array, rows_between

BATCH_BYTES = (
    2**17
)  # of decoded rows that are kept as one block; small, so that those of many lanes are
CURSORS = 64  # places in large row groups that are read on from, of one file


def open_parquet(path: Path) -> "ParquetTable":
    """Opens the file's footer.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: the file is no Parquet file, or cut short.

    Cost: a row group is decoded from its start, a piece at a time, and read on from where it
    stands: whoever goes on reads each row once, whoever goes to a place in the middle of a large
    row group decodes what lies before it.
    """
    handle = Handle(path, _opened)
    file = handle.get()
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns = tuple(file.schema_arrow.names)
    if len(set(columns)) < len(columns):
        raise DataError(f"{path}: has the columns {list(columns)}, expected distinct names")
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    gaps = {
        c.path_in_schema
        for c in chunks
        if c.statistics is not None and c.statistics.has_null_count and c.statistics.null_count
    }
    return ParquetTable(
        path, handle, columns, (0, *accumulate(group.num_rows for group in groups)), frozenset(gaps)
    )


def _opened(path: Path) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(
            f"{path}: Parquet needs pyarrow; pip install 'throughtime[arrow]'"
        ) from error
    try:
        return parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=2**18
        )  # or a column of a row group is read whole
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: not a readable Parquet file ({error}); is it cut short?"
        ) from error


@dataclass
class ParquetTable:
    """Batches of rows, decoded one after another.

    Several lanes read on from places of their own.
    """

    path: Path
    handle: Handle[Any]
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    gaps: frozenset[str]
    rate: float | None = None
    cache_key: CacheKey = field(default_factory=CacheKey, repr=False)
    _cursors: "OrderedDict[tuple[Any, ...], Iterator[Any]]" = field(
        default_factory=OrderedDict, init=False, repr=False
    )

    def __len__(self) -> int:
        return self.starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursors": OrderedDict()}

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, len(self))
        size = max(64, BATCH_BYTES // (8 * len(columns) or 1))
        parts: list[Array] = []
        for group, (begin, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            if begin >= stop or end <= start:
                continue
            low, high = max(start, begin) - begin, min(stop, end) - begin
            for batch in range(low // size, -(-high // size)):
                rows = self._batch(group, batch, size, tuple(columns))
                parts.append(rows[max(0, low - batch * size) : high - batch * size])
        if not parts:
            return np.empty((0, len(columns)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _batch(self, group: int, batch: int, size: int, columns: tuple[str, ...]) -> Array:
        return BLOCK_CACHE.get(
            (self.cache_key, group, batch, columns),
            lambda: self._decoded(group, batch, size, columns),
        )

    def _decoded(self, group: int, batch: int, size: int, columns: tuple[str, ...]) -> Array:
        """Goes on from the cursor that stands at this batch, or from the start of the group."""
        file = self.handle.get()
        at, cursor = batch, self._cursors.pop((id(file), group, batch, columns), None)
        if cursor is None:
            at, cursor = 0, self._rows(file, group, size, columns)
        for _ in range(at, batch):
            next(cursor, None)
        rows = next(cursor, None)
        expected = min(size, self.starts[group + 1] - self.starts[group] - batch * size)
        if rows is None or rows.num_rows != expected:
            raise DataError(
                f"{self.path}: row group {group} ends before row {batch * size + expected}; is the"
                " file cut short?"
            )
        if (batch + 1) * size < self.starts[group + 1] - self.starts[group]:
            self._cursors[id(file), group, batch + 1, columns] = cursor
        while len(self._cursors) > CURSORS:
            self._cursors.popitem(last=False)
        return stacked(self.path, rows, columns, self.gaps)

    def _rows(self, file: Any, group: int, size: int, columns: tuple[str, ...]) -> Iterator[Any]:
        import pyarrow as pa

        try:
            yield from file.iter_batches(
                size, row_groups=[group], columns=list(columns), use_threads=False
            )
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.path}: row group {group} cannot be read ({error}); is the file damaged?"
            ) from error
