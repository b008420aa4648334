"""Arrow IPC files and streams, and Feather: record batches of a memory-mapped file."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import (
    BLOCK_CACHE,
    Array,
    CacheKey,
    Handle,
    MappedFile,
    rows_between,
)


def open_arrow(path: Path) -> "ArrowTable":
    """Opens an Arrow file (`.arrow`, `.feather` version 2) or an Arrow stream.

    Raises:
        DataError: the file is neither, or cut short.

    Cost: batches that are not compressed are not copied but mapped. A compressed one is decoded
    whole, and once when the file is opened, for its length; a compressed stream stays decoded in
    memory.
    """
    handle = Handle(path, _ArrowFile)
    file = handle.get()
    columns = tuple(file.schema.names)
    if len(set(columns)) < len(columns):
        raise DataError(f"{path}: has the columns {list(columns)}, expected distinct names")
    lengths, nullable = [], set[str]()
    for index in range(file.count):
        batch = file.batch(index)
        lengths.append(batch.num_rows)
        nullable.update(
            name for name, column in zip(columns, batch.columns, strict=True) if column.null_count
        )
    return ArrowTable(path, handle, columns, (0, *accumulate(lengths)), frozenset(nullable))


class _ArrowFile:
    """An open file: its schema, and its record batches, which share the mapped memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        try:
            self.file = MappedFile(path)
            buffer = pa.py_buffer(self.file.mapping)
            self._address, self._size = buffer.address, buffer.size
            if self.file.mapping[:6] == b"ARROW1":
                self._reader: Any = pa.ipc.open_file(pa.BufferReader(buffer))
                self.schema, self.count = self._reader.schema, self._reader.num_record_batches
                self._batches: list[Any] | None = None
                return
            with pa.ipc.open_stream(pa.BufferReader(buffer)) as stream:
                self.schema, self._batches = stream.schema, list(stream)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(
                f"{path}: not a readable Arrow file ({error}); is it cut short?"
            ) from error
        if self.file.mapping[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
            raise DataError(f"{path}: the stream has no end; the file is cut short")
        self.count = len(self._batches)

    def batch(self, index: int) -> Any:
        """A record batch: a view of the mapped memory, or decoded if it is compressed."""
        import pyarrow as pa

        if self._batches is not None:
            return self._batches[index]
        try:
            return self._reader.get_batch(index)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.path}: record batch {index} cannot be read ({error}); is the file cut"
                " short?"
            ) from error

    def decoded_bytes(self, batch: Any) -> int:
        """The bytes of a batch that are not mapped."""
        buffers = [b for column in batch.columns for b in column.buffers() if b is not None]
        return sum(b.size for b in buffers if not 0 <= b.address - self._address < self._size)


@dataclass(frozen=True)
class ArrowTable:
    """Record batches; only the rows that are read are converted."""

    path: Path
    handle: Handle[_ArrowFile]
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    nullable: frozenset[str]
    rate: float | None = None
    cache_key: CacheKey = field(default_factory=CacheKey, repr=False)

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, len(self))
        file = self.handle.get()
        parts: list[Array] = []
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[index + 1])
            if end > start:
                batch = BLOCK_CACHE.get(  # a mapped batch takes no memory there
                    (self.cache_key, id(file), index),
                    lambda index=index: file.batch(index),
                    file.decoded_bytes,
                )
                rows = batch.slice(start - self.starts[index], end - start)
                parts.append(stack_columns(self.path, rows, columns, self.nullable))
                file.file.count_read(rows.nbytes)
            start, index = end, index + 1
        return concat(parts, len(columns))


def concat(parts: Sequence[Array], width: int) -> Array:
    """Rows one after another; without parts, none of `width` columns."""
    if not parts:
        return np.empty((0, width))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def stack_columns(path: Path, rows: Any, columns: Sequence[str], nullable: frozenset[str]) -> Array:
    """Columns of a record batch, side by side.

    A missing number is NaN, a missing text empty; the integers of a `nullable` column are float64
    everywhere.
    """
    arrays = [(name, rows.column(rows.schema.get_field_index(name))) for name in columns]
    return np.stack(
        [_values(path, name, column, nullable=name in nullable) for name, column in arrays], axis=1
    )


def _values(path: Path, name: str, column: Any, *, nullable: bool) -> Array:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array(["" if text is None else text for text in column.to_pylist()], np.str_)
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(
            f"{path}: column '{name}' has the type {column.type}, expected numbers or text"
        )
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(np.float64) if nullable and values.dtype.kind != "f" else values
