"""Stretches of a stream, read when they are asked for or before: here, in a thread, or in worker
processes.

A stretch is a pure function of what is played in it, so who reads it, and when, changes no number;
a place in the stream is a number of steps, and what was read ahead of it is no part of it. The
processes are those of `torch.utils.data.DataLoader`.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from torch.utils.data import DataLoader, Dataset

from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.stream._collate import Collator, MissingCounts
from throughtime.stream.lanes import LaneSlice

Workers: TypeAlias = int | Literal["thread"]
DEPTH = 2  # stretches read ahead by a thread, and by each process


class ReadRequest(NamedTuple):
    """A stretch: its first step in the epoch, its length, and what is played in it."""

    start: int
    steps: int
    plays: tuple[LaneSlice, ...]


Stretch: TypeAlias = tuple[Chunk, MissingCounts]


class Reader(Protocol):
    """Gives one stretch after another."""

    def read(self, now: ReadRequest, later: Iterable[ReadRequest]) -> Stretch:
        """The stretch asked for; `later` are those that will probably follow."""
        ...


@dataclass
class SyncReader:
    """Reads when asked, one thread at a time: an open file has one position."""

    collator: Collator
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type["SyncReader"], tuple[Collator]]:
        return SyncReader, (self.collator,)

    def read(self, now: ReadRequest, later: Iterable[ReadRequest]) -> Stretch:
        del later
        with self.lock:
            return self.collator.chunk(now.plays, now.steps)


@dataclass
class ThreadReader:
    """Reads the next stretches in a thread: enough where reading waits for a disk, or decodes outside Python."""

    here: SyncReader
    _waiting: deque[tuple[ReadRequest, Future[Stretch]]] = field(
        default_factory=deque[tuple[ReadRequest, Future[Stretch]]]
    )
    _later: Iterator[ReadRequest] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="throughtime-stream")

    def __reduce__(self) -> tuple[type["ThreadReader"], tuple[SyncReader]]:
        return ThreadReader, (self.here,)

    def read(self, now: ReadRequest, later: Iterable[ReadRequest]) -> Stretch:
        if not self._waiting or self._waiting[0][0] != now:
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._later = iter(later)
            self._submit(now)
        _, future = self._waiting.popleft()
        for request in self._later:
            self._submit(request)
            if len(self._waiting) >= DEPTH:
                break
        return future.result()

    def _submit(self, request: ReadRequest) -> None:
        self._waiting.append((request, self._thread.submit(self.here.read, request, ())))


class _Stretches(Dataset[Any]):
    """What a worker process does: the request is the index."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __getitem__(self, request: ReadRequest) -> Stretch | DataError:
        try:
            return self.collator.chunk(request.plays, request.steps)
        except DataError as error:  # told as it is, without the worker's traceback
            return error


class _Requests:
    """The order in which the workers read: whatever is put here before the loader is iterated."""

    def __init__(self) -> None:
        self.now: Iterator[ReadRequest] = iter(())
        self.sent: deque[ReadRequest] = deque()

    def __iter__(self) -> Iterator[ReadRequest]:
        for request in self.now:
            self.sent.append(request)
            yield request

    def __len__(self) -> int:
        raise TypeError("requests are not counted")


class ProcessReader:
    """Reads in worker processes, in order, however many they are."""

    def __init__(self, collator: Collator, workers: int) -> None:
        self._collator, self._workers, self._requests = collator, workers, _Requests()
        self._loader: DataLoader[Any] = DataLoader(
            _Stretches(collator),
            batch_size=None,
            sampler=self._requests,
            num_workers=workers,
            prefetch_factor=DEPTH,
            collate_fn=_as_it_is,
            persistent_workers=True,
        )
        self._stretches: Iterator[Any] = iter(())
        # A loader that is garbage in a cycle (of an exception's frames, say) waits 5 s for each
        # worker; kept until then it does not.
        weakref.finalize(self, _let_go, self._loader)

    def __reduce__(self) -> tuple[type["ProcessReader"], tuple[Collator, int]]:
        return ProcessReader, (self._collator, self._workers)

    def read(self, now: ReadRequest, later: Iterable[ReadRequest]) -> Stretch:
        sent = self._requests.sent
        if not sent or sent[0] != now:
            self._collator.prime()  # in all processes the same
            sent.clear()
            self._requests.now = chain([now], later)
            self._stretches = iter(self._loader)
        try:
            found = next(self._stretches, None)
        except (
            BaseException
        ):  # whatever it was, what the workers give next is not what was asked for
            sent.clear()
            raise
        sent.popleft()
        if not isinstance(found, tuple):
            sent.clear()
            raise found or RuntimeError(
                "the worker processes ended before they had read all that they were asked for"
            )
        return found


def _let_go(loader: DataLoader[Any]) -> None:
    """Its processes end with it."""
    del loader


def _as_it_is(stretch: Any) -> Any:
    return stretch


@dataclass
class TimedReader:
    """A reader that adds up how long it was waited for."""

    reader: Reader
    seconds: float = 0.0

    def read(self, now: ReadRequest, later: Iterable[ReadRequest]) -> Stretch:
        return self.aside(self.reader, now, later)

    def aside(self, reader: Reader, now: ReadRequest, later: Iterable[ReadRequest]) -> Stretch:
        """The same through another reader."""
        began = time.perf_counter()
        try:
            return reader.read(now, later)
        finally:
            self.seconds += time.perf_counter() - began
