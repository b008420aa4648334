"""Tables of named columns by pyarrow: Arrow and Feather files, Parquet, frames, converted files.

A file of another format is converted once to an Arrow file, see `converted`. Its floating columns
lie side by side in a list column of each type, so that rows of many columns are one slice.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import (
    Array,
    MappedFile,
    TableFile,
    block_slices,
    concat_blocks,
    unreadable,
)

_TEXT = ("string", "large_string", "string_view")  # the last one since pyarrow 16
_FLOATS = ("double", "float")  # types whose columns lie side by side in a converted file
_INDEX = re.compile(r"__index_level_\d+__")  # pandas stores the numbers of rows so
ROWS = 65_536  # of a block that is converted, at most


class RestartError(Exception):
    """A later block showed what a column holds: the conversion begins again."""


class Blocks(NamedTuple):
    """A file as record batches, to be converted.

    Attributes:
        schema: of the batches.
        batches: makes them, from the first one on.
        faults: why columns cannot be read, by name; known when the batches have been made.
    """

    schema: Any
    batches: Callable[[], Iterable[Any]]
    faults: Mapping[str, str] = {}


@dataclass
class Content:
    """What is known of the columns of a file, stored with its converted blocks.

    Attributes:
        columns: their names.
        times: those of time stamps, dates and times of day.
        slots: the type and the place of each column that lies beside others.
        nullable: columns with a missing value: their whole numbers are read as float64.
        faults: why columns cannot be read, by name.
        starts: the first row of each block, and the end of the last one.
    """

    columns: tuple[str, ...]
    times: tuple[str, ...]
    slots: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    nullable: frozenset[str] = frozenset()
    faults: Mapping[str, str] = field(default_factory=dict[str, str])
    starts: Sequence[int] = (0,)

    @classmethod
    def of(cls, path: Path, schema: Any, batches: Iterable[Any]) -> "Content":
        """That of record batches as they are."""
        lengths, nullable = list[int](), set[str]()
        for batch in batches:
            lengths.append(batch.num_rows)
            nullable |= with_missing(batch)
        starts = (0, *accumulate(lengths))
        return cls(*named_columns(path, schema), nullable=frozenset(nullable), starts=starts)


def with_missing(batch: Any) -> set[str]:
    """The columns of a record batch that have a missing value."""
    named = zip(batch.schema.names, batch.columns, strict=True)
    return {name for name, column in named if column.null_count}


class ArrowFile(TableFile):
    """Record batches of named columns.

    Args:
        path: of the file, for messages.
        content: of its columns.
        batch: a record batch by its number.
        mapped: the file that they share memory with, if any.
    """

    def __init__(
        self,
        path: Path,
        content: Content,
        batch: Callable[[int], Any],
        mapped: MappedFile | None = None,
    ) -> None:
        self.path, self.content, self._batch, self._mapped = path, content, batch, mapped
        self.columns, self.times = content.columns, content.times
        self.length = content.starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        faults = self.content.faults
        for name in columns if faults else ():
            if name in faults:
                raise DataError(f"{self.path}: {faults[name]}")
        parts: list[Array] = []
        for index, first, end in block_slices(self.content.starts, start, stop):
            parts.append(self._rows(self._batch(index), first, end, columns))
            if self._mapped is not None:
                self._mapped.count_read(parts[-1].nbytes)
        return concat_blocks(parts)

    def _rows(self, batch: Any, start: int, stop: int, columns: Sequence[str]) -> Array:
        slots = [self.content.slots.get(name) for name in columns]
        if None in slots or len({slot[0] for slot in slots if slot}) > 1:
            if len(columns) > 1:
                parts = [self._rows(batch, start, stop, [name]) for name in columns]
                return np.concatenate(parts, axis=1)
            rows = batch.slice(start, stop - start)
            return stack_columns(self.path, rows, columns, self.content.nullable)
        kind, places = slots[0][0], [slot[1] for slot in slots if slot]  # pyright: ignore[reportOptionalSubscript]
        lists = batch.column(batch.schema.get_field_index(kind))
        matrix: Array = lists.values.to_numpy().reshape(len(lists), -1)[start:stop]
        return matrix if places == list(range(matrix.shape[1])) else matrix[:, places]


def open_arrow(path: Path) -> TableFile:
    """An Arrow file (`.arrow`, `.feather` version 2), memory-mapped, or an Arrow stream.

    Raises:
        DataError: the file is neither, or cut short.

    Cost: a compressed file and a stream are converted once, see `converted`.
    """
    import pyarrow as pa

    from throughtime.stream.formats.converted import converted

    with unreadable(f"{path}: not a readable Arrow file"):
        mapped = MappedFile(path)
        buffer = pa.py_buffer(mapped.mapping)
        if mapped.mapping[:6] != b"ARROW1":
            schema = pa.ipc.open_stream(buffer).schema
            if mapped.mapping[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
                raise DataError(f"{path}: the stream has no end; the file is cut short")
            return converted(path, lambda: Blocks(schema, lambda: pa.ipc.open_stream(buffer)))
        reader: Any = pa.ipc.open_file(buffer)

    def batch(index: int) -> Any:
        what = f"{path}: record batch {index} cannot be read"
        with unreadable(what, "is the file cut short?"):
            return reader.get_batch(index)

    def batches() -> Iterator[Any]:
        return map(batch, range(reader.num_record_batches))

    first = next(filter(len, batches()), None)
    buffers = [b for column in first or () for b in column.buffers() if b is not None and b.size]
    if not all(0 <= b.address - buffer.address < buffer.size for b in buffers):  # compressed
        return converted(path, lambda: Blocks(reader.schema, batches))
    return ArrowFile(path, Content.of(path, reader.schema, batches()), batch, mapped)


def open_parquet(path: Path) -> TableFile:
    """A Parquet file, converted once, see `converted`.

    Raises:
        DataError: the file is no Parquet file, or cut short.
    """
    from pyarrow import parquet

    from throughtime.stream.formats.converted import converted

    def blocks() -> Blocks:
        with unreadable(f"{path}: not a readable Parquet file"):
            # without a buffer size a column of a row group is read whole
            file: Any = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**18)
        return Blocks(file.schema_arrow, lambda: file.iter_batches(ROWS, use_threads=False))

    return converted(path, blocks)


def side_by_side(batch: Any, columns: Sequence[str]) -> tuple[Any, dict[str, tuple[str, int]]]:
    """A record batch with its floating columns in one list column of each type, and their places.

    A missing number is NaN there.
    """
    import pyarrow as pa

    kinds = {name: str(batch.schema.field(name).type) for name in columns}
    arrays, slots = dict[str, Any](), dict[str, tuple[str, int]]()
    for kind in _FLOATS:
        names = [name for name in columns if kinds[name] == kind]
        if names and kind not in kinds:  # a column may have this name
            slots |= {name: (kind, index) for index, name in enumerate(names)}
            values = [batch.column(name).to_numpy(zero_copy_only=False) for name in names]
            flat = pa.array(np.stack(values, axis=1).reshape(-1))
            arrays[kind] = pa.FixedSizeListArray.from_arrays(flat, len(names))
    arrays |= {name: batch.column(name) for name in columns if name not in slots}
    batch = pa.RecordBatch.from_arrays([*arrays.values()], names=[*arrays])
    return batch, slots


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
    if not nullable or not kinds.is_integer(column.type):
        return column.to_numpy(zero_copy_only=False)
    whole = column.fill_null(0).to_numpy()
    if (whole != whole.astype(np.float64).astype(whole.dtype)).any():
        raise DataError(
            f"{path}: column '{name}' has missing values, and whole numbers of so many digits that"
            " float64 would merge them; leave it out, or fill the missing ones"
        )
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
