"""tt.rollout within a larger graph: several losses, weights that changed, hooks, and what is asked
for alone.

Shapes: `T` steps, `B` lanes.
"""

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from rollouts import EXACT, deviation, of_all, of_both, played, random_state, rolled, whole
from strategies import (
    FEATURES,
    HIDDEN,
    Weights,
    apart,
    gradients,
    inputs,
    named,
    start,
    states_apart,
    weights,
)
from throughtime.errors import ModelError


def test_rollout_is_part_of_a_larger_graph() -> None:
    """An encoder before, another net after, a state computed before and used by another rollout."""
    first, second = named("hides-layer").net(), named("tensor-state").net()
    found = list[Weights]()
    for play_first, play_second in (
        (whole(first), whole(second)),
        (rolled(first, chunk=3), rolled(second, chunk=4)),
    ):
        torch.manual_seed(1)
        encoder, starter, link = (
            nn.Linear(FEATURES, FEATURES).double(),
            nn.Linear(2, HIDDEN).double(),
            nn.Linear(2, FEATURES).double(),
        )
        x, z = encoder(inputs(30, 2)), starter(torch.ones(2, 2, dtype=torch.float64))
        y, state = play_first(x, None, None)
        more, end = play_second(link(y).tanh(), z, None)
        again, _ = play_first(x.flip(0), state, None)  # the same net once more, from where it was
        (more.square().mean() + again.square().mean() + y[3:5].sum() * end.sum()).backward()
        parts = {
            "first": first,
            "second": second,
            "encoder": encoder,
            "starter": starter,
            "link": link,
        }
        found.append(
            {
                f"{name}.{key}": g
                for name, part in parts.items()
                for key, g in gradients(part).items()
            }
        )
        first.zero_grad()
        second.zero_grad()
    assert apart(found[1], found[0]) < EXACT
    assert all(g.abs().max() > 1e-9 for g in found[0].values())


def test_gradients_may_be_asked_for_without_touching_any() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2).requires_grad_()
    expected = played(net, whole(net), x, None, None, of_all)
    y, state = tt.rollout(net, x, chunk=4)
    (found,) = torch.autograd.grad(of_all(y, state), [x])
    assert (found - expected.gradients["x"]).abs().max() < EXACT
    assert x.grad is None
    assert all(p.grad is None for p in net.parameters())


def test_only_what_wants_a_gradient_gets_one() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    net.get_submodule("module.lstm").requires_grad_(requires_grad=False)
    expected = played(net, whole(net), x, None, None, of_all).gradients
    y, state = tt.rollout(net, x, chunk=4)
    of_all(y, state).backward()
    assert apart(gradients(net), {name: g for name, g in expected.items() if name != "x"}) < EXACT
    assert x.grad is None
    net.requires_grad_(requires_grad=False)
    y, _ = tt.rollout(net, x, chunk=4)
    assert not y.requires_grad
    found = played(net, rolled(net, chunk=4), x, random_state(net, x), None, of_both)
    net.requires_grad_(requires_grad=False)
    assert deviation(found, played(net, whole(net), x, random_state(net, x), None, of_both)) < EXACT
    assert found.gradients["x"].abs().max() > 1e-6


def test_without_gradients_there_is_no_graph() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    expected, end = net(x, start(net, x))
    for mode in (torch.no_grad, torch.inference_mode):
        for chunk in (4, None):
            with mode():
                y, state = tt.rollout(net, x, chunk=chunk)
            assert not y.requires_grad
            assert (y - expected).abs().max() < EXACT
            assert states_apart(state, end) < EXACT


def test_second_derivatives_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2).requires_grad_()
    y, state = tt.rollout(net, x, chunk=4)
    with pytest.raises(
        ModelError,
        match=(
            r"a second derivative \(create_graph=True\).*call the net itself, net\(x, state,"
            r" resets\)"
        ),
    ):
        torch.autograd.grad(of_all(y, state), [x], create_graph=True)


def test_weights_changed_before_the_backward_pass_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first, second = tt.rollout(net, x, chunk=4), tt.rollout(net, x, chunk=4)
    of_all(*first).backward()
    kept = gradients(net)
    optimizer.step()
    with pytest.raises(
        ModelError,
        match=r"weights were changed in place \(optimizer\.step\(\)\?\).*call backward first",
    ):
        of_all(*second).backward()
    assert apart(gradients(net), kept) == 0
    of_all(*tt.rollout(net, x, chunk=4)).backward()


def test_inputs_changed_before_the_backward_pass_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    y, state = tt.rollout(net, x, chunk=4)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        of_all(y, state).backward()


def test_state_changed_before_the_backward_pass_changes_nothing() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    state = random_state(net, x)
    expected = played(net, whole(net), x, state, None, of_all)
    y, after = tt.rollout(net, x, state, chunk=4)
    for leaf in (*tt.state.tensors(state), *tt.state.tensors(tt.state.detach(after))):
        leaf.zero_()
    of_all(y, after).backward()
    assert (
        apart(
            gradients(net),
            {name: g for name, g in expected.gradients.items() if name.startswith("module")},
        )
        < EXACT
    )


def test_hooks_on_parameters_are_called_once_with_the_whole_gradient() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    expected = played(net, whole(net), x, None, None, of_all).gradients
    calls = list[tuple[str, Tensor]]()
    for name, p in net.named_parameters():
        p.register_hook(lambda gradient, name=name: calls.append((name, gradient)))
    of_all(*tt.rollout(net, x, chunk=4)).backward()
    assert len(calls) == len(weights(net))
    assert apart(dict(calls), {name: g for name, g in expected.items() if name != "x"}) < EXACT
