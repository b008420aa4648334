"""A stream as the dataloader of a trainer: each batch is a part of the epoch.

A trainer hands out batches, but a gradient policy takes as many steps from the stream as it needs.
A batch here therefore holds no data: it says up to which step the trainer's step may advance the
stream. The trainer's cost per batch is paid once for many chunks.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import throughtime as tt
from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.gradient.window import check_whole


class StreamBatch:
    """The steps of a stream between two positions: part `index` of the `count` of its epoch."""

    # no dataclass: trainers copy those, field by field, when they move a batch
    __slots__ = ("count", "index", "stream")

    def __init__(self, stream: tt.Stream, index: int, count: int) -> None:
        self.stream, self.index, self.count = stream, index, count

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its epoch."""
        return self.index + 1 >= self.count

    @property
    def is_finished(self) -> bool:
        """Whether the stream has reached its end; the last batch ends with the epoch alone."""
        stream = self.stream
        return not self.is_last and stream.position * self.count >= (self.index + 1) * stream.steps

    def chunks(self) -> Iterator[Chunk]:
        """Its chunks, for an evaluation; the first batch starts the epoch."""
        if self.index == 0:
            self.stream._start()
        while not self.is_finished and (chunk := self.stream.take(self.stream.chunk)) is not None:
            yield chunk


class Loader:
    """A stream as the dataloader of a trainer: each batch is `chunks` chunks of it.

    Every epoch has as many batches as the first, whatever order the recordings are drawn in.

    Args:
        stream: the stream; one loader each for training and for validation.
        chunks: chunks of the stream in a batch. Many make a trainer's cost per batch small; they
            change no result.

    Raises:
        DataError: no stream, or less than one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.loader import Loader
        >>> recording = {"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}
        >>> len(Loader(tt.Stream(recording, lanes=1, chunk=10), chunks=2))
        3
    """

    def __init__(self, stream: tt.Stream, chunks: int = 1) -> None:
        # users bring DataLoaders
        if not isinstance(stream, tt.Stream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"the loader got a {type(stream).__name__}, expected a tt.Stream(recordings,"
                " lanes, chunk)"
            )
        check_whole("chunks", chunks, 1)
        self.stream, self.chunks = stream, chunks
        self._count = self._next_index = self._first_index = 0

    def __len__(self) -> int:
        """Batches in every epoch."""
        if not self._count:
            self.stream._sync_ranks()
            self._count = math.ceil(self.stream.steps / (self.chunks * self.stream.chunk))
        return self._count

    def __iter__(self) -> Iterator[StreamBatch]:
        first, self._first_index = self._first_index, 0
        for index in range(first, len(self)):
            self._next_index = index + 1
            yield StreamBatch(self.stream, index, len(self))

    def state_dict(self) -> dict[str, Any]:
        """The index of the next batch; `tt.updates` saves the position in the stream."""
        return {"next": self._next_index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at that batch, or anew if the epoch was over."""
        self._first_index = self._next_index = state["next"] % len(self)


def as_stream_batch(batch: object) -> StreamBatch:
    """The batch, if a `Loader` made it.

    Raises:
        DataError: the trainer has another dataloader.
    """
    if isinstance(batch, StreamBatch):
        return batch
    raise DataError(
        f"the trainer hands out a {type(batch).__name__}, expected a batch of a stream: give it"
        " Loader(tt.Stream(recordings, lanes, chunk), chunks=20) as its dataloader"
    )
