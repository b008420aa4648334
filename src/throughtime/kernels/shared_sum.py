"""Sums of vectors over ranks on one machine, in memory that they share.

gloo sends every message through two threads of its own on each rank, and these compete with other
ranks for the cores: on two cores, a sum of 84,000 numbers held each of two ranks up for 0.7 ms and
took 0.1 ms here. Each rank writes its vector, waits until all have, adds up its share of every
vector, and waits again; nothing else runs meanwhile. Who waits spins for two milliseconds at most,
then sleeps.

Shapes: `N` numbers in the vector of each rank.
"""

import ctypes
import functools
import mmap
import os
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from throughtime.kernels.library import library

LINE = 128  # bytes of each rank: tt_rank in cpu/throughtime.h
CHECK = 100_000_000  # nanoseconds of waiting after which a rank looks whether the others are alive


class SharedSum:
    """The sum over all ranks of a vector that each of them writes.

    All ranks make the same calls in the same order. Each holds a lock on a byte of the file behind
    the memory, which the system releases when its process ends: so the others find out.

    Attributes:
        mine: `(N,)`, to be written by this rank before `reduce()`.
        total: `(N,)`, after `reduce()` the sum, the same bits on every rank; valid until `mine` of
            the next message is complete on all ranks.
        timeout: seconds that `reduce()` waits for another rank; those of the group.
    """

    def __init__(
        self, file: int, rank: int, ranks: int, size: int, dtype: torch.dtype, timeout: float
    ) -> None:
        self.timeout = timeout
        self._file, self._rank, self._ranks = file, rank, ranks
        self._memory = mmap.mmap(file, _bytes(ranks, size, dtype))
        lines = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._barrier = functools.partial(_barrier(), lines, rank, ranks)
        numbers = torch.frombuffer(self._memory, dtype=dtype, offset=_start(ranks))
        *self._vectors, self.total = numbers.view(ranks + 1, size)
        self.mine = self._vectors[rank]
        self._share = slice(size * rank // ranks, size * (rank + 1) // ranks)
        self._arrivals = 0

    @classmethod
    def open(cls, size: int, dtype: torch.dtype) -> "SharedSum | None":
        """For vectors of so many numbers, on all ranks of the default group at once.

        Returns:
            None on every rank if the group's messages are not gloo's, if any rank is on another
            machine or lacks the compiled core, or if there is no room; on systems without /dev/shm
            too.

        Cost: three messages and the clearing of the memory, some milliseconds.
        """
        group: Any = distributed.group.WORLD
        backend = group._get_backend(torch.device("cpu"))  # there is no public way
        if backend.name() != "gloo":
            return None
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        path: list[Any] = [None]
        if rank == 0 and library() is not None:
            with suppress(OSError):  # without room, or a folder to write to, gloo sums
                path[0] = _make(_bytes(ranks, size, dtype))
        distributed.broadcast_object_list(path, src=0)
        if path[0] is None:
            return None
        try:
            file = _attach(path[0], rank, _bytes(ranks, size, dtype)) if library() else None
            everywhere = torch.tensor(file is not None, dtype=torch.int64, device="cpu")
            distributed.all_reduce(everywhere, op=distributed.ReduceOp.MIN)
        finally:
            if rank == 0:
                path[0].unlink()  # nothing is left behind by ranks that fail or are killed later
        if file is None:
            return None
        if not everywhere:
            os.close(file)
            return None
        timeout = backend.options._timeout.total_seconds()
        shared = cls(file, rank, ranks, size, dtype, timeout)
        weakref.finalize(shared, os.close, file)
        return shared

    def reduce(self) -> None:
        """Add up what every rank has written to `mine`.

        Raises:
            RuntimeError: another rank has ended, or has not come for `timeout` seconds.
        """
        self._wait()
        share, (first, second, *more) = self._share, self._vectors
        torch.add(first[share], second[share], out=self.total[share])
        for vector in more:
            self.total[share].add_(vector[share])
        self._wait()

    def _wait(self) -> None:
        """Until every rank has called it as often as this one."""
        self._arrivals = (self._arrivals + 1) % 2**32
        deadline = time.monotonic() + self.timeout
        while not self._barrier(self._arrivals, CHECK):
            ended = [rank for rank in range(self._ranks) if not self._is_alive(rank)]
            if ended and not self._barrier(self._arrivals, 0):  # it had not come before it ended
                raise RuntimeError(f"rank {ended[0]} has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all ranks have come within {self.timeout:g} seconds")

    def _is_alive(self, rank: int) -> bool:
        """Whether a process has the lock of that rank."""
        if rank == self._rank:
            return True
        return not _lock(self._file, rank, shared=True)


def _barrier() -> Any:
    core: Any = library()
    core.tt_barrier.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_uint32,
        ctypes.c_int64,
    ]
    return core.tt_barrier


def _start(ranks: int) -> int:
    """The bytes before the vectors: the line of each rank, then what fills the page."""
    return -(-ranks * LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes(ranks: int, size: int, dtype: torch.dtype) -> int:
    return _start(ranks) + (ranks + 1) * size * dtype.itemsize


def _make(size: int) -> Path | None:
    """A new file of so many bytes in memory, all of them there: its file system may be small."""
    folder = Path("/dev/shm")  # noqa: S108  # the name is drawn at random
    if not folder.is_dir():
        return None
    number, name = tempfile.mkstemp(prefix="throughtime-", dir=folder)
    try:
        os.posix_fallocate(number, 0, size)
    except OSError:
        Path(name).unlink()
        raise
    finally:
        os.close(number)
    return Path(name)


def _attach(path: Path, rank: int, size: int) -> int | None:
    """That file with the lock of this rank; None where it is not the same file or has no locks."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    if os.fstat(file).st_size == size and _lock(file, rank, shared=False):
        return file
    os.close(file)
    return None


def _lock(file: int, rank: int, *, shared: bool) -> bool:
    """Whether nobody else has the lock of that rank; a lock that is not shared is kept."""
    import fcntl  # Windows has none

    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return False
    if shared:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, rank)
    return True
