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
        means: of the inputs of each recording, NaN where it has none.
        rising: input columns that increase strictly within every block.
        faults: one message for each recording with such inputs.
        bad_targets: one message for each block with infinite targets, or other labels than 0 and 1.
        checksums: of the values of each recording, by its name.
    """

    inputs: Moments = field(default_factory=Moments)
    targets: Moments = field(default_factory=Moments)
    classes: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0
    missing_targets: int = 0
    steps: int = 0
    means: list[Array] = field(default_factory=list[Array])
    rising: Array = field(default_factory=lambda: np.ones(1, dtype=np.bool_))
    faults: list[str] = field(default_factory=list[str])
    bad_targets: list[str] = field(default_factory=list[str])
    checksums: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, recording: Recording, task: str, on_steps: Callable[[int], None]) -> None:
        """Add all steps of a recording; `on_steps` is called with those of each block."""
        wrong, first, crc, own = 0, "", 0, Moments()
        for start, steps in read_blocks(recording):
            inputs = features(steps)
            bad = ~np.isfinite(inputs)
            if bad.any() and not wrong:
                step, column = np.argwhere(bad)[0].tolist()
                first = location(recording, start + step, column)
            wrong += int(bad.any(axis=1).sum())
            crc = checksum(steps, crc)
            self.inputs.add(inputs)
            own.add(inputs)
            rises = (np.diff(inputs, axis=0) > 0).all(axis=0) & (len(inputs) > 2)
            self.rising = np.asarray(self.rising & rises)
            if steps.targets is not None and task == "classify":
                for value, n in zip(*np.unique(steps.targets, return_counts=True), strict=True):
                    self.classes[class_name(value)] += int(n)
                self.missing_targets += self.classes.pop("", 0)
            elif steps.targets is not None:
                self._add_numbers(recording, start, steps.targets, labels=task == "multilabel")
            on_steps(len(inputs))
        self.checksums[recording.name] = f"{crc:08x}"
        self.means.append(np.where(own.count > 0, own.mean, np.nan))
        self.steps += len(recording)
        self.missing += wrong
        if wrong:
            self.faults.append(
                f"recording '{recording.name}': {counted(wrong, 'step has', 'steps have')} inputs"
                f" that are NaN or infinite, the first at {first}"
            )

    def _add_numbers(
        self, recording: Recording, start: int, targets: Array, *, labels: bool
    ) -> None:
        """Add a block of numbers, or of labels, which starts at step `start`."""
        rows = targets.reshape(len(targets), -1).astype(np.float64)
        wrong = ~np.isin(rows, (0, 1)) & ~np.isnan(rows) if labels else np.isinf(rows)
        if (steps := wrong.any(axis=1)).any():
            kind = "other" if labels else "infinite"
            count = counted(int(steps.sum()), "step has", "steps have")
            self.bad_targets.append(
                f"recording '{recording.name}': {count} {kind} targets,"
                f" the first is step {start + int(steps.argmax())}"
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
    on_steps: Callable[[int], None] = lambda _: None,
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
    widths = {recording.name: recording.read(0, 1).inputs.size for recording in recordings}
    if len({*widths.values()}) > 1:
        raise DataError(f"all recordings need the same number of input columns, got {widths}")
    for recording in recordings:
        statistics.add(recording, task, on_steps)
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
        changes = np.diff(y)[pairs] != 0
        same = ((np.diff(x, axis=0)[pairs] != 0) == changes[:, None]).all(axis=0)
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
