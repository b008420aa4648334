"""Recordings: one source sequence each, read only where and when it is needed.

Shapes: `T` steps of the recording, `D` input features, `C` target columns.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from throughtime.errors import DataError
from throughtime.stream import formats
from throughtime.stream.formats.table import Array


class Steps(NamedTuple):
    """Some consecutive steps of a recording: `inputs` `(n, D)` or `(n,)`, `targets` `(n,)`, `(n, C)` or `None`."""

    inputs: Array
    targets: Array | None


@runtime_checkable
class Recording(Protocol):
    """What `tt.Stream` plays: anything with a name, a length and a lazy `read`."""

    @property
    def name(self) -> str:
        """How error messages and reports call it."""
        ...

    def __len__(self) -> int:
        """T, its number of steps."""
        ...

    def read(self, start: int, stop: int) -> Steps:
        """The steps from `start` to before `stop`."""
        ...


@dataclass(frozen=True)
class Arrays:
    """A recording held in arrays: in memory, or memory-mapped and then read only where it is played."""

    name: str
    inputs: Array
    targets: Array | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, start: int, stop: int) -> Steps:
        return Steps(self.inputs[start:stop], None if self.targets is None else self.targets[start:stop])


@dataclass(frozen=True)
class Columns:
    """A recording in files: inputs and targets are columns of one table, or of two of equal length."""

    name: str
    inputs: formats.Table
    input_columns: tuple[str, ...]
    targets: formats.Table | None = None
    target_columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, start: int, stop: int) -> Steps:
        inputs = self.inputs.read(start, stop, self.input_columns)
        if self.targets is None:
            return Steps(inputs, None)
        targets = self.targets.read(start, stop, self.target_columns)
        return Steps(inputs, targets[:, 0] if targets.shape[1] == 1 else targets)


@dataclass(frozen=True)
class Part:
    """The steps `start` to before `stop` of another recording, as a recording of its own."""

    whole: Recording
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.whole.name}[{self.start}:{self.stop}]"

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> Steps:
        return self.whole.read(self.start + start, self.start + stop)


def windows(recordings: Sequence[Recording], length: int) -> list[Part]:
    """Every recording cut into windows of `length` steps, the last one shorter.

    A stream of windows starts each of them from the initial state: training as most people do it,
    for comparison with training on the unbroken recordings.

    Example:
        >>> import numpy as np
        >>> from throughtime.stream.recording import as_recording, windows
        >>> [len(w) for w in windows([as_recording({"inputs": np.zeros(250)}, 0)], 100)]
        [100, 100, 50]
    """
    if length < 1:
        raise DataError(f"windows of {length} steps: expected at least 1")
    return [Part(r, start, min(start + length, len(r))) for r in recordings for start in range(0, len(r), length)]


def as_recording(source: Any, index: int) -> Recording:
    """A recording from whatever a user has: a mapping of arrays, a path, or a Recording.

    Args:
        source: a mapping with `inputs` and optionally `targets` and `name`; a path of a file with an
            `inputs` (and `targets`) column or array; or anything with the Recording protocol.
        index: names a recording that has no name of its own.

    Raises:
        DataError: nothing of the kind, or inputs and targets of different lengths.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source, index)
    if isinstance(source, (str, Path)):
        return _from_path(Path(source))
    if isinstance(source, Recording):
        return source
    raise DataError(
        f"recording {index} is a {type(source).__name__}, expected a mapping with 'inputs' and 'targets', a path, "
        "or an object with name, __len__ and read(start, stop)"
    )


def _from_mapping(source: Mapping[str, Any], index: int) -> Recording:
    name = str(source.get("name", index))
    unknown = sorted(set(source) - {"inputs", "targets", "name"})
    if "inputs" not in source or unknown:
        raise DataError(f"recording '{name}' has the keys {sorted(source)}, expected 'inputs' and optionally 'targets' and 'name'")
    inputs = _as_array(source["inputs"], name, "inputs")
    targets = None if source.get("targets") is None else _as_array(source["targets"], name, "targets")
    if targets is not None and len(targets) != len(inputs):
        raise DataError(f"recording '{name}' has {len(inputs)} steps of inputs and {len(targets)} of targets; both need one row per step")
    return Arrays(name, inputs, targets)


def _as_array(value: Any, name: str, role: str) -> Array:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise DataError(f"recording '{name}': {role} are torch.bfloat16, which NumPy does not know; convert them: {role}.float()")
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise DataError(f"recording '{name}': {role} are a {type(value).__name__}, expected a NumPy array or a torch tensor")
    if value.ndim == 0 or value.dtype.kind not in "biuf" or value.dtype == np.longdouble:
        raise DataError(
            f"recording '{name}': {role} have shape {value.shape} and type {value.dtype}, expected numbers with one row per step"
        )
    return value


def _from_path(path: Path) -> Recording:
    table = formats.open_table(path)
    if "inputs" in table.columns:
        inputs, targets = ("inputs",), tuple(c for c in table.columns if c == "targets")
    else:
        inputs, targets = table.columns, ()
    return columns(path.name, table, inputs, table if targets else None, targets)


def columns(
    name: str,
    inputs: formats.Table,
    input_columns: Sequence[str],
    targets: formats.Table | None = None,
    target_columns: Sequence[str] = (),
) -> Columns:
    """A checked recording from tables: the columns exist, the lengths agree, there is at least one step."""
    _check_columns(inputs, input_columns, "inputs")
    if targets is not None:
        _check_columns(targets, target_columns, "targets")
        if len(targets) != len(inputs):
            raise DataError(
                f"recording '{name}': {inputs.path} has {len(inputs)} steps and {targets.path} has {len(targets)}; "
                "targets need one row per step"
            )
    if len(inputs) == 0:
        raise DataError(f"{inputs.path}: the recording is empty, expected at least one step")
    return Columns(name, inputs, tuple(input_columns), targets, tuple(target_columns))


def _check_columns(table: formats.Table, wanted: Sequence[str], role: str) -> None:
    missing = [c for c in wanted if c not in table.columns]
    if not missing and wanted:
        return
    near = difflib.get_close_matches(missing[0], table.columns, n=1) if missing else []
    hint = f"; did you mean '{near[0]}'?" if near else ""
    if len(table.columns) == 1 and ";" in table.columns[0]:
        hint = "; its fields seem to be separated by ';', expected ','"
    raise DataError(f"{table.path}: {role} {list(wanted)} asked for, the file has {list(table.columns)}{hint}")
