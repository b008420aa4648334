"""Parquet: the footer when opened, then the row groups that are read."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from throughtime.errors import DataError
from throughtime.stream.formats.arrow import concat, stack_columns
from throughtime.stream.formats.table import BLOCK_CACHE, Array, CacheKey, Handle, rows_between

BATCH_BYTES = 2**17  # of decoded rows cached as one block; small, so that many lanes fit
CURSORS = 64  # positions in large row groups to read on from, of one file


def open_parquet(path: Path) -> "ParquetTable":
    """Opens the file's footer.

    Raises:
        DataError: the file is no Parquet file, or cut short.

    Cost: a row group is decoded from its start, a batch at a time. Reading on decodes each row
    once; reading from the middle of a large row group decodes the rows before it.
    """
    handle = Handle(path, _opened)
    file = handle.get()
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns = tuple(file.schema_arrow.names)
    if len(set(columns)) < len(columns):
        raise DataError(f"{path}: has the columns {list(columns)}, expected distinct names")
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    nullable = {
        c.path_in_schema
        for c in chunks
        if c.statistics is not None and c.statistics.has_null_count and c.statistics.null_count
    }
    return ParquetTable(
        path,
        handle,
        columns,
        (0, *accumulate(group.num_rows for group in groups)),
        frozenset(nullable),
    )


def _opened(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # without a buffer size a column of a row group is read whole
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**18)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: not a readable Parquet file ({error}); is it cut short?"
        ) from error


@dataclass
class ParquetTable:
    """Batches of rows, decoded one after another; each lane reads on from its own cursor."""

    path: Path
    handle: Handle[Any]
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    nullable: frozenset[str]
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
        return concat(parts, len(columns))

    def _batch(self, group: int, batch: int, size: int, columns: tuple[str, ...]) -> Array:
        return BLOCK_CACHE.get(
            (self.cache_key, group, batch, columns),
            lambda: self._decoded(group, batch, size, columns),
        )

    def _decoded(self, group: int, batch: int, size: int, columns: tuple[str, ...]) -> Array:
        """Read on from the cursor at this batch, or from the start of the group."""
        file = self.handle.get()
        begin, cursor = batch, self._cursors.pop((id(file), group, batch, columns), None)
        if cursor is None:
            begin, cursor = 0, self._rows(file, group, size, columns)
        for _ in range(begin, batch):
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
        return stack_columns(self.path, rows, columns, self.nullable)

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
