"""Anchors: the steps whose losses `tt.reach` differentiates, and the windows that contain them.

Shapes: `T` steps, `B` lanes (rows of the batch). A recording is one unbroken sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.diagnose._slice import StreamSlice
from throughtime.gradient._segments import forward
from throughtime.state import State


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
                step = begin + valid[int(torch.randint(len(valid), (), generator=generator))]
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
