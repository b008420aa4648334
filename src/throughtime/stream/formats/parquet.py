"""Parquet: the footer when opened, then the row groups that are read."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from throughtime.errors import DataError
from throughtime.stream.formats.arrow import named_columns, stack_columns
from throughtime.stream.formats.table import (
    BLOCK_CACHE,
    Array,
    TableFile,
    block_slices,
    concat_blocks,
    unreadable,
)

BATCH_BYTES = 2**17  # of decoded rows cached as one block; small, so that many lanes fit
CURSORS = 64  # positions in large row groups to read on from, of one file


class ParquetFile(TableFile):
    """Batches of rows, decoded one after another; each lane reads on from its own cursor.

    Raises:
        DataError: the file is no Parquet file, or cut short.

    Cost: a row group is decoded from its start, a batch at a time. Reading on decodes each row
    once; reading from the middle of a large row group decodes the rows before it.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.path, self._key = path, object()
        self._cursors = OrderedDict[tuple[Any, ...], Iterator[Any]]()
        with unreadable(f"{path}: not a readable Parquet file", (OSError, pa.ArrowException)):
            # without a buffer size a column of a row group is read whole
            self._file: Any = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**18)
        metadata = self._file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self.columns, self.times = named_columns(path, self._file.schema_arrow)
        # without statistics a column that may have gaps is floating, in every part of the file
        levels = [
            metadata.schema.column(i).max_definition_level for i in range(metadata.num_columns)
        ]
        self._nullable = frozenset(
            chunk.path_in_schema
            for group in groups
            for chunk, level in zip(map(group.column, range(len(levels))), levels, strict=True)
            if level
            and (
                chunk.statistics is None
                or not chunk.statistics.has_null_count
                or chunk.statistics.null_count
            )
        )
        self._starts: tuple[int, ...] = (0, *accumulate(group.num_rows for group in groups))
        self.length = self._starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        size = max(64, BATCH_BYTES // (8 * len(columns) or 1))
        parts: list[Array] = []
        for group, low, high in block_slices(self._starts, start, stop):
            for batch in range(low // size, -(-high // size)):
                rows = self._batch(group, batch, size, tuple(columns))
                parts.append(rows[max(0, low - batch * size) : high - batch * size])
        return concat_blocks(parts)

    def _batch(self, group: int, batch: int, size: int, columns: tuple[str, ...]) -> Array:
        return BLOCK_CACHE.get(
            (self._key, group, batch, columns),
            lambda: self._decoded(group, batch, size, columns),
        )

    def _decoded(self, group: int, batch: int, size: int, columns: tuple[str, ...]) -> Array:
        """Read on from the cursor at this batch, or from the start of the group."""
        begin, cursor = batch, self._cursors.pop((group, batch, columns), None)
        if cursor is None:
            begin, cursor = 0, self._rows(group, size, columns)
        for _ in range(begin, batch):
            next(cursor, None)
        rows = next(cursor, None)
        expected = min(size, self._starts[group + 1] - self._starts[group] - batch * size)
        if rows is None or rows.num_rows != expected:
            raise DataError(
                f"{self.path}: row group {group} ends before row {batch * size + expected}; is the"
                " file cut short?"
            )
        if (batch + 1) * size < self._starts[group + 1] - self._starts[group]:
            self._cursors[group, batch + 1, columns] = cursor
        while len(self._cursors) > CURSORS:
            self._cursors.popitem(last=False)
        return stack_columns(self.path, rows, columns, self._nullable)

    def _rows(self, group: int, size: int, columns: tuple[str, ...]) -> Iterator[Any]:
        import pyarrow as pa

        what = f"{self.path}: row group {group} cannot be read"
        with unreadable(what, (OSError, pa.ArrowException), "is the file damaged?"):
            yield from self._file.iter_batches(
                size, row_groups=[group], columns=list(columns), use_threads=False
            )
