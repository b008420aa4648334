"""Arrow IPC files and streams, and Feather: record batches of a memory-mapped file through pyarrow."""

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, MissingExtraError
from throughtime.stream.formats._handle import BLOCK_CACHE, CacheKey, Handle
from throughtime.stream.formats.npy import RELEASE_AFTER
from throughtime.stream.formats.table import Array, rows_between


@dataclass(frozen=True)
class Mapped:
    """A reader of record batches, and the mapping that they lie in."""

    reader: Any
    mapping: mmap.mmap

    def batch(self, index: int) -> Any:
        """One record batch: a view of the mapping, or decoded if it is compressed."""
        return self.reader[index] if isinstance(self.reader, list) else self.reader.get_batch(index)


def open_arrow(path: Path) -> "ArrowTable":
    """Opens an Arrow file (`.arrow`, `.feather` version 2) or an Arrow stream.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: the file is neither, or cut short.

    Cost: batches that are not compressed are not copied but mapped; a compressed one is decoded
    whole, and when the file is opened each of them once, to learn its length; a compressed stream
    stays decoded in memory.
    """
    handle = Handle(path, _opened)
    opened = handle.get()
    schema = opened.reader[0].schema if isinstance(opened.reader, list) else opened.reader.schema
    count = (
        len(opened.reader) if isinstance(opened.reader, list) else opened.reader.num_record_batches
    )
    columns = tuple(schema.names)
    if len(set(columns)) < len(columns):
        raise DataError(f"{path}: has the columns {list(columns)}, expected distinct names")
    lengths, gaps = [], set[str]()
    for index in range(count):
        batch = _batch(path, opened, index)
        lengths.append(batch.num_rows)
        gaps.update(
            name for name, column in zip(columns, batch.columns, strict=True) if column.null_count
        )
    return ArrowTable(path, handle, columns, (0, *accumulate(lengths)), frozenset(gaps))


def _opened(path: Path) -> Mapped:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError(
            f"{path}: Arrow needs pyarrow; pip install 'throughtime[arrow]'"
        ) from error
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(mapping))
        if mapping[:6] == b"ARROW1":
            return Mapped(pa.ipc.open_file(source), mapping)
        with pa.ipc.open_stream(source) as stream:
            schema, batches = stream.schema, list(stream)
        if mapping[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
            raise DataError(f"{path}: the stream has no end; the file is cut short")
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a readable Arrow file ({error}); is it cut short?") from error
    return Mapped(batches or [pa.RecordBatch.from_pylist([], schema=schema)], mapping)


def _batch(path: Path, opened: Mapped, index: int) -> Any:
    import pyarrow as pa

    try:
        return opened.batch(index)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: record batch {index} cannot be read ({error}); is the file cut short?"
        ) from error


@dataclass
class ArrowTable:
    """Record batches; only the rows asked for are converted."""

    path: Path
    handle: Handle[Mapped]
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    gaps: frozenset[str]
    rate: float | None = None
    cache_key: CacheKey = field(default_factory=CacheKey, repr=False)
    _held: int = 0

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, len(self))
        opened = self.handle.get()
        parts: list[Array] = []
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[index + 1])
            if end > start:
                rows = self._batch(opened, index).slice(start - self.starts[index], end - start)
                parts.append(stacked(self.path, rows, columns, self.gaps))
                self._release(opened, rows.nbytes)
            start, index = end, index + 1
        if not parts:
            return np.empty((0, len(columns)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _batch(self, opened: Mapped, index: int) -> Any:
        """A decoded batch is kept; one that lies in the mapping costs nothing to have again."""
        base = _address(opened)
        key = (self.cache_key, id(opened), index)
        return BLOCK_CACHE.get(
            key,
            lambda: _batch(self.path, opened, index),
            lambda batch: _decoded_bytes(batch, base, len(opened.mapping)),
        )

    def _release(self, opened: Mapped, read: int) -> None:
        self._held += read
        if self._held > RELEASE_AFTER and hasattr(mmap, "MADV_DONTNEED"):
            opened.mapping.madvise(mmap.MADV_DONTNEED)
            self._held = 0


def _address(opened: Mapped) -> int:
    import pyarrow as pa

    return pa.py_buffer(opened.mapping).address


def _decoded_bytes(batch: Any, base: int, size: int) -> int:
    buffers = [b for column in batch.columns for b in column.buffers() if b is not None]
    return sum(b.size for b in buffers if not base <= b.address < base + size)


def stacked(path: Path, rows: Any, columns: Sequence[str], gaps: frozenset[str]) -> Array:
    """Columns of a record batch, side by side.

    A missing number is NaN, a missing text empty; whole numbers of a column with `gaps` are float64
    wherever they are read.
    """
    arrays = [(name, rows.column(rows.schema.get_field_index(name))) for name in columns]
    return np.stack(
        [_values(path, name, column, gap=name in gaps) for name, column in arrays], axis=1
    )


def _values(path: Path, name: str, column: Any, *, gap: bool) -> Array:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array(
            ["" if text is None else text for text in column.to_pylist()], dtype=np.str_
        )
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(
            f"{path}: column '{name}' has the type {column.type}, expected numbers or text"
        )
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(np.float64) if gap and values.dtype.kind != "f" else values
