"""From the plays of a timetable to the arrays of a chunk: read, check, convert, splice.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from throughtime.chunk import Chunk, Marks
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.lanes import Play
from throughtime.stream.recording import Recording, Steps

Read: TypeAlias = tuple[Play, Steps]

IGNORED = -100  # torch.nn.CrossEntropyLoss's ignore_index


@dataclass
class Collator:
    """Makes chunks of a fixed layout: every recording must have the columns and the type of the first one read.

    Attributes:
        masked: steps whose inputs were not finite and were masked, so far.
        without_target: steps whose target was missing (NaN, or -100 for classes), so far.
    """

    recordings: Sequence[Recording]
    lanes: int
    dtype: torch.dtype | None
    warm_up: int
    mask_missing: bool
    masked: int = 0
    without_target: int = 0

    def __post_init__(self) -> None:
        self._first: tuple[str, Steps] | None = None

    def chunk(self, plays: Sequence[Play], steps: int) -> Chunk:
        """The chunk in which `plays` happen."""
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
        inputs = self._inputs(reads, steps, mask)
        targets = self._targets(reads, steps, mask)
        marks = Marks.of(torch.from_numpy(resets), torch.from_numpy(mask), torch.from_numpy(recording), torch.from_numpy(position))
        return Chunk(torch.from_numpy(inputs), None if targets is None else torch.from_numpy(targets), marks, 0, steps)

    def _read(self, play: Play) -> Steps:
        recording = self.recordings[play.recording]
        steps = recording.read(play.position, play.position + play.steps)
        if len(steps.inputs) != play.steps:
            raise DataError(
                f"recording '{recording.name}' gave {len(steps.inputs)} of the {play.steps} steps asked for at step "
                f"{play.position}; it said that it has {len(recording)}. Did the file change?"
            )
        if self._first is None:
            self._first = (recording.name, steps)
        first_name, first = self._first
        faults = [
            f"recording '{recording.name}' has {role} of {_layout(got)}, recording '{first_name}' of {_layout(expected)}"
            for role, got, expected in (("inputs", steps.inputs, first.inputs), ("targets", steps.targets, first.targets))
            if _layout(got) != _layout(expected)
        ]
        if faults:
            raise DataError("; ".join(faults) + ". All recordings of a stream need the same columns.")
        return steps

    def _inputs(self, reads: Sequence[Read], steps: int, mask: Array) -> Array:
        sample = reads[0][1].inputs
        dtype = self._dtype(sample.dtype)
        tokens = sample.ndim == 1 and dtype.kind == "i"
        parts = [(play, s.inputs if tokens or s.inputs.ndim > 1 else s.inputs.reshape(-1, 1)) for play, s in reads]
        inputs = _splice(parts, steps, self.lanes, dtype)
        if dtype.kind == "f" and not np.isfinite(inputs).all():
            self._missing(inputs, reads, mask)
        return inputs

    def _missing(self, inputs: Array, reads: Sequence[Read], mask: Array) -> None:
        """Masks steps whose inputs are not finite, or refuses them with their count and first place."""
        bad = ~np.isfinite(inputs).reshape(*inputs.shape[:2], -1)
        if not self.mask_missing:
            play = next(p for p, _ in reads if bad[p.at : p.at + p.steps, p.lane].any())
            where = bad[play.at : play.at + play.steps, play.lane]
            step, column = np.argwhere(where)[0]
            raise DataError(
                f"recording '{self.recordings[play.recording].name}' has {int(where.sum())} inputs that are NaN or infinite "
                f"between steps {play.position} and {play.position + play.steps}, the first at step {play.position + step}, "
                f"column {column}. Clean the file, or mask them: missing='mask' (command line: --missing mask)"
            )
        rows = bad.any(axis=2)
        inputs[rows] = 0
        mask[rows] = False
        self.masked += int(rows.sum())

    def _targets(self, reads: Sequence[Read], steps: int, mask: Array) -> Array | None:
        sample = reads[0][1].targets
        if sample is None:
            mask[:] = False
            return None
        dtype = np.dtype(np.int64) if sample.dtype.kind in "biu" else self._dtype(sample.dtype)
        targets = _splice([(play, s.targets) for play, s in reads if s.targets is not None], steps, self.lanes, dtype)
        missing = np.isnan(targets) if dtype.kind == "f" else targets == IGNORED
        if missing.any():
            rows = missing.reshape(*mask.shape, -1).any(axis=2)
            self.without_target += int(rows.sum())
            mask[rows] = False
        return targets

    def _dtype(self, found: np.dtype[Any]) -> np.dtype[Any]:
        """Floating data take the stream's dtype; integers stay integers unless it is floating."""
        if self.dtype is not None:
            return np.dtype(str(self.dtype).removeprefix("torch."))
        return found if found.kind == "f" else np.dtype(np.int64)


def _layout(array: Array | None) -> str:
    if array is None:
        return "no columns"
    kind = {"f": "floating", "b": "integer", "u": "integer", "i": "integer"}.get(array.dtype.kind, str(array.dtype))
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
