"""How a gradient reaches the weights, and those of the loss: once, whole, or not at all.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from itertools import pairwise

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
    exact_updates,
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
    remembering,
    start,
    weights,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient import Policy
from throughtime.gradient.objective import trainable_weights

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


in_segments = pytest.mark.parametrize("name", ["exact", "segments", "randomized"])


def test_optimizer_that_steps_inside_the_hook_makes_the_same_step() -> None:
    usual, fused, data = (
        named("hides-layer").net(),
        named("hides-layer").net(),
        PolicyData.draw(30, 2, 0),
    )

    def step(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in fused.parameters():
        p.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(usual.parameters(), lr=0.1)
    for _ in tt.updates(
        usual, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4, cut_every=10)
    ):
        optimizer.step()
        optimizer.zero_grad()
    exact_updates(fused, data, tt.Exact(chunk=4, cut_every=10))
    assert apart(weights(fused), weights(usual)) < EXACT


def test_frozen_weights_have_no_gradient_and_the_others_theirs() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(30, 2, 0)
    net.get_submodule("module.lstm").requires_grad_(requires_grad=False)
    ((_, _, expected),) = plain(net, data)
    exact_updates(net, data)
    assert apart(gradients(net), expected) < EXACT
    assert {name.split(".")[1] for name, p in net.named_parameters() if p.grad is not None} == {
        "head"
    }


def test_layers_below_a_frozen_one_are_blamed_through_it() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(30, 2, 0)
    net.get_submodule("module.head").requires_grad_(requires_grad=False)
    ((_, _, expected),) = plain(net, data)
    exact_updates(net, data)
    assert apart(gradients(net), expected) < EXACT
    assert gradients(net)["module.lstm.weight_hh_l0"].abs().max() > 1e-6


def blamed_on_the_loss(
    net: Carried, loss_fn: nn.Module, data: PolicyData, ends: list[int]
) -> list[Tensor]:
    """Plain autograd: the gradient of the loss's own weight, for the steps up to each end."""
    y, _ = net(data.x, start(net, data.x), data.resets)
    results = list[Tensor]()
    for begin, end in pairwise([0, *ends]):
        valid = data.mask[begin:end]
        loss = loss_fn(y[begin:end][valid], data.targets[begin:end][valid])
        results += torch.autograd.grad(loss, list(loss_fn.parameters()), retain_graph=True)
    return results


def loss_weight_error(policy: Policy) -> float:
    """How far the gradients of the loss's own weight are from plain autograd."""
    net, loss_fn = named("hides-layer").net(), Tempered()
    data, errors = PolicyData.draw(30, 2, 0, masked=0.3), list[float]()
    updates = each_update(net, loss_fn, data, policy)
    ends = [end for end, _ in updates]
    expected = blamed_on_the_loss(net, loss_fn, data, ends)
    assert len(updates) > 1 or policy is POLICIES["exact"]
    for (begin, end), (_, grads), want in zip(pairwise([0, *ends]), updates, expected, strict=True):
        assert want.abs() > 1e-3
        share = int(data.mask[begin:end].sum()) / (10 * 2)
        weight = share if isinstance(policy, tt.Randomized) else 1.0
        errors.append((grads["temperature"] - weight * want).abs().item())
    return max(errors)


@every_policy
def test_weights_of_the_loss_get_the_gradient_of_plain_autograd(policy: Policy) -> None:
    assert loss_weight_error(policy) < EXACT


@in_segments
def test_weights_of_a_loss_inside_a_function_get_their_gradient_or_are_refused(name: str) -> None:
    """As under `Truncated`, whose backward pass is autograd's own."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), PolicyData.draw(30, 2, 0)
    user_loss = lambda y, t: loss_fn(y, t)  # noqa: E731, PLW0108  # as users do
    list(tt.updates(net, [data.chunk], user_loss, gradient=POLICIES["truncated"]))
    assert loss_fn.temperature.grad is not None
    with pytest.raises(ModelError, match=r"weights of its own inside.*Give the module itself"):
        list(tt.updates(net, [data.chunk], user_loss, gradient=POLICIES[name]))


class Decayed(nn.Module):
    """A loss with a weight of the net's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y - t).square().mean() + self.weight.square().sum()


@pytest.mark.parametrize(
    "policy",
    [tt.Exact(chunk=4), tt.Truncated(30), tt.Truncated(30, 31)],
    ids=["exact", "truncated", "overlapping"],
)
def test_weight_of_both_net_and_loss_gets_both_gradients_once(policy: Policy) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(30, 2, 0, masked=0.3)
    loss_fn = Decayed(net.get_parameter("module.head.weight"))
    expected = plain(net, data, loss_fn=loss_fn)
    assert deviation(policy_gradients(net, [data.chunk], policy, loss_fn), expected) < EXACT
    assert apart(plain(net, data)[0][2], expected[0][2]) > 0.1


def test_weights_gathered_are_named_as_the_user_knows_them() -> None:
    net, loss_fn = named("hides-layer").net(), Tempered()
    results = trainable_weights(net, loss_fn)
    assert list(results) == [
        *(name for name, _ in net.module.named_parameters()),
        "loss_fn.temperature",
    ]
    assert [id(p) for p in results.values()] == [
        id(p) for p in (*net.parameters(), loss_fn.temperature)
    ]
    net.get_submodule("module.lstm").requires_grad_(requires_grad=False)
    loss_fn.requires_grad_(requires_grad=False)
    assert list(trainable_weights(net, loss_fn)) == ["head.weight", "head.bias"]
    assert list(trainable_weights(net, Decayed(net.get_parameter("module.head.weight")))) == [
        "head.weight",
        "head.bias",
    ]


class Reads(nn.Module):
    """Tokens, embedded."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, FEATURES, sparse=sparse)
        self.gru = nn.GRU(FEATURES, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.embedding(x))[0]


def test_sparse_gradients_stay_sparse_and_equal_dense_ones() -> None:
    tokens, targets = (
        torch.arange(60).view(30, 2) % 7,
        torch.randn(30, 2, HIDDEN, dtype=torch.float64),
    )
    results = list[Weights]()
    for sparse in (False, True):
        torch.manual_seed(5)
        net = tt.carry(remembering(Reads(sparse=sparse)))
        list(
            tt.updates(
                net,
                [Chunk.from_tensors(tokens, targets)],
                nn.MSELoss(),
                gradient=tt.Exact(chunk=4),
            )
        )
        grad = net.get_parameter("module.embedding.weight").grad
        assert grad is not None
        assert grad.is_sparse == sparse
        results.append({name: g.to_dense() for name, g in gradients(net).items()})
    assert apart(results[1], results[0]) < EXACT
    assert results[0]["module.embedding.weight"].abs().sum(1).count_nonzero() == 7


def test_weights_inside_a_function_are_found_where_the_last_steps_do_not_count() -> None:
    """The mutant looks at the last segment only, which has no loss."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), PolicyData.draw(30, 2, 0)
    mask = torch.arange(30).unsqueeze(1).expand(30, 2) < 15
    chunk = Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)
    user_loss = lambda y, t: loss_fn(y, t)  # noqa: E731, PLW0108  # as users do
    with pytest.raises(ModelError, match="weights of its own inside"):
        list(tt.updates(net, [chunk], user_loss, gradient=tt.Exact(chunk=10)))
