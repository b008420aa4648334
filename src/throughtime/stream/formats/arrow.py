"""Tables by pyarrow: Arrow and Feather files, frames, and files converted once to an Arrow file.

Files of another format are converted batch by batch to an Arrow file in the user's cache folder. It
ends with a trailer: what is known of the columns, the source as it was (size, times, a hash of
sampled blocks), where each batch ends, and the CRC-32 of each. What does not fit is converted
again. A cached file is written under another name, synced and renamed; a lock lets one process
write while the others wait for its file.
"""

import hashlib
import io
import json
import logging
import os
import re
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.files import exclusive, sync, user_folder
from throughtime.stream.formats.table import Array, FileStamp, Table, unreadable

VERSION = 7  # of what is stored: older files are converted again
SMALL = 2**18  # bytes of a file that is converted in memory, wherever it is opened
ROWS = 65_536  # of a batch that is converted, at most
_TEXT = ("string", "large_string", "string_view")  # the last one since pyarrow 16
_TIMES = ("timestamp", "date", "time")
_CASTS = {"bool": "int8", "decimal": "double", "null": "double", "date": "date32"}
_KNOWN = {*_TEXT, *_TIMES, *_CASTS, "int", "uint", "halffloat", "float", "double"}
_INDEX = re.compile(r"__index_level_\d+__")  # pandas stores the numbers of rows so
_SAMPLES, _SAMPLE = 16, 4096  # blocks of a source that are hashed, and their bytes
_checked: dict[str, set[int]] = {}  # the parts of each cached file that this process has checked
_warned = set[Path]()
_log = logging.getLogger("throughtime")


class DamagedError(Exception):
    """A cached file does not hold what was written, or belongs to another source."""


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


class Content(NamedTuple):
    """What is known of record batches.

    Attributes:
        starts: the first row of each, and the end of the last one.
        nullable: columns with a missing value: their whole numbers are read as float64.
        faults: why columns cannot be read, by name.
    """

    starts: Sequence[int]
    nullable: Sequence[str] = ()
    faults: Mapping[str, str] = {}

    @classmethod
    def of(cls, batches: Iterable[Any]) -> "Content":
        """That of record batches that can all be read."""
        starts, nullable = [0], dict[str, None]()
        for batch in batches:
            starts.append(starts[-1] + batch.num_rows)
            columns = zip(batch.schema.names, batch.columns, strict=True)
            nullable |= {name: None for name, column in columns if column.null_count}
        return cls(starts, (*nullable,))


class ArrowFile(Table):
    """Record batches of named columns.

    Args:
        path: of the file, for messages.
        schema: of the batches.
        content: of the batches.
        batch: one of them by its number.
        again: makes the table anew, where a batch turns out to be damaged.

    Raises:
        DataError: two columns of one name.
    """

    def __init__(
        self,
        path: Path | str,
        schema: Any,
        content: Content,
        batch: Callable[[int], Any],
        again: "Callable[[], ArrowFile] | None" = None,
    ) -> None:
        self.path, self.content, self._batch, self._again = path, content, batch, again
        self._latest: tuple[int, Any, dict[str, Array]] = -1, None, {}  # batch that was read last
        self._kinds = {field.name: _kind(field.type) for field in schema}
        self._order = {name: i for i, name in enumerate(schema.names)}
        self.times = tuple(name for name, kind in self._kinds.items() if kind in _TIMES)
        # an index of pandas that has no name and no times is no column
        self.columns = tuple(n for n in schema.names if n in self.times or not _INDEX.fullmatch(n))
        self.length = content.starts[-1]
        if len({*self.columns}) < len(self.columns):
            names = listed(self.columns, quoted=True)
            raise DataError(f"{path}: has the columns {names}, expected distinct names")

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        try:
            return self._read(start, stop, columns)
        except DamagedError:
            if self._again is None:
                raise
            with unreadable(f"{self.path}: cannot be converted again", "make room", (OSError,)):
                self._batch = self._again()._batch
        return self._read(start, stop, columns)

    def _read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        faults = self.content.faults
        for name in columns if faults else ():
            if name in faults:
                raise DataError(f"{self.path}: {faults[name]}")
        starts, parts = self.content.starts, list[Array]()
        index = bisect_right(starts, start) - 1
        while start < stop:
            first, end = starts[index], min(stop, starts[index + 1])
            if start < end:  # an empty batch has no rows
                latest = self._latest
                if latest[0] != index:
                    latest = self._latest = index, self._batch(index), {}
                own = slice(start - first, end - first)
                values = [self._column(n, *latest[1:], own) for n in columns]
                parts.append(values[0][:, None] if len(values) == 1 else np.stack(values, axis=1))
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _column(self, name: str, batch: Any, views: dict[str, Array], rows: slice) -> Array:
        """Rows of a batch; plain numbers are a view of the file, which `views` keeps."""
        if name not in views:
            column = batch.column(self._order[name])
            if column.null_count or self._kinds[name] not in ("double", "float"):
                return self._values(name, column.slice(rows.start, rows.stop - rows.start))
            views[name] = column.to_numpy()
        return views[name][rows]

    def _values(self, name: str, column: Any) -> Array:
        """A column; a missing number is NaN, a missing text empty."""
        import pyarrow as pa

        kind = self._kinds[name]
        if kind == "dictionary":
            column = column.dictionary_decode()
            kind = _kind(column.type)
        if kind in _TEXT:
            return np.array(["" if text is None else text for text in column.to_pylist()], np.str_)
        if kind == "time":
            return column.cast(pa.time64("ns")).cast("int64").to_numpy(False).astype("m8[ns]")
        if kind not in _KNOWN:
            raise DataError(
                f"{self.path}: column '{name}' has the type {column.type}, expected numbers or"
                " text; leave it out of the inputs"
            )
        if kind not in ("int", "uint") or name not in self.content.nullable:
            return column.cast(_CASTS.get(kind, column.type)).to_numpy(zero_copy_only=False)
        whole = column.fill_null(0).to_numpy()
        if (whole != whole.astype(np.float64).astype(whole.dtype)).any():
            raise DataError(
                f"{self.path}: column '{name}' has missing values, and whole numbers of so many"
                " digits that float64 would merge them; leave it out, or fill the missing ones"
            )
        return column.cast("double").to_numpy(zero_copy_only=False)


def _kind(dtype: Any) -> str:
    """The name of an Arrow type without its width, its unit and its parameters."""
    return re.split(r"[\d<\[(]", str(dtype))[0]


def arrow_columns(name: str, table: Any, nullable: Sequence[str] = ()) -> ArrowFile:
    """The columns of a `pyarrow.Table`; `nullable` ones have a missing value elsewhere."""
    batches = table.to_batches()
    content = Content.of(batches)
    content = content._replace(nullable=(*content.nullable, *nullable))
    return ArrowFile(name, table.schema, content, batches.__getitem__)


def open_arrow(path: Path) -> Table:
    """An Arrow file (`.arrow`, `.feather` version 2), memory-mapped, or an Arrow stream.

    Raises:
        DataError: the file is neither, or cut short.

    Cost: a compressed file and a stream are converted once, see `converted`.
    """
    import pyarrow as pa

    with unreadable(f"{path}: not a readable Arrow file"):
        buffer: Any = pa.memory_map(str(path)).read_buffer()
        data = memoryview(buffer)
        if bytes(data[:6]) != b"ARROW1":
            schema = pa.ipc.open_stream(buffer).schema
            if bytes(data[-8:]) != b"\xff\xff\xff\xff\0\0\0\0":
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
    return ArrowFile(path, reader.schema, Content.of(batches()), batch)


def open_parquet(path: Path) -> Table:
    """A Parquet file, converted once, see `converted`.

    Raises:
        DataError: the file is no Parquet file, or cut short.
    """
    from pyarrow import parquet

    def blocks() -> Blocks:
        with unreadable(f"{path}: not a readable Parquet file"):
            # without a buffer size a column of a row group is read whole
            file: Any = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**18)
        return Blocks(file.schema_arrow, lambda: file.iter_batches(ROWS, use_threads=False))

    return converted(path, blocks)


def cache_folder() -> Path:
    """`$THROUGHTIME_CACHE`, or `throughtime` in the user's cache folder."""
    chosen = os.environ.get("THROUGHTIME_CACHE")
    return Path(chosen) if chosen else user_folder("cache", {"darwin": "Library/Caches"})


def converted(path: Path, source: Callable[[], Blocks], options: str = "") -> Table:
    """The columns of a file as those of its cached Arrow file, which is written first if need be.

    Args:
        path: of the file.
        source: opens it.
        options: of the conversion.

    Raises:
        DataError: the file cannot be read, or changes meanwhile.

    Cost: once, some 50 to 200 MB/s, and about as many bytes on the disk. A file of at most 256 kB,
    and any where the cache folder cannot be written, which a warning says, is held in memory.
    """
    import pyarrow as pa

    with unreadable(
        f"{path}: cannot be read", "is it damaged, or may you not read it?", (OSError,)
    ):
        key = f"{path.resolve()}|{options}"
        file = cache_folder() / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.arrow"
        path.open("rb").close()
        is_small = path.stat().st_size <= SMALL
    try:
        if not is_small:
            return _cached(path, file, source)
    except OSError as error:
        if file.parent not in _warned:
            _warned.add(file.parent)
            warnings.warn(
                f"{file.parent}: cannot hold the converted values of {path} ({error.strerror}), so"
                " they are held in memory. Make room, or name another folder in THROUGHTIME_CACHE",
                stacklevel=2,
            )
    sink = io.BytesIO()
    content, _ = _write(path, source, sink)
    reader: Any = pa.ipc.open_file(pa.py_buffer(sink.getvalue()))
    return ArrowFile(path, reader.schema, content, reader.get_batch)


def _cached(
    path: Path, cached: Path, source: Callable[[], Blocks], *, damaged: bool = False
) -> ArrowFile:
    """The cached file of a source, written if need be, which is again where it is damaged."""

    def known() -> ArrowFile | None:
        with suppress(DamagedError, FileNotFoundError):
            return _open(path, cached, lambda: _cached(path, cached, source, damaged=True))
        return None

    file = None if damaged else known()
    if file is not None:
        return file
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_suffix(".tmp")
    with exclusive(cached.with_suffix(".lock"), wait=True):
        if damaged:
            cached.unlink(missing_ok=True)
        while (file := known()) is None:  # another process may have written it meanwhile
            stamp, before = FileStamp.of(path), fingerprint(path)
            _log.info("converting %s, %.0f MB, once", path, stamp.size / 1e6)
            try:
                with temporary.open("wb") as sink:
                    content, ends = _write(path, source, sink)
                _add_trailer(temporary, content, ends, before)
                stamp.check()
                temporary.replace(cached)
            finally:
                temporary.unlink(missing_ok=True)
    return file


def fingerprint(path: Path) -> list[Any]:
    """What shows whether a file is what it was: size, times, a hash of sampled blocks.

    Cost: a tenth of a millisecond, if the blocks are in the page cache.
    """
    status, digest = path.stat(), hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        last = max(0, status.st_size - _SAMPLE)
        for i in range(_SAMPLES):
            file.seek(last * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest.hexdigest()]


def _write(path: Path, source: Callable[[], Blocks], sink: BinaryIO) -> tuple[Content, list[int]]:
    """Write the batches of a source as an Arrow file; what they hold, and where each ends."""
    import pyarrow as pa

    blocks, ends = source(), list[int]()
    ArrowFile(path, blocks.schema, Content((0,)), lambda _: None)  # refuses names
    batches = iter(blocks.batches())

    def written() -> Iterator[Any]:
        with pa.ipc.new_file(sink, blocks.schema) as writer:
            ends.append(sink.tell())
            while True:
                errors = (OSError, pa.ArrowException)  # of the source, not of the sink
                with unreadable(f"{path}: cannot be read", "is it damaged?", errors):
                    batch = next(batches, None)
                if batch is None:
                    return
                writer.write_batch(batch)
                ends.append(sink.tell())
                yield batch

    return Content.of(written())._replace(faults=dict(blocks.faults)), ends


def _add_trailer(path: Path, content: Content, ends: list[int], source: list[Any]) -> None:
    """Add the trailer to an Arrow file, and sync it."""
    import pyarrow as pa

    data: Any = memoryview(pa.memory_map(str(path)).read_buffer())
    ends = [0, *ends, len(data)]
    sums = [zlib.crc32(data[a:b]) for a, b in pairwise(ends)]
    trailer = json.dumps([VERSION, source, content, ends, sums]).encode()
    with path.open("ab") as file:
        file.write(b"\n%b\n%08x" % (trailer, zlib.crc32(trailer)))
    sync(path)


def _open(path: Path, cached: Path, again: Callable[[], ArrowFile]) -> ArrowFile:
    """The cached file of a source.

    Raises:
        DamagedError: it is damaged, or the source is not what it was.
        FileNotFoundError: there is none.
    """
    import pyarrow as pa

    try:
        data: Any = memoryview(pa.memory_map(str(cached)).read_buffer())
        tail = bytes(data[-(2**16) :])
        while (begin := tail.rfind(b"\n[", 0, -9)) < 0 and len(tail) < len(data):
            tail = bytes(data[-4 * len(tail) :])
        trailer = tail[begin + 1 : -9]
        total = zlib.crc32(trailer)
        if tail[-9:] != b"\n%08x" % total:
            raise DamagedError
        version, source, content, ends, sums = json.loads(trailer)
        if version != VERSION or source != fingerprint(path):
            raise DamagedError
    except (ValueError, TypeError) as error:
        raise DamagedError from error
    checked = _checked.setdefault(f"{cached}|{total}", set())

    def check(part: int) -> None:
        """Check the bytes of a part once: of the schema, of a batch, of the footer."""
        if part not in checked:
            if zlib.crc32(data[ends[part] : ends[part + 1]]) != sums[part]:
                raise DamagedError
            checked.add(part)

    check(0)
    check(len(sums) - 1)
    reader: Any = pa.ipc.open_file(pa.py_buffer(data[: ends[-1]]))

    def batch(index: int) -> Any:
        check(index + 1)
        return reader.get_batch(index)

    return ArrowFile(path, reader.schema, Content(*content), batch, again)
