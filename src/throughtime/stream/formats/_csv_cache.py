"""Blocks of CSV files: converted to an Arrow file in the user's cache folder, or parsed when read.

A cache file is named for the path, size, modification time and dialect of its source. It is written
under another name and renamed, so a reader never opens half of one. A lock lets one process write
while the others wait for its file.
"""

import contextlib
import hashlib
import json
import os
import sys
import warnings
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from throughtime._files import exclusive, sync
from throughtime.errors import DataError
from throughtime.stream.formats._csv_dialect import Dialect, detect_dialect
from throughtime.stream.formats.table import (
    BLOCK_CACHE,
    FileStamp,
    MappedFile,
    TableFile,
    block_slices,
)

VERSION = 4  # of what is stored: older cache files are ignored and replaced
_METADATA = b"throughtime"
_warned = set[Path]()
_LARGE = 2**23  # bytes of a file whose conversion is shown
_MB = 10**6
_Show = Callable[[str, int, int], None]
_show: ContextVar[_Show | None] = ContextVar("show", default=None)


@contextlib.contextmanager
def conversion_shown(show: _Show) -> Generator[None]:
    """Within it, `show` is called with a phase, the MB done and all MB, as a large file is read."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def cache_folder() -> Path:
    """`$THROUGHTIME_CACHE`, or `throughtime` in the user's cache folder."""
    if chosen := os.environ.get("THROUGHTIME_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "throughtime"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "throughtime"


def skip_mark(file: BinaryIO) -> int:
    """Set a file to its first byte after a byte order mark; the position of that byte."""
    offset = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
    return file.seek(offset)


class CsvScan(ABC):
    """One pass over a CSV file, block by block.

    Attributes:
        path: the file.
        file: the same, open.
        offset: where the next block begins, in bytes.
        starts: the first row of each block, and the end of the last one.
        offsets: where each block begins, and where the last one ends.
        schema: that of the record batches.
    """

    schema: Any

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.offset = skip_mark(file)
        self.starts, self.offsets = array("q", [0]), array("q")

    def batches(self) -> Iterator[Any]:
        """The record batches of all blocks, in order."""
        self.offsets.append(self.offset)
        size, show = self.path.stat().st_size, _show.get()
        phase, total = f"converting {self.path.name}, MB", -(-size // _MB)
        if size < _LARGE:
            show = None
        while data := self._next_block():
            data, batch = self._parse(data, self.starts[-1])
            self.offset += len(data)
            self.offsets.append(self.offset)
            self.starts.append(self.starts[-1] + batch.num_rows)
            if show is not None:
                show(phase, self.offset // _MB, total)
            yield batch
        if show is not None:
            show(phase, total, total)

    def reparse(self, block: int) -> Any:
        """The record batch of a block once more."""
        return self._parse(self._read(block), self.starts[block])[1]

    def _read(self, block: int) -> bytes:
        """The bytes of a block."""
        begin, end = self.offsets[block : block + 2]
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin).ljust(end - begin, b"\n")  # see `_next_block`

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """What was learned in the pass."""

    @abstractmethod
    def _next_block(self) -> bytes:
        """The bytes from `offset` on; empty at the end. A last line may be given an end."""

    @abstractmethod
    def _parse(self, data: bytes, start: int) -> tuple[bytes, Any]:
        """The bytes of a block, which may end later than `data`, and its batch from row `start`."""


class CsvTable(TableFile):
    """A CSV file: record batches of its cache file, or parsed again where they are read.

    Args:
        path: the file.
        layout: see `open_cached`.
        scan: begins a pass.
        small: bytes of a file that is not cached.
        delimiter: see `detect_dialect`.
        decimal: see `detect_dialect`.
    """

    def __init__(
        self,
        path: Path,
        layout: str,
        scan: Callable[[Path, BinaryIO, Dialect], CsvScan],
        small: int,
        delimiter: str | None,
        decimal: str | None,
    ) -> None:
        self.path, stamp, self._key, self._cache = path, FileStamp.of(path), object(), None
        try:
            with path.open("rb") as file:
                skip_mark(file)
                dialect = detect_dialect(path, file, delimiter, decimal)

            def begin(path: Path, file: BinaryIO) -> CsvScan:
                return scan(path, file, dialect)

            if stamp.size > small:
                self._cache = open_cached(stamp, f"{layout}{dialect.word}", begin)
            if self._cache is None:
                with path.open("rb") as file:
                    self._scan = begin(path, file)
                    deque(self._scan.batches(), maxlen=0)
                self.metadata = self._scan.metadata()
            else:
                self.metadata = self._cache.metadata
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        self._starts: list[int] = self.metadata["starts"]
        self._faults: dict[str, str] = self.metadata["faults"]  # why a column cannot be read

    def batches(
        self, columns: Iterable[str], start: int, stop: int
    ) -> Iterator[tuple[Any, int, int]]:
        """The batches that hold rows, and the first and last row within each.

        Raises:
            DataError: one of the columns has a fault.
        """
        for name in columns if self._faults else ():
            if name in self._faults:
                raise DataError(f"{self.path}: {self._faults[name]}")
        for block, first, end in block_slices(self._starts, start, stop):
            yield self._batch(block), first, end

    def _batch(self, block: int) -> Any:
        if self._cache is None:
            return BLOCK_CACHE.get(
                (self._key, block), lambda: self._scan.reparse(block), lambda batch: batch.nbytes
            )
        batch = self._cache.batch(block)
        self._cache.file.count_read(batch.nbytes)
        return batch


class CacheFile:
    """An open cache file: record batches of mapped memory, and the metadata written with them."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.file = MappedFile(path)
        self._reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self.file.mapping)))
        last = self._reader.get_batch_with_custom_metadata(self._reader.num_record_batches - 1)
        self.metadata: dict[str, Any] = json.loads(last[1][_METADATA])

    def batch(self, index: int) -> Any:
        """A record batch; it shares the mapped memory."""
        return self._reader.get_batch(index)


def write_batches(path: Path, scan: CsvScan) -> None:
    """Write the batches of a pass to an Arrow file; its metadata is that of the last, empty one."""
    import pyarrow as pa

    with path.open("wb") as file, pa.ipc.new_file(file, scan.schema) as writer:
        for batch in scan.batches():
            writer.write_batch(batch)
        metadata = {_METADATA: json.dumps(scan.metadata()).encode()}
        empty = pa.RecordBatch.from_pylist([], schema=scan.schema)
        writer.write_batch(empty, custom_metadata=metadata)
    sync(path)


def open_cached(
    stamp: FileStamp, layout: str, scan: Callable[[Path, BinaryIO], CsvScan]
) -> CacheFile | None:
    """The cache file of a source, written first if there is none.

    Args:
        stamp: of the source.
        layout: the options of the conversion, as a word.
        scan: begins a pass over the source.

    Returns:
        None where the cache folder cannot be written; a warning says so once.
    """
    folder = cache_folder()
    source = hashlib.sha256(os.fsencode(stamp.path.resolve())).hexdigest()[:24]
    version = f"-{stamp.size}-{stamp.modified}-v{VERSION}"
    path = folder / f"{source}-{layout}{version}.arrow"
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):  # there is none, or it is damaged
            return CacheFile(path)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with exclusive(path.with_suffix(".lock"), wait=True):
            with contextlib.suppress(FileNotFoundError, ValueError):
                return CacheFile(path)  # another process has written it meanwhile
            try:
                with stamp.path.open("rb") as file:
                    write_batches(temporary, scan(stamp.path, file))
                stamp.check()
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            for old in folder.glob(f"{source}-*"):
                if not old.stem.endswith(version):
                    old.unlink(missing_ok=True)
        return CacheFile(path)
    except OSError as error:
        if folder not in _warned:
            _warned.add(folder)
            warnings.warn(
                f"{folder}: cannot hold the converted values of {stamp.path} ({error.strerror});"
                " CSV files are parsed where they are read, which is slower. Make room, or name"
                " another folder in THROUGHTIME_CACHE",
                stacklevel=2,
            )
        return None
