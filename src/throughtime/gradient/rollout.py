"""The exact gradient for any loss of the outputs, in the memory of one chunk.

A custom autograd function around a checkpointed pass (`_segments.py`): forward without a graph,
states stored between chunks; backward chunk by chunk, each run again from its state, with the
cotangents that autograd passes in.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError, ModelError
from throughtime.gradient import schedule
from throughtime.gradient._backward import CreditFlow, GradientAccumulator
from throughtime.gradient._memory import MemoryBudget, Offload
from throughtime.gradient._segments import CheckpointedPass, Verify, check_verify
from throughtime.gradient.objective import trainable_weights
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
    """Outputs for all steps and the state after them, with a graph of constant memory.

    Same call as `net(x, state, resets)` and the same gradients, to inputs, state and parameters.
    Use it for losses that are not a mean over steps (of a spectrum, of a whole sequence, of its
    end), or as part of a larger graph. Where the loss is a mean over steps, `tt.updates` with
    `tt.Exact` holds neither inputs nor outputs in memory.

    Args:
        net: made by `tt.carry`.
        x: `(T, B, D)`, or `(T, B)` integers for a module that embeds them; one unbatched lane as
            floating `(T, D)` or integer `(T,)`.
        state: the state entering the first step; default: the initial state.
        resets: `(T, B)` bool, true where the state entering the step is the initial state.
        memory: for stored states and the graph of one chunk; see `tt.Exact`.
        chunk: steps per forward call; "auto": the fastest that fits.
        offload: where the states between chunks are stored; see `tt.Exact`.
        verify: which recomputed states are compared; see `tt.Exact`.

    Returns:
        `y` `(T, B, C)`, and the state after step T.

    Raises:
        ConfigError: a memory too small; it says how much is needed.
        DataError: inputs that are not `(T, B, ...)` with at least one step.
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
    budget = MemoryBudget(memory, chunk, offload)
    budget.check()
    check_verify(verify)
    if x.dim() < 2 or not len(x):
        raise DataError(
            f"inputs have shape {tuple(x.shape)}, expected (T, B, D) or (T, B) with at least one"
            " step"
        )
    steps = Chunk.from_tensors(x, resets=resets)
    entering = net.initial_state(steps.lanes, like=x) if state is None else state
    length = budget.segment_steps(
        net, steps.steps, lambda n: steps[0:n], trees.detach(entering), None
    )
    bounds = schedule.pieces(steps.steps, length)
    plan = _Plan(net, steps, entering, bounds, offload, verify)
    weights = trainable_weights(net).values()
    y, *leaves = _Rollout.apply(plan, x, *trees.tensors(entering), *weights)
    rest = iter(leaves)
    return y, trees.map_leaves(lambda _: next(rest), entering)


@dataclass(eq=False)
class _Plan:
    """One rollout, and the versions of the weights that its backward pass must find."""

    net: Carried
    steps: Chunk
    entering: State
    bounds: Sequence[int]
    offload: Offload
    verify: Verify
    versions: list[int] = field(default_factory=list[int])

    def chunks(self) -> Iterator[Chunk]:
        """The steps, segment by segment."""
        return (self.steps[start:stop] for start, stop in pairwise(self.bounds))

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast that is active now, for later."""
        kind = self.steps.inputs.device.type
        if not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def checkpointed(self, *, input_grads: bool) -> CheckpointedPass:
        """The pass; it starts from a state without a graph, which autograd joins to its past."""
        return CheckpointedPass(
            self.net,
            self.bounds,
            lambda start, stop: self.steps[start:stop],
            trees.detach(self.entering),
            offload=self.offload,
            verify=self.verify,
            input_grads=input_grads,
        )

    def span(self, chunk: Chunk) -> slice:
        """The steps of a chunk among all of them."""
        return slice(chunk.start - self.steps.start, chunk.stop - self.steps.start)


class _Rollout(torch.autograd.Function):
    """`plan, x, *state, *weights` to `y, *state`."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        checkpoints = plan.checkpointed(input_grads=x.requires_grad)
        outputs: Tensor | None = None
        for chunk, y in checkpoints.forward(plan.chunks(), graph=False):
            if outputs is None:
                outputs = y.new_empty(plan.steps.steps, *y.shape[1:])
            outputs[plan.span(chunk)] = y
        if outputs is None:
            raise RuntimeError("a rollout without steps")
        ctx.save_for_backward(x)  # autograd then detects inputs that were changed in place
        ctx.plan, ctx.checkpoints, ctx.autocast = plan, checkpoints, plan.autocast()
        ctx.weights = rest[len(trees.tensors(plan.entering)) :]
        plan.versions[:] = [weight._version for weight in ctx.weights]
        leaves = trees.tensors(checkpoints.state)
        ctx.mark_non_differentiable(*(leaf for leaf in leaves if not trees.differentiable(leaf)))
        ctx.set_materialize_grads(False)
        return outputs, *leaves

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ModelError(
                "tt.rollout was asked for a second derivative (create_graph=True): its backward"
                " pass keeps no graph of its own. For gradient penalties and the like call the net"
                " itself, net(x, state, resets), on a stretch that fits in memory."
            )
        dy, *cotangents = grad_outputs
        (x,) = ctx.saved_tensors
        plan: _Plan = ctx.plan
        weights: list[Tensor] = list(ctx.weights)
        if [weight._version for weight in weights] != plan.versions:
            raise ModelError(
                "weights were changed in place (optimizer.step()?) between tt.rollout and its"
                " backward pass, which runs the net again: call backward first"
            )
        named = {str(i): weight for i, weight in enumerate(weights)}
        flow = CreditFlow(GradientAccumulator(named), cotangents)
        dx = torch.zeros_like(x) if x.requires_grad else None
        with ctx.autocast:
            for segment in ctx.checkpoints.backward():
                span = plan.span(segment.chunk)
                roots = [] if dy is None else [(segment.outputs, dy[span])]
                product = flow.through(segment, roots)
                if dx is not None and product.inputs is not None:
                    dx[span] = product.inputs
                del segment, roots
        return None, dx, *(flow.cotangents or ()), *flow.grads.result()
