"""Blocks of a stream in order, read ahead: in a thread, or in worker processes.

Both map requests to blocks as `map(collator.read, requests)` does, so the choice changes no number.
The processes are those of `torch.utils.data.DataLoader`.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

from torch.utils.data import DataLoader, Dataset

from throughtime.errors import DataError
from throughtime.stream._collate import Block, Collator, ReadRequest

Workers: TypeAlias = int | Literal["thread"]
DEPTH = 2  # blocks read ahead by a thread, and by each process


def map_in_thread(
    read: Callable[[ReadRequest], Block], requests: Iterable[ReadRequest]
) -> Iterator[Block]:
    """Read the next blocks in a thread: for slow disks, and for decoders outside Python."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="throughtime-stream")
    pending = deque[Future[Block]]()
    try:
        for request in requests:
            pending.append(thread.submit(read, request))
            if len(pending) > DEPTH:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class _BlockDataset(Dataset[Any]):
    """The code of a worker process: the index of a block is its request."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __getitem__(self, request: ReadRequest) -> Block | DataError:
        try:
            return self.collator.collate(request)
        except DataError as error:  # returned, since raising adds the worker's traceback
            return error


class _RequestSampler:
    """The requests that the workers read, in order; set before the loader is iterated."""

    def __init__(self) -> None:
        self.requests: Iterable[ReadRequest] = ()

    def __iter__(self) -> Iterator[ReadRequest]:
        return iter(self.requests)


class ProcessMap:
    """Reads in worker processes, which remain from epoch to epoch."""

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
        # A loader that is garbage in a cycle (of an exception's frames, say) waits 5 s for each
        # worker; one that is referenced until then does not.
        weakref.finalize(self, _identity, self._loader)

    def __reduce__(self) -> tuple[type["ProcessMap"], tuple[Collator, int]]:
        return ProcessMap, (self._collator, self._workers)

    def __call__(self, requests: Iterable[ReadRequest]) -> Iterator[Block]:
        self._collator.prime()  # the same layout in all processes
        self._sampler.requests = requests
        for result in self._loader:
            if isinstance(result, DataError):
                raise result
            yield result


def _identity(value: Any) -> Any:
    return value
