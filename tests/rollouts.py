"""What the tests of tt.rollout share: losses, what they blame, and the net itself beside it.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import throughtime as tt
from strategies import Weights, apart, gradients, start, states_apart
from throughtime.carry import Carried
from throughtime.state import State

EXACT = 1e-10
LaneSlice = Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]]
Loss = Callable[[Tensor, State], Tensor]


def of_all(y: Tensor, _: State) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).square().mean()


def of_last(y: Tensor, _: State) -> Tensor:
    return y[-1].square().sum()


def of_spectrum(y: Tensor, _: State) -> Tensor:
    return (
        torch.fft.rfft(y, dim=0).abs().square()[1 : 1 + len(y) // 3].mean()
        + y.std(0, correction=0).square().sum()
    )


def of_end(_: Tensor, state: State) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in tt.state.tensors(state)]).sum()


def of_both(y: Tensor, state: State) -> Tensor:
    return of_all(y, state) + of_end(y, state) + y.exp().mean() * y.max()


LOSSES: list[Loss] = [of_all, of_last, of_spectrum, of_end, of_both]


class Played(NamedTuple):
    """Outputs, state, and gradients to parameters, inputs, and the state that entered."""

    y: Tensor
    state: State
    gradients: Weights


def played(
    net: Carried, play: LaneSlice, x: Tensor, state: State, resets: Tensor | None, loss: Loss
) -> Played:
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    entering = (
        None
        if state is None
        else tt.state.map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(), state)
    )
    y, after = play(x, entering, resets)
    loss(y, after).backward()
    found = gradients(net) | {"x": torch.zeros_like(x) if x.grad is None else x.grad}
    for name, leaf in () if state is None else tt.state.leaves(entering):
        found[f"state.{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    net.zero_grad()
    return Played(y.detach(), tt.state.detach(after), found)


def whole(net: Carried) -> LaneSlice:
    return lambda x, state, resets: net(x, start(net, x) if state is None else state, resets)


def rolled(net: Carried, **options: Any) -> LaneSlice:
    return lambda x, state, resets: tt.rollout(net, x, state, resets=resets, **options)


def deviation(a: Played, b: Played) -> float:
    return max(
        (a.y - b.y).abs().max().item(),
        states_apart(a.state, b.state),
        apart(a.gradients, b.gradients),
    )


def random_state(net: Carried, x: Tensor, seed: int = 9) -> State:
    draw = torch.Generator().manual_seed(seed)
    return tt.state.map_leaves(
        lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype) * 0.5,
        tt.state.detach(start(net, x)),
    )


def random_resets(steps: int, lanes: int, seed: int = 9) -> Tensor:
    return torch.rand(steps, lanes, generator=torch.Generator().manual_seed(seed)) < 0.1
