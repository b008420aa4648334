"""Targets of later steps: the same values in every chunk and lane, and none of another split.

Shapes: `n` steps, `C` target columns.
"""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from strategies import seeds
from test_targets import KINDS, check_rows, kinds, missing
from throughtime.errors import DataError
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Part, StepArrays, TableRecording
from throughtime.stream.targets import shift_targets

lengths = st.integers(1, 60)
cuts = st.tuples(st.floats(0, 1), st.floats(0, 1))


def series(y: Array, name: str = "series") -> TableRecording:
    return TableRecording(
        name, ArrayRows("x", np.arange(len(y), dtype=np.float64)[:, None]), ArrayRows("y", y)
    )


class Targets:
    """The targets of a recording as a row source."""

    source = "targets"

    def __init__(self, recording: Any) -> None:
        self.recording = recording

    def __len__(self) -> int:
        return len(self.recording)

    def read(self, start: int, stop: int) -> Array:
        steps = self.recording.read(start, stop)
        assert (steps.inputs[:, 0] == np.arange(start, min(stop, len(self)))).all()
        return steps.targets


@given(kinds, lengths, st.integers(0, 59), cuts, seeds)
def test_a_shifted_target_is_the_one_so_many_steps_later(
    kind: str, n: int, shift: int, cut: tuple[float, float], seed: int
) -> None:
    shift %= n
    y = KINDS[kind](n, np.random.default_rng(seed))
    expected = [
        *y[shift:],
        *[missing(y[:1].astype(np.int64)[0] if y.dtype.kind in "biu" else y[0])] * shift,
    ]
    check_rows(Targets(shift_targets(series(y), shift)), expected, cut)


def test_targets_of_several_later_steps_lie_side_by_side() -> None:
    """All columns of the first step come first; each lacks as many as it is ahead."""
    y = np.random.default_rng(0).normal(size=(30, 2))
    shifted = shift_targets(series(y), [3, 1, 20])
    lacking = [np.concatenate([y[n:], np.full((n, 2), np.nan)]) for n in (3, 1, 20)]
    for start, stop in ((0, 30), (7, 19), (25, 30)):
        got = Targets(shifted).read(start, stop)
        np.testing.assert_array_equal(got, np.concatenate(lacking, axis=1)[start:stop])


class Spy:
    """A recording that writes down up to which step it was read."""

    def __init__(self, recording: TableRecording) -> None:
        self.recording, self.name, self.last = recording, recording.name, 0

    def __len__(self) -> int:
        return len(self.recording)

    def read(self, start: int, stop: int) -> StepArrays:
        self.last = max(self.last, min(stop, len(self)))
        return self.recording.read(start, stop)


def test_targets_do_not_cross_the_end_of_a_split() -> None:
    spy = Spy(series(np.arange(100.0)))
    train = shift_targets(Part(spy, 0, 80), 24)
    chunks = [*tt.Stream([train], lanes=3, chunk=7, seed=0)]
    assert sum(part.valid_steps for part in chunks) == 80 - 24
    assert spy.last == 80
    mutant = Part(shift_targets(spy, 24), 0, 80)  # shifted before it is cut
    mutant.read(0, 80)
    assert spy.last > 80


def test_a_recording_needs_a_target() -> None:
    recording = series(np.arange(9.0))
    assert shift_targets(recording, 0) is recording
    assert len(shift_targets(recording, np.int64(8))) == 9
    with pytest.raises(DataError, match="ahead=9 of 9 steps: none has a target"):
        shift_targets(recording, 9)


@pytest.mark.parametrize("form", ["array", "part of a frame"])
def test_a_mapping_shifts_its_targets(form: str) -> None:
    """An input column may be the target of a later step, and not of the same one."""
    y = np.arange(9.0)
    data: Any = y if form == "array" else pd.DataFrame({"y": y})
    recording: Any = {"inputs": data, "targets": data, "ahead": 2}
    if form == "part of a frame":
        recording = tt.recording(data, targets="y", start=1, stop=9, ahead=2)
    (chunk,) = tt.Stream(recording, lanes=1, chunk=9, rank=0, ranks=1)
    assert chunk.targets is not None
    first = int(form == "part of a frame")
    assert chunk.targets[chunk.mask].flatten().tolist() == [*range(first + 2, 9)]
    assert chunk.inputs.flatten().tolist() == [*range(first, 9)]
    if form != "array":
        with pytest.raises(DataError, match="target"):
            tt.recording(data, targets="y", inputs="y", ahead=0)
