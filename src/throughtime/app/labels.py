"""Targets of a recording: one per row, per N rows, per interval, or one for the whole recording.

Targets are given in rows of the file and become steps: `frame_size` rows form one step. A frame is
complete or dropped. Its target is that of its last row, when the net has read all of it; so an
interval of rows covers the steps whose last row it covers.

Shapes: `T` steps, `N` rows per frame, `D` columns.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import Table
from throughtime.stream.formats.csv import is_number
from throughtime.stream.formats.table import Array, Rows
from throughtime.stream.labels import (
    At,
    IntervalLabels,
    PeriodicLabels,
    interval_labels,
    periodic_labels,
)
from throughtime.stream.manifest import ManifestEntry
from throughtime.stream.recording import (
    INTERVAL_COLUMNS,
    ArrayRows,
    ColumnRows,
    columns,
    interval_columns,
)

LABEL = ("label",)


class Rate(NamedTuple):
    """Rows per second, and the file or model that says so."""

    source: str
    value: float


class Targets(NamedTuple):
    """The targets of a recording, their column names and rates, and the intervals that were lost.

    An interval shorter than a frame is lost.
    """

    rows: Rows
    columns: tuple[str, ...]
    rates: tuple[Rate, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class FrameRows:
    """PeriodicLabels `frame_size` rows as one step of `N * D` numbers, row after row."""

    rows: Rows
    frame_size: int

    @property
    def where(self) -> str:
        return self.rows.where

    def __len__(self) -> int:
        return len(self.rows) // self.frame_size

    def read(self, start: int, stop: int) -> Array:
        rows = self._read_rows(start, stop)
        return rows.reshape(len(rows) // self.frame_size, -1)

    def _read_rows(self, start: int, stop: int) -> Array:
        return self.rows.read(start * self.frame_size, min(stop, len(self)) * self.frame_size)


class LastRows(FrameRows):
    """The last of every `frame_size` rows."""

    def read(self, start: int, stop: int) -> Array:
        return self._read_rows(start, stop)[self.frame_size - 1 :: self.frame_size]


@dataclass(frozen=True)
class LabelRows:
    """Labels in a type that has a value for "none": text for classes, floats for a regression."""

    rows: Rows
    classify: bool

    @property
    def where(self) -> str:
        return self.rows.where

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Array:
        return _with_missing_value(self.rows.read(start, stop), classify=self.classify)


def _with_missing_value(labels: Array, *, classify: bool) -> Array:
    """Whole numbers as text for classes and as floats otherwise; other types unchanged."""
    if labels.dtype.kind not in "biu":
        return labels
    return labels.astype(np.str_ if classify else np.float64)


@dataclass(frozen=True)
class BackgroundRows:
    """Labels of intervals, and one class for all steps outside them."""

    intervals: IntervalLabels
    background_class: str

    @property
    def where(self) -> str:
        return self.intervals.where

    def __len__(self) -> int:
        return len(self.intervals)

    def read(self, start: int, stop: int) -> Array:
        ones = np.ones(len(self.intervals.starts))
        covered = replace(self.intervals, labels=ones, at="all").read(start, stop)
        labels = self.intervals.read(start, stop)
        return np.where(np.isnan(covered), self.background_class, labels)


def label_of_recording(
    entry: ManifestEntry, steps: int, *, classify: bool, at: At | None
) -> Targets:
    """The label that the manifest gives to the whole recording.

    Raises:
        DataError: there is none, or it is no number and the task is regression.
    """
    label = entry.label or ""
    if not label or (not classify and not (is_number(label) and math.isfinite(float(label)))):
        expected = "a class" if classify else "a finite number (or is it --task classify?)"
        raise DataError(f"recording '{entry.name}' has the label {label!r}, expected {expected}")
    values = ArrayRows("the manifest", np.array([label if classify else float(label)]))
    return Targets(periodic_labels(entry.name, values, steps, steps, at or "last"), LABEL)


def labels_of_intervals(
    name: str,
    table: Table,
    rows: int,
    *,
    frame_size: int,
    classify: bool,
    at: At | None,
    background_class: str | None,
) -> Targets:
    """Labels of intervals in rows of the inputs.

    Raises:
        DataError: intervals that are unsorted, overlap or leave the recording, or labels of the
            wrong type.
    """
    starts, stops, labels = interval_columns(table)
    labels = _with_missing_value(labels, classify=classify)
    if not classify and labels.dtype.kind == "U" and len(labels):
        wrong = next((text for text in labels.tolist() if not is_number(text)), labels[0])
        raise DataError(
            f"{table.path}: the label {wrong!r} is no number, and --task regress needs one"
        )
    if labels.dtype.kind == "U":
        labels = np.char.strip(labels)
    spans = interval_labels(name, str(table.path), starts, stops, labels, rows, at or "all")
    lost = 0
    if frame_size > 1:
        first, end = spans.starts // frame_size, spans.stops // frame_size
        keep = first < end
        lost = int((~keep).sum())
        spans = replace(
            spans,
            starts=first[keep],
            stops=end[keep],
            labels=spans.labels[keep],
            steps=spans.steps // frame_size,
        )
    labelled = spans if background_class is None else BackgroundRows(spans, background_class)
    return Targets(labelled, LABEL, lost=lost)


def targets_every(
    name: str,
    table: Table,
    chosen: tuple[str, ...],
    rows: int,
    count: int,
    *,
    frame_size: int,
    classify: bool,
    at: At | None,
) -> Targets:
    """A row of targets for every `count` of the `rows` of the inputs.

    Raises:
        DataError: the table has more or fewer rows.
    """
    names = columns(name, table, table.columns, table, chosen or table.columns).target_columns
    labels = LabelRows(ColumnRows(table, names, flat=True), classify)
    checked = periodic_labels(name, labels, count, rows, at or "last")
    rates = () if table.rate is None else (Rate(str(table.path), table.rate * count),)
    per_step = PeriodicLabels(labels, count // frame_size, rows // frame_size, checked.at)
    return Targets(per_step, names, rates)


def targets_of_rows(table: Table, chosen: tuple[str, ...], frame_size: int) -> Targets:
    """A row of targets for each row of the inputs."""
    rows = ColumnRows(table, chosen, flat=True)
    rates = () if table.rate is None else (Rate(str(table.path), table.rate),)
    return Targets(rows if frame_size == 1 else LastRows(rows, frame_size), chosen, rates)


def holds_intervals(table: Table, chosen: tuple[str, ...]) -> bool:
    """Whether a targets file holds intervals: these columns, none chosen as a row target."""
    return set(table.columns) == set(INTERVAL_COLUMNS) and chosen in {(), LABEL}
