"""How much memory a sweep may take, and how many bytes a net's graph does, measured on a few of its
steps.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.gradient import schedule
from throughtime.gradient.edges import Offload, check_offload
from throughtime.gradient.objective import Objective
from throughtime.gradient.replay import unnoticed
from throughtime.gradient.schedule import Size
from throughtime.gradient.sweep import started
from throughtime.state import State

TRIAL = 48  # steps at most; the difference to a third of them is free of what every graph has


@dataclass(frozen=True)
class Room:
    """How much memory a sweep may take, and where.

    Args:
        memory: for graph and edge states.
        chunk: steps per piece, or "auto".
        offload: where edge states are kept.
    """

    memory: str | int | float
    chunk: int | Literal["auto"]
    offload: Offload

    def check(self) -> None:
        """Refuses what is out of range."""
        schedule.bytes_in(self.memory)
        check_offload(self.offload)
        if self.chunk != "auto":
            schedule.whole("chunk", self.chunk, 1)

    def length(
        self,
        net: Carried,
        steps: int,
        first: Callable[[int], Chunk],
        state: State,
        objective: Objective | None,
    ) -> int:
        """Steps per piece: as given, or the fastest that fits.

        `first` gives the first steps, to be measured.
        """
        if self.chunk != "auto":
            return min(self.chunk, steps)
        size = measure(net, lambda wanted: first(min(wanted, steps)), state, objective)
        sweet = None if first(1).inputs.is_cuda else schedule.SWEET_SPOT
        return schedule.best_chunk(
            steps, size, schedule.bytes_in(self.memory), kept=self.offload is None, sweet=sweet
        )


_known: "WeakKeyDictionary[Carried, dict[tuple[Any, ...], Size]]" = WeakKeyDictionary()


def measure(
    net: Carried, first: Callable[[int], Chunk], state: State, objective: Objective | None
) -> Size:
    """The size of a sweep's parts; measured once for each net, mode and shape of chunk.

    Args:
        net: what will be run.
        first: gives the first steps of the stretch to come, as many as asked for, or all there are.
        state: the state entering them.
        objective: its loss belongs to the graph; `None` if there is none.

    Saved tensors are counted by storage; what a custom autograd function keeps elsewhere is not
    seen.
    """
    chunk = first(TRIAL)
    autocast = torch.is_autocast_enabled(chunk.inputs.device.type)
    weights = tuple((weight.dtype, weight.requires_grad) for weight in net.parameters())
    key = (
        chunk.inputs.shape,
        chunk.inputs.dtype,
        net.training,
        autocast,
        weights,
        objective is None,
    )
    known = _known.setdefault(net, {})
    if key not in known:
        known[key] = _measure(net, chunk, state, objective)
    return known[key]


def _measure(net: Carried, long: Chunk, state: State, objective: Objective | None) -> Size:
    if state is None:
        state = trees.detach(net.initial_state(long.lanes, like=long.inputs))
    edge = sum(leaf.nbytes for leaf in trees.tensors(state))
    long = Chunk.from_tensors(
        long.inputs, long.targets
    )  # without what differs from place to place, so that a resumed run measures the same
    short = long[0 : -(-long.steps // 3)]
    with unnoticed(net, short.inputs.device):
        less, few = _graph(net, short, state, objective)
        if long.steps == short.steps:
            return Size(less / short.steps, 0, edge, few / short.steps)
        more, many = _graph(net, long, state, objective)
    step = (more - less) / (long.steps - short.steps)
    return Size(
        step, max(0, less - step * short.steps), edge, (many - few) / (long.steps - short.steps)
    )


def _graph(
    net: Carried, chunk: Chunk, state: State, objective: Objective | None
) -> tuple[int, int]:
    """Bytes and number of the storages that the graph of one forward pass keeps, besides weights, inputs and state."""
    given = [*net.parameters(), *net.buffers(), chunk.inputs, chunk.targets, *trees.tensors(state)]
    known = {leaf.untyped_storage().data_ptr() for leaf in given if leaf is not None}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved.detach()  # a graph that kept its own output would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        piece = started(net, chunk, state)
        loss = (
            objective.loss(piece.outputs, chunk) if objective is not None and chunk.valid else None
        )
        outputs = (
            3 * piece.outputs.nbytes
        )  # themselves, their gradient, and the last piece's, which an update hands out
    del piece, loss
    return sum(kept.values()) + outputs, len(kept)
