"""A slice of a stream for measurements, and the losses that `tt.reach` samples from it.

Reading a slice does not advance the stream.

Shapes: `T` steps, `B` lanes (rows of the batch). A recording is one unbroken sequence.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk, Placement, Readable
from throughtime.errors import DataError, MissingExtraError
from throughtime.gradient import Objective
from throughtime.gradient._segments import forward
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
        placement: of the net and the loss.
    """

    stream: Readable
    begin: int
    steps: int
    state: State
    placement: Placement

    @classmethod
    def of(
        cls,
        net: Carried,
        stream: Readable,
        steps: int | None,
        state: State,
        objective: Objective,
    ) -> "StreamSlice":
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
        return cls(
            stream,
            begin,
            left if steps is None else min(steps, left),
            state,
            objective.placement(net),
        )

    def read(self, start: int, stop: int) -> Chunk:
        """The steps from `start` to before `stop` of the slice."""
        chunk = self.stream.read(self.begin + start, self.begin + min(stop, self.steps))
        return chunk.convert(self.placement)

    def valid_before(self) -> list[int]:
        """The number of valid steps before each step, over all lanes; `steps + 1` entries."""
        valid, end = [0], self.begin + self.steps
        for start in range(self.begin, end, _BLOCK):
            valid += self.stream.read(start, min(start + _BLOCK, end)).mask.sum(1).tolist()
        return list(accumulate(valid))

    def inner(self, begin: int, steps: int, state: State) -> "StreamSlice":
        """Up to `steps` steps of this slice from step `begin` on, entered with `state`."""
        return StreamSlice(
            self.stream, self.begin + begin, min(steps, self.steps - begin), state, self.placement
        )


def windows(
    net: Carried, section: StreamSlice, lag: int, count: int
) -> Iterator[tuple[StreamSlice, State]]:
    """Windows spread evenly over the slice, and the state entering each."""
    length = min(section.steps, lag + spread_of(lag))
    starts = [(section.steps - length) * i // max(1, count - 1) for i in range(count)]
    first = section.read(0, 1)
    state = (
        trees.detach(net.initial_state(first.lanes, like=first.inputs))
        if section.state is None
        else section.state
    )
    for previous, start in pairwise([0, *starts]):
        for begin in range(previous, start, 1024):
            chunk = section.read(begin, min(begin + 1024, start))
            with torch.no_grad():
                ((_, state),) = forward(net, chunk, state)
        yield section.inner(start, length, state), state


def spread_of(lag: int) -> int:
    """The last steps of a window, among which its anchors are drawn."""
    return max(1, lag // 4)


class Anchor(NamedTuple):
    """One step of a lane whose loss is differentiated.

    Attributes:
        lane: of the window.
        step: in the window.
        oldest: the first step of the window whose state belongs to the anchor's recording.
    """

    lane: int
    step: int
    oldest: int


@dataclass(frozen=True, eq=False)
class AnchorSet:
    """One anchor of each lane of a window; a lane without a valid step has none.

    Attributes:
        chunk: the window, with a mask of the anchors alone.
        anchors: by lane.
    """

    chunk: Chunk
    anchors: list[Anchor]

    @classmethod
    def draw(cls, whole: Chunk, spread: int, generator: torch.Generator) -> "AnchorSet":
        """Draw an anchor of each lane from the last `spread` steps."""
        mask, anchors, begin = torch.zeros_like(whole.mask), list[Anchor](), whole.steps - spread
        for lane in range(whole.lanes):
            valid = whole.mask[begin:, lane].nonzero().flatten().tolist()
            if valid:
                step = (
                    begin
                    + valid[int(torch.randint(len(valid), (), device="cpu", generator=generator))]
                )
                starts = whole.resets[: step + 1, lane].nonzero().flatten().tolist()
                mask[step, lane] = True
                anchors.append(Anchor(lane, step, starts[-1] + 1 if starts else 0))
        return cls(
            Chunk.from_tensors(whole.inputs, whole.targets, resets=whole.resets, mask=mask), anchors
        )

    def context(self, steps: int) -> Chunk:
        """The last `steps` steps up to each anchor, side by side; only the last step is valid."""

        def stacked(values: Tensor) -> Tensor:
            rows = [values[step - steps + 1 : step + 1, lane] for lane, step, _ in self.anchors]
            return torch.stack(rows, dim=1)

        chunk = self.chunk
        return Chunk.from_tensors(
            stacked(chunk.inputs),
            None if chunk.targets is None else stacked(chunk.targets),
            resets=stacked(chunk.resets),
            mask=stacked(chunk.mask),
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
