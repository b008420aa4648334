"""Standardisation of recordings: moments in one pass, and recordings by all of their own steps.

Means and spreads are merged block by block (Chan, Golub & LeVeque 1983), so that a long recording
loses no digits. `tt.nn.Standardise.of(stream)` is the layer that a net keeps of them.

Shapes: `T` steps, `D` columns.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Recording, RecordingView, StepArrays, innermost

BLOCK, _WIDE = 65_536, 16  # steps read at once, fewer where there are more than so many columns


@dataclass
class Moments:
    """Count, mean and squared deviations of columns, without values that are not finite."""

    count: Array = field(default_factory=lambda: np.zeros(1))
    mean: Array = field(default_factory=lambda: np.zeros(1))
    spread: Array = field(default_factory=lambda: np.zeros(1))

    def add(self, values: Array) -> None:
        """Add `(n, D)` values."""
        finite = np.isfinite(values)
        n = finite.sum(axis=0)
        mean = np.where(finite, values, 0.0).sum(axis=0) / np.maximum(n, 1)
        step, total = mean - self.mean, np.maximum(self.count + n, 1)
        within = (np.where(finite, values - mean, 0.0) ** 2).sum(axis=0)
        self.spread = self.spread + within + step**2 * self.count * n / total
        self.mean = self.mean + step * n / total
        self.count = self.count + n

    @property
    def scale(self) -> Array:
        """Standard deviations; 1 for a constant column."""
        deviation = np.sqrt(self.spread / np.maximum(self.count, 1))
        return np.where(deviation > 0, deviation, 1.0)


def read_blocks(recording: Recording) -> Iterator[tuple[int, StepArrays]]:
    """The blocks of a recording: the first step of each, and its steps."""
    count = max(1, BLOCK * _WIDE // max(_WIDE, recording.read(0, 1).inputs.size))
    for start in range(0, len(recording), count):
        yield start, recording.read(start, min(start + count, len(recording)))


def as_columns(rows: Array) -> Array:
    """Rows of steps as float64 `(n, D)`."""
    return rows.reshape(len(rows), -1).astype(np.float64)


def moments_of(recordings: Sequence[Recording], role: str = "inputs") -> Moments:
    """The moments of the inputs, or of the targets, of all recordings; one read of each.

    Raises:
        DataError: they have no targets.
    """
    moments = Moments()
    for recording in recordings:
        for _, steps in read_blocks(recording):
            if role not in steps.by_role:
                raise DataError(f"recording '{recording.name}' has no {role} to standardise")
            moments.add(as_columns(steps.by_role[role]))
    return moments


@dataclass(frozen=True)
class StandardisedRecording(RecordingView[Recording]):
    """A recording whose inputs have the mean 0 and the deviation 1, by all of its steps."""

    whole: Recording

    @cached_property
    def _moments(self) -> Moments:
        return moments_of([self.whole])

    def read(self, start: int, stop: int) -> StepArrays:
        steps = self.whole.read(start, stop)
        inputs = (as_columns(steps.inputs) - self._moments.mean) / self._moments.scale
        return steps._replace(inputs=inputs.reshape(steps.inputs.shape))


def standardised(recording: Recording) -> Recording:
    """The recording standardised by all of its steps; itself where it, or what it views, is."""
    part: object = recording
    while isinstance(part, RecordingView):
        if isinstance(part, StandardisedRecording):
            return recording
        part = part.whole
    return StandardisedRecording(recording)


def check_standardise(how: str | None, recordings: Sequence[Recording], missing: str) -> None:
    """Refuse a setting that is none, or that these recordings cannot have.

    Raises:
        DataError: one of these.
    """
    fault = ""
    if how not in (None, "split", "recording") and not re.fullmatch(r"first:[1-9]\d*", str(how)):
        fault = "expected 'split', 'recording', 'first:N', such as 'first:400', or None"
    elif how not in (None, "split"):
        if any(getattr(innermost(r)[0], "static", None) is not None for r in recordings):
            fault = "has no statistics of static features, which are the same at each step of a"
            fault += " recording: take 'split', or leave static out"
        elif how != "recording" and missing == "mask":
            fault = "would count masked steps as zeros: fill them, or take 'split'"
    if fault:
        raise DataError(f"standardise={how!r}: {fault}")
