"""Tables by pyarrow: Arrow and Feather files, frames, and files converted once to an Arrow file.

Files of another format are converted block by block to an Arrow file in the user's cache folder.
Their floating columns lie side by side in a list column of each type, so that rows of many columns
are one slice. A cached file ends with a trailer: what is known of the columns, the source as it was
(size, times, a hash of sampled blocks), where each block ends, and the CRC-32 of each. What does
not fit is converted again. A cached file is written under another name, synced and renamed; a lock
lets one process write while the others wait for its file.
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
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from throughtime._files import exclusive, sync, user_folder
from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import (
    Array,
    FileStamp,
    MappedFile,
    Table,
    unreadable,
)

VERSION = 6  # of what is stored: older files are converted again
SMALL = 2**18  # bytes of a file that is converted in memory, wherever it is opened
ROWS = 65_536  # of a block that is converted, at most
_TEXT = ("string", "large_string", "string_view")  # the last one since pyarrow 16
_NUMBERS = ("int", "uint", "halffloat", "float", "double")
_TIMES = ("timestamp", "date", "time")
_CASTS = {"bool": "int8", "decimal": "double", "null": "double", "date": "date32"}
_FLOATS = ("double", "float")  # types whose columns lie side by side in a converted file
_INDEX = re.compile(r"__index_level_\d+__")  # pandas stores the numbers of rows so
_SAMPLES, _SAMPLE = 16, 4096  # blocks of a source that are hashed, and their bytes
_checked: dict[str, set[int]] = {}  # the blocks of each cached file that this process has checked
_warned = set[Path]()
_log = logging.getLogger("throughtime")


class DamagedError(Exception):
    """A cached file does not hold what was written, or belongs to another source."""


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
    def of(cls, path: Path | str, schema: Any, batches: Iterable[Any]) -> "Content":
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


class ArrowFile(Table):
    """Record batches of named columns.

    Args:
        path: of the file, for messages.
        content: of its columns.
        batch: a record batch by its number.
        mapped: the file that they share memory with, if any.
    """

    def __init__(
        self,
        path: Path | str,
        content: Content,
        batch: Callable[[int], Any],
        mapped: MappedFile | None = None,
    ) -> None:
        self.path, self.content, self._batch, self._mapped = path, content, batch, mapped
        self.columns, self.times = content.columns, content.times
        self.length = content.starts[-1]

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        faults = self.content.faults
        for name in columns if faults else ():
            if name in faults:
                raise DataError(f"{self.path}: {faults[name]}")
        starts, parts = self.content.starts, list[Array]()
        index = bisect_right(starts, start) - 1
        while start < stop:
            first, end = starts[index], min(stop, starts[index + 1])
            if start < end:  # an empty block has no rows
                parts.append(self._rows(self._batch(index), start - first, end - first, columns))
                if self._mapped is not None:
                    self._mapped.count_read(parts[-1].nbytes)
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _rows(self, batch: Any, start: int, stop: int, columns: Sequence[str]) -> Array:
        parts: list[Array] = []
        slots = self.content.slots
        for kind, group in groupby(columns, lambda name: slots[name][0] if name in slots else ""):
            names = [*group]
            if kind:
                lists = batch.column(batch.schema.get_field_index(kind))
                matrix: Array = lists.values.to_numpy().reshape(len(lists), -1)[start:stop]
                places = [slots[name][1] for name in names]
                whole = places == list(range(matrix.shape[1]))
                parts.append(matrix if whole else matrix[:, places])
                continue
            for name in names:
                column = batch.column(batch.schema.get_field_index(name))
                parts.append(self._values(name, column.slice(start, stop - start))[:, None])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _values(self, name: str, column: Any) -> Array:
        """A column; a missing number is NaN, a missing text empty."""
        import pyarrow as pa

        if hasattr(column, "dictionary"):
            column = column.dictionary_decode()
        kind = _kind(column.type)
        if kind in _TEXT:
            return np.array(["" if text is None else text for text in column.to_pylist()], np.str_)
        if kind == "time":
            return column.cast(pa.time64("ns")).cast("int64").to_numpy(False).astype("m8[ns]")
        if kind not in {*_NUMBERS, *_CASTS, *_TIMES}:
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


def arrow_columns(name: str, table: Any, nullable: frozenset[str] = frozenset()) -> ArrowFile:
    """The columns of a `pyarrow.Table`; `nullable` ones have a missing value elsewhere."""
    batches = table.to_batches()
    content = Content.of(name, table.schema, batches)
    content.nullable |= nullable
    return ArrowFile(name, content, batches.__getitem__)


def open_arrow(path: Path) -> Table:
    """An Arrow file (`.arrow`, `.feather` version 2), memory-mapped, or an Arrow stream.

    Raises:
        DataError: the file is neither, or cut short.

    Cost: a compressed file and a stream are converted once, see `converted`.
    """
    import pyarrow as pa

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


def named_columns(path: Path | str, schema: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of a schema, and those of time stamps, dates and times of day among them.

    An index of pandas that has no name and no times is no column.

    Raises:
        DataError: two columns of one name.
    """
    times = tuple(field.name for field in schema if _kind(field.type) in _TIMES)
    columns = tuple(n for n in schema.names if n in times or not _INDEX.fullmatch(n))
    if len(set(columns)) < len(columns):
        raise DataError(
            f"{path}: has the columns {listed(columns, quoted=True)}, expected distinct names"
        )
    return columns, times


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

    Cost: once, some 100 to 200 MB/s, and about as many bytes on the disk. A file of at most 256 kB,
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
            return CachedFile(path, file, source)
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
    return ArrowFile(path, content, reader.get_batch)


class CachedFile(Table):
    """The columns of a file, from its cached Arrow file.

    Args:
        path: of the file.
        cached: of the Arrow file.
        source: opens the file for the conversion.
    """

    def __init__(self, path: Path, cached: Path, source: Callable[[], Blocks]) -> None:
        self.path = self._origin = path
        self._cached, self._source = cached, source
        try:
            self._file = _open(path, cached)
        except (DamagedError, FileNotFoundError):
            self._file = self._convert()
        content = self._file.content
        self.columns, self.times, self.length = content.columns, content.times, content.starts[-1]

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        try:
            return self._file.rows(start, stop, columns)
        except DamagedError:
            what, hint = f"{self._cached}: is damaged", "make room, or set THROUGHTIME_CACHE"
            with unreadable(what, hint, (OSError,)):
                self._file = self._convert(damaged=True)
        return self._file.rows(start, stop, columns)

    def _convert(self, *, damaged: bool = False) -> ArrowFile:
        self._cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._cached.with_suffix(".tmp")
        with exclusive(self._cached.with_suffix(".lock"), wait=True):
            if damaged:
                self._cached.unlink(missing_ok=True)
            try:
                return _open(self._origin, self._cached)  # another process has written it meanwhile
            except (DamagedError, FileNotFoundError):
                stamp, source = FileStamp.of(self._origin), fingerprint(self._origin)
            _log.info("converting %s, %.0f MB, once", self._origin, stamp.size / 1e6)
            try:
                with temporary.open("wb") as file:
                    content, ends = _write(self._origin, self._source, file)
                _add_trailer(temporary, content, ends, source)
                stamp.check()
                temporary.replace(self._cached)
            finally:
                temporary.unlink(missing_ok=True)
            return _open(self._origin, self._cached)


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
    """Write the blocks of a source as an Arrow file; what they hold, and where each block ends."""
    import pyarrow as pa

    def batches(blocks: Blocks) -> Iterator[Any]:
        errors = (OSError, pa.ArrowException)  # of the source, which are no errors of the sink
        with unreadable(f"{path}: cannot be read", "is it damaged?", errors):
            yield from blocks.batches()

    while True:
        blocks, starts, ends, nullable = source(), [0], list[int](), set[str]()
        columns, times = named_columns(path, blocks.schema)
        empty = pa.RecordBatch.from_pylist([], schema=blocks.schema)
        first, slots = side_by_side(empty, columns)
        sink.seek(0)
        sink.truncate()
        try:
            with pa.ipc.new_file(sink, first.schema) as writer:
                ends.append(sink.tell())
                for batch in batches(blocks):
                    nullable |= with_missing(batch)
                    writer.write_batch(side_by_side(batch, columns)[0])
                    starts.append(starts[-1] + batch.num_rows)
                    ends.append(sink.tell())
        except RestartError:
            continue
        faults = dict(blocks.faults)
        return Content(columns, times, slots, frozenset(nullable), faults, starts), ends


def _add_trailer(path: Path, content: Content, ends: list[int], source: list[Any]) -> None:
    """Add the trailer to an Arrow file, and sync it."""
    data = MappedFile(path).mapping
    ends = [0, *ends, len(data)]
    sums = [zlib.crc32(memoryview(data)[a:b]) for a, b in pairwise(ends)]
    known = asdict(content) | {"nullable": sorted(content.nullable)}
    trailer = json.dumps(
        {"version": VERSION, "source": source, "content": known, "ends": ends, "sums": sums}
    ).encode()
    with path.open("ab") as file:
        file.write(b"\n%b\n%08x" % (trailer, zlib.crc32(trailer)))
    sync(path)


def _open(path: Path, cached: Path) -> ArrowFile:
    """The cached file of a source.

    Raises:
        DamagedError: it is damaged, or the source is not what it was.
        FileNotFoundError: there is none.
    """
    import pyarrow as pa

    try:
        mapped = MappedFile(cached)
        data = memoryview(mapped.mapping)
        trailer = mapped.mapping[mapped.mapping.rfind(b"\n{") + 1 : -9]
        total = zlib.crc32(trailer)
        if bytes(data[-9:]) != b"\n%08x" % total:
            raise DamagedError
        stored = json.loads(trailer)
        if stored["version"] != VERSION or stored["source"] != fingerprint(path):
            raise DamagedError
        ends, sums, content = stored["ends"], stored["sums"], Content(**stored["content"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError from error
    content.columns, content.times = tuple(content.columns), tuple(content.times)
    checked = _checked.setdefault(f"{cached}|{total}", set())

    def check(part: int) -> None:
        """Check the bytes of a block once: of the schema, of a batch, of the footer."""
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

    return ArrowFile(path, content, batch, mapped)
