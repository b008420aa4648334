"""What the trace says: where a gradient dies or blows up, what crosses the edge, time constants,
and how it is logged.

Shapes: `T` steps, `B` lanes.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import inputs, remembering
from throughtime.diagnose._trace_summary import GradientSummary, Timescale
from throughtime.diagnose.trace import Trace, trace

STEPS = 60


def linear(
    factor: float,
    loss: Callable[[Tensor], Tensor] = lambda y: y[-1],
    *,
    steps: int = STEPS,
) -> Trace:
    """A linear RNN of one unit: each step backward multiplies the gradient by `factor`."""
    net = nn.RNN(1, 1, nonlinearity="relu", bias=False).double()
    for name, weight in net.named_parameters():
        nn.init.constant_(weight, factor if "hh" in name else 1.0)
    with trace(net) as found:
        y, _ = net(torch.ones(steps, 1, 1, dtype=torch.float64))
        loss(y).sum().backward()
    return found


def row(found: Trace, name: str = "layer0.h") -> GradientSummary:
    return next(one for one in found.summary().rows if one.name == name)


def test_a_gradient_dies_where_it_falls_below_the_threshold() -> None:
    """0.9 to the power 66 is the first below a thousandth."""
    seen = row(linear(0.9, steps=100))
    assert seen.vanished == 99 - 66
    assert seen.lifetime == 66
    assert row(linear(0.99)).vanished is None
    assert row(linear(0.99)).lifetime == STEPS


def remembering_lstm(forget: float) -> nn.LSTM:
    """An LSTM in double precision whose forget gate is about `forget`."""
    torch.manual_seed(0)
    net = nn.LSTM(3, 4).double()
    weights = dict(net.named_parameters())
    with torch.no_grad():
        weights["weight_hh_l0"].mul_(0.1)
        weights["bias_ih_l0"][4:8] = math.log(forget / (1 - forget))
        weights["bias_hh_l0"][4:8] = 0
    return net


@pytest.mark.parametrize("given", [False, True])
def test_a_forget_gate_that_scales_a_state_of_zero_has_not_vanished(given: bool) -> None:
    net, x = remembering_lstm(0.99), torch.randn(40, 2, 3, dtype=torch.float64)
    x[:3] = 0
    weights = dict(net.named_parameters())
    with torch.no_grad():  # c stays zero while the inputs are
        weights["bias_ih_l0"][8:12] = -weights["bias_hh_l0"][8:12]
    state = (torch.zeros(1, 2, 4, dtype=torch.float64),) * 2 if given else None
    with trace(net) as found:
        net(x, state)[0][-1].square().sum().backward()
    assert found["layer0.f"][0].tolist() == [0, 0]
    assert row(found, "layer0.f").vanished is None
    assert row(found, "layer0.f").lifetime == 40


def test_a_forget_gate_vanishes_where_its_state_does() -> None:
    net, x = remembering_lstm(0.5), torch.randn(60, 2, 3, dtype=torch.float64)
    with trace(net) as found:
        net(x)[0][-1].square().sum().backward()
    vanished = row(found, "layer0.f").vanished, row(found, "layer0.c").vanished
    assert all(step is not None and 40 < step < 55 for step in vanished)


def test_a_reset_gate_without_biases_has_not_vanished_at_a_state_of_zero() -> None:
    net, x = nn.GRU(3, 4, bias=False).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    with trace(net) as found:
        net(x)[0].square().sum().backward()
    assert found["layer0.r"][0].tolist() == [0, 0]
    assert row(found, "layer0.r").vanished is None


def test_a_bidirectional_layer_has_a_summary_without_an_edge_of_its_backward_direction() -> None:
    net = nn.LSTM(3, 4, bidirectional=True).double()
    with trace(net) as found:
        net(torch.randn(6, 2, 3, dtype=torch.float64))[0].square().sum().backward()
    assert {one.vanished for one in found.summary().rows} == {None}
    assert {one.name for one in found.summary().rows if one.edge is not None} == {
        "layer0.h",
        "layer0.c",
    }


def test_lags_are_counted_from_the_last_step_with_a_gradient() -> None:
    seen = row(linear(0.5, lambda y: y[30]))
    assert (seen.end, seen.at, seen.lifetime) == (30, 30, 10)
    assert seen.vanished == 20


def test_what_comes_alive_again_further_back_has_not_died() -> None:
    """A small last loss, a large earlier one: dead means small down to the first step."""
    seen = row(linear(0.9, lambda y: y[80] + 1e-9 * y[99], steps=100))
    assert (seen.at, seen.end, seen.vanished) == (80, 99, 80 - 66)


def test_a_gradient_blows_up_where_losses_alone_could_not_make_it_so_large() -> None:
    seen = row(linear(1.2))
    late = [1.2**lag for lag in range(STEPS)]
    first = next(lag for lag, norm in enumerate(late) if norm > 10 * (lag + 1) * max(late[:6]))
    assert seen.exploded == STEPS - 1 - first


def test_losses_that_add_up_are_no_explosion() -> None:
    assert row(linear(1.0, torch.sum)).largest == pytest.approx(STEPS)
    assert row(linear(1.0)).exploded is None
    assert row(linear(0.9, lambda y: y[30])).exploded is None  # no loss after it, and no gradient


def test_a_gradient_that_is_not_finite_has_blown_up() -> None:
    found = linear(0.5, lambda y: y[4] * torch.inf + y[8], steps=9)
    assert row(found).exploded == 4
    assert row(found).largest == math.inf


def test_the_share_that_crosses_the_edge_is_that_of_the_state_entering() -> None:
    seen = row(linear(0.9))
    assert seen.edge == pytest.approx(0.9**STEPS)
    assert row(linear(1.2)).edge == pytest.approx(1.2)


def test_a_gradient_that_does_not_come_is_said() -> None:
    net = nn.GRU(3, 4)
    with trace(net) as found:
        y, _ = net(torch.randn(5, 2, 3))
        (y * 0).sum().backward()
    assert (row(found).largest, row(found).lifetime, row(found).edge) == (0, 0, 0.0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.LSTMCell, nn.GRU])
def test_time_constants_are_those_of_the_gates_seen(kind: Any) -> None:
    net, x = remembering(kind(3, 4)), inputs(20, 3)
    with trace(net) as found:
        if isinstance(net, nn.LSTMCell):
            state = None
            for step in x:
                state = net(step, state)
            loss = torch.as_tensor(state[0] if state else 0).sum()
        else:
            loss = net(x)[0].sum()
        loss.backward()
    weights = {name.removesuffix("_l0"): weight for name, weight in net.named_parameters()}
    h, c = x.new_zeros(2, 3, 4)
    kept: list[Tensor] = []
    for step in x:
        a, b = (
            step @ weights["weight_ih"].T + weights["bias_ih"],
            h @ weights["weight_hh"].T + weights["bias_hh"],
        )
        if kind is nn.GRU:
            (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
            z = (az + bz).sigmoid()
            h = (1 - z) * (an + (ar + br).sigmoid() * bn).tanh() + z * h
            kept.append(z)
        else:
            i, f, g, o = (a + b).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            kept.append(f.sigmoid())
    expected = -1 / torch.stack(kept).mean((0, 1)).log()
    (pace,) = found.summary().timescales
    assert pace.taus == pytest.approx(expected.tolist(), rel=1e-12)
    assert pace.name == ("cell" if kind is nn.LSTMCell else "layer0")
    assert min(pace.taus) <= pace.short <= pace.median <= pace.long <= max(pace.taus)


def test_a_gate_that_is_always_open_keeps_for_ever() -> None:
    pace = Timescale.from_mean("layer0", torch.tensor([0.5, 1.0, 0.9]))
    assert pace.taus[1] == math.inf
    assert pace.median == pytest.approx(-1 / math.log(0.9), rel=1e-6)


def example() -> Trace:
    net, x = remembering(nn.LSTM(3, 4)), inputs(20, 3)
    with trace(net) as found:
        net(x)[0].square().mean().backward()
    return found


def test_the_table_says_it_in_words() -> None:
    told = str(example())
    lines = told.splitlines()
    assert lines[0].split() == [
        "gradient",
        "of",
        "largest",
        "at",
        "step",
        "lifetime",
        "edge",
        "vanished",
        "exploded",
    ]
    assert [line.split()[0] for line in lines[1:7]] == [f"layer0.{letter}" for letter in "hcifgo"]
    assert "layer0: its gates keep 1/e for" in told
    assert all(len(line) < 140 for line in lines)
