"""Recordings: one source sequence each, read lazily.

Shapes: `T` steps of the recording, `D` input features, `C` target columns, `S` static features.
"""

import difflib
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from throughtime.errors import DataError, listed
from throughtime.stream import formats
from throughtime.stream.formats.table import Array, RowSource
from throughtime.stream.labels import IntervalLabels, interval_labels, periodic_labels

_SAMPLE = 16  # steps


class StepArrays(NamedTuple):
    """Consecutive steps: `inputs` `(n, D)` or `(n,)`, `targets` `(n,)`, `(n, C)` or `None`.

    `static` `(S,)` belongs to all of them.
    """

    inputs: Array
    targets: Array | None
    static: Array | None = None


class StepChecksum:
    """CRC-32 of inputs, targets and static features, over blocks of steps in order."""

    def __init__(self) -> None:
        self._sums = [0, 0, 0]

    def add(self, steps: StepArrays) -> None:
        """Add a block; its length must be the same wherever checksums are compared."""
        for i, values in enumerate(steps):
            if values is not None:
                array = np.asarray(values)
                content = (
                    repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
                )
                self._sums[i] = zlib.crc32(content, self._sums[i])

    def __str__(self) -> str:
        return "".join(f"{value:08x}" for value in self._sums)


@runtime_checkable
class Recording(Protocol):
    """The protocol of what `tt.Stream` plays: a name, a length and a lazy `read`."""

    @property
    def name(self) -> str:
        """The name in error messages and reports."""
        ...

    def __len__(self) -> int:
        """T, its number of steps."""
        ...

    def read(self, start: int, stop: int) -> StepArrays:
        """The steps from `start` to before `stop`."""
        ...


Recordings: TypeAlias = Sequence[Any] | Mapping[str, Any] | Recording | str | Path


def sample_checksum(recording: Recording) -> str:
    """A checksum of the first, middle and last steps.

    An error while reading is the result: other ranks wait for one. So is "random" if two reads
    differ, as where `read` adds noise.
    """
    size, half = len(recording), len(recording) // 2
    spans = [(0, _SAMPLE), (half, half + _SAMPLE), (size - _SAMPLE, size)]
    sums: list[str] = []
    try:
        for _ in range(2):
            checksum = StepChecksum()
            for start, stop in spans:
                checksum.add(recording.read(max(0, start), min(stop, size)))
            sums.append(str(checksum))
    except Exception as error:  # noqa: BLE001 (a recording may be anybody's)
        return f"missing ({type(error).__name__}: {error})"
    return sums[0] if sums[0] == sums[1] else "random"


@dataclass(frozen=True)
class ArrayRows:
    """The rows of an array; if it is memory-mapped, only the rows read are loaded."""

    source: str
    array: Array

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


@dataclass(frozen=True)
class ColumnRows:
    """Columns of a table, `(n, D)`; with `flat`, a single column is read as `(n,)`."""

    table: formats.Table
    columns: tuple[str, ...]
    flat: bool = False

    @property
    def source(self) -> str:
        return str(self.table.path)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, start: int, stop: int) -> Array:
        rows = self.table.read(start, stop, self.columns)
        return rows[:, 0] if self.flat and rows.shape[1] == 1 else rows


@dataclass(frozen=True)
class ConcatRows:
    """The columns of several row sources, concatenated."""

    parts: tuple[RowSource, ...]

    @property
    def source(self) -> str:
        return ", ".join(part.source for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def read(self, start: int, stop: int) -> Array:
        return np.concatenate(
            [(rows := part.read(start, stop)).reshape(len(rows), -1) for part in self.parts], axis=1
        )


def check_lengths(name: str, parts: Sequence[tuple[str, int]]) -> None:
    """Refuse inputs of different lengths; each part is a name and a number of rows."""
    for (first, length), (second, other) in pairwise(parts):
        if length != other:
            raise DataError(
                f"recording '{name}': {first} has {length} rows and {second} has {other}; all"
                " inputs of a recording need one row per step"
            )


def concat_rows(name: str, parts: Sequence[RowSource]) -> RowSource:
    """One source of rows, or several of equal length side by side.

    Raises:
        DataError: their lengths differ.
    """
    check_lengths(name, [(part.source, len(part)) for part in parts])
    return parts[0] if len(parts) == 1 else ConcatRows(tuple(parts))


@dataclass(frozen=True)
class TableRecording:
    """A recording of rows: of arrays, of columns of files, or of several of them."""

    name: str
    inputs: RowSource
    targets: RowSource | None = None
    static: Array | None = None
    input_columns: tuple[str, ...] = ()
    target_columns: tuple[str, ...] = ()
    times: RowSource | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, start: int, stop: int) -> StepArrays:
        return StepArrays(
            self.inputs.read(start, stop),
            None if self.targets is None else self.targets.read(start, stop),
            self.static,
        )


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

    def read(self, start: int, stop: int) -> StepArrays:
        return self.whole.read(self.start + start, self.start + stop)


def value_columns(table: formats.Table, exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns of a table that are not time stamps, and not excluded."""
    others = {*table.times, *exclude}
    return tuple(name for name in table.columns if name not in others)


def time_rows(table: formats.Table, exclude: Sequence[str] = ()) -> ColumnRows | None:
    """The first column of time stamps of a table, `datetime64[ns]` `(n,)`; `None` without one."""
    names = [name for name in table.times if name not in exclude]
    return ColumnRows(table, (names[0],), flat=True) if names else None


def step_times(recording: object, start: int, stop: int) -> Array | None:
    """The time stamps of the steps `start` to before `stop`, `datetime64[ns]` `(n,)`.

    `time_texts` of `throughtime.stream.formats.times` writes them in ISO 8601.

    Args:
        recording: plays the steps; wrappers are looked through.
        start: the first step.
        stop: the step after the last one.

    Returns:
        `None` if the recording has no time stamps. That of a frame is that of its last row.
    """
    while not isinstance(recording, TableRecording):
        if isinstance(recording, Part):
            start, stop = start + recording.start, stop + recording.start
        recording = getattr(recording, "whole", None) or getattr(recording, "source", None)
        if recording is None or isinstance(recording, str):
            return None
    return None if recording.times is None else recording.times.read(start, stop)


def location(recording: object, step: int, column: int) -> str:
    """An input in words: `step 1204, column 0 (row 1204, column 'ecg')`; its name if it has one.

    Args:
        recording: plays the step; wrappers are looked through.
        step: of the recording.
        column: of its inputs. A frame of N rows has the columns of each of them in turn.
    """
    text = f"step {step}, column {column}"
    while not isinstance(recording, TableRecording):
        if isinstance(recording, Part):
            step += recording.start
        inner = getattr(recording, "whole", None) or getattr(recording, "source", None)
        if inner is None or isinstance(inner, str):
            return text
        recording = inner
    names, rows = recording.input_columns, getattr(recording.inputs, "frame_size", 1)
    if not names or column >= rows * len(names):
        return text
    row = step * rows + column // len(names)
    return f"{text} (row {row}, column '{names[column % len(names)]}')"


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
    return [
        Part(r, start, min(start + length, len(r)))
        for r in recordings
        for start in range(0, len(r), length)
    ]


def as_recording(source: Any, index: int) -> Recording:
    """A recording from a mapping of arrays or files, a path, or a Recording.

    Args:
        source: a path of a file with an `inputs` (and `targets`) column or array; anything with the
            Recording protocol; or a mapping with

            `inputs`: `(T, D)` or `(T,)`: an array, a tensor, the path of a file, or a list of them,
            side by side;
            `targets`: `(T,)` or `(T, C)`, one for each step; a single number, for the whole
            recording; with `target_every`, one for every so many steps;
            `intervals`: instead of targets, `(starts, stops, labels)` in steps, or a file with
            these columns, in order and without overlap;
            `target_at`: "all" steps of such a span carry its label, or only the "last"; default:
            all of an interval, the last of others;
            `static`: `(S,)` numbers of the recording, appended to the inputs of every step;
            `name`: the name in messages and reports.
        index: names a recording that has no name of its own.

    Raises:
        DataError: another kind of source, or inputs and targets of different lengths.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source, str(source.get("name", index)))
    if isinstance(source, (str, Path)):
        return _from_path(Path(source))
    if isinstance(source, Recording):
        return source
    raise DataError(
        f"recording {index} is a {type(source).__name__}, expected a mapping with 'inputs' and"
        " 'targets', a path, or an object with name, __len__ and read(start, stop)"
    )


_KEYS = ("inputs", "targets", "target_every", "intervals", "target_at", "static", "name")


def _from_mapping(source: Mapping[str, Any], name: str) -> Recording:
    values = {key: value for key, value in source.items() if value is not None}
    unknown = sorted(set(source) - set(_KEYS))
    if "inputs" not in values or unknown:
        near = difflib.get_close_matches(unknown[0], _KEYS, n=1) if unknown else []
        hint = f"; did you mean '{near[0]}' for '{unknown[0]}'?" if near else ""
        raise DataError(
            f"recording '{name}' has the keys {listed(sorted(map(str, source)), quoted=True)},"
            f" expected 'inputs' and optionally {', '.join(_KEYS[1:])}{hint}"
        )
    if "targets" in values and "intervals" in values:
        raise DataError(
            f"recording '{name}' has targets and intervals, expected one of them: a step has one"
            " target"
        )
    parts = _several(values["inputs"])
    inputs = concat_rows(name, [_rows(part, name, "inputs") for part in parts])
    _check_separate_files(name, parts, values.get("targets"))
    return TableRecording(
        name,
        inputs,
        _targets(values, name, len(inputs)),
        _static(values.get("static"), name),
        inputs.columns if isinstance(inputs, ColumnRows) else (),
    )


def _check_separate_files(name: str, inputs: Sequence[Any], targets: Any) -> None:
    """Refuse one file as inputs and targets: each step would have its target as an input."""
    if not isinstance(targets, (str, Path)):
        return
    for part in inputs:
        if isinstance(part, (str, Path)) and Path(part).resolve() == Path(targets).resolve():
            table = formats.open_table(Path(part))
            raise DataError(
                f"recording '{name}': inputs and targets are all columns of {part}, so each step"
                f" has its target as an input. Its columns are {listed(table.columns)}; choose:"
                " table = throughtime.stream.formats.open_table(path), then {'inputs': table.read("
                "0, len(table), ['a', 'b']), 'targets': table.read(0, len(table), ['y'])[:, 0]}"
            )


def _several(inputs: Any) -> Sequence[Any]:
    """The parts to put side by side: those of a list of files and arrays, or the only one."""
    listed = isinstance(inputs, (list, tuple)) and all(
        isinstance(i, (str, Path, np.ndarray, torch.Tensor)) for i in inputs
    )
    return inputs if listed and inputs else [inputs]


def _targets(values: Mapping[str, Any], name: str, steps: int) -> RowSource | None:
    if "intervals" in values:
        source, starts, stops, labels = _interval_columns(values["intervals"], name)
        return interval_labels(
            name, source, starts, stops, labels, steps, values.get("target_at", "all")
        )
    if "targets" not in values:
        for key in ("target_every", "target_at"):
            if key in values:
                raise DataError(
                    f"recording '{name}' has '{key}' and no targets that it could belong to"
                )
        return None
    value, every = values["targets"], values.get("target_every")
    if np.ndim(value) == 0 and not isinstance(value, (str, Path)):
        targets: RowSource = ArrayRows("targets", np.asarray(value).reshape(1))
        every = steps if every is None else every
    else:
        targets = _rows(value, name, "targets")
    if every is not None:
        return periodic_labels(name, targets, every, steps, values.get("target_at", "last"))
    if "target_at" in values:
        raise DataError(
            f"recording '{name}' has 'target_at' and a target for every step; it belongs to"
            " 'target_every', 'intervals' or a single target"
        )
    if len(targets) != steps:
        raise DataError(
            f"recording '{name}' has {steps} steps of inputs and {len(targets)} of targets; both"
            " need one row per step, or say how many steps each target is for: 'target_every'"
        )
    return targets


def _interval_columns(source: Any, name: str) -> tuple[str, Any, Any, Any]:
    """The name of the source, starts, stops and labels."""
    if isinstance(source, (str, Path)):
        return str(source), *interval_columns(formats.open_table(Path(source)))
    if not isinstance(source, (list, tuple)) or len(source) != 3:
        raise DataError(
            f"recording '{name}': intervals are a {type(source).__name__}, expected (starts, stops,"
            " labels), or a path"
        )
    starts, stops, labels = source
    return "the mapping", starts, stops, labels


INTERVAL_COLUMNS = ("start", "stop", "label")


def interval_columns(table: formats.Table) -> tuple[Array, Array, Array]:
    """Starts, stops and labels from a table with these columns."""
    _check_columns(table, INTERVAL_COLUMNS, "intervals")
    starts, stops, labels = (
        table.read(0, len(table), (column,))[:, 0] for column in INTERVAL_COLUMNS
    )
    return starts, stops, labels


def _static(value: Any, name: str) -> Array | None:
    if value is None:
        return None
    static = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if static.ndim != 1 or static.dtype.kind not in "biuf" or not np.isfinite(static).all():
        raise DataError(
            f"recording '{name}': static has shape {static.shape} and type {static.dtype}, expected"
            " (S,) finite numbers"
        )
    return static


def _rows(value: Any, name: str, role: str) -> RowSource:
    """An array, or all columns of a file."""
    if isinstance(value, (str, Path)):
        table = formats.open_table(Path(value))
        return ColumnRows(table, value_columns(table), flat=role == "targets")
    return ArrayRows(role, _as_array(value, name, role))


def _as_array(value: Any, name: str, role: str) -> Array:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise DataError(
                f"recording '{name}': {role} are torch.bfloat16, which NumPy does not know; convert"
                f" them: {role}.float()"
            )
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"recording '{name}': {role} are a {type(value).__name__}, expected a NumPy array or a"
            " torch tensor"
        )
    if value.ndim == 0 or value.dtype.kind not in "biuf" or value.dtype == np.longdouble:
        raise DataError(
            f"recording '{name}': {role} have shape {value.shape} and type {value.dtype}, expected"
            " numbers with one row per step"
        )
    return value


def _from_path(path: Path) -> Recording:
    if path.suffix.lower() == ".txt":
        from throughtime.stream.formats.text import (
            text,
        )  # it is a recording itself, and so imports this module

        return text(path)
    table = formats.open_table(path)
    if "inputs" in table.columns:
        inputs, targets = ("inputs",), tuple(c for c in table.columns if c == "targets")
    else:
        inputs, targets = value_columns(table), ()
    return columns(path.name, table, inputs, table if targets else None, targets)


def as_sources(recordings: Recordings) -> Sequence[Any]:
    """The recordings as a sequence, where there may be a single one."""
    single = isinstance(recordings, (Mapping, str, Path, Recording))
    return [recordings] if single else recordings


def with_one_kind(recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """Recordings whose label types agree: one without any interval takes the type of the others."""

    def intervals(recording: Recording) -> IntervalLabels | None:
        targets = recording.targets if isinstance(recording, TableRecording) else None
        return targets if isinstance(targets, IntervalLabels) else None

    several = [labels for labels in map(intervals, recordings) if labels is not None]
    sample = next((labels.labels for labels in several if len(labels.labels)), None)

    def alike(recording: Recording) -> Recording:
        labels = intervals(recording)
        if sample is None or labels is None or len(labels.labels):
            return recording
        typed: Any = recording
        return replace(typed, targets=replace(labels, labels=sample[:0]))

    return tuple(map(alike, recordings))


def columns(
    name: str,
    inputs: formats.Table,
    input_columns: Sequence[str],
    targets: formats.Table | None = None,
    target_columns: Sequence[str] = (),
) -> TableRecording:
    """A recording from tables, checked: the columns exist, the lengths agree, and are not 0."""
    _check_columns(inputs, input_columns, "inputs")
    if targets is not None:
        _check_columns(targets, target_columns, "targets")
        if len(targets) != len(inputs):
            raise DataError(
                f"recording '{name}': {inputs.path} has {len(inputs)} steps and {targets.path} has"
                f" {len(targets)}; targets need one row per step"
            )
    if len(inputs) == 0:
        raise DataError(f"{inputs.path}: the recording is empty, expected at least one step")
    labels = None if targets is None else ColumnRows(targets, tuple(target_columns), flat=True)
    return TableRecording(
        name,
        ColumnRows(inputs, tuple(input_columns)),
        labels,
        None,
        tuple(input_columns),
        tuple(target_columns),
        time_rows(inputs),
    )


def _check_columns(table: formats.Table, names: Sequence[str], role: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{table.path}: {role} name {listed(twice, quoted=True)} twice; name each column once"
        )
    clocks = [name for name in names if name in table.times]
    if clocks:
        raise DataError(
            f"{table.path}: column '{clocks[0]}' of the {role} holds time stamps, expected numbers;"
            " leave it out"
        )
    available = set(table.columns)  # there may be a million
    # lines of a CSV file are also named from the last one, which only the table knows
    missing = [c for c in names if c not in available and c not in table.columns]
    if not missing and names:
        return
    near = difflib.get_close_matches(missing[0], table.columns, n=1) if missing else []
    absent = f"; {listed(missing, quoted=True)} missing" if len(names) > len(missing) > 0 else ""
    hint = f"{absent}; did you mean '{near[0]}'?" if near else absent
    if len(table.columns) == 1 and (mark := re.search(r"[;,|\t]", table.columns[0])):
        hint = f"; are its fields separated by {mark[0]!r}? --delimiter (delimiter= in Python)"
    raise DataError(
        f"{table.path}: {role} {listed(names, quoted=True)} asked for, the file has"
        f" {listed(table.columns, quoted=True)}{hint}"
    )
