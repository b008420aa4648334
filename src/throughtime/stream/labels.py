"""Targets at a lower rate than the signal: one for every so many steps, or for intervals of them.

Every step of such a span carries its label (`target_at="all"`), or only the last one does
(`target_at="last"`), where the net has read all of the span. The target of a step without a label
is missing: NaN, -100, or empty text. Such a step is masked.

Shapes: `n` steps read, `S` spans, `C` target columns.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource

At: TypeAlias = Literal["all", "last"]
IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss's ignore_index


def missing_like(shape: tuple[int, ...], sample: Array) -> Array:
    """Missing targets, of the kind of `sample`."""
    kind = sample.dtype.kind
    fill = {"U": "", "S": "", "f": np.nan}.get(kind, IGNORE_INDEX)
    return np.full(shape, fill, sample.dtype if kind in "USf" else np.int64)


@dataclass(frozen=True)
class PeriodicLabels:
    """A label for every `every` steps of a recording; the last one may be for fewer."""

    labels: RowSource
    every: int
    steps: int
    at: At

    @property
    def source(self) -> str:
        return self.labels.source

    def __len__(self) -> int:
        return self.steps

    def read(self, start: int, stop: int) -> Array:
        stop = min(stop, self.steps)
        step = np.arange(start, stop)
        owner = step // self.every
        labels = self.labels.read(start // self.every, (stop - 1) // self.every + 1)
        spread = labels[owner - start // self.every]
        if self.at == "all":
            return spread
        result = missing_like(spread.shape, labels)
        last = ((step + 1) % self.every == 0) | (step == self.steps - 1)
        result[last] = spread[last]
        return result


@dataclass(frozen=True)
class IntervalLabels:
    """A label for each interval `[start, stop)` of steps, in order, without overlap.

    Steps between intervals have no label, or that of the background. `lost` is the number of
    intervals that were shorter than a step.
    """

    source: str
    starts: Array
    stops: Array
    labels: Array
    steps: int
    at: At
    background: str | None = None
    lost: int = 0

    def __len__(self) -> int:
        return self.steps

    def read(self, start: int, stop: int) -> Array:
        step = np.arange(start, min(stop, self.steps))
        result = missing_like((len(step), *self.labels.shape[1:]), self.labels)
        inside = np.zeros(len(step), dtype=np.bool_)
        if len(self.starts):
            owner = np.searchsorted(self.starts, step, side="right") - 1
            inside = (owner >= 0) & (step < self.stops[owner])
            labelled = inside & (step == self.stops[owner] - 1) if self.at == "last" else inside
            result[labelled] = self.labels[owner[labelled]]
        return result if self.background is None else np.where(inside, result, self.background)


def periodic_labels(name: str, labels: RowSource, count: Any, steps: int, at: At) -> PeriodicLabels:
    """Checked labels for every `count` steps.

    Raises:
        DataError: the number of labels does not fit that of the steps.
    """
    check_at(name, at)
    count = count.item() if isinstance(count, np.integer) else count
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(
            f"recording '{name}': target_every={count!r}, expected how many steps a label is for,"
            " at least 1"
        )
    expected = -(-steps // count)
    if len(labels) != expected:
        raise DataError(
            f"recording '{name}': {labels.source} has {len(labels)} labels, one for every {count}"
            f" of {steps} steps, expected {expected}"
        )
    return PeriodicLabels(labels, count, steps, at)


def interval_labels(
    name: str, source: str, starts: Any, stops: Any, labels: Any, steps: int, at: At
) -> IntervalLabels:
    """Checked intervals, in steps.

    Raises:
        DataError: they are out of order, overlap, leave the recording, or are no whole numbers; the
            message names the first.
    """
    check_at(name, at)
    begin, end, label = (np.asarray(values) for values in (starts, stops, labels))
    if not (begin.ndim == end.ndim == 1) or not len(begin) == len(end) == len(label):
        raise DataError(
            f"recording '{name}': intervals in {source} have {len(begin)} starts, {len(end)} stops,"
            f" {len(label)} labels; expected one each"
        )
    for role, values in (("starts", begin), ("stops", end)):
        if len(values) and (
            values.dtype.kind not in "iuf"
            or not (np.isfinite(values) & (values == np.floor(values))).all()
        ):
            raise DataError(
                f"recording '{name}': interval {role} in {source} are {values.dtype}, expected"
                " whole steps, such as 1200"
            )
    begin, end = begin.astype(np.int64), end.astype(np.int64)
    _check_order(name, source, begin, end, steps)
    return IntervalLabels(source, begin, end, label, steps, at)


def _check_order(name: str, source: str, starts: Array, stops: Array, steps: int) -> None:
    late = starts[1:] < stops[:-1]  # before the interval before it stops
    checks = (
        ((starts < 0) | (stops > steps), f"leaves the recording of {steps} steps"),
        (starts >= stops, "stops before it has a step; a stop is after its start"),
        (np.append(False, starts[1:] < starts[:-1]), "starts before {}; sort them"),
        (
            np.append(False, late),
            "overlaps {}, and a step has one label. Cut or join them",
        ),
    )
    for wrong, fault in checks:
        if wrong.any():
            i = int(wrong.argmax())
            previous = f"the one before it, {starts[i - 1]} to {stops[i - 1]}"
            raise DataError(
                f"recording '{name}': interval {i} in {source}, {starts[i]} to {stops[i]},"
                f" {fault.format(previous)}"
            )


def check_at(name: str, at: Any) -> None:
    """Refuse anything but the two words."""
    if at not in ("all", "last"):
        raise DataError(
            f"recording '{name}': target_at={at!r}, expected 'all' (every step of a span carries"
            " its label) or 'last'"
        )
