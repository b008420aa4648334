"""Blocks of CSV files: converted to an Arrow file in the user's cache folder, or parsed when read.

A cache file is named for the path, size and modification time of its source. It is written under
another name and renamed, so a reader never opens half of one. A lock lets one process write while
the others wait for its file.
"""

import contextlib
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from throughtime.errors import DataError
from throughtime.stream.formats.table import BLOCK_CACHE, FileStamp, MappedFile

VERSION = 1  # of what is stored: older cache files are ignored and replaced
_METADATA = b"throughtime"
_warned = set[Path]()


def cache_folder() -> Path:
    """`$THROUGHTIME_CACHE`, or `throughtime` in the user's cache folder."""
    if chosen := os.environ.get("THROUGHTIME_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "throughtime"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "throughtime"


class CsvScan(Protocol):
    """One pass over a CSV file."""

    @property
    def schema(self) -> Any:
        """Of the batches."""
        ...

    def batches(self) -> Iterator[Any]:
        """The record batches of all blocks, in order."""
        ...

    def metadata(self) -> dict[str, Any]:
        """What was learnt in the pass."""
        ...

    def reparse(self, block: int) -> Any:
        """The record batch of a block once more."""
        ...


class CsvBlocks:
    """The record batches of a CSV file: of its cache file, or parsed again where they are read.

    Args:
        path: the file.
        layout: see `open_cached`.
        scan: begins a pass.
        small: bytes of a file that is not cached.
    """

    def __init__(
        self, path: Path, layout: str, scan: Callable[[Path, BinaryIO], CsvScan], small: int
    ) -> None:
        stamp, self._key, self._cache = FileStamp.of(path), object(), None

        def convert(target: Path) -> None:
            with path.open("rb") as file:
                source = scan(path, file)
                write_batches(target, source.schema, source.batches(), source.metadata)

        try:
            if stamp.size > small:
                self._cache = open_cached(stamp, layout, convert)
            if self._cache is not None:
                self.metadata = self._cache.metadata
                return
            with path.open("rb") as file:
                self._scan = scan(path, file)
                for _ in self._scan.batches():
                    pass
            self.metadata = self._scan.metadata()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error

    def __getitem__(self, block: int) -> Any:
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

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The value of `metadata` in `write_batches`."""
        last = self._reader.num_record_batches - 1
        return json.loads(self._reader.get_batch_with_custom_metadata(last)[1][_METADATA])

    def batch(self, index: int) -> Any:
        """A record batch; it shares the mapped memory."""
        return self._reader.get_batch(index)


def write_batches(
    path: Path, schema: Any, batches: Iterable[Any], metadata: Callable[[], dict[str, Any]]
) -> None:
    """Write an Arrow file; `metadata` is called after the last batch."""
    import pyarrow as pa

    with path.open("wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
            empty = [pa.array([], kind) for kind in schema.types]
            writer.write_batch(
                pa.RecordBatch.from_arrays(empty, schema=schema),
                custom_metadata={_METADATA: json.dumps(metadata()).encode()},
            )
        file.flush()
        os.fsync(file.fileno())


def open_cached(stamp: FileStamp, layout: str, write: Callable[[Path], None]) -> CacheFile | None:
    """The cache file of a source, written first if there is none.

    Args:
        stamp: of the source.
        layout: the options of the conversion, as a word.
        write: writes the cache file to a path.

    Returns:
        None where the cache folder cannot be written; a warning says so once.
    """
    folder = cache_folder()
    source = hashlib.sha256(os.fsencode(stamp.path.resolve())).hexdigest()[:24]
    name = f"{source}-{layout}-{stamp.size}-{stamp.modified}-v{VERSION}.arrow"
    path = folder / name
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):  # there is none, or it is damaged
            return CacheFile(path)
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_suffix(".tmp")) as temporary:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return CacheFile(path)  # another process has written it meanwhile
            write(temporary)
            stamp.check()
            temporary.replace(path)
            for old in folder.glob(f"{source}-{layout}-*"):
                if old not in (path, temporary):
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


@contextlib.contextmanager
def _exclusive(path: Path) -> Generator[Path, None, None]:
    """A temporary file that one process at a time writes; the system unlocks a killed one's."""
    import fcntl

    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                current = False
            if current:  # else the process that had the lock renamed or removed it: try again
                try:
                    yield path
                finally:
                    path.unlink(missing_ok=True)
                return
