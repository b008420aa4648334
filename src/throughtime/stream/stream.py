"""Stream: recordings played on lanes, chunk after chunk, resumable at any step.

Shapes: `T` steps, `B` lanes, `D` input features, `C` target columns.
"""

import hashlib
import math
import random
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Never

import torch
from torch import distributed

from throughtime.chunk import Chunk, Placement, join
from throughtime.errors import DataError, check_whole
from throughtime.state import State
from throughtime.stream._collate import DTYPES, Collator
from throughtime.stream.lanes import LaneSchedule
from throughtime.stream.recording import check_standardise, sample_checksum, standardised
from throughtime.stream.sources import Recordings, as_recordings

BLOCK_LANE_STEPS = 16_384  # read at once, unless a single chunk has more


class Shard(NamedTuple):
    """Which of how many ranks plays a stream in this process."""

    rank: int
    ranks: int

    @classmethod
    def of(cls, rank: int | None, ranks: int | None) -> "Shard":
        """The user's rank, or that of `torch.distributed`'s default group, or 0 of 1.

        Raises:
            DataError: only one of the two is set, or a rank that is none of `ranks`.
        """
        if rank is not None and ranks is not None and 0 <= rank < ranks:
            return cls(rank, ranks)
        if rank is not None or ranks is not None:
            raise DataError(f"rank={rank}, ranks={ranks}: expected a rank below ranks, or neither")
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size())
        return cls(0, 1)


class Stream:
    """Long recordings as an unbroken stream of chunks.

    It is to recordings what a DataLoader is to samples. Each lane plays recordings one after
    another, without padding; a reset marks every start. One iteration is one epoch: every step of
    every recording exactly once, in order within its lane; the last chunk is shorter. Fewer
    recordings than lanes are cut into contiguous parts. Each part starts from the initial state, or
    with `hand_off` from the state in which the part before it ended an epoch earlier. The seed
    draws a new order for each epoch. Iterating again starts the epoch again, except after
    `load_state_dict`. Nothing is read before it is needed.

    In a process group of `torch.distributed` each rank plays its own recordings (or its own parts
    of a long one), balanced by length. An epoch has the same number of steps on all ranks.

    Args:
        recordings: one or several: arrays `(T, D)`, also of Zarr or xarray; tuples `(inputs,
            targets)`; mappings with `inputs`, `targets`, labels at a lower rate, static features,
            and series by other names; frames, Arrow tables, paths; objects with `name`, `__len__`
            and `read(start, stop)`; a list of these; a folder.
            What is lazy is read as it is played.
        lanes: B, of this rank, at most the number of steps of all recordings.
        chunk: steps per chunk; it changes memory and speed, never a gradient.
        seed: draws the order of the recordings; `None` keeps the order of the sequence.
        warm_up: first steps of a recording (and of a part) whose targets do not count.
        dtype: type of the inputs and of floating targets; `None` keeps floating types until a net
            plays the stream, which takes those of its weights (float32 or float64); integers become
            int64 (token indices). Integer targets are int64, unless a loss of torch takes floats.
        missing: `"error"` refuses inputs that are NaN or infinite; `"mask"` sets them to 0 and
            masks their step.
        hand_off: each part of a recording that is cut continues from the state in which the part
            before it ended the last epoch; `tt.updates` passes it on. The first epoch starts from
            the initial state. All parts of a recording but the last are equally long.
        standardise: by which statistics the inputs are standardised: "split", those of all these
            recordings; "recording", those of each one; "first:400", those of the first 400 steps of
            each, as they arrive, and anew where a recording is cut. The net does it, and is saved
            and exported with it: put `tt.nn.Standardise.of(stream)` before its first layer, or
            `tt.updates` refuses the net.
        rank: of this process, with `ranks`; default: that of `torch.distributed`.
        ranks: how many there are; 1 plays everything in this process.

    Attributes:
        epoch: epochs finished so far.
        position: steps of every lane played in this epoch.

    A floating target that is NaN, or an integer one that is -100, means that the step has no
    target: it is masked.

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

    once = False  # any step of an epoch can be read again

    def __init__(
        self,
        recordings: Recordings,
        lanes: int,
        chunk: int,
        *,
        seed: int | None = 0,
        warm_up: int = 0,
        dtype: torch.dtype | None = None,
        missing: Literal["error", "mask"] = "error",
        hand_off: bool = False,
        standardise: str | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        lanes = check_whole("lanes", lanes, 1, DataError)
        chunk = check_whole("chunk", chunk, 1, DataError)
        warm_up = check_whole("warm_up", warm_up, 0, DataError)
        if missing not in ("error", "mask"):
            raise DataError(f"missing={missing!r}: expected 'error' or 'mask'")
        if dtype is not None and dtype not in DTYPES:
            raise DataError(
                f"dtype={dtype}: expected one of {', '.join(map(str, DTYPES))}; or torch.autocast"
            )
        self.recordings = tuple(as_recordings(recordings))
        check_standardise(standardise, self.recordings, missing)
        self.standardise = standardise
        if standardise == "recording":
            self.recordings = tuple(map(standardised, self.recordings))
        self.lengths = tuple(len(recording) for recording in self.recordings)
        self.lanes, self.chunk, self.seed = lanes, chunk, seed
        self.hand_off = hand_off
        self.missing = missing
        self._requested_shard = rank, ranks
        self._shard = Shard.of(rank, ranks)
        if 0 in self.lengths:
            raise DataError(
                f"recording '{self.recordings[self.lengths.index(0)].name}' is empty; leave it out"
            )
        self._collator = Collator(self.recordings, lanes, dtype, warm_up, missing == "mask")
        self._entering: Any = None  # a reference of a net, an epoch and its states
        self._placement: Placement | None = None
        self._sums = dict[str, str]()
        self._begin(0)
        self._resumed = False
        self._generation = 0

    def _begin(self, epoch: int, *, handed_off: bool = False) -> None:
        self.epoch, self.position = epoch, 0
        self._block: tuple[range, Chunk] | None = None  # the steps that were read last
        order = None
        if self.seed is not None:
            order = random.Random(f"{self.seed}:{epoch}")  # noqa: S311  an order, not a secret
        self._schedule = LaneSchedule.plan(
            self.lengths,
            self.lanes,
            order,
            rank=self._shard.rank,
            ranks=self._shard.ranks,
            handed_off=handed_off,
            even=self.hand_off,
        )

    def __repr__(self) -> str:
        size = f"{len(self.recordings)} recordings, {sum(self.lengths)} steps"
        return f"Stream({size}, lanes={self.lanes}, at step {self.position} of epoch {self.epoch})"

    def _place(self, placement: Placement | None) -> None:
        """Give chunks of this placement from now on; None: as they are read."""
        if placement != self._placement:
            self._placement, self._block = placement, None

    def _hand_over(self, state: State, net: object) -> None:
        """Store the states with which this net enters the coming epoch, lane by lane."""
        self._entering = (weakref.ref(net), self.epoch, state)

    def _entering_state(self, net: object) -> State:
        """The state of `_hand_over` for this net and epoch; `None` before the first epoch.

        Raises:
            DataError: another loop has played an epoch of this stream since.
        """
        if self._entering is None or self._entering[0]() is not net:
            return None
        if self._entering[1] != self.epoch:
            raise DataError(
                f"the states handed on are for epoch {self._entering[1]}, and the stream is"
                f" in epoch {self.epoch}: give tt.evaluate, and each loop, a Stream of its own"
            )
        return self._entering[2]

    def __getstate__(self) -> dict[str, Any]:
        # a copy is another stream, and its net another net
        return {**self.__dict__, "_entering": None}

    @property
    def steps(self) -> int:
        """Steps of the longest lane in this epoch.

        Other lanes have nothing left to play in the last of them.
        """
        return self._schedule.steps

    def __len__(self) -> int:
        """Chunks in this epoch."""
        return math.ceil(self.steps / self.chunk)

    def __iter__(self) -> Iterator[Chunk]:
        self._start()
        while (chunk := self.take(self.chunk)) is not None:
            yield chunk

    def _sync_ranks(self) -> None:
        """Take this process's rank in a process group that was started after the stream was made.

        Raises:
            DataError: it has already played as another rank; or it has too few steps for the lanes
                of all ranks.
        """
        shard = Shard.of(*self._requested_shard)
        if shard == self._shard:
            return
        if self._generation or self.position or self.epoch:
            raise DataError(
                f"the stream has played for rank {self._shard.rank} of {self._shard.ranks}, and"
                f" this process is rank {shard.rank} of {shard.ranks} now: make a new stream after"
                " torch.distributed.init_process_group, or say rank=..., ranks=..."
            )
        self._shard = shard
        self._begin(0)

    def _start(self, *, handed_off: bool = False) -> None:
        """Go to the start of the epoch, or stay at the position that `load_state_dict` set.

        Args:
            handed_off: parts continue from the states of the parts before them, so their first
                steps are no resets. The caller enters with `_entering_state`.
        """
        self._sync_ranks()
        if not self._resumed:
            self.position = 0
        if self.position == 0 and handed_off != self._schedule.handed_off:
            self._begin(self.epoch, handed_off=handed_off)
        self._mark_moved(resumed=False)

    def _skip_epoch(self) -> None:
        """Leave the rest of this epoch out; the order of the next one is drawn anew."""
        self._begin(self.epoch + 1)
        self._mark_moved(resumed=False)

    def _mark_moved(self, *, resumed: bool) -> None:
        """A change of `_generation` shows a loop that another one has moved the stream."""
        self._resumed = resumed
        self._generation += 1

    def take(self, steps: int) -> Chunk | None:
        """The next `steps` steps (fewer at the end); `None`, once, at the end of each epoch."""
        end = self._schedule.steps
        if self.position >= end:
            self._begin(self.epoch + 1)
            return None
        stop, position, parts = min(self.position + steps, end), self.position, list[Chunk]()
        while position < stop:
            steps_read, block = self._read_block(position)
            first, last = steps_read.start, min(stop, steps_read.stop)
            parts.append(block._cut(position - first, last - first))
            position = last
        self.position = stop  # after an error the position is as before
        return join(parts)

    def remaining(self, steps: int) -> int:
        """How many of the next `steps` steps there are in this epoch."""
        return min(steps, self.steps - self.position)

    def steps_to_common_reset(self) -> int:
        """Steps to the next one at which every lane starts a recording, or to the epoch's end."""
        resets = self._schedule.common_resets
        return resets[min(bisect_right(resets, self.position), len(resets) - 1)] - self.position

    def _read_block(self, position: int) -> tuple[range, Chunk]:
        """Read the steps around one of them: several chunks where they are small.

        Cutting a chunk from a block costs a tenth of reading it. Blocks depend on the position
        alone, not on where the stream was resumed or how much is taken at a time: a chunk is
        aligned in memory the same way each time, and kernels round it alike.
        """
        if self._block is None or position not in self._block[0]:
            fits = BLOCK_LANE_STEPS // self.lanes
            size = max(1, fits // self.chunk * self.chunk or min(self.chunk, 8 * fits))
            start = position // size * size
            self._block = None  # after an error too
            self._block = range(start, start + size), self.read(start, start + size)
        return self._block

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch; the position does not change."""
        chunk = self._collator.read(self._schedule, start, min(stop, self.steps))
        return chunk if self._placement is None else chunk.convert(self._placement)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain values.

        With the same recordings it resumes bit for bit. They are known by their names, lengths and
        checksums.

        Cost: the first call reads up to 96 blocks of 64 steps.
        """
        return {
            "epoch": self.epoch,
            "position": self.position,
            "handed_off": self._schedule.handed_off,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position saved by `state_dict`; the next iteration continues there.

        Raises:
            DataError: the position belongs to another stream; the message names each difference.
        """
        self._sync_ranks()
        faults = [
            f"{key} is {state[key]!r} there and {value!r} here"
            for key, value in self._identity().items()
            # no checksum if a recording could not be read then
            if state.get(key, value) != value and not str(state[key]).startswith("missing (")
        ]
        if faults:
            raise DataError(
                f"the saved position belongs to another stream: {'; '.join(faults[:12])}. Make the"
                " stream as it was, of the same recordings, or start without the position"
            )
        self._begin(int(state["epoch"]), handed_off=bool(state["handed_off"]))
        self.position = int(state["position"])
        self._mark_moved(resumed=True)

    def _plan(self) -> dict[str, Any]:
        """What all ranks must have in common: the schedule, and the position in it."""
        return {key: value for key, value in self.state_dict().items() if key != "rank"}

    def _identity(self) -> dict[str, Any]:
        names = repr([(r.name, len(r)) for r in self.recordings])
        settings = ("lanes", "seed", "hand_off", "missing", "standardise")
        return {
            **{name: getattr(self, name) for name in settings},
            **self._shard._asdict(),
            "warm_up": self._collator.warm_up,
            "dtype": str(self._collator.dtype),
            "recordings": len(self.recordings),
            "names_and_lengths": hashlib.sha256(names.encode()).hexdigest()[:16],
            **self._checksums(),
        }

    def _checksums(self) -> dict[str, str]:
        """Checksums of some steps of some recordings, read once.

        None within a read, as in the handler of a signal: an open file has one position.
        """
        if not (self._sums or self._collator.reading):
            # at most 32 of them, and three blocks of each at least
            chosen = [*enumerate(self.recordings)][:: -(-len(self.recordings) // 32)]
            blocks = 96 // len(chosen)
            self._sums = {
                f"checksum of recording {i} ('{r.name}')": sample_checksum(r, blocks)
                for i, r in chosen
            }
        return self._sums

    def __getitem__(self, index: object) -> Never:
        """Refused: a sampler that picks chunks by index would tear the lanes apart."""
        raise DataError(
            "a Stream is not indexed: its chunks follow one another, and a DataLoader, a sampler or"
            " Accelerate's prepare would tear its lanes apart. Write for chunk in stream, or give"
            " it to tt.updates: it shuffles, and plays on each rank of torch.distributed its own"
        )


def whole_stream(
    recordings: Recordings, chunk: int = 512, *, standardise: str | None = None
) -> Stream:
    """A stream that cuts none of the recordings, up to 64 side by side, all on this rank."""
    played = as_recordings(recordings)
    lanes = min(max(1, len(played)), 64)
    return Stream(played, lanes, chunk, seed=None, standardise=standardise, rank=0, ranks=1)
