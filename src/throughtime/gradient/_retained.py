"""Truncated backpropagation with retained graphs: those of earlier strides are not run again.

    every stride:   run it once, from a detached copy of the carried state, and keep its graph
    every update:   back through the retained graphs of the last `horizon` steps, newest first

At fixed weights the gradients are those of windows that are run again. After `optimizer.step()`
a retained graph still belongs to the weights it was run with, as in Williams and Peng's paper,
while a window that is run again belongs to the present ones. Weights that a graph saves are copied
when it is built, so that the optimizer may change them in place.
`torch.autograd.graph.allow_mutation_on_saved_tensors` does the same for every tensor. But it must
be entered around the user's loop, which it slows down, and it stays active when the loop is left.

Measured on a 2-core Zen 5 beside windows that are run again, horizon 4 to 16 strides: 0.75 to 1.0
of the time for a GRUCell in a Python loop; 1.2 to 1.7 for fused layers, whose forward pass is cheap
and whose backward pass is cheaper in one call. Cost per step: one forward pass, and horizon /
stride backward passes; memory for the graphs of `horizon` steps, and a copy of the weights for each
of their strides.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient._backward import (
    CreditFlow,
    GradientAccumulator,
    deliver,
    suspended_hooks,
)
from throughtime.gradient._segments import Segment, run_chunk, run_segment
from throughtime.gradient.objective import Objective, trainable_weights
from throughtime.gradient.policy import Update, empty_update
from throughtime.state import State

Retained = tuple[State, tuple[Segment, ...]]  # the state entering the first step, and the segments


def update(
    net: Carried,
    chunk: Chunk,
    begin: int,
    objective: Objective,
    retained: Retained,
    lengths: tuple[int, int],
) -> tuple[Update | None, State, tuple[Segment, ...]]:
    """Run one stride, retain its graph, and go back through the graphs if a step of it counts.

    Args:
        net: made by `tt.carry`.
        chunk: the stride.
        begin: its first step in the epoch.
        objective: the loss.
        retained: the state before the first stride, and the segments of earlier strides.
        lengths: stride and horizon.

    Returns:
        The update, the carried state, and the segments that a later window may need.
    """
    edge, earlier = retained
    stride, horizon = lengths
    segments = [*earlier, *_run(net, chunk, edge, _cuts(chunk.steps, stride, horizon))]
    new = len(segments) - len(earlier)
    state = trees.detach(segments[-1].after)
    outputs = torch.cat([segment.outputs.detach() for segment in segments[-new:]])
    if not objective.counts(chunk):
        result = empty_update(objective, chunk, state, outputs)
    else:
        loss = _backward(net, objective, (outputs, chunk, begin), segments, new, horizon)
        weight = objective.rank_weight(chunk)
        result = Update(loss, chunk.valid_steps, state, outputs.detach(), chunk, weight=weight)
    return result, state, _needed(segments, horizon)


def _cuts(steps: int, stride: int, horizon: int) -> list[int]:
    """Bounds that cut a stride in two, so that a later window begins at one of them."""
    cut = (steps - horizon) % stride
    return [0, cut, steps] if 0 < cut < steps else [0, steps]


def _run(net: Carried, chunk: Chunk, state: State, bounds: Sequence[int]) -> list[Segment]:
    """The segments of a stride, each with a graph of its own."""
    segments: list[Segment] = []
    with _WeightCopies(net).saved():
        for start, stop in pairwise(bounds):
            segments.append(run_segment(net, chunk[start:stop], state))
            state = segments[-1].after
    return segments


def _backward(
    net: Carried,
    objective: Objective,
    stride: tuple[Tensor, Chunk, int],
    segments: list[Segment],
    new: int,
    horizon: int,
) -> Tensor:
    """Add the gradient of the newest stride's loss to `.grad`; returns the loss, detached."""
    outputs, chunk, begin = stride
    objective.check_weights(outputs, chunk)
    loss = objective.loss(outputs.requires_grad_(), chunk)
    if not loss.requires_grad:
        objective.check_depends([])
    flow = CreditFlow(GradientAccumulator(trainable_weights(net, objective.loss_fn)))
    weights = flow.grads.weights
    with suspended_hooks(weights):
        dy, *own = torch.autograd.grad(
            objective.scaled(loss), [outputs, *weights], allow_unused=True
        )
    flow.grads.add(own)
    parts = iter(reversed(dy.split([segment.chunk.steps for segment in segments[-new:]])))
    for segment in reversed(_within(net, segments, horizon)):
        part = next(parts, None)
        flow.through(segment, [] if part is None else [(segment.outputs, part)], retain=True)
    deliver(flow.grads, objective, (loss, outputs), chunk, begin)
    return loss.detach()


def _within(net: Carried, segments: list[Segment], horizon: int) -> list[Segment]:
    """The segments of the last `horizon` steps.

    One that begins earlier, as at a ragged end, is run again from there on.
    """
    within: list[Segment] = []
    left = horizon
    for segment in reversed(segments):
        if left <= 0:
            break
        later = segment.chunk.steps - left
        within.append(segment if later <= 0 else _run_later_part(net, segment, later))
        left -= segment.chunk.steps
    return within[::-1]


def _run_later_part(net: Carried, segment: Segment, start: int) -> Segment:
    first, second = segment.chunk[0:start], segment.chunk[start : segment.chunk.steps]
    with torch.no_grad():
        _, edge = run_chunk(net, first, trees.detach(segment.before))
    return run_segment(net, second, edge)


def _needed(segments: list[Segment], horizon: int) -> tuple[Segment, ...]:
    """Those that a later window may still reach."""
    later = 0
    for count, segment in enumerate(reversed(segments)):
        if later >= horizon - 1:
            return tuple(segments[len(segments) - count :])
        later += segment.chunk.steps
    return tuple(segments)


@dataclass(eq=False)
class _WeightCopies:
    """Copies of the weights as they are now, made where a graph saves them."""

    net: nn.Module

    def __post_init__(self) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in self.net.parameters()}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def saved(self) -> AbstractContextManager[Any]:
        """Graphs built inside save copies of the weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, saved: Tensor) -> tuple[Tensor, int]:
        storage = saved.untyped_storage()
        address = storage.data_ptr()
        if address not in self._weights:
            own = saved.detach()
            return own, own._version
        if address not in self._copies:
            self._copies[address] = storage.clone()
        copy = torch.empty(0, dtype=saved.dtype, device=saved.device)
        copy.set_(self._copies[address], saved.storage_offset(), saved.size(), saved.stride())
        return copy, copy._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    saved, version = packed
    if saved._version != version:
        raise ModelError(
            f"a tensor of shape {tuple(saved.shape)} that a retained graph needs was changed in"
            " place after the net had run: outputs or states of an update? Change copies of them,"
            " or take graphs='recompute'."
        )
    return saved
