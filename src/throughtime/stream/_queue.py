"""Chunks from any iterable as a source of steps for a gradient policy."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

from torch.utils.data import DataLoader, SequentialSampler

from throughtime.chunk import Chunk, Placement, join
from throughtime.errors import DataError


class ChunkQueue:
    """Adjacent chunks from any iterable, cut to the lengths asked for.

    A list or tuple of chunks can be read again; an iterator gives every step once.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        if isinstance(chunks, DataLoader):
            _refuse_sampler(cast("DataLoader[Any]", chunks))
        self._again = chunks if isinstance(chunks, Sequence) else None
        self.once = self._again is None
        self._kind = type(chunks).__name__
        again = self._again or ()
        steps = (c.steps for c in again if isinstance(c, Chunk))  # pyright: ignore[reportUnnecessaryIsInstance]
        self._starts = [0, *accumulate(steps)]
        self._chunks = iter(chunks)
        self._waiting: list[Chunk] = []
        self._last: Chunk | None = None
        self._placement: Placement | None = None
        self.position = 0

    def _place(self, placement: Placement) -> None:
        """Give chunks of this placement from now on."""
        self._placement = placement

    def take(self, steps: int) -> Chunk | None:
        self._fetch_until(steps)
        if not self._waiting:
            return None
        whole = join(self._waiting)
        self._waiting = [whole[steps : whole.steps]] if whole.steps > steps else []
        taken = whole[0:steps]
        self.position += taken.steps
        return taken

    def remaining(self, steps: int) -> int:
        return min(steps, self._fetch_until(steps))

    def read(self, start: int, stop: int) -> Chunk:
        chunks = self._readable()
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop)
        chunk = join(
            [
                chunks[i][max(0, start - self._starts[i]) : stop - self._starts[i]]
                for i in range(first, min(last, len(chunks)))
            ]
        )
        return chunk if self._placement is None else chunk.convert(self._placement)

    def steps_to_common_reset(self) -> int:
        chunks = self._readable()
        for i in range(max(0, bisect_right(self._starts, self.position) - 1), len(chunks)):
            chunk, at = chunks[i], self._starts[i]
            if chunk.any_reset:
                metadata, span = chunk.metadata, chunk.span
                common = (metadata.resets[span] | (metadata.recording[span] < 0)).all(dim=1)
                steps = [at + step for step in common.nonzero().flatten().tolist()]
                later = [step for step in steps if step > self.position]
                if later:
                    return later[0] - self.position
        return self._starts[-1] - self.position

    def _readable(self) -> Sequence[Chunk]:
        if self._again is None:
            raise DataError(
                "this gradient policy reads its steps again, and the chunks come from a"
                f" {self._kind}, which gives each of them once: give tt.updates a tt.Stream, or a"
                " list of chunks"
            )
        return self._again

    def _fetch_until(self, steps: int) -> int:
        """Fetch chunks until `steps` steps are waiting or the source is exhausted.

        Returns the number of waiting steps.
        """
        while (waiting := sum(c.steps for c in self._waiting)) < steps and self._fetch():
            pass
        return waiting

    def _fetch(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            if self._last is None:
                raise DataError(
                    "the stream gave no chunk at all; an exhausted iterator? Give tt.updates a"
                    " tt.Stream or a list of chunks"
                )
            return False
        # users pass loaders of anything
        if not isinstance(chunk, Chunk):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"the stream gave a {type(chunk).__name__}, expected a Chunk: use"
                " tt.Stream(recordings, lanes, chunk), or Chunk.from_tensors(inputs, targets) of"
                " throughtime.chunk"
            )
        if self._last is not None:
            _check_adjacent(self._last, chunk)
        self._last = chunk
        self._waiting.append(chunk if self._placement is None else chunk.convert(self._placement))
        return True


def _refuse_sampler(loader: "DataLoader[Any]") -> None:
    sampler = loader.sampler
    if not isinstance(sampler, SequentialSampler) and loader.batch_size is not None:
        raise DataError(
            f"the DataLoader picks its samples with a {type(sampler).__name__}: consecutive batches"
            " are not adjacent in time, and the state carried between them would belong to other"
            " steps. Give tt.updates a tt.Stream, which keeps every lane in order."
        )


def _check_adjacent(last: Chunk, chunk: Chunk) -> None:
    """Require every lane to continue where it stopped, or to reset."""
    if last.lanes != chunk.lanes:
        raise DataError(
            f"a chunk of {chunk.lanes} lanes follows one of {last.lanes}; a carried state needs the"
            " same lanes in every chunk"
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
            f" step {int(after.position[start, lane])} without a reset: the chunks are not adjacent"
            " (shuffled? sharded?). Mark the reset, or use tt.Stream."
        )
