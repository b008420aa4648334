"""Gradients gathered piece by piece, and handed over once.

Hooks on parameters, and whoever accumulates into `.grad`, see one whole gradient, as after an ordinary backward pass.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Gathered:
    """The sum of the gradients added so far, one for each weight."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Adds `scale` times the gradients; `None` is zero."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self.sums[i]
            if total is None:
                self.sums[i] = gradient.clone() if scale == 1 else gradient * scale
            elif total.is_sparse or gradient.is_sparse:
                self.sums[i] = total + gradient * scale
            else:
                total.add_(gradient, alpha=scale)

    def dense(self) -> list[Tensor]:
        """Every sum, zeros where nothing was added."""
        return [torch.zeros_like(w) if s is None else s.to_dense() for w, s in zip(self.weights, self.sums, strict=True)]

    def faulty(self) -> int | None:
        """The place of the first gradient that is not finite."""
        for i, total in enumerate(self.sums):
            values = total.coalesce().values() if total is not None and total.is_sparse else total
            if values is not None and not bool(values.isfinite().all()):
                return i
        return None

    def deliver(self) -> None:
        """Adds the sums to `.grad`, through autograd."""
        chosen = [(w, s) for w, s in zip(self.weights, self.sums, strict=True) if s is not None]
        if chosen:
            with torch.enable_grad():
                _Delivery.apply([s for _, s in chosen], *[w for w, _ in chosen]).backward()
        self.sums = [None] * len(self.weights)


class _Delivery(torch.autograd.Function):
    """A number whose gradient with respect to the weights is what was gathered."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def weights_of(net: nn.Module) -> list[Tensor]:
    """The parameters that want a gradient."""
    return [weight for weight in net.parameters() if weight.requires_grad]


def norm(tensors: Iterable[Tensor | None]) -> float:
    """The norm of all of them together."""
    squares = [t.detach().double().square().sum() for t in tensors if t is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
