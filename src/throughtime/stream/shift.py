"""Targets of later steps, for forecasting: the target of step `t` is that of step `t + n`.

Those of several later steps lie side by side. The last `n` steps of a recording have none: their
targets are NaN, -100 or empty text, and such steps are masked. Shift a recording after it is cut
into splits: so no target of one split is read in another.

Shapes: `T` steps of the recording, `C` target columns, `F` later steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.labels import missing_like
from throughtime.stream.recording import Recording, RecordingView, StepArrays, step_times

_RECENT = 1000  # steps whose spacing goes on


@dataclass(frozen=True)
class ForecastRecording(RecordingView[Recording]):
    """The inputs and series of a recording with the targets of later steps.

    Of several, the targets are `(T, F * C)`: all columns of the first, then those of the next.
    """

    whole: Recording
    ahead: tuple[int, ...]

    def read(self, start: int, stop: int) -> StepArrays:
        stop = min(stop, len(self))
        steps = self.whole.read(start, min(stop + max(self.ahead), len(self)))
        if steps.targets is None:
            return steps
        targets = later_rows(steps.targets, self.ahead, stop - start)
        series = {name: rows[: stop - start] for name, rows in steps.series.items()}
        return StepArrays(steps.inputs[: stop - start], targets, steps.static, series)


def later_rows(rows: Array, shifts: Sequence[int], count: int) -> Array:
    """The first `count` rows, each taken so many rows later; of several shifts side by side."""
    if len(shifts) == 1:
        return padded_slice(rows, shifts[0], shifts[0] + count)
    columns = rows[:, None] if rows.ndim == 1 else rows
    return np.concatenate([padded_slice(columns, n, n + count) for n in shifts], axis=1)


def padded_slice(rows: Array, start: int, stop: int) -> Array:
    """The rows `start` to before `stop` of targets; missing ones before the first, after the last.

    Whole numbers are read as int64, which holds the -100 of a missing one.
    """
    kept = rows[max(0, start) : max(0, stop)]
    if rows.dtype.kind in "biu":
        kept = kept.astype(np.int64)
    before = min(max(0, -start), stop - start)
    parts = [
        missing_like((before, *rows.shape[1:]), rows),
        kept,
        missing_like((stop - start - before - len(kept), *rows.shape[1:]), rows),
    ]
    filled = [part for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else np.concatenate(parts)


def horizons(ahead: Any) -> tuple[Any, ...]:
    """How many steps later the targets are, as one or several numbers; none of 0."""
    if np.ndim(ahead):
        return tuple(ahead)
    return (ahead,) if ahead else ()


def shift_targets(recording: Recording, steps: Any) -> Recording:
    """The recording with each step's target taken `steps` steps later; itself if that is 0.

    Args:
        recording: any; its targets in any form.
        steps: a whole number, at least 0; or several, such as `range(1, 25)`: then the targets of
            all of them lie side by side, `(T, F * C)`, each at least 1.

    Raises:
        DataError: another number, or one for which no step has a target.

    Cost: each read of the recording reads as many steps more as the furthest target is ahead.

    Example:
        >>> import numpy as np
        >>> from throughtime.stream.sources import as_recording
        >>> from throughtime.stream.shift import shift_targets
        >>> hours = np.arange(4.0)
        >>> recording = as_recording((hours, hours))
        >>> shift_targets(recording, 1).read(0, 4).targets
        array([ 1.,  2.,  3., nan])
    """
    several = np.ndim(steps) > 0
    counts = [n.item() if isinstance(n, np.integer) else n for n in (steps if several else [steps])]
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in counts)
    if not counts or not whole or min(counts) < int(several):
        raise DataError(
            f"recording '{recording.name}': ahead={steps!r}, expected how many steps later the"
            " target of a step is, at least 0, or several of at least 1, such as range(1, 25): a"
            " target of the past is no forecast"
        )
    count = max(counts)
    if 0 < len(recording) <= count:
        raise DataError(
            f"recording '{recording.name}' has {len(recording)} steps, so none has a target"
            f" {count} steps later; leave it out, or take a smaller one"
        )
    return ForecastRecording(recording, tuple(counts)) if count else recording


def later_times(recording: Recording, start: int, stop: int, steps: int) -> Array | None:
    """The time stamps of the steps `steps` after each of `start` to before `stop`.

    Beyond the end of the recording they go on by the median of its last spacings.

    Returns:
        `datetime64[ns]` `(stop - start,)`; `None` if the recording has no time stamps.
    """
    end = len(recording)
    recent = step_times(recording, max(0, end - _RECENT), end)
    if recent is None:
        return None
    first, last = start + steps, stop + steps
    known = recent[:0] if first >= end else step_times(recording, first, min(last, end))
    rows = np.flatnonzero(~np.isnat(recent))
    after = np.arange(max(first, end), last) - end + len(recent)
    future = np.full(len(after), np.datetime64("NaT"), recent.dtype)
    if len(rows) > 1:
        spacings = np.sort(np.diff(recent[rows]) // np.diff(rows))
        future = recent[rows[-1]] + (after - rows[-1]) * spacings[len(spacings) // 2]
    return future if known is None else np.concatenate([known, future])
