"""Gates: places in time where the credit that flows back is multiplied, by zero (cut), by one, or
by more, and may be watched.

    forward:  s -> s          backward:  a -> factor * a

The factor is looked up when gradients flow, so one graph serves several truncations, one after
another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.state import State


@dataclass(eq=False)
class Gate:
    """One place; what is set counts from the next backward pass on.

    Attributes:
        factor: what the adjoint is multiplied by.
        watch: is given the adjoint of every leaf as it arrives, in their order.
    """

    factor: float = 1.0
    watch: Callable[[Sequence[Tensor | None]], None] | None = None

    def __call__(self, state: State) -> State:
        """The same state, its gradient passing this gate."""
        if (
            self.watch is not None and torch.is_grad_enabled()
        ):  # what has no graph yet has a gradient all the same
            state = trees.map_leaves(
                lambda leaf: leaf if leaf.requires_grad else _leaf(leaf), state
            )
        alive = [leaf.requires_grad for leaf in trees.tensors(state)]
        if not any(alive):
            return state
        passed = iter(
            _Pass.apply(self, alive, *(leaf for leaf in trees.tensors(state) if leaf.requires_grad))
        )
        return trees.map_leaves(lambda leaf: next(passed) if leaf.requires_grad else leaf, state)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(trees.differentiable(value))


class _Pass(torch.autograd.Function):
    """The identity, but for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, alive: list[bool], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.gate, ctx.alive = gate, alive
        ctx.set_materialize_grads(False)
        return tuple(leaf.clone() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *adjoint: Tensor | None) -> Any:
        factor = ctx.gate.factor
        if ctx.gate.watch is not None:
            found = iter(adjoint)
            ctx.gate.watch([next(found) if alive else None for alive in ctx.alive])
        if factor == 0:
            return None, None, *[None] * len(adjoint)
        return None, None, *(a if a is None or factor == 1 else a * factor for a in adjoint)
