"""DATA of the command line: recordings in splits, their inputs numbers and their classes indices.

Shapes: `T` steps, `D` input features, `C` target columns.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from throughtime.app.framed import Framed
from throughtime.app.labels import Kind
from throughtime.app.manifest import Files
from throughtime.errors import DataError
from throughtime.stream.formats.csv import is_number
from throughtime.stream.formats.table import Array
from throughtime.stream.labels import IGNORE_INDEX, PeriodicLabels
from throughtime.stream.recording import Part, Recording, Steps, TableRecording
from throughtime.stream.rows import ColumnRows, Rows


def of_splits(found: Sequence[Files], wanted: Sequence[str]) -> list[Files]:
    """The recordings of some splits, and those that no split is named for.

    All of them if there is none such.
    """
    chosen = [files for files in found if files.split in {*wanted, ""}]
    return chosen or list(found)


@dataclass(frozen=True)
class Numeric:
    """A recording whose inputs, and targets if the task is regression, must be numbers."""

    source: TableRecording
    check_targets: bool

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> Steps:
        steps = self.source.read(start, stop)
        named = (
            ("inputs", steps.inputs),
            ("targets", steps.targets if self.check_targets else None),
        )
        for role, values in named:
            if values is not None and values.dtype.kind not in "biuf":
                rows = (
                    self.source.targets
                    if role == "targets" and self.source.targets is not None
                    else self.source.inputs
                )
                fields = values.reshape(len(values), -1).tolist()
                step, text = next(
                    ((i, v) for i, row in enumerate(fields) for v in row if not is_number(v)),
                    (0, fields[0][0]),
                )
                raise DataError(
                    f"{rows.where}: the {role} hold text, such as {text!r} at step {start + step},"
                    f" expected numbers; choose columns with --{role} (the file has"
                    f" {', '.join(_columns_of(rows))})"
                )
        return steps


def _columns_of(rows: Rows) -> tuple[str, ...]:
    if isinstance(rows, (Framed, Kind)):
        return _columns_of(rows.rows)
    if isinstance(rows, PeriodicLabels):
        return _columns_of(rows.labels)
    return rows.table.columns if isinstance(rows, ColumnRows) else ()


@dataclass(frozen=True)
class Labelled:
    """A recording whose targets are classes by name: read as their indices, -100 where there is none."""

    source: Recording
    classes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> Steps:
        steps = self.source.read(start, stop)
        if steps.targets is None:
            return steps
        return steps._replace(targets=self._indices(steps.targets, start))

    def _indices(self, targets: Array, start: int) -> Array:
        if targets.ndim > 1:
            raise DataError(
                f"recording '{self.name}': classification needs one column of targets, got"
                f" {targets.shape[1]}; choose it with --targets"
            )
        values, inverse = np.unique(targets, return_inverse=True)
        index = {name: i for i, name in enumerate(self.classes)}
        codes = np.array(
            [
                IGNORE_INDEX if name == "" else index.get(name, -1)
                for name in map(class_name, values)
            ],
            dtype=np.int64,
        )
        if (codes == -1).any():
            wrong = values[codes == -1][0]
            at = start + int(np.argmax(targets == wrong))
            raise DataError(
                f"recording '{self.name}': unknown class '{class_name(wrong)}' at step {at}; the"
                f" training split has {', '.join(self.classes)}"
            )
        return codes[inverse]


def class_name(value: object) -> str:
    """A class as it is called everywhere: whole numbers without a point; empty for a missing one."""
    text = str(value).strip()
    if re.fullmatch(r"-?[0-9]+", text):
        return str(int(text))
    try:
        number = float(text)
    except ValueError:
        return text
    if np.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() else text


def split(
    recordings: Sequence[tuple[str, Recording]], holdout: float
) -> tuple[dict[str, list[Recording]], str]:
    """Recordings by split, and in words where the splits come from.

    Without a split column the last recordings by name are held out as `valid`; of a single
    recording, its end.
    """
    if any(name for name, _ in recordings):
        splits: dict[str, list[Recording]] = {}
        for name, recording in recordings:
            splits.setdefault(name or "train", []).append(recording)
        return splits, "splits as in the manifest"
    everything = [recording for _, recording in recordings]
    if holdout == 0:
        return {
            "train": everything
        }, "nothing held out (--holdout 0): the scores are those of the training data"
    if len(everything) == 1:
        whole, cut = everything[0], round(len(everything[0]) * (1 - holdout))
        if not 0 < cut < len(whole):
            raise DataError(
                f"recording '{whole.name}' has {len(whole)} steps, too few to hold out a share of"
                f" {holdout}; take --holdout 0"
            )
        return {
            "train": [Part(whole, 0, cut)],
            "valid": [Part(whole, cut, len(whole))],
        }, f"the last {holdout:.0%} of the recording held out"
    count = max(1, round(len(everything) * holdout))
    return {
        "train": everything[:-count],
        "valid": everything[-count:],
    }, f"{count} of {len(everything)} recordings held out, the last by name"


def choose(splits: Mapping[str, list[Recording]], name: str) -> list[Recording]:
    """The recordings of one split; `all` is every one.

    Raises:
        DataError: there is no such split.
    """
    chosen = [r for rs in splits.values() for r in rs] if name == "all" else splits.get(name, [])
    if not chosen:
        there = ", ".join(f"{k} ({len(v)})" for k, v in splits.items())
        hint = (
            "; write train into the column 'split' of those to train on" if name == "train" else ""
        )
        raise DataError(f"no recordings in split '{name}'; there are {there}{hint}")
    return chosen
