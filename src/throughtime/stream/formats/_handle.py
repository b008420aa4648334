"""Open files and decoded blocks, both within bounds, both safe after a fork and after pickling."""

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

MAX_OPEN_FILES = 128  # of all recordings; a system allows a process some 1024
CACHE_BYTES = 12 * 2**20  # of all files together, and at least one block
RELEASE_AFTER = 8 * 2**20  # bytes of a mapped file read before its pages are given back
_recent: "OrderedDict[int, weakref.ref[Handle[Any]]]" = OrderedDict()  # the last used one last


class Handle(Generic[T]):
    """An open file that is opened on first use, and again after a fork or after pickling.

    Also opened again: a file that was closed because more than `MAX_OPEN_FILES` are in use.

    Args:
        path: the file.
        opener: a function of a module, so that it can be pickled. It raises DataError for a file
            that is not usable.
    """

    def __init__(self, path: Path, opener: Callable[[Path], T]) -> None:
        self.path = path
        self._opener = opener
        self._file: T | None = None
        self._process = -1

    def get(self) -> T:
        """The open file; hold it no longer than one read."""
        file = self._file
        if file is None or self._process != os.getpid():
            # Close an inherited file first: some libraries share open files by name, and a read in
            # a forked process would move the position of the parent's.
            self._file = file = None
            self._file = file = self._opener(self.path)
            self._process = os.getpid()
        _recent.pop(id(self), None)
        _recent[id(self)] = weakref.ref(self)
        while len(_recent) > MAX_OPEN_FILES:
            oldest = _recent.popitem(last=False)[1]()
            if oldest is not None:
                oldest.release()
        return file

    def release(self) -> None:
        """Drop the open file. It closes when its last reader drops it too."""
        self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opener": self._opener, "_file": None, "_process": -1}


class MappedFile:
    """A memory-mapped file whose pages return to the system after they were read.

    Memory then stays flat. Arrays that share the memory stay valid: the system reads their pages
    again where they are used.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._unreleased = 0

    def count_read(self, size: int) -> None:
        """Count bytes that were read; enough of them release the pages."""
        self._unreleased += size
        if self._unreleased > RELEASE_AFTER and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)
            self._unreleased = 0


class CacheKey:
    """The owner of cached blocks: a new one for each table, and for each unpickled copy of it."""

    def __reduce__(self) -> tuple[type["CacheKey"], tuple[()]]:
        return CacheKey, ()


class BlockCache:
    """Decoded blocks by key, the least recently used dropped first.

    Lanes that play different parts of the same file decode each block once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self.reset_lock()

    def reset_lock(self) -> None:
        """Make a new lock: a forked process may have inherited a locked one."""
        self._lock = threading.Lock()

    def get(
        self,
        key: Hashable,
        decode: Callable[[], T],
        size: Callable[[T], int] = lambda block: getattr(block, "nbytes", 0),
    ) -> T:
        """The block of this key, decoded unless it is cached.

        An array is made read-only, because it is returned again.
        """
        with self._lock:
            entry = self._blocks.get(key)
            if entry is not None:
                self._blocks.move_to_end(key)
                return entry[0]
        block = decode()
        if isinstance(block, np.ndarray):
            block.flags.writeable = False
        bytes_used = max(1024, size(block))  # a view of mapped memory is an object all the same
        with self._lock:
            self._bytes += bytes_used - self._blocks.pop(key, (None, 0))[1]
            self._blocks[key] = (block, bytes_used)
            while self._bytes > self.limit and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1][1]
        return block


BLOCK_CACHE = BlockCache(CACHE_BYTES)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BLOCK_CACHE.reset_lock)
