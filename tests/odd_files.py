"""Odd but legal data files: how each is written, and what the format's own library reads in it.

A case writes its file and returns a `Reference`. What throughtime makes of the file has no part in
it. A common file must be read; an odd one may be refused by a message that says what to do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MATRIX = ""  # the only column of a file without names: all of its inputs
T = 12
U = np.arange(T) * 1.5 - 3
V = np.sin(np.arange(T) * 0.7)
COUNTS = np.arange(T, dtype=np.int32) - 4
BOTH = np.column_stack([U, V])


@dataclass(frozen=True)
class Reference:
    """The values that a library reads.

    Args:
        numbers: by the name of the column; `(T,)` or `(T, D)`, a missing value is NaN.
        texts: by the name of the column; a missing text is None.
        times: the time stamps of the steps, `(T,)`.
        refused: columns that are no inputs: time stamps, durations, lists.
    """

    numbers: Mapping[str, Any]
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    times: Any = None
    refused: Sequence[str] = ()


class OddFile(NamedTuple):
    """A case: the name of its file, the function that writes it, and the options to read it by."""

    file: str
    write: Callable[[Path], Reference]
    common: bool
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return self.file


Writer = Callable[[Path], Reference]


def cases(common: Mapping[str, Writer], odd: Mapping[str, Writer]) -> list[OddFile]:
    """Files that users expect to be read, and files that may be refused in words, by name."""
    return [
        OddFile(name, write, known)
        for files, known in ((common, True), (odd, False))
        for name, write in files.items()
    ]


def nanoseconds(times: Any) -> list[int | None]:
    """Time stamps of any unit as whole nanoseconds since 1970, exactly; None where one lacks."""
    array = np.asarray(times)
    unit, count = np.datetime_data(array.dtype)
    factor = int(np.timedelta64(1, unit) / np.timedelta64(1, "ns"))
    whole = array.astype(np.int64).tolist()
    return [
        None if lacks else value * count * factor
        for value, lacks in zip(whole, np.isnat(array).tolist(), strict=True)
    ]


def is_same(value: Any, expected: Any, epsilon: float) -> bool:
    """Whether two values agree: integers exactly, floats to rounding, NaN with NaN."""
    if value != value or expected != expected:
        return bool(value != value and expected != expected)
    if isinstance(expected, int) or value == expected:
        return bool(value == expected)
    return abs(value - expected) <= 4 * epsilon * abs(expected)


def rows(column: Any) -> list[list[Any]]:
    """The steps of a column `(T,)`, `(T, D)` or of more axes, each a list of its numbers."""
    if isinstance(column, list):  # an array of [1, 2**63] would be floating, the list is exact
        values: list[Any] = column
        return [value if isinstance(value, list) else [value] for value in values]
    array = np.asarray(column)
    return array.reshape(len(array), -1).tolist()


def differences(values: Any, expected: Any) -> list[str]:
    """Where the values of a column differ from those of the reference; at most three."""
    steps, wanted = rows(np.asarray(values)), rows(expected)
    if [*map(len, steps)] != [*map(len, wanted)]:
        return [f"shape {np.shape(values)}, expected {np.shape(expected)}"]
    kind: Any = getattr(expected, "dtype", np.dtype(float))
    epsilon = float(np.finfo(kind if kind.kind == "f" else float).eps)
    wrong = [
        f"step {step}: {got}, expected {want}"
        for step, pair in enumerate(zip(steps, wanted, strict=True))
        for got, want in zip(*pair, strict=True)
        if not is_same(got, want, epsilon)
    ]
    return wrong[:3]


def matrix(values: Any, **others: Any) -> Reference:
    """All inputs of a file whose columns have no names."""
    return Reference({MATRIX: np.asarray(values)}, **others)
