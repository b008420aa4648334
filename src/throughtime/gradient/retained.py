"""The other execution of truncated backpropagation: graphs of earlier strides are kept, not run
again.

    every stride:   run it once, from a detached copy of the carried state, and keep its graph
    every update:   back through the kept graphs of the last `horizon` steps, the newest first, each
    with a fresh adjoint

At fixed weights the gradients are those of the windows that `window.py` runs again. After
`optimizer.step()` the kept graphs go on to belong to the weights they were run with, as in Williams
and Peng's paper, while a window that is run again belongs to the present ones. Weights that a graph
has saved are copied when it is built, so that the optimizer may change them in place;
`torch.autograd.graph.allow_mutation_on_saved_tensors` does the same for every tensor, but has to be
entered around the user's loop, which it slows down, and stays behind when the loop is left.

Measured on a 2-core Zen 5 beside windows that are run again, horizon 4 to 16 strides: 0.75 to 1.0
of the time for a GRUCell in a Python loop, 1.2 to 1.7 for fused layers, whose forward pass is cheap
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
from throughtime.errors import ModelError, RunError
from throughtime.gradient.finite import not_finite
from throughtime.gradient.gather import Gathered, hooks_held, weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import Progress, Update, nothing
from throughtime.gradient.sweep import Adjoint, Piece, started
from throughtime.state import State


def kept_update(
    net: Carried,
    chunk: Chunk,
    stop: int,
    objective: Objective,
    progress: Progress,
    stride: int,
    horizon: int,
) -> tuple[Update | None, Progress]:
    """Runs one stride, keeps its graph, and, if a step of it counts, goes back through the kept ones."""
    pieces = [
        *progress.graphs,
        *_played(net, chunk, progress.edge, _cut(chunk.steps, stride, horizon)),
    ]
    state = trees.detach(pieces[-1].after)
    fresh = len(pieces) - len(progress.graphs)
    outputs = torch.cat([piece.outputs.detach() for piece in pieces[-fresh:]])
    update = nothing(objective, chunk, state, outputs)
    if objective.counts(chunk):
        loss = _back(net, objective, outputs, chunk, stop, pieces, fresh, horizon)
        update = Update(
            loss, chunk.valid, state, outputs.detach(), chunk, weight=objective.weight(chunk)
        )
    return update, Progress(state, state, graphs=_needed(pieces, horizon))


def _cut(steps: int, stride: int, horizon: int) -> list[int]:
    """Where a stride is cut in two, so that a later window begins at an edge."""
    at = (steps - horizon) % stride
    return [0, at, steps] if 0 < at < steps else [0, steps]


def _played(net: Carried, chunk: Chunk, edge: State, cuts: Sequence[int]) -> list[Piece]:
    """The steps between the cuts, each with a graph of its own."""
    pieces: list[Piece] = []
    with Copies(net).kept():
        for start, stop in pairwise(cuts):
            edge = pieces[-1].after if pieces else edge
            pieces.append(started(net, chunk[start:stop], edge))
    return pieces


def _back(
    net: Carried,
    objective: Objective,
    outputs: Tensor,
    chunk: Chunk,
    stop: int,
    pieces: list[Piece],
    fresh: int,
    horizon: int,
) -> Tensor:
    """Adds the gradient of the newest stride's loss to `.grad`; returns the loss, detached."""
    objective.check_weights(outputs, chunk)
    loss = objective.loss(outputs.requires_grad_(), chunk)
    if not loss.requires_grad:
        objective.check_depends([])
    gathered = Gathered(weights_of(net, objective.loss_fn))
    with hooks_held(gathered.weights):
        dy, *own = torch.autograd.grad(
            objective.scaled(loss), [outputs, *gathered.weights], allow_unused=True
        )
    gathered.add(own)
    parts = iter(reversed(dy.split([piece.chunk.steps for piece in pieces[-fresh:]])))
    adjoint: Adjoint | None = None
    for piece in reversed(_within(net, pieces, horizon)):
        part = next(parts, None)
        pulled = piece.pull(
            gathered.weights, [] if part is None else [(piece.outputs, part)], adjoint, keep=True
        )
        gathered.add(pulled.weights)
        adjoint = pulled.adjoint
    objective.check_depends(gathered.sums)
    fault = gathered.faulty() if objective.scaler is None else None
    if fault is not None:
        raise RunError(not_finite(fault, stop - chunk.steps, stop, chunk, loss.item()))
    gathered.deliver()
    return loss.detach()


def _within(net: Carried, pieces: list[Piece], horizon: int) -> list[Piece]:
    """The pieces of the last `horizon` steps.

    One that begins earlier, as at a ragged end, is run again from there on.
    """
    found: list[Piece] = []
    left = horizon
    for piece in reversed(pieces):
        if left <= 0:
            break
        found.append(
            piece
            if piece.chunk.steps <= left
            else _later_part(net, piece, piece.chunk.steps - left)
        )
        left -= piece.chunk.steps
    return found[::-1]


def _later_part(net: Carried, piece: Piece, start: int) -> Piece:
    first, second = piece.chunk[0:start], piece.chunk[start : piece.chunk.steps]
    with torch.no_grad():
        _, edge = net(
            first.inputs, trees.detach(piece.before), first.resets if first.any_reset else None
        )
    return started(net, second, edge)


def _needed(pieces: list[Piece], horizon: int) -> tuple[Piece, ...]:
    """Those that a later window may still reach."""
    later = 0
    for count, piece in enumerate(reversed(pieces)):
        if later >= horizon - 1:
            return tuple(pieces[len(pieces) - count :])
        later += piece.chunk.steps
    return tuple(pieces)


@dataclass(eq=False)
class Copies:
    """Copies of the weights as they are now, made where a graph saves them."""

    net: nn.Module

    def __post_init__(self) -> None:
        self._own = {weight.untyped_storage().data_ptr() for weight in self.net.parameters()}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def kept(self) -> AbstractContextManager[Any]:
        """Graphs built inside save copies of the weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, _unchanged)

    def _keep(self, saved: Tensor) -> tuple[Tensor, int]:
        storage = saved.untyped_storage()
        place = storage.data_ptr()
        if place not in self._own:
            kept = saved.detach()
            # torch's documented counter has no other name
            return (kept, kept._version)
        if place not in self._copies:
            self._copies[place] = storage.clone()
        copy = torch.empty(0, dtype=saved.dtype, device=saved.device)
        copy.set_(self._copies[place], saved.storage_offset(), saved.size(), saved.stride())
        return copy, copy._version


def _unchanged(kept: tuple[Tensor, int]) -> Tensor:
    if kept[0]._version != kept[1]:
        raise ModelError(
            f"a tensor of shape {tuple(kept[0].shape)} that a kept graph needs was changed in place"
            " after the net had run: outputs or states of an update? Change copies of them, or"
            " take graphs='recompute'."
        )
    return kept[0]
