"""From the plays of a timetable to the arrays of a chunk: read, check, convert, splice.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime.chunk import Chunk, Marks
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.lanes import Play
from throughtime.stream.recording import Recording, Steps

Read: TypeAlias = tuple[Play, Steps]
Counts: TypeAlias = tuple[int, ...] | None

DTYPES = (torch.float32, torch.float64, torch.float16)
IGNORED = -100  # torch.nn.CrossEntropyLoss's ignore_index


class Gaps(NamedTuple):
    """Steps missing before each step of a chunk, over all lanes; `None` where there are none."""

    masked: Counts  # inputs not finite
    without_target: Counts


def _before_each(rows: Array) -> tuple[int, ...]:
    return (0, *accumulate(rows.sum(axis=1).tolist()))


@dataclass
class Collator:
    """Makes chunks of a fixed layout: every recording must have the columns and the type of the first one read."""

    recordings: Sequence[Recording]
    lanes: int
    dtype: torch.dtype | None
    warm_up: int
    mask_missing: bool

    def __post_init__(self) -> None:
        self._first: tuple[str, Steps] | None = None

    def chunk(self, plays: Sequence[Play], steps: int) -> tuple[Chunk, "Gaps"]:
        """The chunk in which `plays` happen, and what is missing in it."""
        reads = [(play, self._read(play)) for play in plays]
        resets = np.zeros((steps, self.lanes), dtype=np.bool_)
        mask = np.zeros((steps, self.lanes), dtype=np.bool_)
        recording = np.full((steps, self.lanes), -1)
        position = np.full((steps, self.lanes), -1)
        for play in plays:
            rows = slice(play.at, play.at + play.steps)
            resets[play.at, play.lane] = play.since == 0
            mask[play.at + max(0, self.warm_up - play.since) : rows.stop, play.lane] = True
            recording[rows, play.lane] = play.recording
            position[rows, play.lane] = np.arange(play.position, play.position + play.steps)
        inputs, masked = self._inputs(reads, steps, mask)
        targets, without = self._targets(reads, steps, mask)
        marks = Marks.of(torch.from_numpy(resets), torch.from_numpy(mask), torch.from_numpy(recording), torch.from_numpy(position))
        chunk = Chunk(torch.from_numpy(inputs), None if targets is None else torch.from_numpy(targets), marks, 0, steps)
        return chunk, Gaps(masked, without)

    def _read(self, play: Play) -> Steps:
        recording = self.recordings[play.recording]
        steps = recording.read(play.position, play.position + play.steps)
        if len(steps.inputs) != play.steps:
            raise DataError(
                f"recording '{recording.name}' gave {len(steps.inputs)} of the {play.steps} steps asked for at step "
                f"{play.position}; it said that it has {len(recording)}. Did the file change?"
            )
        for role, array in (("inputs", steps.inputs), ("targets", steps.targets)):
            if array is not None and array.dtype.kind not in "biuf":
                raise DataError(f"recording '{recording.name}': the {role} are {array.dtype}, expected numbers; map text to integers first")
        if self._first is None:
            self._first = (recording.name, steps)
        first_name, first = self._first
        pairs = (("inputs", steps.inputs, first.inputs), ("targets", steps.targets, first.targets))
        layouts = [(role, *(_layout(array, exact=self.dtype is None) for array in arrays)) for role, *arrays in pairs]
        faults = [
            f"recording '{recording.name}' has {role} of {got}, recording '{first_name}' of {expected}"
            for role, got, expected in layouts
            if got != expected
        ]
        if faults:
            more = "All recordings of a stream need the same columns" + (", or give the stream a dtype." if self.dtype is None else ".")
            raise DataError("; ".join(faults) + ". " + more)
        return steps

    def _inputs(self, reads: Sequence[Read], steps: int, mask: Array) -> tuple[Array, Counts]:
        sample = reads[0][1].inputs
        dtype = self._dtype(sample.dtype)
        tokens = sample.ndim == 1 and dtype.kind == "i"
        parts = [(play, s.inputs if tokens or s.inputs.ndim > 1 else s.inputs.reshape(-1, 1)) for play, s in reads]
        inputs = _splice(parts, steps, self.lanes, dtype)
        if dtype.kind != "f" or np.isfinite(inputs).all():
            return inputs, None
        bad = ~np.isfinite(inputs).reshape(*inputs.shape[:2], -1)
        if not self.mask_missing:
            self._refuse_missing(bad, reads)
        rows = np.asarray(bad.any(axis=2))
        inputs[rows] = 0
        mask[rows] = False
        return inputs, _before_each(rows)

    def _refuse_missing(self, bad: Array, reads: Sequence[Read]) -> None:
        play = next(p for p, _ in reads if bad[p.at : p.at + p.steps, p.lane].any())
        where = bad[play.at : play.at + play.steps, play.lane]
        step, column = np.argwhere(where)[0]
        raise DataError(
            f"recording '{self.recordings[play.recording].name}' has {int(where.sum())} inputs that are NaN or infinite "
            f"between steps {play.position} and {play.position + play.steps}, the first at step {play.position + step}, "
            f"column {column}. Clean the file, or mask them: missing='mask' (command line: --missing mask)"
        )

    def _targets(self, reads: Sequence[Read], steps: int, mask: Array) -> tuple[Array | None, Counts]:
        sample = reads[0][1].targets
        if sample is None:
            mask[:] = False
            return None, None
        dtype = np.dtype(np.int64) if sample.dtype.kind in "biu" else self._dtype(sample.dtype)
        targets = _splice([(play, s.targets) for play, s in reads if s.targets is not None], steps, self.lanes, dtype)
        missing = np.isnan(targets) if dtype.kind == "f" else targets == IGNORED
        if not missing.any():
            return targets, None
        rows = np.asarray(missing.reshape(*mask.shape, -1).any(axis=2))
        mask[rows] = False
        return targets, _before_each(rows)

    def _dtype(self, found: np.dtype[Any]) -> np.dtype[Any]:
        """Floating data take the stream's dtype; integers stay integers unless it is floating."""
        if self.dtype is not None:
            return np.dtype(str(self.dtype).removeprefix("torch."))
        return found if found.kind == "f" else np.dtype(np.int64)


def _layout(array: Array | None, *, exact: bool) -> str:
    """The columns in words; `exact` tells floating types apart, where they decide the type of a chunk."""
    if array is None:
        return "no columns"
    kind = {"f": str(array.dtype) if exact else "floating", "b": "integer", "u": "integer", "i": "integer"}[array.dtype.kind]
    width = "x".join(map(str, array.shape[1:])) or "1"
    return f"{width} {'columns' if array.ndim > 1 else 'column (a vector)'} of {kind} numbers"


def _splice(parts: Sequence[tuple[Play, Array]], steps: int, lanes: int, dtype: np.dtype[Any]) -> Array:
    """`(T, B, ...)` from the parts of each lane, in memory that torch allocates.

    Kernels round differently for differently aligned memory; torch aligns to 64 bytes, NumPy and a user's array need not.
    """
    shape = (steps, lanes, *parts[0][1].shape[1:])
    spliced: Array = torch.zeros(shape, dtype=getattr(torch, dtype.name)).numpy()
    for play, values in parts:
        spliced[play.at : play.at + play.steps, play.lane] = values
    return spliced
