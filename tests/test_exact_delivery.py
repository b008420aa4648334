"""How a gradient reaches the weights, and those of the loss: once, whole, weighted as the whole mean is, finite, or not at all.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import throughtime as tt
from givens import Given, deviation, plain, policy_gradients
from strategies import FEATURES, HIDDEN, Weights, apart, gradients, named, recordings, remembering, seeds, start, weights
from throughtime.chunk import join
from throughtime.errors import ConfigError, DataError, ModelError, RunError
from throughtime.gradient import Objective, Policy, online, retained, stretch, sweep
from throughtime.gradient.gather import Gathered, weights_of

EXACT = 1e-10


def run(net: tt.Carried, data: Given, policy: tt.Exact | None = None, loss_fn: Any = None, **options: Any) -> list[tt.Update]:
    return list(tt.updates(net, [data.chunk], loss_fn or nn.MSELoss(), gradient=policy or tt.Exact(chunk=4), **options))


def test_hooks_after_accumulation_are_called_once_with_the_whole_gradient() -> None:
    net, data = named("hides-layer").net(), Given.draw(30, 2, 0)
    ((_, _, expected),) = plain(net, data)
    seen = list[tuple[int, Tensor]]()

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        seen.append((id(p), p.grad.clone()))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    run(net, data)
    assert len(seen) == len({key for key, _ in seen}) == len(expected)
    names = {id(p): name for name, p in net.named_parameters()}
    assert apart({names[key]: gradient for key, gradient in seen}, expected) < EXACT


def test_hooks_on_parameters_are_called_once_with_the_whole_gradient() -> None:
    """A hook that halves the gradient halves it once."""
    net, data = named("hides-layer").net(), Given.draw(30, 2, 0)
    ((_, _, expected),) = plain(net, data)
    calls = list[Tensor]()

    def hook(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient / 2

    for p in net.parameters():
        p.register_hook(hook)
    run(net, data)
    assert len(calls) == len(expected)
    assert apart(gradients(net), {name: g / 2 for name, g in expected.items()}) < EXACT


POLICIES: dict[str, Policy] = {
    "exact": tt.Exact(chunk=4),
    "segments": tt.Exact(chunk=4, segment=10),
    "truncated": tt.Truncated(10),
    "overlapping": tt.Truncated(10, 15),
    "retained": tt.Truncated(10, 15, graphs="retain"),
    "randomized": tt.Randomized(10, grain=5),
    "online": tt.Online(10),
}
every_policy = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))


class Tempered(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y / self.temperature - t).square().mean()


def each_update(net: tt.Carried, loss_fn: nn.Module, data: Given, policy: Policy) -> list[tuple[int, Weights]]:
    """Where each update ends, and its gradient to the weights of net and loss."""
    torch.manual_seed(3)  # where the randomized one cuts
    found = list[tuple[int, Weights]]()
    for update in tt.updates(net, [data.chunk], loss_fn, gradient=policy):
        found.append((int(update.chunk.position[-1, 0]) + 1, gradients(net) | gradients(loss_fn)))
        net.zero_grad()
        loss_fn.zero_grad()
    return found


@every_policy
def test_every_update_calls_every_hook_once_with_the_whole_gradient(policy: Policy) -> None:
    """Hooks on gradients, which halve them, and hooks after accumulation, of net and loss."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), Given.draw(30, 2, 0)
    expected = each_update(net, loss_fn, data, policy)
    calls, accumulated = list[Tensor](), list[Tensor]()

    def halve(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient / 2

    everything = [*net.parameters(), *loss_fn.parameters()]
    for p in everything:
        p.register_hook(halve)
        p.register_post_accumulate_grad_hook(accumulated.append)
    found = each_update(net, loss_fn, data, policy)
    assert len(calls) == len(accumulated) == len(everything) * len(expected)
    for (_, got), (_, whole) in zip(found, expected, strict=True):
        assert apart(got, {name: g / 2 for name, g in whole.items()}) < EXACT


@pytest.mark.parametrize(("name", "module"), [("exact", sweep), ("retained", sweep), ("retained", retained), ("online", online)])
def test_hooks_that_are_not_held_are_called_for_every_piece(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant."""
    monkeypatch.setattr(module, "hooks_held", lambda _: contextlib.nullcontext())
    net, loss_fn, calls = named("hides-layer").net(), Tempered(), list[Tensor]()
    for p in (*net.parameters(), *loss_fn.parameters()):
        p.register_hook(calls.append)
    updates = each_update(net, loss_fn, Given.draw(30, 2, 0), POLICIES[name])
    assert len(calls) > len(updates) * len(updates[0][1])


def test_optimizer_that_steps_inside_the_hook_makes_the_same_step() -> None:
    usual, fused, data = named("hides-layer").net(), named("hides-layer").net(), Given.draw(30, 2, 0)

    def step(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in fused.parameters():
        p.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(usual.parameters(), lr=0.1)
    for _ in tt.updates(usual, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4, segment=10)):
        optimizer.step()
        optimizer.zero_grad()
    run(fused, data, tt.Exact(chunk=4, segment=10))
    assert apart(weights(fused), weights(usual)) < EXACT


def test_frozen_weights_have_no_gradient_and_the_others_theirs() -> None:
    net, data = named("hides-layer").net(), Given.draw(30, 2, 0)
    net.get_submodule("module.lstm").requires_grad_(requires_grad=False)
    ((_, _, expected),) = plain(net, data)
    run(net, data)
    assert apart(gradients(net), expected) < EXACT
    assert {name.split(".")[1] for name, p in net.named_parameters() if p.grad is not None} == {"head"}


def test_layers_below_a_frozen_one_are_blamed_through_it() -> None:
    net, data = named("hides-layer").net(), Given.draw(30, 2, 0)
    net.get_submodule("module.head").requires_grad_(requires_grad=False)
    ((_, _, expected),) = plain(net, data)
    run(net, data)
    assert apart(gradients(net), expected) < EXACT
    assert gradients(net)["module.lstm.weight_hh_l0"].abs().max() > 1e-6


def blamed_on_the_loss(net: tt.Carried, loss_fn: nn.Module, data: Given, ends: list[int]) -> list[Tensor]:
    """Plain autograd: the gradient to the loss's own weight, of the mean over the steps up to each of `ends`."""
    y, _ = net(data.x, start(net, data.x), data.resets)
    found = list[Tensor]()
    for begin, end in pairwise([0, *ends]):
        valid = data.mask[begin:end]
        loss = loss_fn(y[begin:end][valid], data.targets[begin:end][valid])
        found += torch.autograd.grad(loss, list(loss_fn.parameters()), retain_graph=True)
    return found


@every_policy
def test_weights_of_the_loss_get_the_gradient_of_plain_autograd(policy: Policy) -> None:
    net, loss_fn, data = named("hides-layer").net(), Tempered(), Given.draw(30, 2, 0, masked=0.3)
    updates = each_update(net, loss_fn, data, policy)
    expected = blamed_on_the_loss(net, loss_fn, data, [end for end, _ in updates])
    assert len(updates) > 1 or policy is POLICIES["exact"]
    for (begin, end), (_, got), want in zip(pairwise([0, *(end for end, _ in updates)]), updates, expected, strict=True):
        weight = int(data.mask[begin:end].sum()) / (10 * 2) if isinstance(policy, tt.Randomized) else 1.0
        assert (got["temperature"] - weight * want).abs() < EXACT
        assert want.abs() > 1e-3


@pytest.mark.parametrize(("name", "module"), [("exact", stretch), ("randomized", stretch), ("retained", retained), ("online", online)])
def test_loss_whose_weights_nobody_asks_for_gets_none(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant."""
    monkeypatch.setattr(module, "weights_of", lambda net, _: weights_of(net))
    loss_fn = Tempered()
    list(tt.updates(named("hides-layer").net(), [Given.draw(30, 2, 0).chunk], loss_fn, gradient=POLICIES[name]))
    assert loss_fn.temperature.grad is None


@pytest.mark.parametrize("name", ["exact", "retained", "randomized", "online"])
def test_weights_of_a_loss_inside_a_function_get_their_gradient_or_are_refused(name: str) -> None:
    """As under `Truncated` with windows that are run again, whose backward pass is autograd's own."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), Given.draw(30, 2, 0)
    for policy in (POLICIES["truncated"], POLICIES[name]):
        loss_fn.zero_grad()
        try:
            list(tt.updates(net, [data.chunk], lambda y, t: loss_fn(y, t), gradient=policy))  # noqa: PLW0108  # as users do
        except ModelError:
            return
        assert loss_fn.temperature.grad is not None


class Decayed(nn.Module):
    """A loss with a weight of the net's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y - t).square().mean() + self.weight.square().sum()


@pytest.mark.parametrize(
    "policy",
    [tt.Exact(chunk=4), tt.Truncated(30), tt.Truncated(30, 31), tt.Truncated(30, 31, graphs="retain"), tt.Online(30)],
    ids=["exact", "truncated", "overlapping", "retained", "online"],
)
def test_weight_of_both_net_and_loss_gets_both_gradients_once(policy: Policy) -> None:
    net, data = named("hides-layer").net(), Given.draw(30, 2, 0, masked=0.3)
    loss_fn = Decayed(net.get_parameter("module.head.weight"))
    expected = plain(net, data, loss_fn=loss_fn)
    assert deviation(policy_gradients(net, [data.chunk], policy, loss_fn), expected) < EXACT
    assert apart(plain(net, data)[0][2], expected[0][2]) > 0.1


def test_weights_gathered_are_named_as_the_user_knows_them() -> None:
    net, loss_fn = named("hides-layer").net(), Tempered()
    found = weights_of(net, loss_fn)
    assert list(found) == [*(name for name, _ in net.module.named_parameters()), "loss_fn.temperature"]
    assert list(Gathered(found).names) == list(found)
    assert [id(p) for p in found.values()] == [id(p) for p in (*net.parameters(), loss_fn.temperature)]
    net.get_submodule("module.lstm").requires_grad_(requires_grad=False)
    loss_fn.requires_grad_(requires_grad=False)
    assert list(weights_of(net, loss_fn)) == ["head.weight", "head.bias"]
    assert list(weights_of(net, Decayed(net.get_parameter("module.head.weight")))) == ["head.weight", "head.bias"]


class Reads(nn.Module):
    """Tokens, embedded."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, FEATURES, sparse=sparse)
        self.gru = nn.GRU(FEATURES, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.embedding(x))[0]


def test_sparse_gradients_stay_sparse_and_equal_dense_ones() -> None:
    tokens, targets = torch.arange(60).view(30, 2) % 7, torch.randn(30, 2, HIDDEN, dtype=torch.float64)
    found = list[Weights]()
    for sparse in (False, True):
        torch.manual_seed(5)
        net = tt.carry(remembering(Reads(sparse=sparse)))
        list(tt.updates(net, [tt.Chunk.of(tokens, targets)], nn.MSELoss(), gradient=tt.Exact(chunk=4)))
        grad = net.get_parameter("module.embedding.weight").grad
        assert grad is not None
        assert grad.is_sparse == sparse
        found.append({name: g.to_dense() for name, g in gradients(net).items()})
    assert apart(found[1], found[0]) < EXACT
    assert found[0]["module.embedding.weight"].abs().sum(1).count_nonzero() == 7


def labelled(steps: int, lanes: int, seed: int, masked: float) -> Given:
    data = Given.draw(steps, lanes, seed, masked=masked)
    return Given(data.x, (data.targets[:, :, 0] > 0.6).long(), data.resets, data.mask)


WEIGHT = torch.tensor([0.3, 5.0], dtype=torch.float64)
WEIGHTED: dict[str, Any] = {
    "cross entropy": nn.CrossEntropyLoss(weight=WEIGHT),
    "smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "nll": nn.NLLLoss(weight=WEIGHT),
}


@settings(max_examples=15)
@given(
    steps=st.sampled_from([1, 7, 29]),
    chunk=st.sampled_from([1, 2, 3, 7, 50, "auto"]),
    lanes=st.sampled_from([1, 2]),
    masked=st.sampled_from([0.0, 0.6]),
    seed=seeds,
)
@pytest.mark.parametrize("loss_fn", list(WEIGHTED.values()), ids=list(WEIGHTED))
def test_class_weights_give_the_gradient_of_the_whole_mean(
    loss_fn: Any, steps: int, chunk: Any, lanes: int, masked: float, seed: int
) -> None:
    net, data = named("hides-layer").net(), labelled(steps, lanes, seed, masked)
    found = policy_gradients(net, [data.chunk], tt.Exact(chunk=chunk), loss_fn)
    assert deviation(found, plain(net, data, loss_fn=loss_fn)) < EXACT


def test_class_weights_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: chunks weighted by their valid steps."""
    net, data, loss_fn = named("hides-layer").net(), labelled(29, 2, 0, 0.3), nn.CrossEntropyLoss(weight=WEIGHT)
    expected = plain(net, data, loss_fn=loss_fn)
    monkeypatch.setattr(Objective, "mass", lambda _, chunk: chunk.valid)
    assert deviation(policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn), expected) > 1e-4


def test_class_of_no_weight_does_not_count() -> None:
    """Some chunks have no other class, so no mean of their own."""
    net, data = named("hides-layer").net(), labelled(29, 1, 0, 0.0)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert any(not part.any() for part in data.targets.split(3))
    found = policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn)
    assert deviation(found, plain(net, data, loss_fn=loss_fn)) < EXACT


def test_class_that_the_loss_ignores_does_not_count() -> None:
    net, data = named("hides-layer").net(), labelled(29, 1, 0, 0.0)
    loss_fn = nn.CrossEntropyLoss(ignore_index=1)
    found = policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn)
    ((_, _, expected),) = plain(net, data, loss_fn=loss_fn)
    assert apart(found[0][2], expected) < EXACT


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (nn.MSELoss(reduction="sum"), "loss_fn has reduction='sum', expected 'mean'"),
        (nn.CrossEntropyLoss(reduction="sum"), "loss_fn has reduction='sum', expected 'mean'"),
        (nn.MSELoss(reduction="none"), r"loss_fn returned a tensor of shape \(6, 2\), expected one number.*reduction='none'"),
        (
            lambda y, t: (y - t).square().mean().item(),
            r"loss_fn returned a float, expected a tensor with one number: the mean over its 6 rows",
        ),
        (lambda y, t: (y.detach() - t).square().mean(), "the loss depends on no parameter that requires a gradient"),
    ],
    ids=["sum", "classes' sum", "none", "float", "detached"],
)
def test_loss_that_is_no_mean_is_refused(loss_fn: Any, reason: str) -> None:
    net, data = named("hides-layer").net(), Given.draw(23, 2, 0)
    with pytest.raises(ModelError, match=reason):
        run(net, data, loss_fn=loss_fn)
    assert all(p.grad is None for p in net.parameters())


def test_frozen_net_is_refused() -> None:
    net = named("hides-layer").net().requires_grad_(requires_grad=False)
    with pytest.raises(ModelError, match="the loss depends on no parameter that requires a gradient"):
        run(net, Given.draw(23, 2, 0))


def some_chunks() -> list[tt.Chunk]:
    return list(tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None))


@pytest.mark.parametrize("policy", [tt.Exact(), tt.Exact(chunk=4), tt.Exact(segment=10), tt.Exact(segment=10, chunk=4)], ids=repr)
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (lambda: (chunk for chunk in some_chunks()), "generator"),
        (lambda: iter(some_chunks()), "list_iterator"),
        (lambda: DataLoader(some_chunks(), batch_size=None), "DataLoader"),  # pyright: ignore[reportArgumentType]  # it takes any sequence
    ],
    ids=["generator", "iterator", "loader"],
)
def test_chunks_that_come_only_once_are_refused(policy: tt.Exact, source: Callable[[], Any], kind: str) -> None:
    net = named("hides-layer").net()
    with pytest.raises(
        DataError, match=rf"come from a {kind}, which gives each of them once: give tt\.updates a tt\.Stream, or a list of chunks"
    ):
        list(tt.updates(net, source(), nn.MSELoss(), gradient=policy))
    assert all(p.grad is None for p in net.parameters())


def test_list_of_chunks_is_as_good_as_the_stream() -> None:
    net = named("hides-layer").net()
    for policy in (tt.Exact(), tt.Exact(chunk=4), tt.Exact(segment=10), tt.Exact(segment=10, chunk=4)):
        stream = tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None)
        for chunks in (some_chunks(), tuple(some_chunks())):
            assert deviation(policy_gradients(net, chunks, policy), policy_gradients(net, stream, policy)) < EXACT


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"chunk": 0}, "chunk=0: expected a whole number of at least 1"),
        ({"chunk": 10.0}, r"chunk=10\.0: expected a whole number"),
        ({"chunk": "all"}, "chunk='all': expected a whole number"),
        ({"segment": 0}, "segment=0: expected a whole number of at least 1"),
        ({"segment": True}, "segment=True: expected a whole number"),
        ({"memory": "much"}, "memory='much': expected an amount like '512MB'"),
        ({"memory": -1}, "memory=-1: expected an amount"),
        ({"verify": "some"}, "verify='some': expected 'first', 'all' or 'off'"),
        ({"offload": "/no/such/folder"}, "offload='/no/such/folder': expected None, 'cpu', or a folder that exists"),
        ({"clip_adjoint": 0.0, "chunk": 5}, r"clip_adjoint=0\.0: expected a norm above 0"),
        ({"clip_adjoint": float("nan"), "chunk": 5}, "clip_adjoint=nan: expected a norm above 0"),
        ({"clip_adjoint": 1.0}, r"the chunk becomes part of the gradient: give chunk=\.\.\. too"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tt.Exact(**setting)


class Roots(nn.Module):
    """`sqrt(|w x|)` has no gradient to `w` where x is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(FEATURES, HIDDEN)
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn((self.scale * x).abs().sqrt())[0]


def rootless(*zeros: int) -> tt.Stream:
    """Recordings of 20 and 15 steps on one lane; the inputs are zero at some steps of the epoch."""
    found = recordings([20, 15], outputs=HIDDEN)
    for at in zeros:
        found[int(at >= 20)]["inputs"][at - 20 * (at >= 20)] = 0
    return tt.Stream(found, 1, 5, seed=None)


def faulty(zeros: Sequence[int] = (), inputs: Sequence[int] = (), targets: Sequence[int] = ()) -> tt.Chunk:
    """The same epoch; at some steps inputs are zero, or NaN, or targets are NaN."""
    epoch = join(list(rootless(*zeros)))
    assert epoch.targets is not None
    epoch.inputs[list(inputs)] = epoch.targets[list(targets)] = torch.nan
    return epoch


@pytest.mark.parametrize(
    ("policy", "steps", "recording", "before"),
    [
        (tt.Exact(chunk=4), "24 to 27", 1, 1),
        (tt.Exact(), "20 to 34", 1, 1),
        (tt.Exact(chunk=4, segment=10), "24 to 27", 1, 2),
        (tt.Exact(chunk=4, offload="cpu", verify="all"), "24 to 27", 1, 1),
    ],
    ids=repr,
)
def test_gradient_that_is_not_finite_is_refused_naming_where_it_came_from(
    policy: tt.Exact, steps: str, recording: int, before: int
) -> None:
    net = tt.carry(remembering(Roots()))
    updates = tt.updates(net, rootless(27), nn.MSELoss(), gradient=policy)
    for _ in range(before):
        next(updates)
    kept, own = (gradients(net), weights(net)), [p.grad for p in net.parameters()]
    where = rf"in the chunk of steps {steps} of the epoch \(recording {recording}\), whose part of the loss is [0-9.]+\."
    with pytest.raises(
        RunError, match=rf"the gradient of 'scale' is not finite \(NaN or infinite\) {where} `\.grad` and the weights are as they"
    ):
        next(updates)
    assert apart(gradients(net), kept[0]) == apart(weights(net), kept[1]) == 0
    assert all(p.grad is g for p, g in zip(net.parameters(), own, strict=True))


@pytest.mark.parametrize(
    ("epoch", "steps", "loss"),
    [
        (faulty([2, 13]), "12 to 15", "[0-9.]+"),
        (faulty(targets=[7, 13]), "4 to 7", "nan"),
        (faulty([17], targets=[6]), "4 to 7", "nan"),
        (faulty([2], targets=[9, 13]), "8 to 11", "nan"),
        (faulty(inputs=[6]), "4 to 7", "nan"),
        (faulty([17, 25], targets=[29], inputs=[31]), "16 to 19", "[0-9.]+"),
    ],
    ids=["gradients", "losses", "loss before gradient", "losses after gradient", "state from there on", "of the first update"],
)
@pytest.mark.parametrize("verify", ["first", "all", "off"])
def test_chunk_named_is_the_first_with_such_a_loss_else_the_last_with_such_a_gradient(
    epoch: tt.Chunk, steps: str, loss: str, verify: Any
) -> None:
    """A loss that is no number began the trouble; else the gradient did, on its way back from the end."""
    net = tt.carry(remembering(Roots()))
    with pytest.raises(RunError, match=rf"in the chunk of steps {steps} of the epoch .*, whose part of the loss is {loss}\."):
        list(tt.updates(net, [epoch], nn.MSELoss(), gradient=tt.Exact(chunk=4, verify=verify)))
    assert all(p.grad is None for p in net.parameters())


class Rooted(Tempered):
    """The root of a weight that is zero: the loss is finite, its gradient is not."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y - t).square().mean() + (self.temperature - 1).sqrt()


@pytest.mark.parametrize(
    ("name", "steps"),
    [("exact", "28 to 29"), ("segments", "8 to 9"), ("retained", "0 to 9"), ("online", "0 to 9")],
)
def test_weight_of_the_loss_is_named_as_such(name: str, steps: str) -> None:
    net, data, loss_fn = named("hides-layer").net(), Given.draw(30, 2, 0), Rooted()
    with pytest.raises(RunError, match=rf"the gradient of 'loss_fn\.temperature' is not finite .* in the chunk of steps {steps} of"):
        list(tt.updates(net, [data.chunk], loss_fn, gradient=POLICIES[name]))
    assert all(p.grad is None for p in (*net.parameters(), *loss_fn.parameters()))


def test_finite_chunks_whose_sum_is_not_are_refused() -> None:
    net, x = tt.carry(nn.Sequential(nn.RNN(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1))), torch.randn(8, 1, FEATURES)
    chunk = tt.Chunk.of(x, torch.zeros(8, 1))
    with pytest.raises(RunError, match="though every chunk's is: their sum is too large"):
        list(tt.updates(net, [chunk], lambda y, _: y.mean() * 1e20 * 1e18 * 6, gradient=tt.Exact(chunk=4)))
    assert all(p.grad is None for p in net.parameters())


def test_gradients_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: nobody looks."""
    monkeypatch.setattr(Gathered, "faulty", lambda _: None)
    net = tt.carry(remembering(Roots()))
    list(tt.updates(net, rootless(27), nn.MSELoss(), gradient=tt.Exact(chunk=4)))
    assert gradients(net)["module.scale"].isnan().any()


ENDED = r"these updates ended with an error in the middle of a step: .*tt\.updates\(\.\.\.\), or from a saved place with load_state_dict"


def test_nobody_goes_on_from_a_state_that_stayed_behind() -> None:
    """After a refusal the stream has moved on, and the state has not."""
    net = tt.carry(remembering(Roots()))
    updates = tt.updates(net, rootless(7), nn.MSELoss(), gradient=tt.Exact(chunk=4, segment=10))
    with pytest.raises(RunError, match="in the chunk of steps 4 to 7"):
        next(updates)
    for _ in range(2):
        with pytest.raises(RunError, match=ENDED):
            next(updates)
    with pytest.raises(RunError, match="in the chunk of steps 4 to 7"):
        list(tt.updates(net, rootless(7), nn.MSELoss(), gradient=tt.Exact(chunk=4, segment=10)))


@every_policy
def test_saved_place_is_gone_on_from_after_an_error(policy: Policy) -> None:
    """As if there had been none; an error of the user's own is one as well."""
    failing = [False]

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        if failing[0]:
            raise ArithmeticError("the user's own")
        return nn.functional.mse_loss(y, t)

    def begun() -> tuple[tt.Carried, tt.Updates]:
        net = named("hides-layer").net()
        torch.manual_seed(3)
        return net, tt.updates(net, tt.Stream(recordings([31, 20]), 1, 8), loss_fn, gradient=policy)

    (net, updates), (through, undisturbed) = begun(), begun()
    next(updates)
    random = torch.get_rng_state()
    place = updates.state_dict() if policy is not POLICIES["retained"] else None
    failing[0] = True
    with pytest.raises(ArithmeticError, match="the user's own"):
        next(updates)
    failing[0] = False
    with pytest.raises(RunError, match=ENDED):
        next(updates)
    if place is not None:
        updates.load_state_dict(place)
        torch.set_rng_state(random)
        rest = list(updates)
        torch.manual_seed(3)
        assert [u.loss.item() for u in rest] == [u.loss.item() for u in list(undisturbed)[1:]]
        assert apart(gradients(net), gradients(through)) == 0


def test_scaler_decides_itself_about_gradients_that_are_not_finite() -> None:
    net = tt.carry(remembering(Roots()))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**7), torch.optim.SGD(net.parameters(), lr=0.1)
    before, changed = weights(net), list[bool]()
    for _ in tt.updates(net, rootless(7), nn.MSELoss(), gradient=tt.Exact(chunk=4), scaler=scaler):
        scaler.step(optimizer)
        scaler.update()
        changed.append(apart(weights(net), before) > 0)
        optimizer.zero_grad()
    assert changed == [False, True]
    assert scaler.get_scale() == 2.0**6


def test_scaler_scales_the_gradient_and_not_the_loss() -> None:
    data, scaler = Given.draw(23, 2, 0, masked=0.3), torch.amp.GradScaler("cpu", init_scale=2.0**7)
    usual, scaled = named("hides-layer").net(), named("hides-layer").net()
    (first,), (second,) = run(usual, data), run(scaled, data, scaler=scaler)
    assert torch.equal(first.loss, second.loss)
    assert apart({name: g / 2.0**7 for name, g in gradients(scaled).items()}, gradients(usual)) < EXACT
    assert apart(gradients(scaled), gradients(usual)) > 1e-3
    assert first.swept is not None
    assert second.swept is not None
    assert torch.allclose(first.swept.adjoints, second.swept.adjoints)


def test_clipping_under_a_scaler_is_that_without_one() -> None:
    data, policy = Given.draw(23, 2, 0), tt.Exact(chunk=4, clip_adjoint=0.005)
    usual, scaled = named("hides-layer").net(), named("hides-layer").net()
    (update,) = run(usual, data, policy)
    run(scaled, data, policy, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**7))
    assert update.swept is not None
    assert update.swept.clipped
    assert apart({name: g / 2.0**7 for name, g in gradients(scaled).items()}, gradients(usual)) < 1e-7


def test_recordings_without_targets_make_no_update() -> None:
    net = named("hides-layer").net()
    assert list(tt.updates(net, tt.Stream({"inputs": np.zeros((9, 3))}, 1, 5), nn.MSELoss(), gradient=tt.Exact())) == []


def test_weights_inside_a_function_are_found_where_the_last_steps_do_not_count() -> None:
    """The mutant looks at the last piece only, which has no loss."""
    net, loss_fn, data = named("hides-layer").net(), Tempered(), Given.draw(30, 2, 0)
    mask = torch.arange(30).unsqueeze(1).expand(30, 2) < 15
    chunk = tt.Chunk.of(data.x, data.targets, resets=data.resets, mask=mask)
    with pytest.raises(ModelError, match="weights of its own inside"):
        list(tt.updates(net, [chunk], lambda y, t: loss_fn(y, t), gradient=tt.Exact(chunk=10)))  # noqa: PLW0108  # as users do
