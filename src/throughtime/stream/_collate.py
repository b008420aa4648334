"""From lane slices to the tensors of a chunk: read, check, convert, assemble.

Shapes: `T` steps, `B` lanes, `S` static features.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from threading import RLock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime._metadata import ChunkMetadata
from throughtime.chunk import Chunk
from throughtime.errors import DataError, counted
from throughtime.stream.formats.table import Array
from throughtime.stream.labels import IGNORE_INDEX
from throughtime.stream.lanes import LaneSchedule, LaneSlice
from throughtime.stream.layout import text_hint
from throughtime.stream.recording import Recording, StepArrays, location

Reads: TypeAlias = Sequence[tuple[LaneSlice, StepArrays]]
Counts: TypeAlias = tuple[int, ...] | None

DTYPES = (torch.float32, torch.float64, torch.float16)


class MissingCounts(NamedTuple):
    """Steps masked before each step of a chunk, over all lanes; `None` where there are none."""

    inputs: Counts  # not finite
    targets: Counts  # NaN or -100

    def add(self, counts: tuple[int, int], begin: int, end: int) -> tuple[int, int]:
        """Counts of inputs and of targets, plus those of the steps `begin` to before `end`."""
        more = (0 if before is None else before[end] - before[begin] for before in self)
        inputs, targets = (count + n for count, n in zip(counts, more, strict=True))
        return inputs, targets


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


Block: TypeAlias = tuple[Chunk, MissingCounts]


@dataclass
class Collator:
    """Makes chunks of one layout: that of the first recording that is read.

    It is the reader of a stream that reads when needed, one thread at a time: an open file has one
    position.
    """

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
        self._lock, self._busy = RLock(), False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock(), _busy=False)

    @contextmanager
    def exclusive(self) -> Generator[bool]:
        """No other thread reads inside; false in the handler of a signal that came in a read."""
        with self._lock:
            free, self._busy = not self._busy, True
            try:
                yield free
            finally:
                self._busy = not free

    def read(self, request: ReadRequest, later: Iterable[ReadRequest] = ()) -> Block:
        """The requested block, when no other thread reads one."""
        del later
        with self.exclusive():
            return self.collate(request.slices, request.steps)

    def collate(self, slices: Sequence[LaneSlice], steps: int) -> Block:
        """The chunk in which lanes play these slices, and how many of its steps are missing."""
        reads = [(part, self._read(part)) for part in slices]
        per_step = self._metadata(slices, steps)
        mask = per_step[1]
        inputs, missing_inputs = self._inputs(reads, steps, mask)
        targets, missing_targets = self._targets(reads, steps, mask)
        metadata = ChunkMetadata.of(*map(torch.from_numpy, per_step))
        labels = None if targets is None else torch.from_numpy(targets)
        series = self._series(reads, steps)
        chunk = Chunk(torch.from_numpy(inputs), labels, metadata, 0, steps, 0, series)
        return chunk, MissingCounts(missing_inputs, missing_targets)

    def _metadata(self, slices: Sequence[LaneSlice], steps: int) -> tuple[Array, ...]:
        """Resets, mask, recording, position and ends of every step.

        One assignment for each slice, since there may be one for every few steps; the rest is
        looked up by the index of the slice. The last row of the table is for idle lanes.
        """
        owner = np.full((self.lanes, steps), len(slices))
        resets = np.zeros((steps, self.lanes), dtype=np.bool_)
        for i, part in enumerate(slices):
            owner[part.lane, part.start : part.stop] = i
            resets[part.start, part.lane] = part.age == 0
        owner = np.ascontiguousarray(owner.T)
        step = np.arange(steps)[:, None]
        table = np.array(
            [(s.recording, s.position - s.start, s.age - s.start) for s in slices] + [(-1, 0, 0)]
        )
        played = owner < len(slices)
        position = np.where(played, table[:, 1][owner] + step, -1)
        mask = played & (table[:, 2][owner] + step >= self.warm_up) if self.warm_up else played
        recording = table[:, 0][owner]
        return resets, mask, recording, position, position + 1 == self._lengths[recording]

    def prime(self) -> StepArrays:
        """The layout that all recordings must have: that of the first one, read now if need be."""
        if self._first is None:
            self._read(LaneSlice(0, 0, 1, 0, 0, 0))
        if self._first is None:
            raise RuntimeError("a recording that was read and left no layout")
        return self._first[1]

    def _read(self, part: LaneSlice) -> StepArrays:
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
        static = None if steps.static is None else (steps.static.dtype, steps.static.shape)
        layout = static, *[(role, rows.dtype, rows.shape[1:]) for role, rows in arrays.items()]
        if layout not in self._accepted:
            self._check(recording, steps)
            self._accepted.add(layout)
        return steps

    def _check(self, recording: Recording, steps: StepArrays) -> None:
        """Refuse what is not numbers, or other columns than those of the first recording."""
        name, arrays = recording.name, steps.by_role
        for role, array in {**arrays, "static features": steps.static}.items():
            if array is not None and array.dtype.kind not in "biuf":
                raise DataError(
                    text_hint(recording, role)
                    or f"recording '{name}': the {role} are {array.dtype}, expected numbers; map"
                    " text to integers first"
                )
        if taken := [key for key in steps.series if hasattr(Chunk, key)]:
            raise DataError(
                f"recording '{name}' has a series '{taken[0]}', a name that every chunk has; give"
                " it another name"
            )
        if self._first is None:
            self._first = (name, steps)
        first_name, first = self._first
        expected = first.by_role
        layouts = [
            (role, self._layout(role, arrays), self._layout(role, expected))
            for role in {**expected, **arrays}
        ]
        layouts.append(("static features", _width(steps.static), _width(first.static)))
        faults = [
            f"recording '{name}' has {role} of {got}, recording '{first_name}' of {expected}"
            for role, got, expected in layouts
            if got != expected
        ]
        if faults:
            whole = any("integer" in fault or "boolean" in fault for fault in faults)
            hint = "." if whole or self.dtype is not None else ", or give the stream a dtype."
            raise DataError(
                "; ".join(faults) + ". All recordings of a stream need the same columns, and the"
                " same kind of numbers" + hint
            )

    def _layout(self, role: str, arrays: Mapping[str, Array]) -> str:
        """The columns in words; floating types differ only where they decide that of the chunk."""
        array = arrays.get(role)
        if array is None:
            return "no columns"
        kind = "integer"
        if array.dtype.kind == "f":
            kind = "floating" if self.dtype is not None else str(array.dtype)
        elif array.dtype.kind == "b" and "series" in role:
            kind = "boolean"
        width = "x".join(map(str, array.shape[1:])) or "1"
        return f"{width} {'columns' if array.ndim > 1 else 'column (a vector)'} of {kind} numbers"

    def _inputs(self, reads: Reads, steps: int, mask: Array) -> tuple[Array, Counts]:
        first = self.prime()
        sample, static = (reads[0][1] if reads else first).inputs, first.static
        dtype = self._dtype(sample.dtype)
        tokens = sample.ndim == 1 and dtype.kind == "i"
        columns = sample.shape[1:] if tokens or sample.ndim > 1 else (1,)
        if static is not None and len(columns) != 1:
            raise DataError(
                "static features go beside inputs (T, D); these are tokens or have more dimensions"
            )
        if static is not None and dtype.kind != "f" and static.dtype.kind == "f":
            raise DataError(
                f"the static features are {static.dtype} and the inputs {dtype}, which cannot hold"
                " them; give the stream a floating dtype"
            )
        parts = [
            (part, s.inputs if tokens or s.inputs.ndim > 1 else s.inputs.reshape(-1, 1))
            for part, s in reads
        ]
        statics = [(part, s.static) for part, s in reads if s.static is not None]
        width = columns if static is None else (columns[0] + len(static),)
        inputs = _assemble(parts, (steps, self.lanes, *width), dtype, statics)
        if dtype.kind != "f" or self.keep_missing or np.isfinite(inputs).all():
            return inputs, None
        missing = ~np.isfinite(inputs)
        by_step = missing.reshape(*mask.shape, -1)
        if not self.mask_missing:
            self._refuse_missing(by_step, reads)
        inputs[missing] = 0
        return inputs, _mask_out(mask, by_step)

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

    def _targets(self, reads: Reads, steps: int, mask: Array) -> tuple[Array | None, Counts]:
        sample = (reads[0][1] if reads else self.prime()).targets
        if sample is None:
            return None, None
        dtype = np.dtype(np.int64) if sample.dtype.kind in "biu" else self._dtype(sample.dtype)
        parts = [(part, s.targets) for part, s in reads if s.targets is not None]
        targets = _assemble(parts, (steps, self.lanes, *sample.shape[1:]), dtype)
        missing = np.isnan(targets) if dtype.kind == "f" else targets == IGNORE_INDEX
        if not missing.any():
            return targets, None
        return targets, _mask_out(mask, missing.reshape(*mask.shape, -1))

    def _series(self, reads: Reads, steps: int) -> dict[str, torch.Tensor]:
        """The series by name; bool stays bool, other types are those that targets would have."""
        result: dict[str, torch.Tensor] = {}
        for name, sample in (reads[0][1] if reads else self.prime()).series.items():
            kinds = {"b": np.bool_, "f": self._dtype(sample.dtype)}
            dtype = np.dtype(kinds.get(sample.dtype.kind, np.int64))
            parts = [(part, s.series[name]) for part, s in reads]
            result[name] = torch.from_numpy(
                _assemble(parts, (steps, self.lanes, *sample.shape[1:]), dtype)
            )
        return result

    def _dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The stream's dtype, if any; else floating types stay and others become int64."""
        if self.dtype is not None:
            return np.dtype(str(self.dtype).removeprefix("torch."))
        return dtype if dtype.kind == "f" else np.dtype(np.int64)


def _mask_out(mask: Array, missing: Array) -> tuple[int, ...]:
    """Mask steps with a missing column `(T, B, ...)`; the number of them before each step."""
    rows = np.asarray(missing.any(axis=2))
    mask[rows] = False
    return (0, *accumulate(rows.sum(axis=1).tolist()))


def _width(static: Array | None) -> str:
    return "none" if static is None else f"{len(static)} numbers"


def _assemble(
    parts: Sequence[tuple[LaneSlice, Array]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    statics: Sequence[tuple[LaneSlice, Array]] = (),
) -> Array:
    """`(T, B, ...)` from the parts of each lane; static features `(S,)` are the last columns.

    torch allocates the memory, aligned to 64 bytes: kernels round differently for differently
    aligned memory, and NumPy and a user's array may be aligned otherwise.
    """
    played = sum(part.steps for part, _ in parts)
    covered = played == shape[0] * shape[1] and len(statics) in (0, len(parts))
    result: Array = torch.empty(shape, dtype=getattr(torch, dtype.name), device="cpu").numpy()
    if not covered:
        result.fill(0)
    columns = result[..., : -len(statics[0][1])] if statics else result
    for part, values in parts:
        columns[part.start : part.stop, part.lane] = values
    for part, values in statics:
        result[part.start : part.stop, part.lane, -len(values) :] = values
    return result
