"""Survey: what one pass over the recordings of a split finds, before a model sees them.

Means and spreads are merged block by block (Chan, Golub & LeVeque 1983), so that a long recording
loses no digits. Cost: one read of every recording, memory for one block.

Shapes: `T` steps, `D` input features, `C` target columns.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from throughtime.app.data import class_name
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Recording, Steps

SURVEY_BLOCK = 65_536  # steps read at once, fewer of many columns
_WIDE = 16  # columns


@dataclass
class Moments:
    """Count, mean and spread of columns, NaN left out column by column."""

    count: Array = field(default_factory=lambda: np.zeros(0))
    mean: Array = field(default_factory=lambda: np.zeros(0))
    spread: Array = field(default_factory=lambda: np.zeros(0))

    def add(self, values: Array) -> None:
        """Takes in `(n, D)` values."""
        if not len(self.count):
            self.count, self.mean, self.spread = (np.zeros(values.shape[1]) for _ in range(3))
        known = np.isfinite(values)
        n = known.sum(axis=0)
        filled = np.where(known, values, 0.0)
        here = filled.sum(axis=0) / np.maximum(n, 1)
        step = here - self.mean
        total = np.maximum(self.count + n, 1)
        self.spread = (
            self.spread
            + (np.where(known, values - here, 0.0) ** 2).sum(axis=0)
            + step**2 * self.count * n / total
        )
        self.mean = self.mean + step * n / total
        self.count = self.count + n

    @property
    def scale(self) -> Array:
        """Standard deviations; 1 for a column that never changes."""
        deviation = np.sqrt(self.spread / np.maximum(self.count, 1))
        return np.where(deviation > 0, deviation, 1.0)


@dataclass
class Survey:
    """What was found: moments of inputs and targets, classes, and where inputs are missing."""

    inputs: Moments = field(default_factory=Moments)
    targets: Moments = field(default_factory=Moments)
    classes: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0
    missing_targets: int = 0
    steps: int = 0
    rising: Array = field(
        default_factory=lambda: np.zeros(0, dtype=np.bool_)
    )  # input columns that only ever rise within a recording
    faults: list[str] = field(default_factory=list[str])
    bad_targets: list[str] = field(default_factory=list[str])


def survey(recordings: Sequence[Recording], *, classify: bool) -> Survey:
    """One pass over the recordings.

    Raises:
        DataError: recordings with different numbers of columns.
    """
    found = Survey()
    width: tuple[str, int] | None = None
    for recording in recordings:
        missing_here, first = 0, ""
        for start, inputs, targets in _blocks(recording):
            width = width or (recording.name, inputs.shape[1])
            if inputs.shape[1] != width[1]:
                raise DataError(
                    f"recording '{recording.name}' has {inputs.shape[1]} input columns,"
                    f" '{width[0]}' has {width[1]}; all need the same"
                )
            bad = ~np.isfinite(inputs)
            if bad.any() and not first:
                step, column = np.argwhere(bad)[0]
                first = f"step {start + step}, column {column}"
            missing_here += int(bad.any(axis=1).sum())
            found.inputs.add(inputs)
            rises = np.asarray((np.diff(inputs, axis=0) > 0).all(axis=0)) & (len(inputs) > 2)
            found.rising = np.asarray(found.rising & rises if len(found.rising) else rises)
            if targets is not None:
                _add_targets(found, recording.name, start, targets, classify)
        found.steps += len(recording)
        found.missing += missing_here
        if missing_here:
            found.faults.append(
                f"recording '{recording.name}': {missing_here} steps have inputs that are NaN or"
                f" infinite, the first at {first}"
            )
    return found


def blocks(recording: Recording) -> Iterator[tuple[int, Steps]]:
    """All of a recording, piece by piece: the first step of each, and the piece."""
    count = max(1, SURVEY_BLOCK * _WIDE // max(_WIDE, recording.read(0, 1).inputs.size))
    for start in range(0, len(recording), count):
        yield start, recording.read(start, min(start + count, len(recording)))


def _blocks(recording: Recording) -> Iterator[tuple[int, Array, Array | None]]:
    for start, steps in blocks(recording):
        inputs = steps.inputs.reshape(len(steps.inputs), -1).astype(np.float64)
        if steps.static is not None:
            inputs = np.concatenate(
                [inputs, np.broadcast_to(steps.static, (len(inputs), len(steps.static)))], axis=1
            )
        yield start, inputs, steps.targets


def _add_targets(found: Survey, name: str, start: int, targets: Array, classify: bool) -> None:
    if classify:
        values, counts = np.unique(targets, return_counts=True)
        for value, count in zip(values, counts, strict=True):
            found.classes[class_name(value)] += int(count)
        found.missing_targets += found.classes.pop("", 0)
        return
    rows = targets.reshape(len(targets), -1).astype(np.float64)
    infinite = np.isinf(rows).any(axis=1)
    if infinite.any():
        found.bad_targets.append(
            f"recording '{name}': {int(infinite.sum())} targets are infinite from step"
            f" {start + int(infinite.argmax())} on"
        )
    found.missing_targets += int(np.isnan(rows).any(axis=1).sum())
    found.targets.add(rows)


def sorted_classes(classes: Counter[str]) -> tuple[str, ...]:
    """Class names in a stable order: numbers by value, then text."""

    def key(name: str) -> tuple[int, float, str]:
        try:
            return 0, float(name), name
        except ValueError:
            return 1, 0.0, name

    return tuple(sorted(classes, key=key))
