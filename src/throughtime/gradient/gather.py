"""Gradients gathered piece by piece, and handed over once.

Hooks on parameters, and whoever accumulates into `.grad`, see one whole gradient, as after an
ordinary backward pass.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Gathered:
    """The sum of the gradients added so far, one for each weight."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.names, self.weights = list(weights), list(weights.values())
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Adds `scale` times the gradients; `None` is zero."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self.sums[i]
            if total is None:  # half precision would lose what many pieces add
                kept = (
                    gradient.float()
                    if gradient.dtype in (torch.bfloat16, torch.float16)
                    else gradient
                )
                self.sums[i] = kept.clone() if kept is gradient and scale == 1 else kept * scale
            elif total.is_sparse or gradient.is_sparse:
                self.sums[i] = total + gradient * scale
            else:
                total.add_(gradient, alpha=scale)

    def dense(self) -> list[Tensor]:
        """Every sum, zeros where nothing was added."""
        return [
            torch.zeros_like(w) if s is None else s.to_dense()
            for w, s in zip(self.weights, self.result(), strict=True)
        ]

    def result(self) -> list[Tensor | None]:
        """Every sum in the type of its weight."""
        return [
            None if s is None else s.to(w.dtype)
            for w, s in zip(self.weights, self.sums, strict=True)
        ]

    def faulty(self) -> str | None:
        """The name of the first weight whose gradient is not finite."""
        for name, total in zip(self.names, self.sums, strict=True):
            values = total.coalesce().values() if total is not None and total.is_sparse else total
            if values is not None and not bool(values.isfinite().all()):
                return name
        return None

    def deliver(self) -> None:
        """Adds the sums to `.grad`, through autograd."""
        chosen = [(w, s) for w, s in zip(self.weights, self.result(), strict=True) if s is not None]
        if chosen:
            with torch.enable_grad():
                _Delivery.apply([s for _, s in chosen], *[w for w, _ in chosen]).backward()
        self.sums = [None] * len(self.weights)


class _Delivery(torch.autograd.Function):
    """A number whose gradient with respect to the weights is what was gathered."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def weights_of(net: nn.Module, loss_fn: object = None) -> dict[str, Tensor]:
    """The parameters that want a gradient, by name: those of the net, and of a loss that has its own."""
    found: dict[str, Tensor] = {
        name.removeprefix("module."): weight
        for name, weight in net.named_parameters()
        if weight.requires_grad
    }
    if isinstance(loss_fn, nn.Module):
        mine = {id(weight) for weight in found.values()}
        named = loss_fn.named_parameters()
        found |= {
            f"loss_fn.{name}": weight
            for name, weight in named
            if weight.requires_grad and id(weight) not in mine
        }
    return found


@contextmanager
def hooks_held(weights: Sequence[Tensor]) -> Generator[None]:
    """Hooks on weights wait: gradients of pieces are no gradients, and the hooks see the whole one when it is delivered."""
    # there is no public way
    held = [(hooks, dict(hooks)) for weight in weights if (hooks := weight._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


def norm(tensors: Iterable[Tensor | None]) -> float:
    """The norm of all of them together."""
    squares = [wide(t.detach().abs()).square().sum() for t in tensors if t is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def wide(values: Tensor) -> Tensor:
    """The values in double precision, where the device has it."""
    if values.is_complex():
        return values if values.device.type == "mps" else values.to(torch.complex128)
    return values.float() if values.device.type == "mps" else values.double()
