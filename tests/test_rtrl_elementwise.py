"""The example of real-time recurrent learning for units that do not see each other.

Shapes: `T` steps, `B` lanes, `N` units, `m` numbers in the state of a unit, `P` recurrent weights.
"""

import copy
import doctest

import pytest
import torch
from examples.models.min_gru import MinGRU
from examples.policies import rtrl_elementwise
from examples.policies.rtrl import RTRL
from examples.policies.rtrl_elementwise import ElementwiseRTRL
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import data_for, plain, policy_gradients, summed, train
from quick import examples
from strategies import FEATURES, Weights, apart, gradients, recordings, seeds, weights
from throughtime.carry import Carried
from throughtime.errors import ConfigError

EXACT = 1e-12
UNITS, OUTPUTS = 5, 4


class TraceUnits(nn.Module):
    """Complex units `h' = r exp(i t) h + w x` that begin from a learned state."""

    def __init__(self) -> None:
        super().__init__()
        self.radius = nn.Parameter(torch.rand(UNITS) * 0.3 + 0.65)
        self.angle = nn.Parameter(torch.rand(UNITS) * 3)
        self.into = nn.Parameter(torch.randn(2 * UNITS, FEATURES))  # real parts, imaginary parts
        self.first = nn.Parameter(torch.randn(UNITS, dtype=torch.complex64))

    def initial_state(self, lanes: int) -> Tensor:
        return self.first.expand(lanes, UNITS)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.complex(*(x @ self.into.T).split(UNITS, -1))
        gates = torch.polar(self.radius, self.angle).expand_as(inputs)
        h = tt.linear_scan(gates, inputs, state)
        return torch.cat([h.real, h.imag], -1), h[-1]


def net_of(kind: str) -> Carried:
    torch.manual_seed(0)
    layers = {
        "minGRU": (MinGRU(FEATURES, UNITS), nn.Linear(UNITS, OUTPUTS)),
        "trace units": (TraceUnits(), nn.Linear(2 * UNITS, OUTPUTS)),
        "one unit of five numbers": (nn.GRU(FEATURES, UNITS), nn.Linear(UNITS, OUTPUTS)),
    }
    module = nn.Sequential(*layers[kind])
    for name, weight in list(module.named_parameters()):
        wide = torch.complex128 if weight.is_complex() else torch.float64
        module.get_parameter(name).data = weight.data.to(wide)
    return tt.carry(module)


every_net = pytest.mark.parametrize("kind", ["minGRU", "trace units", "one unit of five numbers"])


@examples(12)
@given(
    steps=st.sampled_from([1, 2, 7, 23]),
    stride=st.sampled_from([1, 3, 8, 50]),
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@every_net
def test_updates_sum_to_the_exact_gradient(
    kind: str, steps: int, stride: int, lanes: int, seed: int, resets: float, masked: float
) -> None:
    net = net_of(kind)
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    ((_, _, expected),) = plain(net, data)
    results = policy_gradients(net, [data.chunk], ElementwiseRTRL(stride))
    assert apart(summed(results), expected) < EXACT


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["minGRU", "one unit of five numbers"])
def test_every_update_is_that_of_dense_rtrl_while_the_weights_move(kind: str, rate: float) -> None:
    net, other = net_of(kind), net_of(kind)
    data = data_for(net, 31, 2, 0, resets=0.1)
    results = [list[Weights](), list[Weights]()]
    for one, policy, found in zip(
        (net, other), (ElementwiseRTRL(4), RTRL(4)), results, strict=True
    ):
        optimizer = torch.optim.SGD(one.parameters(), lr=rate)
        for _ in tt.updates(one, [data.chunk], nn.MSELoss(), gradient=policy):
            found.append(gradients(one))
            optimizer.step()
            optimizer.zero_grad()
    assert len(results[0]) == 8
    assert max(apart(a, b) for a, b in zip(*results, strict=True)) < EXACT


class Mixing(MinGRU):
    """Units that read their neighbour's state."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = list[Tensor]()
        for row in self.candidate(x):
            state = 0.5 * state + 0.3 * state.roll(1, -1) + row
            outputs.append(state)
        return torch.stack(outputs), state


@pytest.mark.parametrize(
    "module",
    [
        Mixing(FEATURES, UNITS),
        nn.Sequential(MinGRU(FEATURES, UNITS), MinGRU(UNITS, UNITS)),
        nn.Sequential(nn.Linear(FEATURES, 3), MinGRU(3, UNITS)),
        nn.GRU(FEATURES, UNITS, num_layers=2),
    ],
    ids=["units that read each other", "two layers", "weights before it", "GRU of two layers"],
)
def test_units_that_see_each_other_are_refused(module: nn.Module) -> None:
    net = tt.carry(module.double())
    data = data_for(net, 12, 2, 0)
    with pytest.raises(ConfigError, match="depends on other units"):
        policy_gradients(net, [data.chunk], ElementwiseRTRL(5))


@pytest.mark.parametrize("kind", ["minGRU", "trace units"])
def test_resume_keeps_the_influence_to_the_bit(kind: str) -> None:
    def stream() -> tt.Stream:
        return tt.Stream(recordings([31, 17, 20], outputs=OUTPUTS), lanes=2, chunk=8, warm_up=1)

    net = net_of(kind)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = tt.updates(net, stream(), nn.MSELoss(), gradient=ElementwiseRTRL(5))
    train(optimizer, run, 3)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), run.state_dict()))
    losses = train(optimizer, run)
    other = net_of(kind)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    rest = tt.updates(other, stream(), nn.MSELoss(), gradient=ElementwiseRTRL(5))
    rest.load_state_dict(saved[2])
    assert train(other_optimizer, rest) == losses
    assert apart(weights(other), weights(net)) == 0


def test_a_stride_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="stride=0: expected at least 1 step"):
        ElementwiseRTRL(0)


def test_its_example_runs() -> None:
    assert doctest.testmod(rtrl_elementwise) == doctest.TestResults(failed=0, attempted=5)
