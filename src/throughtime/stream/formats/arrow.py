"""Tables by pyarrow: frames, and files that are converted once to an Arrow file.

Files of CSV, Parquet and Arrow are converted batch by batch to an Arrow file in the user's cache
folder. It ends with a trailer: what is known of the columns, the source as it was (size, times, a
sum of some of its bytes), where each batch ends, and the CRC-32 of each. What does not fit is
converted again. A cached file is written under another name, synced and renamed; a lock lets one
process write while the others wait for its file.
"""

import hashlib
import json
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from throughtime.errors import DataError, listed
from throughtime.files import exclusive, sync, user_folder
from throughtime.stream.formats.table import Array, Table, check_exact, unreadable
from throughtime.stream.formats.times import nanoseconds

VERSION = 13  # of what is stored: older files are converted again
SMALL = 2**18  # bytes of a file that is converted in memory, wherever it is opened
ROWS = 65_536  # of a batch that is converted, at most
_BLOCK = 4096  # bytes of a source that are summed at once
_TEXT = ("string", "large_string", "string_view")  # the last one since pyarrow 16
_TIMES = ("timestamp", "date")
_CASTS = {"bool": "int8", "decimal": "double", "null": "double"}
_KNOWN = {*_CASTS, "int", "uint", "halffloat", "float", "double"}
_checked: dict[str, set[int]] = {}  # the parts of each cached file that this process has checked


Batches: TypeAlias = tuple[Any, Iterable[Any], dict[str, str]]
"""A file to be converted: the schema, record batches of any size, and why columns cannot be read,
by name, which is known when the batches have been made."""


class ArrowFile(Table):
    """Record batches of named columns.

    Args:
        path: of the file, for messages.
        schema: of the batches.
        starts: the first row of each, and the end of the last one.
        nullable: columns with a missing value: their whole numbers are read as float64.
        batch: one of them by its number.
        faults: why columns cannot be read, by name.

    Raises:
        DataError: two columns of one name.
    """

    def __init__(
        self,
        path: Path | str,
        schema: Any,
        starts: Sequence[int],
        nullable: Sequence[str],
        batch: Callable[[int], Any],
        faults: Mapping[str, str],
    ) -> None:
        self.path, self._starts, self._nullable, self._batch = path, starts, nullable, batch
        self._faults = faults
        self._latest: Any = None, None  # the batches that were read last
        self._kinds = {field.name: _kind(field.type) for field in schema}
        self.times = tuple(name for name, kind in self._kinds.items() if kind in _TIMES)
        # an index of pandas that has no name and no times is no column
        self.columns = tuple(
            n for n in schema.names if n in self.times or not n.startswith("__index_level_")
        )
        self.length = starts[-1]
        if len({*self.columns}) < len(self.columns):
            raise DataError(
                f"{path}: columns {listed(self.columns, quoted=True)}, expected distinct names"
            )

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        for name in filter(self._faults.__contains__, columns):  # the first, of several
            raise DataError(self._faults[name])
        span = range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))
        if self._latest[0] != span:
            self._latest = span, pa.Table.from_batches(map(self._batch, span))
        table, first = self._latest[1], start - self._starts[span[0]]
        values = (self._values(n, table.column(n).slice(first, stop - start)) for n in columns)
        return self.join(columns, [v[:, None] for v in values])

    def _values(self, name: str, column: Any) -> Array:
        """A column; a missing number is NaN, a missing text empty."""
        kind, what, [*chunks] = self._kinds[name], f"{self.path}: column '{name}'", column.chunks
        column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        if kind == "dictionary":
            column = pa.array(column.to_pylist(), column.type.value_type)  # not every type decodes
            kind = _kind(column.type)
        if kind in _TEXT:
            return np.array(["" if text is None else text for text in column.to_pylist()], np.str_)
        if kind in _TIMES:
            return nanoseconds(column.to_numpy(zero_copy_only=False), what)
        if kind not in _KNOWN:
            raise DataError(
                f"{what} has the type {column.type}, expected numbers or text; leave it out"
            )
        if kind not in ("int", "uint") or name not in self._nullable:
            return column.cast(_CASTS.get(kind, column.type)).to_numpy(zero_copy_only=False)
        check_exact(what, column.fill_null(0).to_numpy(), np.float64)
        return column.cast("double").to_numpy(zero_copy_only=False)


def _kind(dtype: Any) -> str:
    """The name of an Arrow type without its width, its unit and its parameters."""
    return re.split(r"[\d<\[(]", str(dtype))[0]


def arrow_columns(name: Path | str, table: Any, faults: Mapping[str, str] = {}) -> ArrowFile:
    """The columns of a `pyarrow.Table`."""
    batches = table.to_batches()
    starts = (0, *accumulate(map(len, batches)))
    return ArrowFile(name, table.schema, starts, _nullable(table), batches.__getitem__, faults)


def _nullable(rows: Any) -> list[str]:
    """The columns of a table or a record batch in which a value is missing."""
    columns = zip(rows.schema.names, rows.columns, strict=True)
    return [name for name, column in columns if column.null_count]


def open_arrow(path: Path) -> Table:
    """An Arrow file (`.arrow`, `.feather` version 2), converted once, see `converted`.

    Raises:
        DataError: the file is none, such as a stream, or cut short.
    """

    def batches() -> Batches:
        hint = "cut short, or a stream? Read it with pyarrow.ipc.open_stream, and pass the table"
        with unreadable(f"{path}: not a readable Arrow file", hint):
            reader: Any = pa.ipc.open_file(pa.OSFile(str(path)))
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches)), {}

    return converted(path, batches)


def open_parquet(path: Path) -> Table:
    """A Parquet file, converted once, see `converted`.

    Raises:
        DataError: the file is no Parquet file, or cut short.
    """
    from pyarrow import parquet

    def batches() -> Batches:
        with unreadable(f"{path}: not a readable Parquet file"):
            # without a buffer size a column of a row group is read whole
            file: Any = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**18)
        return file.schema_arrow, file.iter_batches(ROWS, use_threads=False), {}

    return converted(path, batches)


def converted(path: Path, source: Callable[[], Batches], options: str = "") -> Table:
    """The columns of a file as those of its cached Arrow file, which is written first if need be.

    Args:
        path: of the file.
        source: opens it.
        options: of the conversion.

    Raises:
        DataError: the file cannot be read, or changes meanwhile; or the cache folder not written.

    Cost: once, some 200 MB/s, of CSV 10 to 40, and about as many bytes on the disk, in
    `$THROUGHTIME_CACHE` or `throughtime` in the user's cache folder. A file of at most 256 kB is
    held in memory.
    """
    folder = Path(
        os.environ.get("THROUGHTIME_CACHE") or user_folder("cache", {"darwin": "Library/Caches"})
    )
    key = f"{path.resolve()}|{options}"
    cached = folder / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.arrow"
    with unreadable(
        f"{path}: cannot be read, or converted in {folder}",
        "is it damaged or locked, or the disk full? THROUGHTIME_CACHE sets another folder",
        (OSError,),
    ):
        if path.stat().st_size > SMALL:
            return _open(path, cached) or _convert(path, cached, source)
        schema, batches, faults = source()
        return arrow_columns(path, pa.Table.from_batches(_parts(path, batches), schema), faults)


def _convert(path: Path, cached: Path, source: Callable[[], Batches]) -> ArrowFile:
    """Write the cached file of a source, unless another process does."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_suffix(".tmp")
    with exclusive(cached.with_suffix(".lock"), wait=True):
        while (file := _open(path, cached)) is None:
            before = fingerprint(path)
            try:
                _write(path, source(), temporary, before)
                if fingerprint(path) != before:
                    raise DataError(f"{path}: changed while it was read; run again")
                temporary.replace(cached)
            finally:
                temporary.unlink(missing_ok=True)
    return file


def fingerprint(path: Path) -> list[Any]:
    """What shows whether a file is what it was: size, times, and a sum of 64 blocks of it.

    And what was made of it is of this version.
    """
    status, total = path.stat(), 0
    with path.open("rb", buffering=0) as file:
        for start in range(0, status.st_size, max(_BLOCK, status.st_size // 64)):
            file.seek(start)
            total = zlib.crc32(file.read(_BLOCK), total)
    return [VERSION, status.st_size, status.st_mtime_ns, status.st_ctime_ns, total]


def _write(path: Path, content: Batches, to: Path, source: list[Any]) -> None:
    """Write the batches of a source as an Arrow file, then the trailer, and sync it."""
    schema, batches, faults = content
    starts, ends, nullable = [0], [0], set[str]()
    with to.open("wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        ends.append(sink.tell())
        for part in _parts(path, batches):
            writer.write_batch(part)
            ends.append(sink.tell())
            starts.append(starts[-1] + len(part))
            nullable.update(_nullable(part))
            del part  # before the next one is read, which may be large
    data: Any = memoryview(pa.memory_map(str(to)).read_buffer())
    ends.append(len(data))
    sums = [zlib.crc32(data[a:b]) for a, b in pairwise(ends)]
    trailer = json.dumps([source, starts, [*nullable], faults, ends, sums]).encode()
    with to.open("ab") as file:
        file.write(b"%b%08x%08x" % (trailer, len(trailer), zlib.crc32(trailer)))
    sync(to)


def _parts(path: Path, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of a source, each of at most `ROWS` rows."""
    with unreadable(f"{path}: cannot be read", "is it damaged?", (pa.ArrowException,)):
        for batch in batches:
            batch.validate(full=True)  # pyarrow reads beyond the buffers of a damaged file
            yield from pa.Table.from_batches([batch]).to_batches(ROWS)
            del batch  # before the next one is read


def _open(path: Path, cached: Path) -> ArrowFile | None:
    """The cached file of a source; `None` if it is not what was written, or of another source."""
    try:
        data: Any = memoryview(pa.memory_map(str(cached)).read_buffer())
        size, total = (int(bytes(data[a:b]), 16) for a, b in ((-16, -8), (-8, None)))
    except (ValueError, FileNotFoundError):
        return None
    trailer = bytes(data[-16 - size : -16])
    if zlib.crc32(trailer) != total:
        return None
    source, *known = json.loads(trailer)
    if source != fingerprint(path):
        return None
    starts, nullable, faults, ends, sums = known
    checked = _checked.setdefault(f"{cached}|{total}", set())

    def is_intact(part: int) -> bool:
        """Check the bytes of a part once: of the schema, of a batch, of the footer."""
        if part not in checked and zlib.crc32(data[ends[part] : ends[part + 1]]) == sums[part]:
            checked.add(part)
        return part in checked

    def batch(index: int) -> Any:
        if not is_intact(index + 1):
            cached.unlink(missing_ok=True)
            raise DataError(f"{cached}: is damaged; run again, and it is written again")
        return reader.get_batch(index)

    if not (is_intact(0) and is_intact(len(sums) - 1)):
        return None
    reader: Any = pa.ipc.open_file(pa.py_buffer(data[: ends[-1]]))
    return ArrowFile(path, reader.schema, starts, nullable, batch, faults)
