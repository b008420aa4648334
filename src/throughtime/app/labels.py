"""Labels: the targets of a recording as they come, for each row, for every so many, for intervals,
or for the whole of it.

What is said in rows of the file becomes steps: `frame` rows are one.

Shapes: `T` steps.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from throughtime.app.form import Form
from throughtime.app.framed import FrameEnds
from throughtime.app.manifest import Files
from throughtime.app.rates import Rate
from throughtime.errors import DataError
from throughtime.stream.formats import Table
from throughtime.stream.formats.csv import is_number
from throughtime.stream.formats.table import Array
from throughtime.stream.labels import (
    IntervalLabels,
    PeriodicLabels,
    interval_labels,
    periodic_labels,
)
from throughtime.stream.recording import INTERVAL_COLUMNS, columns, interval_columns
from throughtime.stream.rows import ArrayRows, ColumnRows, Rows

LABEL = ("label",)


class Targets(NamedTuple):
    """The targets of a recording: what they are called, their rates, and how many intervals are shorter than a frame."""

    rows: Rows
    columns: tuple[str, ...]
    rates: tuple[Rate, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class Kind:
    """Labels in the kind in which a step without one can be told: text of classes, floating numbers of a regression."""

    rows: Rows
    classify: bool

    @property
    def where(self) -> str:
        return self.rows.where

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Array:
        return in_kind(self.rows.read(start, stop), classify=self.classify)


def in_kind(labels: Array, *, classify: bool) -> Array:
    """Whole numbers as text where they are classes, as floating numbers else.

    Others as they are.
    """
    return (
        labels
        if labels.dtype.kind not in "biu"
        else labels.astype(np.str_ if classify else np.float64)
    )


@dataclass(frozen=True)
class Filled:
    """Intervals between which there is a class."""

    inner: IntervalLabels
    outside: str

    @property
    def where(self) -> str:
        return self.inner.where

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, start: int, stop: int) -> Array:
        covered = replace(self.inner, labels=np.ones(len(self.inner.starts)), at="all").read(
            start, stop
        )
        return np.where(np.isnan(covered), self.outside, self.inner.read(start, stop))


def whole(files: Files, steps: int, form: Form) -> Targets:
    """The label of a manifest, one for the recording.

    Raises:
        DataError: there is none, or it is no number and a regression needs one.
    """
    label = files.label or ""
    classify = form.task == "classify"
    if not label or (not classify and not (is_number(label) and math.isfinite(float(label)))):
        expected = "a class" if classify else "a finite number (or is it --task classify?)"
        raise DataError(f"recording '{files.name}' has the label {label!r}, expected {expected}")
    held = ArrayRows("the manifest", np.array([label if classify else float(label)]))
    return Targets(periodic_labels(files.name, held, steps, steps, form.label_at or "last"), LABEL)


def of_intervals(files: Files, table: Table, steps: int, form: Form) -> Targets:
    """Labels of intervals in rows of the inputs; `steps` counts these rows.

    Raises:
        DataError: intervals that are unsorted, overlap or leave the recording, or labels of the
            wrong kind; the file is named.
    """
    starts, stops, labels = interval_columns(table)
    labels = in_kind(labels, classify=form.task == "classify")
    if form.task == "regress" and labels.dtype.kind == "U" and len(labels):
        wrong = next((text for text in labels.tolist() if not is_number(text)), labels[0])
        raise DataError(
            f"{table.path}: the label {wrong!r} is no number, and --task regress needs one"
        )
    if labels.dtype.kind == "U":
        labels = np.char.strip(labels)
    spans = interval_labels(
        files.name, str(table.path), starts, stops, labels, steps, form.label_at or "all"
    )
    if form.frame > 1:
        spans, lost = _framed(spans, form.frame)
    else:
        lost = 0
    return Targets(spans if form.outside is None else Filled(spans, form.outside), LABEL, lost=lost)


def _framed(spans: IntervalLabels, frame: int) -> tuple[IntervalLabels, int]:
    """The steps whose last row an interval covers; one that covers none is lost."""
    starts, stops = spans.starts // frame, spans.stops // frame
    kept = starts < stops
    framed = replace(
        spans,
        starts=starts[kept],
        stops=stops[kept],
        labels=spans.labels[kept],
        steps=spans.steps // frame,
    )
    return framed, int((~kept).sum())


def of_every(files: Files, table: Table, steps: int, count: int, form: Form) -> Targets:
    """A row of targets for every `count` rows of the inputs; `steps` counts these rows.

    Raises:
        DataError: there are more or fewer.
    """
    chosen = columns(
        files.name, table, table.columns, table, form.targets or table.columns
    ).target_columns
    labels = Kind(ColumnRows(table, chosen, flat=True), form.task == "classify")
    checked = periodic_labels(files.name, labels, count, steps, form.label_at or "last")
    rows = PeriodicLabels(labels, count // form.frame, steps // form.frame, checked.at)
    return Targets(
        rows, chosen, () if table.rate is None else (Rate(str(table.path), table.rate * count),)
    )


def of_rows(table: Table, chosen: tuple[str, ...], frame: int) -> Targets:
    """A row of targets for each row of the inputs."""
    rows = ColumnRows(table, chosen, flat=True)
    rates = () if table.rate is None else (Rate(str(table.path), table.rate),)
    return Targets(rows if frame == 1 else FrameEnds(rows, frame), chosen, rates)


def are_intervals(table: Table, form: Form) -> bool:
    """Whether a targets file holds intervals: exactly these columns, and none of them is asked for as a target of each row."""
    return set(table.columns) == set(INTERVAL_COLUMNS) and form.targets in {(), LABEL}
