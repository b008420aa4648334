"""A slice of a stream for measurements; reading it does not advance the stream."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk, Readable
from throughtime.errors import DataError, MissingExtraError
from throughtime.gradient.schedule import check_whole
from throughtime.state import State

_BLOCK = 4096  # steps read at once


@dataclass(frozen=True, eq=False)
class StreamSlice:
    """Consecutive steps of a stream, and the state entering them.

    Attributes:
        stream: the stream.
        begin: the first step of the slice, counted from the start of the epoch.
        steps: the number of steps.
        state: the state before the first step; `None` for the net's initial state.
        device: that of the net's parameters.
    """

    stream: Readable
    begin: int
    steps: int
    state: State
    device: torch.device

    @classmethod
    def of(cls, net: Carried, stream: Readable, steps: int | None, state: State) -> "StreamSlice":
        """From the stream's position if `state` is passed, else from the start of the epoch."""
        require_carried(net)
        # users do pass lists of chunks
        if not isinstance(stream, Readable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"got a {type(stream).__name__}, expected a tt.Stream: a measurement needs"
                " random access to the steps"
            )
        if steps is not None:
            check_whole("steps", steps, 1)
        begin = 0 if state is None else stream.position
        left = stream.steps - begin
        if left < 1:
            raise DataError(
                "the stream is at the end of its epoch and a state was passed: no steps are left to"
                " measure"
            )
        weight = next(net.parameters(), None)
        return cls(
            stream,
            begin,
            left if steps is None else min(steps, left),
            state,
            torch.device("cpu") if weight is None else weight.device,
        )

    def read(self, start: int, stop: int) -> Chunk:
        """The steps from `start` to before `stop` of the slice."""
        return self.stream.read(self.begin + start, self.begin + min(stop, self.steps)).to(
            self.device
        )

    def valid_before(self) -> list[int]:
        """The number of valid steps before each step, over all lanes; `steps + 1` entries."""
        valid, end = [0], self.begin + self.steps
        for start in range(self.begin, end, _BLOCK):
            valid += self.stream.read(start, min(start + _BLOCK, end)).mask.sum(1).tolist()
        return list(accumulate(valid))

    def inner(self, begin: int, steps: int, state: State) -> "StreamSlice":
        """Up to `steps` steps of this slice from step `begin` on, entered with `state`."""
        return StreamSlice(
            self.stream, self.begin + begin, min(steps, self.steps - begin), state, self.device
        )


def get_axes(axes: Any) -> Any:
    """`axes`, or new matplotlib axes if None."""
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtraError(
            "plot() needs matplotlib: pip install 'throughtime[plot]'"
        ) from error
    return plt.subplots()[1]


def json_safe(value: Any) -> Any:
    """The value with `None` for floats that are not finite, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
