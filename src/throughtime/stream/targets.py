"""The target of each step: by name, of a span of steps, or of a later step.

Labels of intervals belong to every step of them. Names of classes are read as
indices: the class at index `i` is `classes[i]`. For a forecast the target of step `t` is that of
step `t + n`; shift a recording after it is cut into splits, so that no target of one split is read
in another.

A step without a target is masked: its target is NaN, -100 or empty text.

Shapes: `n` steps read, `T` steps of the recording, `C` target columns, `F` later steps.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from throughtime.errors import DataError, check_whole, listed
from throughtime.stream.formats.table import Array, check_exact, is_number
from throughtime.stream.recording import Recording, RecordingView, StepArrays, innermost

IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss's ignore_index


def missing_like(shape: tuple[int, ...], sample: Array) -> Array:
    """Missing targets, of the kind of `sample`; whole numbers are int64, which holds -100."""
    fills: dict[str, Any] = {"U": "", "S": b"", "f": np.nan, "O": None}
    fill = fills.get(sample.dtype.kind, IGNORE_INDEX)
    dtype = np.dtype(np.int64) if fill == IGNORE_INDEX else sample.dtype
    check_exact("the targets", sample, dtype)
    return np.full(shape, fill, dtype)


@dataclass(frozen=True)
class SpanLabels:
    """A label for each interval `[start, stop)` of steps, in order, without overlap.

    Steps between them have none. `stops` has a last 0, for the steps before the first interval.
    """

    source: str
    starts: Array
    stops: Array
    labels: Array
    steps: int

    def __len__(self) -> int:
        return self.steps

    def read(self, start: int, stop: int) -> Array:
        step = np.arange(start, min(stop, self.steps))
        owner = np.searchsorted(self.starts, step, side="right") - 1
        inside = step < self.stops[owner]
        result = missing_like((len(step), *self.labels.shape[1:]), self.labels)
        result[inside] = self.labels[owner[inside]]
        return result


def interval_labels(
    name: str, source: str, starts: Any, stops: Any, labels: Array, steps: int
) -> SpanLabels:
    """The labels of checked intervals of a recording of so many steps.

    Raises:
        DataError: they are out of order, overlap, leave the recording, or are no whole numbers; the
            message names the first.
    """
    sizes, what = [*map(np.size, (starts, stops))], f"recording '{name}': intervals in {source}"
    if {*sizes} != {len(labels)}:
        raise DataError(
            f"{what} have {sizes[0]} starts, {sizes[1]} stops, {len(labels)} labels; expected one"
            " each"
        )
    begin, end = edges = np.stack([np.ravel(starts), np.ravel(stops)])
    if edges.dtype.kind not in "iuf" or (edges != np.floor(edges)).any():
        raise DataError(f"{what} have {edges.dtype} edges, expected whole steps, such as 1200")
    before = np.append(0, end[:-1])
    for wrong, fault in (
        ((begin < 0) | (end > steps), f"leaves the recording of {steps} steps"),
        (begin >= end, "stops before it has a step; a stop is after its start"),
        (begin < before, "begins before the end of the one before it; sort, cut or join them"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise DataError(f"{what}: number {i}, {begin[i]:.0f} to {end[i]:.0f}, {fault}")
    begin, end = edges.astype(np.int64)
    return SpanLabels(source, begin, np.append(end, 0), labels, steps)


def class_name(value: object) -> str:
    """The name of a class: integers without a decimal point, empty for a missing value.

    `01` is a name, other than `1`.
    """
    if value is None:
        return ""
    text = (value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip()
    if not is_number(text) or (text[0] == "0" and text[1:].isdecimal()):
        return text
    with suppress(ValueError):
        return str(int(text))  # above 2^53 as well, which a float rounds
    number = float(text)
    return "" if math.isnan(number) else str(int(number)) if number.is_integer() else text


def sorted_classes(classes: Collection[str]) -> tuple[str, ...]:
    """Class names in a fixed order: numbers by value, then text."""
    numbers = {name: float(name) for name in classes if is_number(name)}
    return (*sorted(numbers, key=lambda n: (numbers[n], n)), *sorted({*classes} - {*numbers}))


def class_names(targets: Iterable[Array]) -> tuple[str, ...]:
    """The classes that occur in blocks of targets, in a fixed order."""
    names = {class_name(value) for block in targets for value in np.unique(block)}
    return sorted_classes(names - {""})


@dataclass(frozen=True)
class ClassRecording(RecordingView):
    """A recording whose targets are class names, read as indices; -100 where there is none.

    Attributes:
        whole: the recording.
        classes: the names, in the order of their indices.
        owner: what has these classes, for messages.
    """

    whole: Recording
    classes: tuple[str, ...] = field(repr=False)
    owner: str = "the classes are"

    def read(self, start: int, stop: int) -> StepArrays:
        steps = self.whole.read(start, stop)
        if steps.targets is None:
            return steps
        return steps._replace(targets=self._indices(steps.targets, start))

    def _indices(self, targets: Array, start: int) -> Array:
        if targets.ndim > 1:
            raise DataError(
                f"recording '{self.name}': {targets.shape[1]} columns of targets; name one"
            )
        if targets.dtype.kind == "O":  # Python values of several types have no order
            targets = np.array([class_name(value) for value in targets], np.str_)
        values, inverse = np.unique(targets, return_inverse=True)
        index = {name: i for i, name in enumerate(self.classes)} | {"": IGNORE_INDEX}
        codes = np.array([index.get(name, -1) for name in map(class_name, values)], np.int64)
        if (codes == -1).any():
            wrong = values[codes == -1][0]
            raise DataError(
                f"recording '{self.name}': unknown class '{class_name(wrong)}' at step"
                f" {start + int(np.argmax(targets == wrong))}; {self.owner} {listed(self.classes)}"
            )
        return codes[inverse]


def with_classes(recording: Recording, classes: Iterable[Any] | None) -> Recording:
    """The recording with its targets as indices of these classes; itself where that is `None`.

    Raises:
        DataError: a class that is named twice, or a recording without targets.
    """
    if classes is None:
        return recording
    names = tuple(map(class_name, classes))
    distinct = 0 < len({*names} - {""}) == len(names) and not isinstance(classes, str)
    if not distinct or getattr(recording, "targets", recording) is None:
        raise DataError(
            f"recording '{recording.name}': classes={classes!r}, expected distinct names in the"
            " order of their indices, and targets that they name: classes=['N', 'V']"
        )
    return ClassRecording(recording, names)


@dataclass(frozen=True)
class ForecastRecording(RecordingView):
    """The inputs and series of a recording with the targets of later steps.

    Of several, the targets are `(T, F * C)`: all columns of the first, then those of the next.
    """

    whole: Recording
    ahead: tuple[int, ...]

    def read(self, start: int, stop: int) -> StepArrays:
        stop = min(stop, len(self))
        steps = self.whole.read(start, min(stop + max(self.ahead), len(self)))
        if steps.targets is None:
            return steps
        targets = later_rows(steps.targets, self.ahead, stop - start)
        series = {name: rows[: stop - start] for name, rows in steps.series.items()}
        return StepArrays(steps.inputs[: stop - start], targets, series)


def later_rows(rows: Array, shifts: Sequence[int], count: int) -> Array:
    """The first `count` rows, each taken so many rows later; of several shifts side by side.

    Rows before the first and after the last are missing.
    """
    later = np.arange(count)[:, None] + np.array(shifts)
    known = (later >= 0) & (later < len(rows))
    result = missing_like((*later.shape, *rows.shape[1:]), rows)
    result[known] = rows[later[known]]
    width = math.prod(result.shape[1:])
    return result[:, 0] if len(shifts) == 1 else result.reshape(count, width)


def horizons(ahead: Any) -> tuple[Any, ...]:
    """How many steps later the targets are, as one or several numbers; none of 0."""
    if np.ndim(ahead):
        return tuple(ahead)
    return (ahead,) if ahead else ()


def shift_targets(recording: Recording, steps: Any) -> Recording:
    """The recording with each step's target taken `steps` steps later; itself if that is 0.

    Args:
        recording: any; its targets in any form.
        steps: a whole number, at least 0; or several different ones, such as `range(1, 25)`: then
            the targets of all of them lie side by side, `(T, F * C)`, each at least 1.

    Raises:
        DataError: another number, one that is named twice, or one for which no step has a target.

    Cost: each read of the recording reads as many steps more as the furthest target is ahead.

    Example:
        >>> from throughtime.stream.sources import as_recording
        >>> from throughtime.stream.targets import shift_targets
        >>> hours = np.arange(4.0)
        >>> recording = as_recording((hours, hours))
        >>> shift_targets(recording, 1).read(0, 4).targets
        array([ 1.,  2.,  3., nan])
    """
    what, least = f"recording '{recording.name}': ahead", np.ndim(steps)
    counts = [check_whole(what, n, least, DataError) for n in np.atleast_1d(steps).tolist()]
    if not counts or len({*counts}) < len(counts):
        raise DataError(
            f"{what}={steps!r}: expected how many steps later the target is, or several different"
            f" ones: ahead={sorted({*counts}) or 1}"
        )
    count = max(counts)
    if count and getattr(innermost(recording)[0], "targets", recording) is None:
        raise DataError(f"{what}={steps!r} of a recording without targets; name them: targets=...")
    if 0 < len(recording) <= count:
        raise DataError(
            f"{what}={count} of {len(recording)} steps: none has a target; leave it out"
        )
    return ForecastRecording(recording, tuple(counts)) if count else recording
