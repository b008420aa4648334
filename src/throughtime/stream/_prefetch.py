"""Readers of blocks of a stream: ahead in a thread, in worker processes, and to a device.

A block is a pure function of the slices that lanes play in it. So the choice of a reader changes no
number, and blocks read ahead are no part of the position in a stream. The processes are those of
`torch.utils.data.DataLoader`.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from throughtime._device import SideStream
from throughtime.errors import DataError
from throughtime.stream._collate import Block, Collator, ReadRequest

Workers: TypeAlias = int | Literal["thread"]
DEPTH = 2  # blocks read ahead by a thread, and by each process


class Reader(Protocol):
    """Reads one block after another."""

    def read(self, request: ReadRequest, later: Iterable[ReadRequest]) -> Block:
        """The requested block; `later` are the requests that will probably follow."""
        ...


class BlockAhead(NamedTuple):
    """A block that is being sent to a device while the device computes.

    Attributes:
        start: its first step in the epoch.
        block: what was read.
        queue: that of its copies.
    """

    start: int
    block: Block
    queue: SideStream

    @classmethod
    def load(
        cls, read: Callable[[int], Block], start: int, device: torch.device
    ) -> "BlockAhead | None":
        """Read a block and send it; None if it cannot be read: that is raised when it is needed."""
        queue = SideStream(device)
        try:
            with queue.copies():
                return cls(start, read(start), queue)
        except Exception:  # noqa: BLE001  # a disk that is gone, whatever a recording raises
            return None

    def join(self) -> Block:
        """The block; what the device computes from now on waits for the copies."""
        chunk, _ = self.block
        tensors = [chunk._inputs, chunk._targets, *chunk._series.values()]
        self.queue.join(t for t in tensors if t is not None)
        return self.block


class ThreadReader:
    """Reads the next blocks in a thread: enough for slow disks, and for decoders outside Python."""

    def __init__(self, reader: Collator) -> None:
        self._reader = reader
        self._pending = deque[tuple[ReadRequest, Future[Block]]]()
        self._later: Iterator[ReadRequest] = iter(())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="throughtime-stream")

    def __reduce__(self) -> tuple[type["ThreadReader"], tuple[Collator]]:
        return ThreadReader, (self._reader,)

    def read(self, request: ReadRequest, later: Iterable[ReadRequest]) -> Block:
        if not self._pending or self._pending[0][0] != request:
            for _, future in self._pending:
                future.cancel()
            self._pending.clear()
            self._later = chain([request], later)
        for following in self._later:
            self._pending.append((following, self._thread.submit(self._reader.read, following)))
            if len(self._pending) > DEPTH:
                break
        return self._pending.popleft()[1].result()


class _BlockDataset(Dataset[Any]):
    """The code of a worker process: the index of a block is its request."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __getitem__(self, request: ReadRequest) -> Block | DataError:
        try:
            return self.collator.collate(request.slices, request.steps)
        except DataError as error:  # returned, since raising adds the worker's traceback
            return error


class _RequestSampler:
    """The requests that the workers read, in order; set before the loader is iterated."""

    def __init__(self) -> None:
        self.requests: Iterator[ReadRequest] = iter(())
        self.sent: deque[ReadRequest] = deque()

    def __iter__(self) -> Iterator[ReadRequest]:
        for request in self.requests:
            self.sent.append(request)
            yield request

    def __len__(self) -> int:
        raise TypeError("requests are not counted")


class ProcessReader:
    """Reads in worker processes; blocks arrive in order, however many processes there are."""

    def __init__(self, collator: Collator, workers: int) -> None:
        self._collator, self._workers, self._sampler = collator, workers, _RequestSampler()
        self._loader: DataLoader[Any] = DataLoader(
            _BlockDataset(collator),
            batch_size=None,
            sampler=self._sampler,
            num_workers=workers,
            prefetch_factor=DEPTH,
            collate_fn=_identity,
            persistent_workers=True,
        )
        self._blocks: Iterator[Any] = iter(())
        # A loader that is garbage in a cycle (of an exception's frames, say) waits 5 s for each
        # worker; one that is referenced until then does not.
        weakref.finalize(self, _drop, self._loader)

    def __reduce__(self) -> tuple[type["ProcessReader"], tuple[Collator, int]]:
        return ProcessReader, (self._collator, self._workers)

    def read(self, request: ReadRequest, later: Iterable[ReadRequest]) -> Block:
        sent = self._sampler.sent
        if not sent or sent[0] != request:
            self._collator.prime()  # the same layout in all processes
            sent.clear()
            self._sampler.requests = chain([request], later)
            self._blocks = iter(self._loader)
        try:
            result = next(self._blocks, None)
        except BaseException:  # the next block of the workers would be another than requested
            sent.clear()
            raise
        sent.popleft()
        if not isinstance(result, tuple):
            sent.clear()
            raise result or RuntimeError(
                "the worker processes ended before they had read all that they were asked for"
            )
        return result


def _drop(loader: DataLoader[Any]) -> None:
    """Its processes end with it."""
    del loader


def _identity(block: Any) -> Any:
    return block
