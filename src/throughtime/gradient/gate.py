"""Gates: places in time where the credit that flows back is multiplied, by nothing at all (cut), by one, or by more.

    forward:  s -> s          backward:  a -> factor * a

The factor is looked up when gradients flow, so one graph serves several truncations, one after another.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.state import State


@dataclass(eq=False)
class Gate:
    """One place; `factor` may be set between two backward passes."""

    factor: float = 1.0

    def __call__(self, state: State) -> State:
        """The same state, its gradient passing this gate."""
        leaves = [leaf for leaf in trees.tensors(state) if leaf.requires_grad]
        if not leaves:
            return state
        passed = iter(_Pass.apply(self, *leaves))
        return trees.map_leaves(lambda leaf: next(passed) if leaf.requires_grad else leaf, state)


class _Pass(torch.autograd.Function):
    """The identity, but for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *adjoint: Tensor | None) -> Any:
        factor = ctx.gate.factor
        if factor == 0:
            return None, *[None] * len(adjoint)
        return None, *(a if a is None or factor == 1 else a * factor for a in adjoint)
