"""Recordings: one source sequence each, read lazily, and their standardisation.

Moments take one pass. Means and spreads are merged block by block (Chan, Golub & LeVeque 1983), so
that a long recording loses no digits.

Shapes: `T` steps of the recording, `D` input features, `C` target columns, `S` static features.
"""

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource, check_exact

_SAMPLE = 64  # steps
BLOCK, _WIDE = 65_536, 16  # steps read at once, fewer where there are more than so many columns


class StepArrays(NamedTuple):
    """Consecutive steps of a recording.

    Attributes:
        inputs: `(n, D)` or `(n,)`.
        targets: `(n,)`, `(n, C)` or `None`.
        series: `(n, ...)` by name: more values of these steps, such as a weight.
    """

    inputs: Array
    targets: Array | None
    series: Mapping[str, Array] = {}

    @property
    def by_role(self) -> dict[str, Array]:
        """Inputs, targets if there are some, and the series, by name."""
        targets = {} if self.targets is None else {"targets": self.targets}
        return {"inputs": self.inputs, **targets, **self.series}


@runtime_checkable
class Recording(Protocol):
    """The protocol of what `tt.Stream` plays: a name, a length and a lazy `read`.

    Any object with these three is a recording; `tt.recording` and `tt.Stream` make them of arrays,
    tables and files. A stream relies on these laws:

    - The length is at least 1 and never changes. Neither do the columns and their types.
    - `read(start, stop)` returns the steps from `start` to before `stop`, for 0 <= start <= stop <=
      T, and may be called in any order, any number of times, also from worker processes.
    - Reading the same steps twice returns the same values: `tt.Exact` and a resumed run read again.
    - Names are unique in a stream: metrics and positions are stored by them.

    Example:
        >>> import numpy as np, throughtime as tt
        >>> from throughtime.stream import StepArrays
        >>> class Ramp:
        ...     name = "ramp"
        ...     def __len__(self):
        ...         return 5
        ...     def read(self, start, stop):
        ...         steps = np.arange(start, stop, dtype=np.float32)
        ...         return StepArrays(inputs=steps[:, None], targets=None)
        >>> [chunk.inputs.flatten().tolist() for chunk in tt.Stream(Ramp(), lanes=1, chunk=3)]
        [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """

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


def sample_checksum(recording: Recording, blocks: int) -> str:
    """A CRC-32 of so many blocks of 64 steps, from the first to the last; of all if they fit.

    An error while reading is the result: other ranks wait for one.
    """
    length, value = len(recording), 0
    try:
        for start in np.linspace(0, max(0, length - _SAMPLE), blocks, dtype=int).tolist():
            steps = recording.read(start, min(start + _SAMPLE, length))
            for rows in steps.by_role.values():
                value = zlib.crc32(rows.tobytes(), value)
    except Exception as error:  # noqa: BLE001 (a recording may be anybody's)
        return f"missing ({type(error).__name__}: {error})"
    return f"{value:08x}"


@dataclass(frozen=True, repr=False)
class TableRecording:
    """A recording of rows: of arrays, of columns of files, or of several of them."""

    name: str
    inputs: RowSource
    targets: RowSource | None = None
    static: Array | None = None
    input_columns: tuple[str, ...] = ()
    target_columns: tuple[str, ...] = ()
    times: RowSource | None = None
    series: tuple[tuple[str, RowSource], ...] = ()
    unnamed: tuple[str, ...] = ()  # columns that no setting names: other recordings have the same

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, start: int, stop: int) -> StepArrays:
        inputs = self.inputs.read(start, stop)
        return StepArrays(
            inputs if self.static is None else self._with_static(inputs, self.static),
            None if self.targets is None else self.targets.read(start, stop),
            {name: rows.read(start, stop) for name, rows in self.series},
        )

    def _with_static(self, inputs: Array, static: Array) -> Array:
        """The inputs, and beside them the static features, in a type that holds both."""
        floating = inputs.dtype.kind == "f"
        columns = inputs[:, None] if floating and inputs.ndim == 1 else inputs
        if columns.ndim != 2:
            raise DataError(
                f"'{self.name}': static features go beside inputs (T, D), not {inputs.shape}"
            )
        exact = np.result_type(columns, static)
        check_exact(f"recording '{self.name}'", columns, exact)
        dtype = columns.dtype if floating else exact
        features = np.broadcast_to(static, (len(columns), len(static)))
        return np.concatenate([columns, features], axis=1, dtype=dtype, casting="same_kind")


class RecordingView(ABC):
    """Steps computed from those of another recording, with its name and length."""

    whole: Any

    @property
    def name(self) -> str:
        return self.whole.name

    def __len__(self) -> int:
        return len(self.whole)

    @abstractmethod
    def read(self, start: int, stop: int) -> StepArrays:
        """The steps `start` to before `stop`."""


@dataclass(frozen=True)
class Part(RecordingView):
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


def step_times(recording: object, start: int, stop: int) -> Array | None:
    """The time stamps of the steps `start` to before `stop`, `datetime64[ns]` `(n,)`.

    `time_texts` of `throughtime.stream.formats.times` writes them in ISO 8601.

    Args:
        recording: plays the steps; wrappers are looked through.
        start: the first step.
        stop: the step after the last one.

    Returns:
        `None` if the recording has no time stamps.
    """
    table, begin = innermost(recording)
    if table is None or table.times is None:
        return None
    return table.times.read(begin + start, begin + stop)


def location(recording: object, step: int, column: int) -> str:
    """An input in words: `step 1204, column 'ecg' (row 1204)`; its number if it has no name.

    Args:
        recording: plays the step; wrappers are looked through.
        step: of the recording.
        column: of its inputs.
    """
    table, start = innermost(recording)
    names = () if table is None else table.input_columns
    if column >= len(names):
        return f"step {step}, column {column}"
    return f"step {step}, column '{names[column]}' (row {step + start})"


def innermost(recording: object) -> tuple[TableRecording | None, int]:
    """The recording of rows inside of wrappers, if there is one, and where they begin."""
    start = 0
    while isinstance(recording, RecordingView):
        start += recording.start if isinstance(recording, Part) else 0
        recording = recording.whole
    return recording if isinstance(recording, TableRecording) else None, start


@dataclass
class Moments:
    """Count, mean and squared deviations of columns, without values that are not finite."""

    count: Any = 0.0
    mean: Any = (0.0,)
    spread: Any = 0.0

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
        """Standard deviations; 1 for a constant column, whose deviation may be rounding."""
        deviation = np.sqrt(self.spread / np.maximum(self.count, 1))
        return np.where(deviation > 1e-12 * np.abs(self.mean), deviation, 1.0)


def read_blocks(recording: Recording) -> Iterator[tuple[int, StepArrays]]:
    """The blocks of a recording: the first step of each, and its steps."""
    count = max(1, BLOCK * _WIDE // max(_WIDE, recording.read(0, 1).inputs.size))
    for start in range(0, len(recording), count):
        yield start, recording.read(start, min(start + count, len(recording)))


def as_columns(rows: Array) -> Array:
    """Rows of steps as float64 `(n, D)`."""
    return rows.reshape(len(rows), -1).astype(np.float64)


def moments_of(recordings: Sequence[Recording], role: str = "inputs") -> Moments:
    """The moments of the inputs, or of the targets, of all recordings; one read of each.

    Raises:
        DataError: they have no targets.
    """
    moments = Moments()
    for recording in recordings:
        for _, steps in read_blocks(recording):
            if role not in steps.by_role:
                raise DataError(f"recording '{recording.name}' has no {role} to standardise")
            values = as_columns(steps.by_role[role])
            if np.any(moments.count) and moments.count.shape != values.shape[1:]:
                raise DataError(
                    f"'{recording.name}' has {len(values.T)} {role}, others {len(moments.mean)}"
                )
            moments.add(values)
    return moments


@dataclass(frozen=True)
class StandardisedRecording(RecordingView):
    """A recording whose inputs have the mean 0 and the deviation 1, by all of its steps."""

    whole: Recording

    @cached_property
    def _moments(self) -> Moments:
        return moments_of([self.whole])

    def read(self, start: int, stop: int) -> StepArrays:
        steps = self.whole.read(start, stop)
        inputs = (as_columns(steps.inputs) - self._moments.mean) / self._moments.scale
        return steps._replace(inputs=inputs.reshape(steps.inputs.shape))


def standardised(recording: Recording) -> Recording:
    """The recording standardised by all of its steps; itself where it, or what it views, is."""
    part: object = recording
    while isinstance(part, RecordingView):
        if isinstance(part, StandardisedRecording):
            return recording
        part = part.whole
    return StandardisedRecording(recording)


def check_standardise(how: str | None, recordings: Sequence[Recording], missing: str) -> None:
    """Refuse a setting that is none, or that these recordings cannot have.

    Raises:
        DataError: one of these.
    """
    if how not in (None, "split", "recording") and not re.fullmatch(r"first:[1-9]\d*", str(how)):
        raise DataError(
            f"standardise={how!r}: expected 'split', 'recording', 'first:N' of a number, or None"
        )
    static = any(getattr(innermost(r)[0], "static", None) is not None for r in recordings)
    masked = missing == "mask" and how != "recording"
    cut = [id(r.whole) for r in recordings if isinstance(r, Part) and standardised(r) is not r]
    if how == "recording" and len({*cut}) < len(cut):
        raise DataError(
            "standardise='recording' of windows: cut what is standardised: tt.windows("
            "tt.Stream(data, lanes, chunk, standardise='recording').recordings, length)"
        )
    if how not in (None, "split") and (static or masked):
        raise DataError(
            f"standardise={how!r} has no statistics of static features, and 'first' would count"
            " masked steps as zeros: take 'split', or leave static out, or fill what is missing"
        )
