"""Stream: recordings played on lanes, chunk after chunk, resumable at any step.

Shapes: `T` steps, `B` lanes, `D` input features, `C` target columns.
"""

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Never

import torch

from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.stream.collate import DTYPES, Collator, Gaps
from throughtime.stream.lanes import Timetable
from throughtime.stream.recording import Recording, as_recording

READ_AHEAD = 16_384  # lane steps read at once, unless a single chunk has more


class Stream:
    """Long recordings as an unbroken stream of chunks: to recordings what a DataLoader is to samples.

    Each lane plays recordings one after another, spliced without padding; a reset marks every start.
    One iteration is one epoch: every step of every recording exactly once, in order within its lane,
    the last chunk shorter. Fewer recordings than lanes are cut into contiguous parts, each starting
    from the initial state. The order is drawn anew each epoch from the seed. Iterating again starts
    the epoch again, except after `load_state_dict`. Nothing is read before it is needed.

    Args:
        recordings: a sequence of recordings, or a single one: a mapping with `inputs` `(T, D)` or
            `(T,)` and `targets` `(T,)` or `(T, C)` (NumPy arrays, memory-mapped ones, torch tensors), a
            path, or any object with `name`, `__len__` and `read(start, stop)`.
        lanes: B, at most the number of steps there are.
        chunk: steps per chunk; it changes memory and speed, never a gradient.
        seed: draws the order of the recordings; `None` keeps the order given.
        warm_up: first steps of a recording (and of a part) whose targets do not count.
        dtype: type of the inputs and of floating targets; `None` keeps floating types, integers become
            int64 (token indices). Integer targets are int64, as torch's losses want them.
        missing: `"error"` refuses inputs that are NaN or infinite; `"mask"` sets them to 0 and masks the step.

    A floating target that is NaN, or an integer one that is -100, means that the step has none: it is masked.

    Raises:
        DataError: no recordings, an empty one, more lanes than steps, columns that differ between
            recordings, and, when it is read, an input that is NaN or infinite.

    Cost: memory for one chunk, or for 16,384 lane steps if that is more; a few microseconds per chunk besides reading.

    Example:
        >>> import numpy as np, throughtime as tt
        >>> recordings = [{"inputs": np.ones((n, 2)), "targets": np.zeros(n)} for n in (5, 3, 4)]
        >>> [tuple(chunk.inputs.shape) for chunk in tt.Stream(recordings, lanes=2, chunk=4)]
        [(4, 2, 2), (3, 2, 2)]
    """

    def __init__(
        self,
        recordings: Sequence[Any] | Mapping[str, Any] | Recording | str | Path,
        lanes: int,
        chunk: int,
        *,
        seed: int | None = 0,
        warm_up: int = 0,
        dtype: torch.dtype | None = None,
        missing: Literal["error", "mask"] = "error",
    ) -> None:
        whole = isinstance(lanes, int) and isinstance(chunk, int) and isinstance(warm_up, int)  # pyright: ignore[reportUnnecessaryIsInstance]  # a user's 1e3 is a float
        if not whole or chunk < 1 or warm_up < 0 or missing not in ("error", "mask"):
            raise DataError(
                f"chunk={chunk}, warm_up={warm_up}, missing={missing!r}: expected chunk >= 1, warm_up >= 0, missing 'error' or 'mask'"
            )
        sources: Sequence[Any] = [recordings] if isinstance(recordings, (Mapping, str, Path, Recording)) else recordings
        if dtype is not None and dtype not in DTYPES:
            raise DataError(f"dtype={dtype}: expected one of {', '.join(map(str, DTYPES))}; for lower precision use torch.autocast")
        self.recordings: tuple[Recording, ...] = tuple(as_recording(source, i) for i, source in enumerate(sources))
        self.lengths = tuple(len(recording) for recording in self.recordings)
        self.lanes, self.chunk, self.seed = lanes, chunk, seed
        self._refuse_empty()
        self._collator = Collator(self.recordings, lanes, dtype, warm_up, missing == "mask")
        self._begin(0)
        self._resumed = False
        self._masked = self._without_target = self._turn = 0

    def _refuse_empty(self) -> None:
        empty = [recording.name for recording, length in zip(self.recordings, self.lengths, strict=True) if length == 0]
        if empty:
            raise DataError(f"recording '{empty[0]}' is empty ({len(empty)} such); leave it out: a recording needs at least one step")

    def _begin(self, epoch: int) -> None:
        order = None if self.seed is None else random.Random(f"{self.seed}:{epoch}")  # noqa: S311  # an order, not a secret
        self._epoch, self._at = epoch, 0
        self._ahead, self._ahead_at, self._gaps = None, 0, Gaps(None, None)
        self._table = Timetable.plan(self.lengths, self.lanes, order)

    def __repr__(self) -> str:
        held = f"{len(self.recordings)} recordings, {sum(self.lengths)} steps"
        return f"Stream({held}, lanes={self.lanes}, at step {self._at} of epoch {self._epoch})"

    @property
    def epoch(self) -> int:
        """Epochs finished so far."""
        return self._epoch

    @property
    def position(self) -> int:
        """Steps of every lane played in this epoch."""
        return self._at

    @property
    def turn(self) -> int:
        """Changes whenever the stream is started or moved: who counts on its place can see that somebody else did."""
        return self._turn

    @property
    def steps(self) -> int:
        """Steps of the longest lane in this epoch; `idle` lane steps of `steps * lanes` have nothing to play."""
        return self._table.steps

    @property
    def idle(self) -> int:
        """Lane steps of this epoch in which a lane has nothing left to play."""
        return self._table.idle

    @property
    def masked(self) -> int:
        """Steps masked so far because their inputs were not finite (`missing="mask"`)."""
        return self._masked

    @property
    def without_target(self) -> int:
        """Steps masked so far because their target was NaN or -100."""
        return self._without_target

    def __len__(self) -> int:
        """Chunks in this epoch."""
        return math.ceil(self._table.steps / self.chunk)

    def __iter__(self) -> Iterator[Chunk]:
        self.start()
        while (chunk := self.take(self.chunk)) is not None:
            yield chunk

    def start(self) -> None:
        """Goes to the start of the epoch, or stays at the place just loaded by `load_state_dict`."""
        if not self._resumed:
            self._at = 0
        self._resumed = False
        self._turn += 1

    def take(self, steps: int) -> Chunk | None:
        """The next `steps` steps (fewer at the end); `None`, once, at the end of each epoch."""
        if self._at >= self._table.steps:
            self._begin(self._epoch + 1)
            return None
        stop = min(self._at + steps, self._table.steps)
        ahead = self._ahead
        if ahead is None or self._at < self._ahead_at or stop > self._ahead_at + ahead.steps:
            ahead = self._read_ahead(steps)
        begin, end = self._at - self._ahead_at, stop - self._ahead_at
        if self._gaps.masked is not None:
            self._masked += self._gaps.masked[end] - self._gaps.masked[begin]
        if self._gaps.without_target is not None:
            self._without_target += self._gaps.without_target[end] - self._gaps.without_target[begin]
        self._at = stop
        return ahead.between(begin, end)

    def ahead(self, steps: int) -> int:
        """How many of the next `steps` steps there are in this epoch."""
        return min(steps, self._table.steps - self._at)

    def unbroken(self) -> int:
        """Steps to the next one at which every lane starts a recording, or to the end of the epoch."""
        fresh = self._table.fresh
        return fresh[min(bisect_right(fresh, self._at), len(fresh) - 1)] - self._at

    def _read_ahead(self, steps: int) -> Chunk:
        """Reads several chunks at once where they are small: cutting costs a tenth of reading.

        What is read together depends on the place alone, not on where the stream was resumed: a chunk lies equally aligned
        in memory each time, and kernels round it alike.
        """
        several = max(1, READ_AHEAD // (self.lanes * steps)) * steps
        start = self._at // several * several
        if self._at + steps > start + several:
            start = self._at
        self._ahead_at = start
        self._ahead, self._gaps = self._chunk(start, min(start + several, self._table.steps))
        return self._ahead

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch, wherever the stream stands."""
        return self._chunk(start, stop)[0]

    def _chunk(self, start: int, stop: int) -> tuple[Chunk, Gaps]:
        return self._collator.chunk(list(self._table.plays(start, stop)), stop - start)

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, as plain values; with the same recordings it resumes bit for bit."""
        return {"epoch": self._epoch, "position": self._at, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a place saved by `state_dict`; the next iteration continues there.

        Raises:
            DataError: the place belongs to another stream; each difference is named.
        """
        mine = self._identity()
        faults = [f"{key} is {state.get(key)!r} there and {mine[key]!r} here" for key in mine if state.get(key) != mine[key]]
        if faults:
            raise DataError("the saved place belongs to another stream: " + "; ".join(faults))
        self._begin(int(state["epoch"]))
        self._at = int(state["position"])
        self._resumed = True
        self._turn += 1

    def _identity(self) -> dict[str, Any]:
        named = "\n".join(f"{r.name}\t{n}" for r, n in zip(self.recordings, self.lengths, strict=True))
        return {
            "lanes": self.lanes,
            "seed": self.seed,
            "warm_up": self._collator.warm_up,
            "dtype": str(self._collator.dtype),
            "missing": "mask" if self._collator.mask_missing else "error",
            "recordings": len(self.recordings),
            "total_steps": sum(self.lengths),
            "names_and_lengths": hashlib.sha256(named.encode()).hexdigest()[:16],
        }

    def __getitem__(self, index: object) -> Never:
        """Refused: a sampler that picks chunks by index would tear the lanes apart."""
        raise DataError(
            "a Stream is not indexed: its chunks follow one another, and a DataLoader, a shuffling or a distributed sampler "
            "would tear its lanes apart. Iterate the stream itself: for chunk in stream"
        )
