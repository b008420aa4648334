"""The trace of fused layers, against plain autograd over an unrolled loop, and against torch.nn
traced.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from strategies import inputs
from test_fused_update import LAYERS, calls, make, recordings
from test_trace import (
    EXACT,
    LANES,
    OPTIONS,
    STEPS,
    every_kind,
    layer,
    mixed,
    states_for,
    unrolled,
)
from throughtime.carry import Carried
from throughtime.diagnose._trace_summary import BackwardRecord
from throughtime.diagnose.trace import Trace, trace
from throughtime.kernels import recurrent, reference
from throughtime.kernels.dispatch import Backend
from throughtime.nn import layers

pytestmark = needs_kernels
MANY: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "no-bias-both-ways": {"bias": False, "bidirectional": True},
}
every_option = pytest.mark.parametrize("options", MANY.values(), ids=MANY)


def fused(net: nn.RNNBase) -> nn.RNNBase:
    return tt.fuse(copy.deepcopy(net))


def traced(net: nn.Module, play: Callable[[], Tensor], **options: Any) -> Trace:
    """What is seen of one backward pass."""
    torch.manual_seed(5)
    with trace(net, **options) as results:
        play().backward()
    net.zero_grad()
    return results


def loss_of(net: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...], *given: Any) -> Tensor:
    hx = states if isinstance(net, nn.LSTM) else states[0]
    y, after = net(x.transpose(0, 1) if net.batch_first else x, hx, *given)
    return mixed(
        y.transpose(0, 1) if net.batch_first else y, after if isinstance(after, tuple) else (after,)
    )


def check_norms(kind: str, net: nn.RNNBase, x: Tensor) -> None:
    """The norms are those of plain autograd, and all else as torch.nn traced has it.

    Training goes on as untraced.
    """
    net = fused(net)
    states = states_for(net, x.shape[1])
    leaves = [x.requires_grad_(), *states, *net.parameters()]
    torch.manual_seed(5)
    untraced = torch.autograd.grad(loss_of(net, x, states), leaves)
    torch.manual_seed(5)
    with trace(net) as results:
        loss = loss_of(net, x, states)
        during = torch.autograd.grad(loss, leaves)
    assert max((a - b).abs().max().item() for a, b in zip(untraced, during, strict=True)) < EXACT
    torch.manual_seed(5)
    whole = unrolled(kind, net, x, states)
    flat = [
        (name, t, value) for name, values in whole.seen.items() for t, value in enumerate(values)
    ]
    gradients = torch.autograd.grad(
        mixed(whole.y, whole.after), [value for *_, value in flat], materialize_grads=True
    )
    assert set(results.names) == set(whole.seen)
    for (name, t, _), gradient in zip(flat, gradients, strict=True):
        assert (results[name][t] - gradient.norm(dim=1)).abs().max() < EXACT
    assert (
        torch.stack([results[name].amin() for name in results.names if name[-1] == "h"]).amin()
        > 1e-6
    )  # there was something to see


@every_kind
@every_option
def test_every_norm_of_a_fused_layer_is_that_of_the_unrolled_loop(
    kind: str, options: dict[str, Any]
) -> None:
    check_norms(kind, layer(kind, **options), inputs(STEPS, LANES))


def reset_at(often: float = 0.25) -> Tensor:
    """Some lanes begin anew in the midst, one with the first step."""
    resets = torch.rand(STEPS, LANES, generator=torch.Generator().manual_seed(1)) < often
    resets[0] = torch.tensor([True, False, False])
    resets[1:, 2] = False
    return resets


def with_resets(
    kind: str, net: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...], resets: Tensor
) -> dict[str, Tensor]:
    """Each lane by itself, a sequence for each recording: norms `(T, B)`, by plain autograd."""
    results: dict[str, Tensor] = {}
    for lane in range(x.shape[1]):
        starts = [0, *[t for t in range(1, STEPS) if resets[t, lane]], STEPS]
        for start, stop in pairwise(starts):
            fresh = start > 0 or bool(resets[0, lane])
            own = tuple(s[:, lane : lane + 1].detach() * (not fresh) for s in states)
            whole = unrolled(kind, net, x[start:stop, lane : lane + 1], own)
            last = whole.after if stop == STEPS else ()
            loss = (whole.y**3).sum() + sum((leaf * leaf).sum() for leaf in last)
            for name, values in whole.seen.items():
                gradients = torch.autograd.grad(
                    loss, values, retain_graph=True, materialize_grads=True
                )
                results.setdefault(name, torch.zeros(STEPS, x.shape[1], dtype=x.dtype))[
                    start:stop, lane
                ] = torch.cat(gradients).norm(dim=1)
    return results


@every_kind
@pytest.mark.parametrize("runs", ["fused", "torch.nn"])
def test_no_gradient_crosses_a_reset(kind: str, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if runs == "torch.nn":  # as in half precision, or where the kernels are missing
        monkeypatch.setattr(layers, "choose", lambda *_: Backend("torch.nn", "for this test"))
    net = fused(layer(kind))
    x, states, resets = inputs(STEPS, LANES), states_for(net), reset_at()

    def loss() -> Tensor:
        y, after = net(x, states if kind == "lstm" else states[0], resets)
        ends = after if isinstance(after, tuple) else (after,)
        return (y**3).sum() + sum((leaf * leaf).sum() for leaf in ends)

    results, wanted = traced(net, loss), with_resets(kind, net, x, states, resets)
    assert set(results.names) == set(wanted)
    assert max((results[name] - norms).abs().max().item() for name, norms in wanted.items()) < EXACT
    if runs == "fused":
        edge = results.last.edges["layer0.h"].norm()
        states = tuple(leaf.detach().requires_grad_() for leaf in states)
        loss().backward()
        assert edge.item() == pytest.approx(
            torch.as_tensor(states[0].grad).norm().item(), rel=1e-12
        )


def test_a_traced_layer_runs_the_kernel_and_the_reference_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that no test above passes because torch.nn was traced instead."""
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **options: (calls.append(name), function(*args, **options))[1]

    monkeypatch.setattr(recurrent, "forward", counted("kernel", recurrent.forward))
    monkeypatch.setattr(recurrent, "backward", counted("kernel backward", recurrent.backward))
    monkeypatch.setattr(reference, "step", counted("reference", reference.step))
    net, x = fused(layer("gru", num_layers=2, bidirectional=True)), inputs(STEPS, LANES)
    traced(net, lambda: net(x)[0].square().sum())
    assert calls == ["kernel"] * 4 + ["reference"] * STEPS * 4


__all__ = ["calls"]  # a fixture

NETS: dict[str, Callable[[], Carried]] = {name: lambda name=name: make(name) for name in LAYERS}


def stacked() -> Carried:
    """Modules of one and two layers, behind one that prepares the inputs."""
    torch.manual_seed(3)
    layers = nn.Tanh(), tt.nn.LSTM(5, 7, num_layers=2), tt.nn.GRU(7, 6), nn.Linear(6, 4)
    return tt.carry(nn.Sequential(*layers).double())


def updates(net: Carried, policy: Any = None, *, zero: bool = True) -> Iterator[Any]:
    """An epoch, with a step of plain descent after each update.

    Recordings of several lengths give resets, masks and a ragged end.
    """
    stream = tt.Stream(
        recordings(torch.float64, 4, regress=False), lanes=3, chunk=16, dtype=torch.float64
    )
    for update in tt.updates(
        net, stream, nn.CrossEntropyLoss(), gradient=policy or tt.Truncated(6)
    ):
        yield update
        with torch.no_grad():
            for weight in net.parameters():
                weight.sub_(0.05 * torch.as_tensor(weight.grad))
        if zero:
            net.zero_grad()


def train(net: Carried, **options: Any) -> None:
    for _ in updates(net, **options):
        pass


def weights(net: Carried) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


def plain(make: Callable[[], Carried]) -> Carried:
    """The same net with layers of torch.nn."""
    net = make()
    for name, part in list(net.module.named_children()):
        if isinstance(part, nn.RNNBase):
            base: Any = type(part).__mro__[2]
            options: dict[str, Any] = {}
            if base is nn.RNN:
                options["nonlinearity"] = part.nonlinearity
            if base is nn.LSTM:
                options["proj_size"] = part.proj_size
            other = base(
                part.input_size,
                part.hidden_size,
                num_layers=part.num_layers,
                bias=part.bias,
                dtype=torch.float64,
                **options,
            )
            other.load_state_dict(part.state_dict())
            setattr(net.module, name, other)
    return tt.carry(net.module)


def differs(one: BackwardRecord, other: BackwardRecord, *, edges: bool = True) -> float:
    """The largest difference between two passes in any value."""
    worst = 0.0
    for part in ("norms", "retention", *["edges"][:edges]):
        values, others = getattr(one, part), getattr(other, part)
        assert values.keys() == others.keys()
        worst = max(worst, *((values[n] - others[n]).abs().max().item() for n in others), 0.0)
    return worst


@pytest.mark.covering
@pytest.mark.parametrize("zero", [True, False], ids=["one-by-one", "added-up"])
@pytest.mark.parametrize("kind", NETS)
def test_a_traced_epoch_is_that_of_torch_nn_and_trains_as_single_calls_do(
    kind: str, zero: bool, calls: list[int]
) -> None:
    net = NETS[kind]()
    train(net, zero=zero)
    untraced, count = weights(net), len(calls)
    net = NETS[kind]()
    with trace(net, keep=100) as result:
        train(net, zero=zero)
    assert (weights(net) - untraced).abs().max() < EXACT
    assert len(calls) == count == result.count > 5
    net = plain(NETS[kind])
    with trace(net, keep=100) as expected:
        train(net, zero=zero)
    assert result.count == expected.count
    pairs = zip(result.passes, expected.passes, strict=True)
    # torch.nn is called anew at each reset, so it has edges of its own
    assert max(differs(one, other, edges=False) for one, other in pairs) < EXACT


def test_updates_of_another_net_are_not_counted() -> None:
    net, other = make("lstm"), make("gru")
    with trace(net, keep=9) as result:
        train(net)
        count = result.count
        train(other)
    assert result.count == count > 1
