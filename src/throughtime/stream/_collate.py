"""From lane slices to the tensors of a block: read, check, convert, assemble.

A block is a pure function of the slices that lanes play in it. So it does not matter who reads it,
and blocks read ahead are no part of the position in a stream.

Shapes: `T` steps, `B` lanes, `S` static features.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime._metadata import ChunkMetadata
from throughtime.chunk import Chunk
from throughtime.errors import DataError, counted
from throughtime.stream.formats.table import Array
from throughtime.stream.lanes import LaneSchedule, LaneSlice
from throughtime.stream.recording import Recording, StepArrays, location
from throughtime.stream.targets import IGNORE_INDEX

Rows: TypeAlias = dict[str, Array]
"""The arrays of some steps by role: inputs, targets, and each series."""
Reads: TypeAlias = Sequence[tuple[LaneSlice, Rows]]

Workers: TypeAlias = Literal[0, "thread"]

DEPTH = 2  # blocks read ahead by a thread
DTYPES = (torch.float32, torch.float64, torch.float16)


class ReadRequest(NamedTuple):
    """A block: its first step in the epoch, its length, and the slices that lanes play in it."""

    start: int
    steps: int
    slices: tuple[LaneSlice, ...]

    @classmethod
    def of(cls, schedule: LaneSchedule, start: int, stop: int) -> "ReadRequest":
        """The steps `start` to before `stop` of an epoch, as far as it goes."""
        stop = min(stop, schedule.steps)
        return cls(start, stop - start, tuple(schedule.slices(start, stop)))


class Block(NamedTuple):
    """Steps of all lanes that are read at once.

    Attributes:
        start: the first step, in the epoch.
        chunk: the steps.
        masked: lane steps that are masked because an input is missing.
        missing_targets: those that have no target.
    """

    start: int
    chunk: Chunk
    masked: int
    missing_targets: int

    @property
    def stop(self) -> int:
        return self.start + self.chunk.steps


class ReadLock:
    """Lets one thread read at a time: an open file has one position. A copy is free."""

    def __init__(self) -> None:
        self._lock, self._busy = RLock(), False

    def __reduce__(self) -> tuple[type["ReadLock"], tuple[()]]:
        return ReadLock, ()

    @contextmanager
    def exclusive(self) -> Generator[bool]:
        """No other thread reads inside; false in the handler of a signal that came in a read."""
        with self._lock:
            free, self._busy = not self._busy, True
            try:
                yield free
            finally:
                self._busy = not free


def map_in_thread(
    read: Callable[[ReadRequest], Block], requests: Iterable[ReadRequest]
) -> Iterator[Block]:
    """Map as `map` does, the next blocks read in a thread: for slow disks, and for decoders."""
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


@dataclass
class Collator:
    """Makes blocks of one layout: that of the first recording that is read."""

    recordings: Sequence[Recording]
    lanes: int
    dtype: torch.dtype | None
    warm_up: int
    mask_missing: bool
    keep_missing: bool = False  # inputs stay NaN, and their steps count
    advice: str = "Clean the file, or mask them: missing='mask' (--missing mask)"

    def __post_init__(self) -> None:
        self._first: tuple[str, StepArrays] | None = None
        self._accepted = set[tuple[Any, ...]]()
        self._lengths = np.array([*map(len, self.recordings)])
        self.lock = ReadLock()

    def read(self, request: ReadRequest) -> Block:
        """The requested block, when no other thread reads one."""
        with self.lock.exclusive():
            return self._collate(request)

    def _collate(self, request: ReadRequest) -> Block:
        start, steps, slices = request
        reads = [(part, self._read(part)) for part in slices]
        first = self._prime()
        arrays = {
            role: self._assemble(role, rows, reads, steps)
            for role, rows in self._in_columns(first.by_role).items()
        }
        inputs, targets = arrays.pop("inputs"), arrays.pop("targets", None)
        per_step = self._metadata(slices, steps)
        masked = _mask_out(per_step[1], self._missing_inputs(inputs, reads))
        missing = 0 if targets is None else _mask_out(per_step[1], _missing(targets))
        metadata = ChunkMetadata.of(*map(torch.from_numpy, per_step))
        labels = None if targets is None else torch.from_numpy(targets)
        series = dict(zip(first.series, map(torch.from_numpy, arrays.values()), strict=True))
        chunk = Chunk(torch.from_numpy(inputs), labels, metadata, 0, steps, 0, series)
        return Block(start, chunk, masked, missing)

    def _metadata(self, slices: Sequence[LaneSlice], steps: int) -> tuple[Array, ...]:
        """Resets, mask, recording, position and ends of every step; idle lanes have -1."""
        resets, mask = np.zeros((2, steps, self.lanes), np.bool_)
        recording, position = np.full((2, steps, self.lanes), -1)
        for part in slices:
            own, step = (slice(part.start, part.stop), part.lane), np.arange(part.steps)
            recording[own], position[own] = part.recording, part.position + step
            mask[own] = part.age + step >= self.warm_up
            resets[part.start, part.lane] = part.age == 0
        return resets, mask, recording, position, position + 1 == self._lengths[recording]

    def _prime(self) -> StepArrays:
        """The layout that all recordings must have: that of the first one, read now if need be."""
        if self._first is None:
            self._read(LaneSlice(0, 0, 1, 0, 0, 0))
        if self._first is None:
            raise RuntimeError("a recording that was read and left no layout")
        return self._first[1]

    def _read(self, part: LaneSlice) -> Rows:
        recording = self.recordings[part.recording]
        steps = recording.read(part.position, part.position + part.steps)
        arrays = steps.by_role
        for role, rows in arrays.items():
            if len(rows) != part.steps:
                raise DataError(
                    f"recording '{recording.name}' gave {len(rows)} of the {part.steps} steps asked"
                    f" for at step {part.position}, as {role}; it said that it has"
                    f" {len(recording)}. Did the file change?"
                )
        # layouts that are known to fit need not be put in words
        layout = tuple((role, rows.dtype, rows.shape[1:]) for role, rows in arrays.items())
        if layout not in self._accepted:
            self._check(recording, steps)
            self._accepted.add(layout)
        return self._in_columns(arrays)

    def _check(self, recording: Recording, steps: StepArrays) -> None:
        """Refuse what is not numbers, or other columns than those of the first recording."""
        name, arrays = recording.name, steps.by_role
        for role, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise DataError(
                    f"recording '{name}': the {role} are {array.dtype}, expected numbers; map text"
                    " to integers first"
                )
        if taken := [key for key in steps.series if hasattr(Chunk, key)]:
            raise DataError(
                f"recording '{name}' has a series '{taken[0]}', a name that every chunk has; give"
                " it another name"
            )
        first_name, first = self._first = self._first or (name, steps)
        expected = first.by_role
        for role in {**expected, **arrays}:
            got, wanted = (self._layout(role, rows.get(role)) for rows in (arrays, expected))
            if got != wanted:
                raise DataError(
                    f"recording '{name}' has {role} of {got}, recording '{first_name}' of {wanted}."
                    " All recordings of a stream need the same columns and the same kind of"
                    " numbers; where floating types differ, give the stream a dtype"
                )

    def _layout(self, role: str, array: Array | None) -> str:
        """The columns in words; floating types differ only where they decide that of the chunk."""
        if array is None:
            return "no columns"
        kind = "integer"
        if array.dtype.kind == "f":
            kind = "floating" if self.dtype is not None else str(array.dtype)
        elif array.dtype.kind == "b" and "series" in role:
            kind = "boolean"
        width = "x".join(map(str, array.shape[1:])) or "1"
        return f"{width} {'columns' if array.ndim > 1 else 'column (a vector)'} of {kind} numbers"

    def _in_columns(self, arrays: Rows) -> Rows:
        """The rows by role; inputs of one number that are no tokens become a column."""
        inputs = arrays["inputs"]
        if inputs.ndim == 1 and self._dtype("inputs", inputs).kind == "f":
            arrays["inputs"] = inputs[:, None]
        return arrays

    def _dtype(self, role: str, rows: Array) -> np.dtype[Any]:
        """The stream's dtype, if any, of inputs and floating rows; others are int64 or bool."""
        if self.dtype is not None and (role == "inputs" or rows.dtype.kind == "f"):
            return np.dtype(str(self.dtype).removeprefix("torch."))
        kept = rows.dtype.kind == "f" or (rows.dtype.kind == "b" and "series" in role)
        return rows.dtype if kept else np.dtype(np.int64)

    def _assemble(self, role: str, sample: Array, reads: Reads, steps: int) -> Array:
        """The rows of one role, `(T, B, ...)`; 0 where a lane has nothing left to play.

        torch allocates the memory, aligned to 64 bytes: kernels round differently for differently
        aligned memory, and NumPy and a user's array may be aligned otherwise.
        """
        shape = steps, self.lanes, *sample.shape[1:]
        dtype = getattr(torch, self._dtype(role, sample).name)
        result: Array = torch.empty(shape, dtype=dtype, device="cpu").numpy()
        if sum(part.steps for part, _ in reads) < steps * self.lanes:
            result.fill(0)
        for part, arrays in reads:
            result[part.start : part.stop, part.lane] = arrays[role]
        return result

    def _missing_inputs(self, inputs: Array, reads: Reads) -> Array:
        """Which inputs are NaN or infinite; they become 0, or are refused."""
        missing = ~np.isfinite(inputs) & (not self.keep_missing)
        if missing.any():
            if not self.mask_missing:
                self._refuse_missing(missing.reshape(*missing.shape[:2], -1), reads)
            inputs[missing] = 0
        return missing

    def _refuse_missing(self, missing: Array, reads: Reads) -> None:
        part, values = next(
            (part, values)
            for part, _ in reads
            if (values := missing[part.start : part.stop, part.lane]).any()
        )
        step, column = np.argwhere(values)[0].tolist()
        recording = self.recordings[part.recording]
        raise DataError(
            f"recording '{recording.name}' has"
            f" {counted(int(values.sum()), 'input that is', 'inputs that are')} NaN or infinite"
            f" between steps {part.position} and {part.position + part.steps}, the first at"
            f" {location(recording, part.position + step, column)}. {self.advice}"
        )


def _missing(targets: Array) -> Array:
    """Which targets are NaN or -100."""
    return np.isnan(targets) if targets.dtype.kind == "f" else targets == IGNORE_INDEX


def _mask_out(mask: Array, missing: Array) -> int:
    """Mask the steps that lack a column `(T, B, ...)`; their number."""
    if not missing.any():
        return 0
    rows = missing.reshape(*mask.shape, -1).any(axis=2)
    mask[rows] = False
    return int(rows.sum())
