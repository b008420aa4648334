"""Files converted once to an Arrow file in the user's cache folder, with checksums of its blocks.

A cached file is an Arrow file and a trailer: what is known of the columns, the source as it was
(size, times, a hash of sampled blocks), where each block ends, and the CRC-32 of each. What does
not fit is converted again. A cached file is written under another name, synced and renamed; a lock
lets one process write while the others wait for its file.
"""

import hashlib
import io
import json
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from throughtime._files import exclusive, sync, user_folder
from throughtime.stream.formats.arrow import (
    ArrowFile,
    Blocks,
    Content,
    RestartError,
    named_columns,
    side_by_side,
    with_missing,
)
from throughtime.stream.formats.table import Array, FileStamp, MappedFile, TableFile, unreadable

VERSION = 5  # of what is stored: older files are converted again
SMALL = 2**18  # bytes of a file that is converted in memory, wherever it is opened
_SAMPLES, _SAMPLE = 16, 4096  # blocks of a source that are hashed, and their bytes
_SIZES = 20  # characters at the end: the checksum and the length of the trailer
_checked: dict[str, set[int]] = {}  # the blocks of each cached file that this process has checked
_warned = set[Path]()
_log = logging.getLogger("throughtime")


class DamagedError(Exception):
    """A cached file does not hold what was written, or belongs to another source."""


def cache_folder() -> Path:
    """`$THROUGHTIME_CACHE`, or `throughtime` in the user's cache folder."""
    chosen = os.environ.get("THROUGHTIME_CACHE")
    return Path(chosen) if chosen else user_folder("cache", {"darwin": "Library/Caches"})


def converted(path: Path, source: Callable[[], Blocks], options: str = "") -> TableFile:
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

    def in_memory() -> TableFile:
        sink = io.BytesIO()
        content, _ = _write(path, source, sink)
        reader: Any = pa.ipc.open_file(pa.py_buffer(sink.getvalue()))
        return ArrowFile(path, content, reader.get_batch)

    with unreadable(
        f"{path}: cannot be read", "is it damaged, or may you not read it?", (OSError,)
    ):
        key = f"{path.resolve()}|{options}"
        file = cache_folder() / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.arrow"
        path.open("rb").close()
        if path.stat().st_size <= SMALL:
            return in_memory()
    try:
        return CachedFile(path, file, source)
    except OSError as error:
        if file.parent not in _warned:
            _warned.add(file.parent)
            warnings.warn(
                f"{file.parent}: cannot hold the converted values of {path} ({error.strerror}), so"
                " they are held in memory. Make room, or name another folder in THROUGHTIME_CACHE",
                stacklevel=2,
            )
        return in_memory()


class CachedFile(TableFile):
    """The columns of a file, from its cached Arrow file.

    Args:
        path: of the file.
        cached: of the Arrow file.
        source: opens the file for the conversion.
    """

    def __init__(self, path: Path, cached: Path, source: Callable[[], Blocks]) -> None:
        self.path, self._cached, self._source = path, cached, source
        try:
            self._file = _open(path, cached)
        except (DamagedError, FileNotFoundError):
            self._file = self._convert()
        content = self._file.content
        self.columns, self.times, self.length = content.columns, content.times, content.starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        try:
            return self._file.read(start, stop, columns)
        except DamagedError:
            what, hint = f"{self._cached}: is damaged", "make room, or set THROUGHTIME_CACHE"
            with unreadable(what, hint, (OSError,)):
                self._file = self._convert(damaged=True)
        return self._file.read(start, stop, columns)

    def _convert(self, *, damaged: bool = False) -> ArrowFile:
        self._cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._cached.with_suffix(".tmp")
        with exclusive(self._cached.with_suffix(".lock"), wait=True):
            if damaged:
                self._cached.unlink(missing_ok=True)
            try:
                return _open(self.path, self._cached)  # another process has written it meanwhile
            except (DamagedError, FileNotFoundError):
                stamp, source = FileStamp.of(self.path), fingerprint(self.path)
            _log.info("converting %s, %.0f MB, once", self.path, stamp.size / 1e6)
            try:
                with temporary.open("wb") as file:
                    content, ends = _write(self.path, self._source, file)
                _add_trailer(temporary, content, ends, source)
                stamp.check()
                temporary.replace(self._cached)
            finally:
                temporary.unlink(missing_ok=True)
            return _open(self.path, self._cached)


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
        file.write(trailer + f"{zlib.crc32(trailer):08x}{len(trailer):012x}".encode())
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
        sizes = bytes(data[-_SIZES:]).decode()
        trailer = data[-_SIZES - int(sizes[8:], 16) : -_SIZES]
        if zlib.crc32(trailer) != int(sizes[:8], 16):
            raise DamagedError
        stored = json.loads(bytes(trailer))
        if stored["version"] != VERSION or stored["source"] != fingerprint(path):
            raise DamagedError
        ends, sums, content = stored["ends"], stored["sums"], Content(**stored["content"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError from error
    content.columns, content.times = tuple(content.columns), tuple(content.times)
    checked = _checked.setdefault(f"{cached}|{sizes}", set())

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
