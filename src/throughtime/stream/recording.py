"""Recordings: one source sequence each, read lazily.

Shapes: `T` steps of the recording, `D` input features, `C` target columns, `S` static features.
"""

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch.utils._pytree import tree_leaves

from throughtime.errors import listed
from throughtime.stream.formats.table import Array, RowSource
from throughtime.stream.labels import IntervalLabels

_SAMPLE = 64  # steps


class StepArrays(NamedTuple):
    """Consecutive steps of a recording.

    Attributes:
        inputs: `(n, D)` or `(n,)`.
        targets: `(n,)`, `(n, C)` or `None`.
        static: `(S,)`, features of the whole recording.
        series: `(n, ...)` by name: more values of these steps, such as a weight.
    """

    inputs: Array
    targets: Array | None
    static: Array | None = None
    series: Mapping[str, Array] = {}

    @property
    def by_role(self) -> dict[str, Array]:
        """Those with a row per step, under the words that messages have for them."""
        arrays = {"inputs": self.inputs}
        if self.targets is not None:
            arrays["targets"] = self.targets
        for name, rows in self.series.items():
            arrays[f"series '{name}'"] = rows
        return arrays


class StepChecksum:
    """CRC-32 of every array of a recording, over blocks of steps in order."""

    def __init__(self) -> None:
        self._sums = Counter[int]()

    def add(self, steps: StepArrays) -> None:
        """Add a block; its length must be the same wherever checksums are compared."""
        for i, values in enumerate(tree_leaves(steps)):
            array = np.asarray(() if values is None else values)
            content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
            self._sums[i] = zlib.crc32(content, self._sums[i])

    def __str__(self) -> str:
        return "".join(f"{value:08x}" for value in self._sums.values())


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
    """A checksum of so many blocks of 64 steps, from the first to the last; of all if they fit.

    An error while reading is the result: other ranks wait for one. So is "random" if two reads
    differ, as where `read` adds noise.
    """
    last = max(0, len(recording) - _SAMPLE)
    starts = [*range(0, last, max(_SAMPLE, -(-last // (blocks - 1)))), last]
    sums: list[str] = []
    try:
        for _ in range(2):
            checksum = StepChecksum()
            for start in starts:
                checksum.add(recording.read(start, min(start + _SAMPLE, len(recording))))
            sums.append(str(checksum))
    except Exception as error:  # noqa: BLE001 (a recording may be anybody's)
        return f"missing ({type(error).__name__}: {error})"
    return sums[0] if sums[0] == sums[1] else "random"


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
    series: tuple[tuple[str, RowSource], ...] = ()

    def __repr__(self) -> str:
        roles = {"inputs": self.input_columns, "targets": self.target_columns}
        named = [f"{role}={listed(names, quoted=True)}" for role, names in roles.items() if names]
        return f"TableRecording({', '.join([f'{self.name!r:.100}', f'{len(self)} steps', *named])})"

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, start: int, stop: int) -> StepArrays:
        return StepArrays(
            self.inputs.read(start, stop),
            None if self.targets is None else self.targets.read(start, stop),
            self.static,
            {name: rows.read(start, stop) for name, rows in self.series},
        )


R = TypeVar("R", bound=Recording)


class RecordingView(ABC, Generic[R]):
    """Steps computed from those of another recording, with its name and length."""

    whole: R

    @property
    def name(self) -> str:
        return self.whole.name

    def __len__(self) -> int:
        return len(self.whole)

    @abstractmethod
    def read(self, start: int, stop: int) -> StepArrays:
        """The steps `start` to before `stop`."""


@dataclass(frozen=True)
class Part(RecordingView[Recording]):
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


def preceding(recordings: Sequence[Recording]) -> list[int]:
    """The index of the part that ends where each recording begins; -1 where there is none.

    Example:
        >>> import numpy as np, throughtime as tt
        >>> preceding(tt.windows([np.zeros((250, 3)), np.zeros((80, 3))], 100))
        [-1, 0, 1, -1]
    """
    parts = {i: r for i, r in enumerate(recordings) if isinstance(r, Part)}
    ends = {(id(part.whole), part.stop): i for i, part in parts.items()}
    return [
        ends.get((id(parts[i].whole), parts[i].start), -1) if i in parts else -1
        for i in range(len(recordings))
    ]


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
    table, begin = innermost(recording)
    if table is None or table.times is None:
        return None
    return table.times.read(begin + start, begin + stop)


def location(recording: object, step: int, column: int) -> str:
    """An input in words: `step 1204, column 0 (row 1204, column 'ecg')`; its name if it has one.

    Args:
        recording: plays the step; wrappers are looked through.
        step: of the recording.
        column: of its inputs. A frame of N rows has the columns of each of them in turn.
    """
    text = f"step {step}, column {column}"
    table, start = innermost(recording)
    if table is None:
        return text
    names, rows = table.input_columns, getattr(table.inputs, "frame_size", 1)
    if not names or column >= rows * len(names):
        return text
    row = (step + start) * rows + column // len(names)
    return f"{text} (row {row}, column '{names[column % len(names)]}')"


def innermost(recording: object) -> tuple[TableRecording | None, int]:
    """The recording of rows inside of wrappers, if there is one, and where they begin."""
    start = 0
    while isinstance(recording, RecordingView):
        start += recording.start if isinstance(recording, Part) else 0
        recording = recording.whole
    return recording if isinstance(recording, TableRecording) else None, start


def with_one_kind(recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """Recordings whose label types agree: one without any interval takes the type of the others."""

    def intervals(recording: Recording) -> IntervalLabels | None:
        if isinstance(recording, RecordingView):
            return intervals(recording.whole)
        targets = recording.targets if isinstance(recording, TableRecording) else None
        return targets if isinstance(targets, IntervalLabels) else None

    several = [labels for labels in map(intervals, recordings) if labels is not None]
    sample = next((labels.labels for labels in several if len(labels.labels)), None)

    typed_alike: dict[int, Recording] = {}  # parts of one recording stay parts of one

    def alike(recording: Recording) -> Recording:
        labels = intervals(recording)
        if sample is None or labels is None or len(labels.labels):
            return recording
        typed: Any = recording
        if isinstance(recording, RecordingView):
            return replace(typed, whole=alike(recording.whole))
        if id(recording) not in typed_alike:
            empty = replace(labels, labels=sample[:0])
            typed_alike[id(recording)] = replace(typed, targets=empty)
        return typed_alike[id(recording)]

    return tuple(map(alike, recordings))
