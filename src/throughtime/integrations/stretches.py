"""A stream as a dataloader of somebody else's trainer: batch after batch, each a stretch of it.

A trainer hands out batches; a gradient policy takes from the stream as many steps as it needs. So a
batch here holds no data: it says up to which step the trainer's step may play. The cost of a
trainer's step is then paid once for many chunks.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import throughtime as tt
from throughtime.errors import DataError


class Stretch:
    """The steps of a stream between two places: stretch `index` of `count` of its epoch."""

    __slots__ = (
        "count",
        "index",
        "stream",
    )  # no dataclass: trainers copy those, field by field, when they move a batch

    def __init__(self, stream: tt.Stream, index: int, count: int) -> None:
        self.stream, self.index, self.count = stream, index, count

    @property
    def last(self) -> bool:
        """Whether it is the last of its epoch, with which it ends."""
        return self.index + 1 >= self.count

    @property
    def over(self) -> bool:
        """Whether the stream has come to its end; the last stretch ends with the epoch alone."""
        return (
            not self.last
            and self.stream.position * self.count >= (self.index + 1) * self.stream.steps
        )

    def chunks(self) -> Iterator[tt.Chunk]:
        """Its chunks, for an evaluation; the first stretch starts the epoch."""
        if self.index == 0:
            self.stream._start()
        while not self.over and (chunk := self.stream.take(self.stream.chunk)) is not None:
            yield chunk


class Loader:
    """A stream as the dataloader of a trainer: each batch is a stretch of `chunks` chunks.

    Every epoch has as many batches as the first, whatever order the recordings are drawn in.

    Args:
        stream: what is played; one loader each for training and for validation.
        chunks: chunks of the stream in a batch. Many make a trainer's cost per batch small; they
            change no number.

    Raises:
        DataError: no stream, or less than one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.stretches import Loader
        >>> stream = tt.Stream({"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}, lanes=1, chunk=10)
        >>> len(Loader(stream, chunks=2))
        3
    """

    def __init__(self, stream: tt.Stream, chunks: int = 1) -> None:
        # users bring DataLoaders
        if not isinstance(stream, tt.Stream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"the loader is given a {type(stream).__name__}, expected a tt.Stream(recordings,"
                " lanes, chunk)"
            )
        # a user's 1e3 is a float
        if not isinstance(chunks, int) or chunks < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"chunks={chunks!r}: expected a whole number of chunks in each batch, at least 1"
            )
        self.stream, self.chunks = stream, chunks
        self._count = 0
        self._next = self._first = 0

    def __len__(self) -> int:
        """Batches in every epoch."""
        if not self._count:
            self.stream._sync_ranks()
            self._count = math.ceil(self.stream.steps / (self.chunks * self.stream.chunk))
        return self._count

    def __iter__(self) -> Iterator[Stretch]:
        first, self._first = self._first, 0
        for index in range(first, len(self)):
            self._next = index + 1
            yield Stretch(self.stream, index, len(self))

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next.

        The place in the stream belongs to the updates, and is saved with them.
        """
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on there, or begins anew if it was the end."""
        self._first = self._next = int(state["next"]) % len(self)


def stretch(batch: object) -> Stretch:
    """The batch, if it is one.

    Raises:
        DataError: the trainer was given something else than a loader.
    """
    if isinstance(batch, Stretch):
        return batch
    raise DataError(
        f"the trainer hands out a {type(batch).__name__}, expected a stretch of a stream: give it "
        "Loader(tt.Stream(recordings, lanes, chunk), chunks=20) as its dataloader"
    )
