"""Stream: recordings played on lanes, chunk after chunk, resumable at any step.

Shapes: `T` steps, `B` lanes, `D` input features, `C` target columns.
"""

import hashlib
import math
import random
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Never

import torch

from throughtime.chunk import Chunk, join
from throughtime.errors import DataError
from throughtime.state import State
from throughtime.stream._collate import DTYPES, Collator, MissingCounts
from throughtime.stream._prefetch import (
    ProcessReader,
    Reader,
    ReadRequest,
    SyncReader,
    ThreadReader,
    TimedReader,
    Workers,
)
from throughtime.stream._shard import Shard
from throughtime.stream.lanes import LaneSchedule
from throughtime.stream.recording import Recording, as_recording, with_one_kind

NONE_MISSING = MissingCounts(None, None)
READ_AHEAD = 16_384  # lane steps read at once, unless a single chunk has more


class Stream:
    """Long recordings as an unbroken stream of chunks: to recordings what a DataLoader is to
    samples.

    Each lane plays recordings one after another, spliced without padding; a reset marks every
    start. One iteration is one epoch: every step of every recording exactly once, in order within
    its lane, the last chunk shorter. Fewer recordings than lanes are cut into contiguous parts,
    each starting from the initial state, or with `hand_off` from the state in which the part before
    it ended an epoch earlier. The order is drawn anew each epoch from the seed. Iterating again
    starts the epoch again, except after `load_state_dict`. Nothing is read before it is needed.

    Where a process group of `torch.distributed` is up, each rank plays its own recordings (or its
    own contiguous parts of a long one), balanced by length, and an epoch has the same number of
    steps on all of them.

    Args:
        recordings: a sequence of recordings, or a single one: a mapping with `inputs` `(T, D)` or
            `(T,)` and `targets` `(T,)` or `(T, C)` (NumPy arrays, memory-mapped ones, torch
            tensors, files), with labels at a lower rate, static features (see
            `throughtime.stream.recording.as_recording`), a path, or any object with `name`,
            `__len__` and `read(start, stop)`.
        lanes: B, of this rank, at most the number of steps there are.
        chunk: steps per chunk; it changes memory and speed, never a gradient.
        seed: draws the order of the recordings; `None` keeps the order given.
        warm_up: first steps of a recording (and of a part) whose targets do not count.
        dtype: type of the inputs and of floating targets; `None` keeps floating types, integers
            become int64 (cache_key indices). Integer targets are int64, as torch's losses want them.
        missing: `"error"` refuses inputs that are NaN or infinite; `"mask"` sets them to 0 and
            masks their step.
        offset: leaves out a random number of first steps of each recording, below this, anew each
            epoch (but never more than half of it), so that the edges of chunks and parts move.
        hand_off: each part of a recording that is cut goes on from the state in which the part
            before it ended the last epoch: `tt.updates` hands it on. The first epoch starts cold.
            Parts are equally long but the last of each recording.
        workers: 0 reads when needed; "thread" reads ahead in a thread, a number in so many worker
            processes. It changes no number, but processes hold arrays as they were at the first
            read: what is written into them later is not seen.
        rank: of this process, with `ranks`; default: as `torch.distributed` says.
        ranks: how many there are; 1 plays everything here.

    A floating target that is NaN, or an integer one that is -100, means that the step has none: it
    is masked.

    Raises:
        DataError: no recordings, an empty one, more lanes than steps, columns that differ between
            recordings, and, when it is read, an input that is NaN or infinite.

    Cost: memory for one chunk, or for 16,384 lane steps if that is more; a few microseconds per
    chunk besides reading.

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
        offset: int = 0,
        hand_off: bool = False,
        workers: Workers = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        # a user's 1e3 is a float
        whole = all(isinstance(value, int) for value in (lanes, chunk, warm_up, offset))  # pyright: ignore[reportUnnecessaryIsInstance]
        if not whole or chunk < 1 or warm_up < 0 or missing not in ("error", "mask"):
            raise DataError(
                f"chunk={chunk}, warm_up={warm_up}, missing={missing!r}: expected chunk >= 1,"
                " warm_up >= 0, missing 'error' or 'mask'"
            )
        sources: Sequence[Any] = (
            [recordings] if isinstance(recordings, (Mapping, str, Path, Recording)) else recordings
        )
        if dtype is not None and dtype not in DTYPES:
            raise DataError(
                f"dtype={dtype}: expected one of {', '.join(map(str, DTYPES))}; for lower precision"
                " use torch.autocast"
            )
        self.recordings: tuple[Recording, ...] = with_one_kind(
            [as_recording(source, i) for i, source in enumerate(sources)]
        )
        self.lengths = tuple(len(recording) for recording in self.recordings)
        self.lanes, self.chunk, self.seed, self.offset, self.hand_off = (
            lanes,
            chunk,
            seed,
            offset,
            hand_off,
        )
        self._shard = Shard.of(rank, ranks)
        self._refuse_empty()
        self._check_offset()
        self._collator = Collator(self.recordings, lanes, dtype, warm_up, missing == "mask")
        self._here = SyncReader(self._collator)
        self._reader = TimedReader(self._reader_of(workers))
        self._entering: tuple[weakref.ref[object], int, State] | None = None
        self._device: torch.device | None = None
        self._begin(0)
        self._resumed = False
        self._masked = self._without_target = self._turn = 0

    def _refuse_empty(self) -> None:
        empty = [
            recording.name
            for recording, length in zip(self.recordings, self.lengths, strict=True)
            if length == 0
        ]
        if empty:
            raise DataError(
                f"recording '{empty[0]}' is empty ({len(empty)} such); leave it out: a recording"
                " needs at least one step"
            )

    def _check_offset(self) -> None:
        if self.offset < 0:
            raise DataError(f"offset={self.offset}: expected a number of steps, 0 for none")
        if self.offset and self.seed is None:
            raise DataError(
                f"offset={self.offset} is drawn from the seed, and seed=None draws nothing; give a"
                " seed"
            )
        if self.offset and self.hand_off:
            raise DataError(
                f"offset={self.offset} moves the edges between parts from epoch to epoch, and"
                " hand_off hands states over at these edges: leave one of them out"
            )
        least = sum(length - min(max(0, self.offset - 1), length // 2) for length in self.lengths)
        if self.offset and self.lanes * self._shard.ranks > least:
            raise DataError(
                f"offset={self.offset} can leave {least} steps of the recordings, and there are"
                f" {self.lanes * self._shard.ranks} lanes: a lane needs at least one step in every"
                " epoch. Take a smaller offset or fewer lanes"
            )

    def _reader_of(self, workers: Workers) -> Reader:
        if workers == "thread":
            return ThreadReader(self._here)
        # a user's "threads"
        if not isinstance(workers, int) or workers is True or workers < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"workers={workers!r}: expected a number of processes, 0 for none, or 'thread'"
            )
        return ProcessReader(self._collator, workers) if workers else self._here

    def _begin(self, epoch: int, *, handed_off: bool = False) -> None:
        self._epoch, self._at = epoch, 0
        self._ahead, self._ahead_at, self._gaps = None, 0, NONE_MISSING
        # an order, not a secret
        order = None if self.seed is None else random.Random(f"{self.seed}:{epoch}")
        offsets = None
        if self.offset and order is not None:
            offsets = [
                order.randrange(min(self.offset, length // 2 + 1)) for length in self.lengths
            ]
        self._table = LaneSchedule.plan(
            self.lengths,
            self.lanes,
            order,
            offsets=offsets,
            rank=self._shard.rank,
            ranks=self._shard.ranks,
            handed_off=handed_off,
            even=self.hand_off,
        )

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

    def _place_on(self, device: torch.device) -> None:
        """Give chunks on this device from now on."""
        self._device = device
        if self._ahead is not None:
            self._ahead = self._ahead.to(device)

    def _hand_over(self, state: State, net: object) -> None:
        """Keeps the states, already those of the lanes that play the next parts, for the epoch that comes now and for this net."""
        self._entering = (weakref.ref(net), self._epoch, state)

    def _entering_state(self, net: object) -> State:
        """What `hand_over` kept for this net and this epoch; `None` if nothing, as before the first
        epoch of every net.

        Raises:
            DataError: somebody else has played an epoch of this stream since.
        """
        if self._entering is None or self._entering[0]() is not net:
            return None
        if self._entering[1] != self._epoch:
            raise DataError(
                f"the states handed on are for epoch {self._entering[1]}, and the stream stands in"
                f" epoch {self._epoch}: it was played by somebody else in between. Give"
                " tt.evaluate, and every other loop, a Stream of its own"
            )
        return self._entering[2]

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_entering": None,
        }  # a copy is another stream, and its net another net

    @property
    def _handed_off(self) -> bool:
        """Whether the parts of this epoch go on from states handed over by the last epoch."""
        return self._table.handed_off

    @property
    def _generation(self) -> int:
        """Changes whenever the stream is started or moved: who counts on its place can see that somebody else did."""
        return self._turn

    @property
    def steps(self) -> int:
        """Steps of the longest lane in this epoch.

        `idle` lane steps of `steps * lanes` have nothing to play.
        """
        return self._table.steps

    @property
    def idle_steps(self) -> int:
        """Lane steps of this epoch in which a lane has nothing left to play."""
        return self._table.idle_steps

    @property
    def wait_seconds(self) -> float:
        """Seconds spent waiting for data so far."""
        return self._reader.seconds

    @property
    def masked(self) -> int:
        """Steps masked so far because their inputs were not finite (`missing="mask"`)."""
        return self._masked

    @property
    def missing_targets(self) -> int:
        """Steps masked so far because their target was NaN or -100."""
        return self._without_target

    def __len__(self) -> int:
        """Chunks in this epoch."""
        return math.ceil(self._table.steps / self.chunk)

    def __iter__(self) -> Iterator[Chunk]:
        self._start()
        while (chunk := self.take(self.chunk)) is not None:
            yield chunk

    def _sync_ranks(self) -> None:
        """Takes its place in the process group that is up now, where the stream was made before it.

        Raises:
            DataError: it has played already, as another rank; or it has too few steps for the lanes
                of all ranks.
        """
        found = self._shard.now()
        if found == self._shard:
            return
        if self._turn or self._at or self._epoch:
            raise DataError(
                f"the stream has played for rank {self._shard.rank} of {self._shard.ranks}, and this"
                f" process is rank {found.rank} of {found.ranks} now: it would go on with the wrong"
                " recordings. Make a new stream after torch.distributed.init_process_group, or say"
                " rank=..., ranks=..."
            )
        self._shard = found
        self._check_offset()
        self._begin(0)

    def _start(self, *, handed_off: bool = False) -> None:
        """Goes to the start of the epoch, or stays at the place just loaded by `load_state_dict`.

        Args:
            handed_off: parts go on from the states of the parts before them, so their first steps are
                no resets.

        Raises:
            DataError: the process group has changed since the stream began to play.
        """
        self._sync_ranks()
        if not self._resumed:
            self._at = 0
        if self._at == 0 and handed_off != self._table.handed_off:
            self._begin(self._epoch, handed_off=handed_off)
        self._resumed = False
        self._turn += 1

    def _skip_epoch(self) -> None:
        """Leaves the rest of this epoch out, and goes to the start of the next one, whose order is drawn anew."""
        self._begin(self._epoch + 1)
        self._resumed = False
        self._turn += 1

    def take(self, steps: int) -> Chunk | None:
        """The next `steps` steps (fewer at the end); `None`, once, at the end of each epoch."""
        if self._at >= self._table.steps:
            self._begin(self._epoch + 1)
            return None
        stop = min(self._at + steps, self._table.steps)
        ahead, begin = self._ahead, self._at - self._ahead_at
        if (
            ahead is not None
            and begin >= 0
            and stop - self._ahead_at <= ahead.steps
            and self._gaps == NONE_MISSING
        ):  # the usual case
            self._at = stop
            return ahead[begin : stop - self._ahead_at]
        parts: list[Chunk] = []
        at, masked, without = self._at, 0, 0
        while at < stop:
            ahead = self._stretch(at)
            begin, end = at - self._ahead_at, min(stop - self._ahead_at, ahead.steps)
            parts.append(ahead[begin:end])
            masked += self._gaps.masked[end] - self._gaps.masked[begin] if self._gaps.masked else 0
            without += (
                self._gaps.missing_targets[end] - self._gaps.missing_targets[begin]
                if self._gaps.missing_targets
                else 0
            )
            at = self._ahead_at + end
        self._at = stop  # after an error the stream stands where it stood
        self._masked += masked
        self._without_target += without
        return join(parts)

    def remaining(self, steps: int) -> int:
        """How many of the next `steps` steps there are in this epoch."""
        return min(steps, self._table.steps - self._at)

    def steps_to_common_reset(self) -> int:
        """Steps to the next one at which every lane starts a recording, or to the end of the epoch."""
        fresh = self._table.common_resets
        return fresh[min(bisect_right(fresh, self._at), len(fresh) - 1)] - self._at

    def _stretch(self, at: int) -> Chunk:
        """What is read together with step `at`: several chunks where they are small, since cutting
        costs a tenth of reading.

        Stretches depend on the place alone, not on where the stream was resumed or how much is
        taken at a time: a chunk lies equally aligned in memory each time, and kernels round it
        alike.
        """
        if self._ahead is not None and self._ahead_at <= at < self._ahead_at + self._ahead.steps:
            return self._ahead
        several = self._together
        start = at // several * several
        table = (
            self._table
        )  # not self: what is still to be read must not keep the stream, and its workers, alive
        later = (
            _request(table, begin, begin + several)
            for begin in range(start + several, table.steps, several)
        )
        self._ahead = None  # after an error nothing is at hand, least of all what was read before
        chunk, self._gaps = self._reader.read(_request(table, start, start + several), later)
        self._ahead = chunk if self._device is None else chunk.to(self._device)
        self._ahead_at = start
        return self._ahead

    @property
    def _together(self) -> int:
        """Steps of a stretch: whole chunks, unless a single one is very large."""
        least = READ_AHEAD // self.lanes
        return max(1, least // self.chunk * self.chunk or min(self.chunk, 8 * least))

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch, wherever the stream stands."""
        chunk, _ = self._reader.aside(self._here, _request(self._table, start, stop), ())
        return chunk if self._device is None else chunk.to(self._device)

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, as plain values.

        With the same recordings it resumes bit for bit.
        """
        return {
            "epoch": self._epoch,
            "position": self._at,
            "handed_off": self._table.handed_off,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a place saved by `state_dict`; the next iteration continues there.

        Raises:
            DataError: the place belongs to another stream; each difference is named.
        """
        self._sync_ranks()
        mine = self._identity()
        faults = [
            f"{key} is {state.get(key)!r} there and {mine[key]!r} here"
            for key in mine
            if state.get(key) != mine[key]
        ]
        if faults:
            raise DataError("the saved place belongs to another stream: " + "; ".join(faults))
        self._begin(int(state["epoch"]), handed_off=bool(state["handed_off"]))
        self._at = int(state["position"])
        self._resumed = True
        self._turn += 1

    def _plan(self) -> dict[str, Any]:
        """What all ranks must have in common: the plan of who plays what, and the place in it."""
        return {key: value for key, value in self.state_dict().items() if key != "rank"}

    def _identity(self) -> dict[str, Any]:
        named = "\n".join(
            f"{r.name}\t{n}" for r, n in zip(self.recordings, self.lengths, strict=True)
        )
        return {
            "lanes": self.lanes,
            "ranks": self._shard.ranks,
            "rank": self._shard.rank,
            "seed": self.seed,
            "offset": self.offset,
            "hand_off": self.hand_off,
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
            "a Stream is not indexed: its chunks follow one another, and a DataLoader, a shuffling"
            " or a distributed sampler, or Accelerate's prepare would tear its lanes apart. Iterate"
            " the stream itself, for chunk in stream, or give it to tt.updates: it draws the order"
            " of the recordings anew each epoch, reads ahead with workers=..., and plays on each"
            " rank of torch.distributed its own"
        )


def _request(table: LaneSchedule, start: int, stop: int) -> ReadRequest:
    stop = min(stop, table.steps)
    return ReadRequest(start, stop - start, tuple(table.slices(start, stop)))
