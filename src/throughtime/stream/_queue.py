"""Chunks from any iterable as a source of steps for a gradient policy."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from throughtime.chunk import Chunk, Placement, join
from throughtime.errors import DataError


class ChunkQueue:
    """Adjacent chunks from any iterable, cut to the lengths asked for.

    A list or tuple of chunks can be read again; an iterator gives every step once.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.once = not isinstance(chunks, Sequence)
        self._source, self._chunks = chunks, _checked(chunks)
        self._waiting = list[Chunk]()
        self._placement: Placement | None = None
        self.position = 0

    def _place(self, placement: Placement) -> None:
        """Give chunks of this placement from now on."""
        self._placement = placement

    def take(self, steps: int) -> Chunk | None:
        self.remaining(steps)
        if not self._waiting:
            return None
        whole = join(self._waiting)
        self._waiting = [whole[steps : whole.steps]] if whole.steps > steps else []
        taken = whole[0:steps]
        self.position += taken.steps
        return taken

    def remaining(self, steps: int) -> int:
        while (waiting := sum(c.steps for c in self._waiting)) < steps:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._waiting.append(self._placed(chunk))
        return min(steps, waiting)

    def read(self, start: int, stop: int) -> Chunk:
        return self._placed(self._joined[start:stop])

    def steps_to_common_reset(self) -> int:
        whole = self._joined
        resets, recording = (
            getattr(whole.metadata, n)[whole.span] for n in ("resets", "recording")
        )
        common = (resets | (recording < 0)).all(dim=1)[self.position + 1 :].nonzero()
        return int(common[0]) + 1 if len(common) else whole.steps - self.position

    def _placed(self, chunk: Chunk) -> Chunk:
        return chunk if self._placement is None else chunk.convert(self._placement)

    @cached_property
    def _joined(self) -> Chunk:
        if self.once:
            raise DataError(
                "this gradient policy reads its steps again, and a"
                f" {type(self._source).__name__} gives each once: give a tt.Stream or a list"
            )
        return join([*_checked(self._source)])


def _checked(chunks: Iterable[Any]) -> Iterator[Chunk]:
    """The chunks, each of which continues the one before it.

    Raises:
        DataError: one does not, or is no chunk, or there is none.
    """
    last: Chunk | None = None
    for chunk in chunks:
        if not isinstance(chunk, Chunk):
            raise DataError(
                f"the stream gave a {type(chunk).__name__}, expected a Chunk: tt.Stream has them,"
                " or throughtime.chunk.Chunk.from_tensors(inputs, targets)"
            )
        if last is not None:
            _check_adjacent(last, chunk)
        last = chunk
        yield chunk
    if last is None:
        raise DataError(
            "the stream gave no chunk; an exhausted iterator? Give a tt.Stream or a list of chunks"
        )


def _check_adjacent(last: Chunk, chunk: Chunk) -> None:
    """Require every lane to continue where it stopped, or to reset."""
    if last.lanes != chunk.lanes:
        raise DataError(
            f"a chunk of {chunk.lanes} lanes follows one of {last.lanes}; give those of one Stream"
        )
    before, after = last.metadata, chunk.metadata
    end, start = last.stop - 1, chunk.start
    same = after.recording[start] == before.recording[end]
    follows = same & (after.position[start] == before.position[end] + 1)
    broken = (~(follows | after.resets[start] | (after.recording[start] < 0))).nonzero()
    if len(broken):
        lane = int(broken[0])
        raise DataError(
            f"lane {lane} jumps from recording {int(before.recording[end, lane])}, step"
            f" {int(before.position[end, lane])} to recording {int(after.recording[start, lane])},"
            f" step {int(after.position[start, lane])} without a reset; shuffled? Use tt.Stream"
        )
