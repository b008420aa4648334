"""Handle: a library's open file, opened when it is first read, one for each process, and not too many at a time."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from throughtime.stream.formats.table import process

T = TypeVar("T")

OPEN_AT_MOST = 128  # files of all recordings; a system allows a process some 1024
_used: "OrderedDict[int, weakref.ref[Handle[Any]]]" = OrderedDict()  # the last used one last


class Handle(Generic[T]):
    """What an `opener` gives for a path, opened anew after a fork, after pickling, and where too
    many files are open.

    Args:
        path: the file.
        opener: a function of a module, so that it can be pickled; it raises DataError for a file
            that does not serve.
    """

    def __init__(self, path: Path, opener: Callable[[Path], T]) -> None:
        self.path = path
        self._opener = opener
        self._opened: T | None = None
        self._process = -1

    def get(self) -> T:
        """The open file; hold it no longer than one read."""
        opened = self._opened
        if opened is None or self._process != process():
            self._opened = opened = (
                None  # an inherited one is closed first: some libraries share open files by name
            )
            self._opened = opened = self._opener(self.path)
            self._process = process()
        self._mark_used()
        return opened

    def _mark_used(self) -> None:
        _used.pop(id(self), None)
        _used[id(self)] = weakref.ref(self)
        while len(_used) > OPEN_AT_MOST:
            oldest = _used.popitem(last=False)[1]()
            if oldest is not None:
                oldest.let_go()

    def let_go(self) -> None:
        """Opens it anew when it is read next.

        It is closed when the last one who reads it lets go.
        """
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opener": self._opener, "_opened": None, "_process": -1}
