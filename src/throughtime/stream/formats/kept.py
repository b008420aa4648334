"""Kept: decoded blocks of all open files, the last used ones, within a bound of bytes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

KEPT_BYTES = 12 * 2**20  # of all files together, and at least one block


class Token:
    """Whose block it is: a fresh one for each table, and for each copy of a table that was pickled."""

    def __reduce__(self) -> tuple[type["Token"], tuple[()]]:
        return Token, ()


class Kept:
    """Blocks by key; lanes that play different parts of the same file decode each block once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self.unlock()

    def unlock(self) -> None:
        """A new lock: a forked process may have inherited a locked one."""
        self._lock = threading.Lock()

    def get(
        self,
        key: Hashable,
        decode: Callable[[], T],
        size: Callable[[T], int] = lambda block: getattr(block, "nbytes", 0),
    ) -> T:
        """The block of this key, decoded unless it is kept.

        An array is made read-only, for it is given out again.
        """
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found[0]
        block = decode()
        if isinstance(block, np.ndarray):
            block.flags.writeable = False
        held = max(
            1024, size(block)
        )  # a block that takes no memory of its own is an object all the same
        with self._lock:
            self._bytes += held - self._blocks.pop(key, (None, 0))[1]
            self._blocks[key] = (block, held)
            while self._bytes > self.limit and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1][1]
        return block


KEPT = Kept(KEPT_BYTES)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=KEPT.unlock)
