"""The trace of fused layers, against plain autograd over an unrolled loop.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from strategies import inputs
from test_fused_update import LAYERS, calls, make, recordings
from test_trace import EXACT, LANES, STEPS, every_kind, layer, states_for, unrolled
from throughtime.carry import Carried
from throughtime.diagnose.trace import Trace, trace
from throughtime.kernels import recurrent, reference
from throughtime.kernels.dispatch import Backend
from throughtime.nn import layers

pytestmark = needs_kernels


def fused(net: nn.RNNBase) -> nn.RNNBase:
    return tt.fuse(copy.deepcopy(net))


def traced(net: nn.Module, play: Callable[[], Tensor], **options: Any) -> Trace:
    """What is seen of one backward pass."""
    torch.manual_seed(5)
    with trace(net, **options) as results:
        play().backward()
    net.zero_grad()
    return results


def reset_at(often: float = 0.25) -> Tensor:
    """Some lanes begin anew in the midst, one with the first step."""
    resets = torch.rand(STEPS, LANES, generator=torch.Generator().manual_seed(1)) < often
    resets[0] = torch.tensor([True, False, False])
    resets[1:, 2] = False
    return resets


def with_resets(
    net: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...], resets: Tensor
) -> dict[str, Tensor]:
    """Each lane by itself, a sequence for each recording: norms `(T, B)`, by plain autograd."""
    results: dict[str, Tensor] = {}
    for lane in range(x.shape[1]):
        starts = [0, *[t for t in range(1, STEPS) if resets[t, lane]], STEPS]
        for start, stop in pairwise(starts):
            fresh = start > 0 or bool(resets[0, lane])
            own = tuple(s[:, lane : lane + 1].detach() * (not fresh) for s in states)
            whole = unrolled(net, x[start:stop, lane : lane + 1], own)
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

    results, wanted = traced(net, loss), with_resets(net, x, states, resets)
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


def train(net: Carried, *, zero: bool = True) -> None:
    """An epoch, with a step of plain descent after each update.

    Recordings of several lengths give resets, masks and a ragged end.
    """
    data = recordings(torch.float64, 4, regress=False)
    stream = tt.Stream(data, lanes=3, chunk=16, dtype=torch.float64)
    for _ in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(6)):
        with torch.no_grad():
            for weight in net.parameters():
                weight.sub_(0.05 * torch.as_tensor(weight.grad))
        if zero:
            net.zero_grad()


def weights(net: Carried) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


@pytest.mark.covering
@pytest.mark.parametrize("zero", [True, False], ids=["one-by-one", "added-up"])
@pytest.mark.parametrize("kind", NETS)
def test_a_traced_epoch_trains_as_single_calls_do(kind: str, zero: bool, calls: list[int]) -> None:
    net = NETS[kind]()
    train(net, zero=zero)
    untraced, count = weights(net), len(calls)
    net = NETS[kind]()
    with trace(net, keep=100) as result:
        train(net, zero=zero)
    assert (weights(net) - untraced).abs().max() < EXACT
    assert len(calls) == count == result.count > 5


def test_updates_of_another_net_are_not_counted() -> None:
    net, other = make("lstm"), make("gru")
    with trace(net, keep=9) as result:
        train(net)
        count = result.count
        train(other)
    assert result.count == count > 1
