"""Arrow IPC files and streams, and Feather: record batches of a memory-mapped file."""

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import (
    BLOCK_CACHE,
    Array,
    MappedFile,
    TableFile,
    block_slices,
    concat_blocks,
    unreadable,
)

_TEXT = ("string", "large_string", "string_view")  # the last one since pyarrow 16


class ArrowFile(TableFile):
    """An Arrow file (`.arrow`, `.feather` version 2) or an Arrow stream.

    Raises:
        DataError: the file is neither, or cut short.

    Cost: batches that are not compressed are not copied but mapped. A compressed one is decoded
    whole, and once when the file is opened, for its length; a compressed stream stays decoded in
    memory.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path, self._key = path, object()
        batches: list[Any] | None = None
        with unreadable(
            f"{path}: not a readable Arrow file", (OSError, ValueError, pa.ArrowException)
        ):
            self._file = MappedFile(path)
            buffer = pa.py_buffer(self._file.mapping)
            self._address, self._size = buffer.address, buffer.size
            if self._file.mapping[:6] == b"ARROW1":
                reader: Any = pa.ipc.open_file(pa.BufferReader(buffer))
                self._read_batch, count = reader.get_batch, reader.num_record_batches
            else:
                with pa.ipc.open_stream(pa.BufferReader(buffer)) as reader:
                    batches = list(reader)
                self._read_batch, count = batches.__getitem__, len(batches)
            schema = reader.schema
        if batches is not None and self._file.mapping[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
            raise DataError(f"{path}: the stream has no end; the file is cut short")
        self.columns, self.times = named_columns(path, schema)
        lengths: list[int] = []
        nullable = set[str]()
        for index in range(count):
            batch = self._batch(index)
            lengths.append(batch.num_rows)
            pairs = zip(schema.names, batch.columns, strict=True)
            nullable.update(name for name, column in pairs if column.null_count)
        self._starts, self._nullable = (0, *accumulate(lengths)), frozenset(nullable)
        self.length = self._starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        parts: list[Array] = []
        for index, first, end in block_slices(self._starts, start, stop):
            batch = BLOCK_CACHE.get(  # a mapped batch takes no memory there
                (self._key, index), lambda index=index: self._batch(index), self._decoded_bytes
            )
            rows = batch.slice(first, end - first)
            parts.append(stack_columns(self.path, rows, columns, self._nullable))
            self._file.count_read(rows.nbytes)
        return concat_blocks(parts)

    def _batch(self, index: int) -> Any:
        """A record batch: a view of the mapped memory, or decoded if it is compressed."""
        import pyarrow as pa

        what = f"{self.path}: record batch {index} cannot be read"
        with unreadable(what, (OSError, pa.ArrowException), "is the file cut short?"):
            return self._read_batch(index)

    def _decoded_bytes(self, batch: Any) -> int:
        """The bytes of a batch that are not mapped."""
        buffers = [b for column in batch.columns for b in column.buffers() if b is not None]
        return sum(b.size for b in buffers if not 0 <= b.address - self._address < self._size)


_INDEX = re.compile(r"__index_level_\d+__")  # pandas stores the numbers of rows so


def named_columns(path: Path, schema: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of a schema, and those of time stamps, dates and times of day among them.

    An index of pandas that has no name and no times is no column.

    Raises:
        DataError: two columns of one name.
    """
    import pyarrow as pa

    kinds = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time)
    times = tuple(f.name for f in schema if any(holds(f.type) for holds in kinds))
    columns = tuple(n for n in schema.names if n in times or not _INDEX.fullmatch(n))
    if len(set(columns)) < len(columns):
        raise DataError(
            f"{path}: has the columns {listed(columns, quoted=True)}, expected distinct names"
        )
    return columns, times


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

    kinds: Any = pa.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if str(column.type) in _TEXT:
        return np.array(["" if text is None else text for text in column.to_pylist()], np.str_)
    for holds, plain in (
        (kinds.is_boolean, pa.int8()),
        (kinds.is_decimal, pa.float64()),
        (kinds.is_null, pa.float64()),
        (kinds.is_date, pa.date32()),
    ):
        column = column.cast(plain) if holds(column.type) else column
    usable = (kinds.is_integer, kinds.is_floating, kinds.is_timestamp, kinds.is_date)
    if kinds.is_time(column.type):
        column = column.cast(pa.time64("ns")).cast(pa.int64()).cast(pa.duration("ns"))
    elif not any(holds(column.type) for holds in usable):
        raise DataError(
            f"{path}: column '{name}' has the type {column.type}, expected numbers or text; leave"
            " it out of the inputs"
        )
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(np.float64) if nullable and values.dtype.kind in "iu" else values
