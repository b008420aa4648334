"""Statistics of the recordings of a split, collected in one pass before training.

Means and spreads are merged block by block (Chan, Golub & LeVeque 1983), so that a long recording
loses no digits. Cost: one read of every recording, memory for one block.

Shapes: `D` input features.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from throughtime.errors import DataError, counted
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import RecordingView, StepArrays, checksum, location
from throughtime.stream.targets import IGNORE_INDEX, class_name

BLOCK = 65_536  # steps read at once, fewer if there are many columns
_WIDE = 16  # up to so many columns, a block has BLOCK steps
_ROUNDING = 1e-8  # of a squared correlation: files round
_FEW = 3  # changes that may agree by chance


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
        step = mean - self.mean
        total = np.maximum(self.count + n, 1)
        within = (np.where(finite, values - mean, 0.0) ** 2).sum(axis=0)
        self.spread = self.spread + within + step**2 * self.count * n / total
        self.mean = self.mean + step * n / total
        self.count = self.count + n

    @property
    def scale(self) -> Array:
        """Standard deviations; 1 for a constant column."""
        deviation = np.sqrt(self.spread / np.maximum(self.count, 1))
        return np.where(deviation > 0, deviation, 1.0)


@dataclass
class Statistics:
    """Moments, classes and missing values of recordings.

    Attributes:
        inputs: moments of the input features.
        targets: moments of targets that are numbers or labels.
        classes: how often each class occurs.
        missing: steps with inputs that are NaN or infinite.
        missing_targets: steps without a target.
        steps: the number of steps.
        rising: input columns that increase strictly within every block.
        faults: one message for each recording with such inputs.
        bad_targets: one message for each block with infinite targets, or other labels than 0 and 1.
        checksums: of the values of each recording, by its name.
        means: of the input features of each recording.
    """

    inputs: Moments = field(default_factory=Moments)
    targets: Moments = field(default_factory=Moments)
    classes: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0
    missing_targets: int = 0
    steps: int = 0
    rising: Array = field(default_factory=lambda: np.ones(1, dtype=np.bool_))
    faults: list[str] = field(default_factory=list[str])
    bad_targets: list[str] = field(default_factory=list[str])
    checksums: dict[str, str] = field(default_factory=dict[str, str])
    means: list[Array] = field(default_factory=list[Array])

    def add_inputs(self, inputs: Array) -> None:
        """Add a block of inputs `(n, D)`."""
        self.inputs.add(inputs)
        rises = (np.diff(inputs, axis=0) > 0).all(axis=0) & (len(inputs) > 2)
        self.rising = np.asarray(self.rising & rises)

    def add_classes(self, targets: Array) -> None:
        """Count the classes of a block."""
        values, counts = np.unique(targets, return_counts=True)
        for value, count in zip(values, counts, strict=True):
            self.classes[class_name(value)] += int(count)
        self.missing_targets += self.classes.pop("", 0)

    def add_targets(self, name: str, start: int, targets: Array, *, labels: bool) -> None:
        """Add a block of numbers, or of labels, which starts at step `start`."""
        rows = targets.reshape(len(targets), -1).astype(np.float64)
        wrong = ~np.isin(rows, (0, 1)) & ~np.isnan(rows) if labels else np.isinf(rows)
        wrong, what = wrong.any(axis=1), "other" if labels else "infinite"
        if wrong.any():
            self.bad_targets.append(
                f"recording '{name}': {counted(int(wrong.sum()), 'step has', 'steps have')}"
                f" {what} targets, the first is step {start + int(wrong.argmax())}"
            )
        self.missing_targets += int(np.isnan(rows).any(axis=1).sum())
        self.targets.add(rows)


@dataclass(frozen=True)
class StandardisedRecording(RecordingView[Recording]):
    """A recording whose inputs have the mean 0 and the deviation 1, by all of its steps."""

    whole: Recording

    @cached_property
    def _moments(self) -> Moments:
        moments = Moments()
        for _, steps in read_blocks(self.whole):
            moments.add(features(steps))
        return moments

    def read(self, start: int, stop: int) -> StepArrays:
        steps = self.whole.read(start, stop)
        inputs = (features(steps) - self._moments.mean) / self._moments.scale
        return steps._replace(inputs=inputs.reshape(steps.inputs.shape))


def collect_statistics(
    recordings: Sequence[Recording],
    *,
    task: str,
    on_steps: Callable[[int], None] | None = None,
) -> Statistics:
    """Collect the statistics of all recordings in one pass.

    Args:
        recordings: those of one split.
        task: whether the targets are classes, labels or numbers.
        on_steps: called with the number of steps of each block read.

    Raises:
        DataError: recordings with different numbers of columns.
    """
    statistics = Statistics()
    width: tuple[str, int] | None = None
    for recording in recordings:
        missing, first, crc, own = 0, "", 0, Moments()
        for start, steps in read_blocks(recording):
            inputs = features(steps)
            width = width or (recording.name, inputs.shape[1])
            if inputs.shape[1] != width[1]:
                raise DataError(
                    f"recording '{recording.name}' has {inputs.shape[1]} input columns,"
                    f" '{width[0]}' has {width[1]}; all recordings need the same number"
                )
            bad = ~np.isfinite(inputs)
            if bad.any() and not first:
                step, column = np.argwhere(bad)[0].tolist()
                first = location(recording, start + step, column)
            missing += int(bad.any(axis=1).sum())
            crc = checksum(steps, crc)
            statistics.add_inputs(inputs)
            own.add(inputs)
            if steps.targets is not None and task == "classify":
                statistics.add_classes(steps.targets)
            elif steps.targets is not None:
                labels = task == "multilabel"
                statistics.add_targets(recording.name, start, steps.targets, labels=labels)
            if on_steps is not None:
                on_steps(len(inputs))
        statistics.checksums[recording.name] = f"{crc:08x}"
        statistics.means.append(np.where(own.count > 0, own.mean, np.nan))
        statistics.steps += len(recording)
        statistics.missing += missing
        if missing:
            statistics.faults.append(
                f"recording '{recording.name}':"
                f" {counted(missing, 'step has', 'steps have')} inputs that are NaN or infinite,"
                f" the first at {first}"
            )
    return statistics


def target_moments(recordings: Sequence[Recording], now: Sequence[int] = ()) -> Moments:
    """The moments of the targets; with the input columns `now`, of their changes from these.

    Cost: one read of every recording.
    """
    moments = Moments()
    for recording in recordings:
        for _, steps in read_blocks(recording):
            if steps.targets is not None:
                targets = steps.targets.reshape(len(steps.targets), -1)
                moments.add(targets - features(steps)[:, list(now)] if now else targets)
    return moments


def leaks(steps: StepArrays, inputs: Sequence[str]) -> list[list[str]]:
    """For each target column, the input columns that determine it.

    Such a column equals it up to a shift and a scale, or changes at the same steps and no others.

    Args:
        steps: consecutive ones, as they are trained on.
        inputs: the names of the columns of a row.
    """
    x, result = features(steps), list[list[str]]()
    for y in [] if steps.targets is None else steps.targets.reshape(len(x), -1).T:
        known = np.isfinite(y) & (y != IGNORE_INDEX) & np.isfinite(x).all(axis=1)
        pairs = known[1:] & known[:-1]
        changes = (y[1:] != y[:-1])[pairs]
        same = ((x[1:] != x[:-1])[pairs] == changes[:, None]).all(axis=0)
        same &= _FEW < changes.sum() < len(changes) / 2
        a, b = (v[known] - v[known].sum(axis=0) / max(1, known.sum()) for v in (x, y))
        squares = (a**2).sum(axis=0) * (b**2).sum()
        equal = (squares > 0) & ((b @ a) ** 2 > (1 - _ROUNDING) * squares)
        columns = np.flatnonzero(equal | same) % len(inputs)
        result.append([inputs[i] for i in dict.fromkeys(columns.tolist())])
    return result


def read_blocks(recording: Recording) -> Iterator[tuple[int, StepArrays]]:
    """The blocks of a recording: the first step of each, and its steps."""
    count = max(1, BLOCK * _WIDE // max(_WIDE, recording.read(0, 1).inputs.size))
    for start in range(0, len(recording), count):
        yield start, recording.read(start, min(start + count, len(recording)))


def features(steps: StepArrays) -> Array:
    """Inputs, static features included, `(n, D)`."""
    return steps.inputs.reshape(len(steps.inputs), -1).astype(np.float64)
