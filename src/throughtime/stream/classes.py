"""Targets by class name, read as indices: the class at index `i` is `classes[i]`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array
from throughtime.stream.labels import IGNORE_INDEX
from throughtime.stream.recording import Recording, RecordingView, StepArrays


def class_name(value: object) -> str:
    """The name of a class: integers without a decimal point, empty for a missing value."""
    if value is None:
        return ""
    text = (value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip()
    if re.fullmatch(r"-?[0-9]+", text):
        return str(int(text))
    try:
        number = float(text)
    except ValueError:
        return text
    if np.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() else text


def sorted_classes(classes: Iterable[str]) -> tuple[str, ...]:
    """Class names in a fixed order: numbers by value, then text."""

    def key(name: str) -> tuple[int, float, str]:
        try:
            return 0, float(name), name
        except ValueError:
            return 1, 0.0, name

    return tuple(sorted(classes, key=key))


def class_names(targets: Iterable[Array]) -> tuple[str, ...]:
    """The classes that occur in blocks of targets, in a fixed order."""
    names = {class_name(value) for block in targets for value in np.unique(block)}
    return sorted_classes(names - {""})


@dataclass(frozen=True)
class ClassRecording(RecordingView[Recording]):
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
                f"recording '{self.name}': classification needs one column of targets, got"
                f" {targets.shape[1]}; choose it with --targets"
            )
        if targets.dtype.kind == "O":  # Python values of several types have no order
            targets = np.array([class_name(value) for value in targets], np.str_)
        values, inverse = np.unique(targets, return_inverse=True)
        index = {name: i for i, name in enumerate(self.classes)} | {"": IGNORE_INDEX}
        if {*self.classes} == {"False", "True"}:  # tables have them as numbers
            index |= {"0": index["False"], "1": index["True"]}
        codes = np.array([index.get(name, -1) for name in map(class_name, values)], np.int64)
        if (codes == -1).any():
            wrong = values[codes == -1][0]
            step = start + int(np.argmax(targets == wrong))
            raise DataError(
                f"recording '{self.name}': unknown class '{class_name(wrong)}' at step {step};"
                f" {self.owner} {listed(self.classes)}"
            )
        return codes[inverse]


def with_classes(recording: Recording, classes: Iterable[Any] | None) -> Recording:
    """The recording with its targets as indices of these classes; itself where that is `None`.

    Raises:
        DataError: a class that is named twice, or a recording without targets.
    """
    if classes is None:
        return recording
    if getattr(recording, "targets", recording) is None:
        raise DataError(
            f"recording '{recording.name}' has classes={classes!r} and no targets that they could"
            " name; write targets='label'"
        )
    names = tuple(map(class_name, classes))
    if isinstance(classes, str) or not names or len(set(names)) < len(names) or "" in names:
        raise DataError(
            f"recording '{recording.name}': classes={classes!r}, expected distinct names in the"
            " order of their indices: classes=['N', 'V']"
        )
    return ClassRecording(recording, names)
