"""The trace as a guest: names, what is kept, and a net that is the same before, while and after it
is traced.

Shapes: `T` steps, `B` lanes.
"""

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from strategies import FEATURES, HIDDEN, HidesCell, inputs, remembering
from throughtime.diagnose.trace import trace
from throughtime.errors import ConfigError, RunError

EXACT = 1e-12
STEPS, LANES = 11, 3
CELLS = pytest.mark.parametrize("kind", [nn.LSTM, nn.LSTMCell])


def lstm() -> nn.LSTM:
    net = nn.LSTM(FEATURES, HIDDEN)
    remembering(net)
    return net


def looped(net: nn.Module, x: Tensor) -> Tensor:
    """Every h of a layer, or of a cell in a loop."""
    if isinstance(net, nn.LSTM):
        return net(x)[0]
    state, hidden = None, list[Tensor]()
    for step in x.unbind(0):
        state = net(step, state)
        hidden.append(state[0])
    return torch.stack(hidden)


def test_a_name_tells_module_layer_and_state() -> None:
    net = nn.Sequential(nn.LSTM(3, 4, num_layers=2))
    cells = HidesCell()
    with trace(net) as found, trace(cells) as others:
        y, _ = net[0](torch.randn(5, 2, 3))
        y.sum().backward()
        cells(torch.randn(5, 2, 3)).sum().backward()
    assert found.names == tuple(f"0.layer{k}.{leaf}" for k in (0, 1) for leaf in "hcifgo")
    assert found["0.layer0.c"].shape == others["cell.f"].shape == (5, 2)
    with pytest.raises(
        ConfigError, match=r"no gradient of .layer0.c. was recorded; recorded are 0.layer0.h"
    ):
        found["layer0.c"]
    assert found.last.gradients["0.layer0.c"].shape == (5, 2, 4)


def test_without_a_backward_pass_there_is_nothing_to_tell() -> None:
    net = nn.LSTM(3, 4)
    with trace(net) as found:
        with torch.no_grad():
            net(torch.randn(5, 2, 3))
        assert found.count == 0
        with pytest.raises(RunError, match="no backward pass was traced yet"):
            found.summary()


GLOBAL_HOOKS = (
    torch_modules._global_forward_hooks,
    torch_modules._global_forward_hooks_with_kwargs,
)


def test_the_net_is_never_touched_and_torch_keeps_no_hook() -> None:
    net = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "cell": nn.GRUCell(3, 4), "own": nn.Linear(3, 4)})
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    with trace(net, names={"own": ("h",)}) as found:
        for name, module in net.named_modules():
            assert module.__dict__.keys() == before[name].keys()
            assert not any(module.__dict__[hook] for hook in hooks)
        y, _ = net["lstm"](torch.randn(5, 2, 3))
        y.sum().backward()
    assert not any(GLOBAL_HOOKS)
    assert found["lstm.layer0.h"].shape == (5, 2)
    graph_of_after = net["lstm"](torch.randn(5, 2, 3))[0].grad_fn
    assert "CreditGate" not in type(graph_of_after).__name__


def test_a_trace_is_entered_again_for_the_passes_that_it_shall_see() -> None:
    net = nn.LSTM(3, 4)
    found = trace(net, keep=9)
    for number in range(6):
        with found if number % 3 == 0 else contextlib.nullcontext():
            net(torch.randn(5 + number, 2, 3))[0].sum().backward()
    assert found.count == 2
    assert [len(one.norms["layer0.h"]) for one in found.passes] == [5, 8]


def test_an_error_on_the_way_ends_the_trace() -> None:
    net = nn.LSTM(3, 4)
    with pytest.raises(RuntimeError, match=r"input\.size"), trace(net):
        net(torch.randn(5, 2, 7))
    assert not any(GLOBAL_HOOKS)
    with pytest.raises(ConfigError, match="keep"):
        trace(net, keep=0)


def test_a_net_is_traced_once_at_a_time() -> None:
    net = nn.LSTM(3, 4)
    with (
        trace(net),
        pytest.raises(ConfigError, match="traced already"),
        trace(nn.Sequential(net)),
    ):
        pass
    assert not any(GLOBAL_HOOKS)
    with trace(net):
        pass


def test_a_forward_that_somebody_wrapped_stays_wrapped() -> None:
    net = nn.LSTM(3, 4)
    inner, calls = net.forward, list[int]()

    def wrapped(*given: Any) -> Any:
        calls.append(1)
        return inner(*given)

    net.__dict__["forward"] = wrapped
    with trace(net) as found:
        y, _ = net(torch.randn(5, 2, 3))
        y.sum().backward()
    assert net.__dict__["forward"] is wrapped
    assert found["layer0.h"].shape == (5, 2)
    assert calls == [1]


def test_copies_of_a_traced_net_compute_with_their_own_weights() -> None:
    net, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with trace(net) as found:
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            with torch.no_grad():
                for weight in twin.parameters():
                    weight.zero_()
            y, _ = twin(x)
            assert not y.any()
            y.sum().backward()
            assert net.weight_hh_l0.grad is None
        assert found.count == 0


@CELLS
@pytest.mark.parametrize("loss", [lambda y: (y**3).sum(), torch.sum], ids=["graph", "no-graph"])
def test_second_derivatives_are_those_of_the_untraced_net(kind: Any, loss: Any) -> None:
    """With a cotangent that has a graph, and with one that has none."""
    net, x = remembering(kind(FEATURES, HIDDEN)), inputs(5, 2).requires_grad_()

    def second() -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(loss(looped(net, x)), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, *net.parameters()])

    untraced = second()
    with trace(net) as found:
        traced = second()
    assert max((a - b).abs().max().item() for a, b in zip(untraced, traced, strict=True)) < EXACT
    assert found.count > 0
    assert max(gradient.abs().max() for gradient in untraced) > 1e-3


@CELLS
def test_every_backward_pass_is_one_even_over_the_same_graph(kind: Any) -> None:
    net, x = remembering(kind(FEATURES, HIDDEN)), inputs(STEPS, LANES)
    with trace(net, keep=5) as found:
        y = looped(net, x)
        y[2].sum().backward(retain_graph=True)
        y[-1].sum().backward()
    first, second = found.passes
    name = "layer0.h" if kind is nn.LSTM else "cell.h"
    assert not first.norms[name][3:].any()
    assert first.norms[name][:3].all()
    assert second.norms[name].all()


@CELLS
def test_weights_that_change_within_the_backward_pass_are_not_those_of_the_gates(kind: Any) -> None:
    """An optimizer in the backward pass steps as soon as a weight's gradient is there."""
    net, x = remembering(kind(FEATURES, HIDDEN)), inputs(STEPS, LANES)
    with trace(net) as plain:
        looped(net, x).square().sum().backward()
    net.zero_grad()

    def descend(weight: Tensor) -> None:
        with torch.no_grad():
            weight -= torch.as_tensor(weight.grad)

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(descend)
    with trace(net) as found:
        looped(net, x).square().sum().backward()
        assert max((found[name] - plain[name]).abs().max().item() for name in plain.names) < EXACT
        fresh = copy.deepcopy(net)
        looped(net, x).square().sum().backward()
    with trace(fresh) as again:
        looped(fresh, x).square().sum().backward()
    assert all(torch.equal(found[name], again[name]) for name in again.names)
    assert max((found[name] - plain[name]).abs().max().item() for name in plain.names) > 1e-3


@CELLS
def test_only_the_last_passes_are_kept_and_no_graph(kind: Any) -> None:
    net, x = remembering(kind(FEATURES, HIDDEN)), inputs(STEPS, LANES)
    with trace(net, keep=3) as found:
        alive: list[weakref.ref[Any]] = []
        for _ in range(8):
            y = looped(net, x)
            alive.append(weakref.ref(y))
            y.square().sum().backward()
            del y
        gc.collect()
        assert len(found.passes) == 3
        assert found.count == 8
        assert not any(ref() is not None for ref in alive)


def test_a_graph_without_a_backward_pass_is_let_go() -> None:
    net, x = nn.LSTMCell(FEATURES, HIDDEN).double(), inputs(STEPS, LANES)
    with trace(net) as found:
        y, _ = state = net(x[1], net(x[0]))
        gone = weakref.ref(y)
        del y, state
        assert gone() is None  # without waiting for the collector: no cycle
        assert found.count == 0


def test_a_backward_pass_that_fails_does_not_spoil_the_next() -> None:
    net, x = nn.LSTMCell(FEATURES, HIDDEN).double(), inputs(STEPS, LANES)

    def refuse(gradient: Tensor) -> None:
        raise ValueError(f"no gradient of shape {tuple(gradient.shape)} today")

    with trace(net) as found:
        looped(net, x).square().sum().backward()
        plain = {name: found[name] for name in found.names}
        first = net(x[0])
        first[0].register_hook(refuse)
        with pytest.raises(ValueError, match="today"):
            net(x[1], first)[0].sum().backward()
        looped(net, x).square().sum().backward()
    assert all(torch.equal(found[name], norms) for name, norms in plain.items())
    assert found["cell.h"].shape == (STEPS, LANES)


@CELLS
def test_half_types_are_summed_wider_than_they_are(kind: Any) -> None:
    net, x = kind(FEATURES, HIDDEN).bfloat16(), torch.randn(STEPS, LANES, FEATURES).bfloat16()
    y = looped(net, x)
    with trace(net) as found:
        again = looped(net, x)
        again.square().sum().backward()
    assert torch.equal(y, again)
    assert all(
        weight.grad is not None and weight.grad.dtype == torch.bfloat16
        for weight in net.parameters()
    )
    assert all(found[name].dtype == torch.float64 for name in found.names)
