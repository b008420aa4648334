"""Shared by the tests of the optimizers: odd parameters, gradients by step, differences."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from throughtime import optim
from throughtime.kernels.library import library, why_missing

PAIRS: dict[str, tuple[Any, Any]] = {
    "adam": (optim.Adam, torch.optim.Adam),
    "adamw": (optim.AdamW, torch.optim.AdamW),
    "sgd": (optim.SGD, torch.optim.SGD),
}
SHAPES = ((7, 5), (33,), (), (1,), (4, 0), (2, 3, 5), (16, 50))
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
needs_core = pytest.mark.skipif(library() is None, reason=str(why_missing()))


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    """Parameters of odd shapes, one of them transposed in memory."""
    draw = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in SHAPES]
    return [*params, nn.Parameter(torch.randn(6, 9, generator=draw, dtype=dtype).t())]


def in_two_groups(params: list[nn.Parameter], **other: Any) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], **other}]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    """Set gradients drawn from the step, large and small in turn, in the parameters' layouts."""
    draw = torch.Generator().manual_seed(1000 + step)
    for param in params:
        drawn = torch.randn(param.shape, generator=draw, dtype=torch.float64) * 10.0 ** (
            step % 3 - 1
        )
        param.grad = torch.empty_like(param).copy_(drawn)


def max_difference(ours: list[Tensor], torchs: list[Tensor]) -> float:
    """The largest distance between vectors, in units of the largest number of each."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, torchs, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers in one vector: alone, a number that cancels to near zero has a large error."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def state_vectors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer keeps, a vector for each name."""
    states: list[dict[str, Tensor]] = list(optimizer.state_dict()["state"].values())
    return [flattened([state[name] for state in states]) for name in (states[0] if states else ())]


def was_compiled(optimizer: Any) -> bool:
    return optimizer.fallback is None


def steps(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], start: int, stop: int
) -> None:
    for step in range(start, stop):
        set_grads(params, step)
        optimizer.step()


def layout(state: dict[str, Any]) -> object:
    """Keys, types and layouts."""
    tensors = {
        k: {n: (t.dtype, t.shape, t.stride()) for n, t in entry.items()}
        for k, entry in state["state"].items()
    }
    return tensors, [sorted(group) for group in state["param_groups"]]


class Race:
    """Our optimizer and torch's side by side, on parameters that begin alike."""

    def __init__(
        self,
        rule: str,
        dtype: torch.dtype = torch.float64,
        /,
        max_norm: float | None = None,
        other: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.mine, self.theirs, self.max_norm = make_params(dtype), make_params(dtype), max_norm
        options, other = {"lr": 0.1} | options, other or {}
        groups = in_two_groups(self.mine, **other), in_two_groups(self.theirs, **other)
        self.ours = PAIRS[rule][0](groups[0], max_norm=max_norm, **options)
        self.torchs = PAIRS[rule][1](groups[1], **options)

    @property
    def sides(self) -> list[tuple[list[nn.Parameter], Any]]:
        return [(self.mine, self.ours), (self.theirs, self.torchs)]

    def run(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            for params, _ in self.sides:
                set_grads(params, step)
            norm = None if self.max_norm is None else clip_grad_norm_(self.theirs, self.max_norm)
            self.ours.step()
            self.torchs.step()
            if norm is not None:
                assert self.ours.norm == pytest.approx(float(norm), rel=BOUNDS[norm.dtype])

    @property
    def apart(self) -> float:
        """The largest difference of weights and state."""
        ours, torchs = ([flattened(p), *state_vectors(o)] for p, o in self.sides)
        return max_difference(ours, torchs)
