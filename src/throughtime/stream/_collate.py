"""From lane slices to the tensors of a block: read, check, convert, assemble.

A block is a pure function of the slices that lanes play in it.

Shapes: `T` steps, `B` lanes, `S` static features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from throughtime._metadata import ChunkMetadata
from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, check_exact
from throughtime.stream.lanes import LaneSchedule, LaneSlice
from throughtime.stream.recording import Recording, StepArrays, location
from throughtime.stream.targets import IGNORE_INDEX

Rows: TypeAlias = dict[str, Array]
"""The arrays of some steps by role: inputs, targets, and each series."""
Reads: TypeAlias = Sequence[tuple[LaneSlice, Rows]]

DTYPES = (torch.float32, torch.float64, torch.float16)


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
    reading: bool = False

    def __post_init__(self) -> None:
        self._layout: Any = None  # of the first recording: its name, and what it has in words
        self._sample: Rows = {}  # of it
        self._accepted = set[tuple[Any, ...]]()
        self._lengths = np.array([*map(len, self.recordings)])

    def read(self, schedule: LaneSchedule, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of an epoch."""
        slices, steps, self.reading = [*schedule.slices(start, stop)], stop - start, True
        try:
            reads = [(part, self._read(part)) for part in slices]
            if not self._sample:  # nothing is left to play, and the layout is not known
                self._read(LaneSlice(0, 0, 1, 0, 0, 0))
        finally:
            self.reading = False
        arrays = {
            role: self._assemble(role, rows, reads, steps) for role, rows in self._sample.items()
        }
        inputs, targets = arrays.pop("inputs"), arrays.pop("targets", None)
        per_step = self._metadata(slices, steps)
        _mask_out(per_step[1], self._missing_inputs(inputs, reads))
        if targets is not None:
            is_float = targets.dtype.kind == "f"
            _mask_out(per_step[1], np.isnan(targets) if is_float else targets == IGNORE_INDEX)
        metadata = ChunkMetadata.of(*map(torch.from_numpy, per_step))
        labels = None if targets is None else torch.from_numpy(targets)
        series = {name: torch.from_numpy(rows) for name, rows in arrays.items()}
        return Chunk(torch.from_numpy(inputs), labels, metadata, 0, steps, 0, series)

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

    def _read(self, part: LaneSlice) -> Rows:
        recording = self.recordings[part.recording]
        steps = recording.read(part.position, part.position + part.steps)
        arrays = steps.by_role
        for role, rows in arrays.items():
            if len(rows) != part.steps:
                raise DataError(
                    f"recording '{recording.name}' gave {len(rows)} of the {part.steps} steps asked"
                    f" for at step {part.position}, as {role}; it said that it has {len(recording)}"
                )
            if rows.dtype.itemsize > 4:
                exact = np.promote_types(self._dtype(role, rows), np.int64)
                check_exact(f"recording '{recording.name}': {role}", rows, exact)
        # layouts that are known to fit need not be put in words
        layout = tuple((role, rows.dtype, rows.shape[1:]) for role, rows in arrays.items())
        if layout not in self._accepted:
            self._check(recording, steps)
        inputs = arrays["inputs"]
        if inputs.ndim == 1 and self._dtype("inputs", inputs).kind == "f":  # no tokens
            arrays["inputs"] = inputs[:, None]
        self._sample = self._sample or arrays
        self._accepted.add(layout)
        return arrays

    def _check(self, recording: Recording, steps: StepArrays) -> None:
        """Refuse what is not numbers, or other columns than those of the first recording."""
        name, arrays = recording.name, steps.by_role
        for role, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise DataError(
                    f"recording '{name}': the {role} are {array.dtype}, expected numbers; map text"
                    " to integers first, or name its classes: tt.recording(..., classes=[...])"
                )
            if role in steps.series and hasattr(Chunk, role):
                raise DataError(
                    f"recording '{name}' has a series '{role}', a name that every chunk has"
                )
        words = {role: self._words(role, array) for role, array in arrays.items()}
        first, expected = self._layout = self._layout or (name, words)
        for role in {**expected, **words}:
            got, wanted = words.get(role, "none"), expected.get(role, "none")
            if got != wanted:
                raise DataError(
                    f"recording '{name}' has {role}: {got}, recording '{first}': {wanted}. All"
                    " recordings of a stream need the same columns and the same kind of numbers;"
                    " where floating types differ, give the stream a dtype"
                )

    def _words(self, role: str, array: Array) -> str:
        """The columns in words; floating types differ only where they decide that of the chunk."""
        kind, is_series = array.dtype.kind, role not in ("inputs", "targets")
        floating = str(array.dtype) if self.dtype is None else "floating"
        words = {"f": floating, "b": "boolean" if is_series else "integer"}.get(kind, "integer")
        return f"({', '.join(['T', *map(str, array.shape[1:])])}) of {words} numbers"

    def _dtype(self, role: str, rows: Array) -> np.dtype[Any]:
        """The stream's dtype, if any, of inputs and floating rows; others are int64 or bool."""
        if self.dtype is not None and (role == "inputs" or rows.dtype.kind == "f"):
            return np.dtype(str(self.dtype).removeprefix("torch."))
        is_series = role not in ("inputs", "targets")
        kept = rows.dtype.kind == "f" or (rows.dtype.kind == "b" and is_series)
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
            f"recording '{recording.name}' has an input that is NaN or infinite at"
            f" {location(recording, part.position + step, column)}. {self.advice}"
        )


def _mask_out(mask: Array, missing: Array) -> None:
    """Mask the steps that lack a column `(T, B, ...)`."""
    if missing.any():
        mask[missing.reshape(*mask.shape, -1).any(axis=2)] = False
