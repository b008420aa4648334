"""How a gradient reaches the weights, and those of the loss: once, whole, or not
at all if it is not finite.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    POLICIES,
    PolicyData,
    Tempered,
    deviation,
    every_policy,
    plain,
    policy_gradients,
)
from strategies import (
    FEATURES,
    HIDDEN,
    Weights,
    apart,
    gradients,
    named,
    recordings,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.errors import ModelError, RunError
from throughtime.gradient import Policy

EXACT = 1e-10


def each_update(
    net: Carried, loss_fn: nn.Module, data: PolicyData, policy: Policy
) -> list[tuple[int, Weights]]:
    """Where each update ends, and its gradient to the weights of net and loss."""
    torch.manual_seed(3)  # where the randomized one cuts
    results = list[tuple[int, Weights]]()
    for update in tt.updates(net, [data.chunk], loss_fn, gradient=policy):
        results.append((int(update.chunk.position[-1, 0]) + 1, gradients(net) | gradients(loss_fn)))
        net.zero_grad()
        loss_fn.zero_grad()
    return results


@every_policy
def test_every_update_calls_every_hook_once_with_the_whole_gradient(policy: Policy) -> None:
    """Hooks on gradients, which halve them, and hooks after accumulation, of net and loss."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), PolicyData.draw(30, 2, 0)
    expected = each_update(net, loss_fn, data, policy)
    calls, accumulated = list[Tensor](), list[Tensor]()

    def halve(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient / 2

    everything = [*net.parameters(), *loss_fn.parameters()]
    for p in everything:
        p.register_hook(halve)
        p.register_post_accumulate_grad_hook(accumulated.append)
    results = each_update(net, loss_fn, data, policy)
    assert len(calls) == len(accumulated) == len(everything) * len(expected)
    for (_, got), (_, whole) in zip(results, expected, strict=True):
        assert apart(got, {name: g / 2 for name, g in whole.items()}) < EXACT


class Decayed(nn.Module):
    """A loss with a weight of its own and one of the net's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y / self.temperature - t).square().mean() + self.weight.square().sum()


@pytest.mark.parametrize(
    "policy", [tt.Exact(chunk=4), tt.Truncated(30), tt.Truncated(30, 31)], ids=str
)
def test_weights_of_the_loss_get_the_gradient_of_plain_autograd_once(policy: Policy) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(30, 2, 0, masked=0.3)
    loss_fn = Decayed(net.get_parameter("module.head.weight"))
    expected = plain(net, data, loss_fn=loss_fn)
    (own,), loss_fn.temperature.grad = [loss_fn.temperature.grad], None
    assert deviation(policy_gradients(net, [data.chunk], policy, loss_fn), expected) < EXACT
    torch.testing.assert_close(loss_fn.temperature.grad, own, rtol=EXACT, atol=0)
    assert apart(plain(net, data)[0][2], expected[0][2]) > 0.1


def test_weights_of_a_loss_inside_a_function_get_their_gradient_or_are_refused() -> None:
    """Also where the last segment has no loss."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), PolicyData.draw(30, 2, 0)
    user_loss = lambda y, t: loss_fn(y, t)  # noqa: E731, PLW0108  # as users do
    list(tt.updates(net, [data.chunk], user_loss, gradient=POLICIES["truncated"]))
    assert loss_fn.temperature.grad is not None
    mask = torch.arange(30).unsqueeze(1).expand(30, 2) < 15
    chunk = Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)
    with pytest.raises(ModelError, match="weights of its own inside"):
        list(tt.updates(net, [chunk], user_loss, gradient=tt.Exact(chunk=10)))


class Roots(nn.Module):
    """Has no gradient to `scale` where inputs are zero; to its first and its last weight it has."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, HIDDEN)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.head(y) + (self.scale * x).abs().sqrt().sum(2, keepdim=True), state


def rootless(*zeros: int) -> tt.Stream:
    """Recordings of 20 and 15 steps on one lane; the inputs are zero at some steps of the epoch."""
    results = recordings([20, 15], outputs=HIDDEN)
    for at in zeros:
        results[int(at >= 20)]["inputs"][at - 20 * (at >= 20)] = 0
    return tt.Stream(results, 1, 5, seed=None)


def faulty(zeros: Sequence[int] = (), targets: Sequence[int] = ()) -> Chunk:
    """The same epoch; at some steps inputs are zero, or targets are NaN."""
    epoch = join(list(rootless(*zeros)))
    assert epoch.targets is not None
    epoch.targets[list(targets)] = torch.nan
    return epoch


@pytest.mark.parametrize(
    ("epoch", "steps", "loss"),
    [
        (faulty([13, 18]), "12 to 15", "[0-9.]+"),
        (faulty(targets=[7, 13]), "4 to 7", "nan"),
        (faulty([17], targets=[6]), "4 to 7", "nan"),
    ],
    ids=["gradients of the last two segments", "losses", "loss before gradient"],
)
def test_chunk_named_is_the_first_with_such_a_loss_else_the_last_with_such_a_gradient(
    epoch: Chunk, steps: str, loss: str
) -> None:
    """A loss that is no number began the trouble.

    Else the gradient did, on its way back from the end.
    """
    net = tt.carry(Roots().double())
    with pytest.raises(
        RunError,
        match=rf"in the chunk of steps {steps} of the epoch .*, whose part of the loss is {loss}\.",
    ):
        list(tt.updates(net, [epoch], nn.MSELoss(), gradient=tt.Exact(chunk=4)))
    assert all(p.grad is None for p in net.parameters())


@every_policy
def test_every_weight_is_checked_and_gradients_are_as_before(policy: Policy) -> None:
    net = tt.carry(Roots().double())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    own = [p.grad for p in net.parameters()]
    with pytest.raises(RunError, match="the gradient of 'scale' is not finite"):
        list(tt.updates(net, rootless(2), nn.MSELoss(), gradient=policy))
    for p, grad in zip(net.parameters(), own, strict=True):
        assert p.grad is grad
        assert grad is not None
        assert (grad == 1).all()
