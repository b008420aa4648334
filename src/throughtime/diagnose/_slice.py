"""The steps of a stream that a measurement reads, without moving it, on the net's device."""

import math
from dataclasses import dataclass
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
        begin: its first step, counted from the start of the epoch.
        steps: the number of steps of every lane.
        state: the state entering the first; `None` for the net's initial state.
        device: where the net computes.
    """

    stream: Readable
    begin: int
    steps: int
    state: State
    device: torch.device

    @classmethod
    def of(cls, net: Carried, stream: Readable, steps: int | None, state: State) -> "StreamSlice":
        """From the stream's position if its state is passed, otherwise from the start."""
        require_carried(net)
        # users pass lists of chunks
        if not isinstance(stream, Readable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"got a {type(stream).__name__}, expected a tt.Stream: a measurement reads any"
                " steps, without moving the stream"
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

    def valid(self) -> list[int]:
        """Valid steps before each step, over all lanes; one entry more than steps."""
        counts = [0]
        for start in range(0, self.steps, _BLOCK):
            block = self.stream.read(
                self.begin + start, self.begin + min(start + _BLOCK, self.steps)
            )
            before = counts[-1] - block.metadata.counted[block.start]
            counts += [
                before + counted
                for counted in block.metadata.counted[block.start + 1 : block.stop + 1]
            ]
        return counts

    def inner(self, begin: int, steps: int, state: State) -> "StreamSlice":
        """A part of the slice."""
        return StreamSlice(
            self.stream, self.begin + begin, min(steps, self.steps - begin), state, self.device
        )


def axes_of(axes: Any) -> Any:
    """The passed axes of matplotlib, or new ones."""
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtraError(
            "plot() draws with matplotlib: pip install 'throughtime[plot]'"
        ) from error
    return plt.subplots()[1]


def plain(value: Any) -> Any:
    """The same with `None` for numbers that are not finite, as JSON needs."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
