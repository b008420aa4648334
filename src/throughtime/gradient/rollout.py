"""The exact gradient for any loss of the outputs, transparent to autograd, in the memory of one
chunk.

A custom autograd function around a sweep (`sweep.py`): forward without a graph, states kept at the
chunks' edges; backward chunk by chunk, each run again from its state, with whatever cotangents
autograd hands in.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError, ModelError
from throughtime.gradient import schedule
from throughtime.gradient.budget import Room
from throughtime.gradient.edges import Offload
from throughtime.gradient.gather import Gathered, weights_of
from throughtime.gradient.sweep import Adjoint, Sweep, Verify, check_verify
from throughtime.state import State


def rollout(
    net: Carried,
    x: Tensor,
    state: State = None,
    *,
    resets: Tensor | None = None,
    memory: str | int | float = "512MB",
    chunk: int | Literal["auto"] = "auto",
    offload: Offload = None,
    verify: Verify = "first",
) -> tuple[Tensor, State]:
    """Outputs for all steps and the state after them, with a graph whose memory does not grow with
    the steps.

    Looks like `net(x, state, resets)` and has the same gradients, to inputs, state and parameters.
    Use it for losses that are no mean over steps: of a spectrum, of a whole sequence, of its end;
    or as a part of a larger graph. Where the loss is a mean over steps, `tt.updates` with
    `tt.Exact` holds neither inputs nor outputs in memory.

    Args:
        net: made by `tt.carry`.
        x: `(T, B, D)`, or `(T, B)` integers for a module that embeds them; one unbatched lane as
            floating `(T, D)` or integer `(T,)`.
        state: the state entering the first step; default: the initial state.
        resets: `(T, B)` bool, true where the state entering the step is the initial state.
        memory: for edge states and the graph of one chunk, while gradients flow; see `tt.Exact`.
        chunk: steps per forward call; "auto": the fastest that fits.
        offload: where edge states are kept; see `tt.Exact`.
        verify: which recomputed states are compared; see `tt.Exact`.

    Returns:
        `y` `(T, B, C)`, and the state after step T.

    Raises:
        ConfigError: a memory too small; it says how much is needed.
        DataError: inputs that are no `(T, B, ...)` with at least one step.
        ModelError: the forward pass does not repeat, weights changed before the backward pass, or a
            second derivative (`create_graph=True`) was asked for.

    Cost: two forward passes and one backward pass per step; outputs and their gradient in memory.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> y, _ = tt.rollout(net, torch.randn(4096, 1, 3))
        >>> torch.fft.rfft(y[:, 0, 0]).abs()[10].backward()  # one bin of a spectrum
        >>> net.module.weight_hh_l0.grad.shape
        torch.Size([24, 8])

    References: T. Chen et al., Training deep nets with sublinear memory cost (2016).
    """
    require_carried(net)
    if x.dim() == (2 if x.is_floating_point() else 1):
        resets = None if resets is None else resets.unsqueeze(1)
        y, end = rollout(
            net,
            x.unsqueeze(1),
            state,
            resets=resets,
            memory=memory,
            chunk=chunk,
            offload=offload,
            verify=verify,
        )
        return y.squeeze(1), end
    room = Room(memory, chunk, offload)
    room.check()
    check_verify(verify)
    if x.dim() < 2 or not len(x):
        raise DataError(
            f"inputs have shape {tuple(x.shape)}, expected (T, B, D) or (T, B) with at least one"
            " step"
        )
    steps = Chunk.from_tensors(x, resets=resets)
    entering = net.initial_state(steps.lanes, like=x) if state is None else state
    length = room.length(
        net, steps.steps, lambda wanted: steps[0:wanted], trees.detach(entering), None
    )
    plan = Plan(net, steps, entering, schedule.pieces(steps.steps, length), offload, verify, [])
    y, *leaves = _Rollout.apply(plan, x, *trees.tensors(entering), *weights_of(net).values())
    following = iter(leaves)
    return y, trees.map_leaves(lambda _: next(following), entering)


@dataclass(eq=False)
class Plan:
    """One rollout: what is run, and what its backward pass must find unchanged."""

    net: Carried
    steps: Chunk
    entering: State
    bounds: Sequence[int]
    offload: Offload
    verify: Verify
    versions: list[int]

    def chunks(self) -> Iterator[Chunk]:
        """The steps, piece by piece."""
        return (self.steps[start:stop] for start, stop in pairwise(self.bounds))

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast that is on now, for later."""
        kind = self.steps.inputs.device.type
        if not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def sweep(self, *, to_inputs: bool) -> Sweep:
        """The executor; its pieces start from states without a graph, autograd joins them to what came before."""
        start = trees.detach(self.entering)
        return Sweep(
            self.net,
            self.bounds,
            lambda start, stop: self.steps[start:stop],
            start,
            offload=self.offload,
            verify=self.verify,
            to_inputs=to_inputs,
        )


class _Rollout(torch.autograd.Function):
    """`plan, x, *state, *weights` to `y, *state`."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        sweep = plan.sweep(to_inputs=x.requires_grad)
        outputs: Tensor | None = None
        for chunk, y in sweep.forward(plan.chunks(), graph=False):
            if outputs is None:
                outputs = y.new_empty(plan.steps.steps, *y.shape[1:])
            outputs[_span(chunk, plan)] = y
        if outputs is None:
            raise RuntimeError("a rollout without steps")
        ctx.save_for_backward(x)  # autograd then finds inputs that were changed in place
        ctx.plan, ctx.sweep, ctx.autocast = plan, sweep, plan.autocast()
        ctx.weights = rest[len(trees.tensors(plan.entering)) :]
        # torch's documented counter has no other name
        plan.versions[:] = [weight._version for weight in ctx.weights]
        leaves = trees.tensors(sweep.state)
        ctx.mark_non_differentiable(*(leaf for leaf in leaves if not trees.differentiable(leaf)))
        ctx.set_materialize_grads(False)
        return outputs, *leaves

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ModelError(
                "tt.rollout was asked for a second derivative (create_graph=True): its backward"
                " pass keeps no graph of its own. For gradient penalties and the like call the net"
                " itself, net(x, state, resets), on a stretch that fits in memory."
            )
        (x,) = ctx.saved_tensors
        plan: Plan = ctx.plan
        weights: list[Tensor] = list(ctx.weights)
        if [weight._version for weight in weights] != plan.versions:
            raise ModelError(
                "weights were changed in place (optimizer.step()?) between tt.rollout and its"
                " backward pass, which runs the net again: call backward first"
            )
        dy, adjoint = cotangents[0], cotangents[1:]
        gathered = Gathered({str(i): weight for i, weight in enumerate(weights)})
        dx = torch.zeros_like(x) if x.requires_grad else None
        with ctx.autocast:
            adjoint = _back(ctx.sweep, plan, dy, adjoint, gathered, dx)
        return None, dx, *adjoint, *gathered.result()


def _back(
    sweep: Sweep,
    plan: Plan,
    dy: Tensor | None,
    adjoint: Adjoint,
    gathered: Gathered,
    dx: Tensor | None,
) -> Adjoint:
    """The adjoint of the state entering the first step.

    Fills in the gradients of weights and inputs on the way.
    """
    for piece in sweep.backward():
        span = _span(piece.chunk, plan)
        pulled = piece.pull(
            gathered.weights, [] if dy is None else [(piece.outputs, dy[span])], adjoint
        )
        gathered.add(pulled.weights)
        if dx is not None and pulled.inputs is not None:
            dx[span] = pulled.inputs
        adjoint = pulled.adjoint
        del piece
    return adjoint


def _span(chunk: Chunk, plan: Plan) -> slice:
    return slice(chunk.start - plan.steps.start, chunk.stop - plan.steps.start)
