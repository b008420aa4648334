"""Streams for the modules of the corpus, and comparisons with their oracles.

Shapes: `T` steps, `B` lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .case import Case


def lengths_of(steps: int) -> list[list[int]]:
    """The whole stream, two chunks, single steps."""
    return [[steps], [steps // 2, steps - steps // 2], [1] * steps]


def build(case: Case, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The module in evaluation mode, and a stream for it."""
    torch.manual_seed(seed)
    module = case.make().eval()
    lanes = case.lanes if case.lanes is not None else 1 if case.verdict == "lane" else 3
    torch.manual_seed(seed + 1)
    return module, case.inputs(case.steps or 7, lanes)


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the size of the numbers."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / (1 + b.abs().max()))


def errors(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest of some differences."""
    return max((error(p, q) for p, q in zip(a, b, strict=True)), default=0.0)


def gradients(y: Tensor, module: nn.Module) -> list[Tensor]:
    """Gradients of a fixed random projection of the outputs."""
    leaves = [p for p in module.parameters() if p.requires_grad]
    if not y.requires_grad:
        return [torch.zeros_like(p) for p in leaves]
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True))


def restarted(case: Case, module: nn.Module, x: Tensor, starts: Tensor) -> Tensor:
    """The oracle run anew on every piece of every lane between two starts."""
    lanes = []
    for b in range(x.size(1)):
        cuts = [t for t in range(1, len(x)) if starts[t, b]]
        bounds = zip([0, *cuts], [*cuts, len(x)], strict=True)
        pieces = [case.oracle(module, x[i:j, b : b + 1], [j - i]) for i, j in bounds]
        lanes.append(torch.cat(pieces))
    return torch.cat(lanes, dim=1)
