"""The policies of the examples: real-time recurrent learning, dense and element by element, and
windows that start from carried states or from noise.

Shapes: `T` steps, `B` lanes, `n` numbers of the state, `P` weights.
"""

import doctest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from examples.models.min_gru import MinGRU
from examples.policies import rtrl, rtrl_elementwise
from examples.policies.rtrl import RTRL
from examples.policies.rtrl_elementwise import ElementwiseRTRL
from examples.policies.starts import CarriedStart, NoiseStart, preceding
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import test_updates
import throughtime as tt
from policy_data import (
    Complex,
    PolicyData,
    data_for,
    plain,
    policy_gradients,
    summed,
)
from quick import examples
from strategies import (
    FEATURES,
    Row,
    Weights,
    apart,
    recordings,
    seeds,
    some_nets,
)
from test_updates import RESUMED, run_and_resume, same_bits
from throughtime.carry import Carried
from throughtime.errors import ConfigError, StateError
from throughtime.gradient import Policy

EXACT = 1e-12
NETS = "lstm", "hides-cell", "dict-state", "namedtuple-state", "learnt-start"


def exact(net: Carried, data: PolicyData) -> Weights:
    ((_, _, results),) = plain(net, data)
    return results


@examples(8)
@given(
    steps=st.sampled_from([1, 2, 7, 13, 23]),
    stride=st.sampled_from([1, 3, 5, 8, 50]),
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@some_nets(*NETS)
def test_updates_sum_to_the_exact_gradient(
    row: Row, steps: int, stride: int, lanes: int, seed: int, resets: float, masked: float
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    results = policy_gradients(net, [data.chunk], RTRL(stride))
    assert apart(summed(results), exact(net, data)) < EXACT


def test_complex_states_are_refused() -> None:
    net, data = tt.carry(Complex().double()), PolicyData.draw(13, 2, 0)
    with pytest.raises(StateError, match=r"two leaves, or take tt\.Exact"):
        policy_gradients(net, [data.chunk], RTRL(4))


def test_strides_out_of_range_are_refused() -> None:
    for policy in (RTRL, ElementwiseRTRL):
        with pytest.raises(ConfigError):
            policy(0)


def test_the_example_of_the_docstring_runs() -> None:
    assert doctest.testmod(rtrl) == doctest.TestResults(failed=0, attempted=4)


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


@examples(8)
@given(
    steps=st.sampled_from([1, 2, 7, 23]),
    stride=st.sampled_from([1, 3, 8, 50]),
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@every_net
def test_elementwise_updates_sum_to_the_exact_gradient(
    kind: str, steps: int, stride: int, lanes: int, seed: int, resets: float, masked: float
) -> None:
    net = net_of(kind)
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    ((_, _, expected),) = plain(net, data)
    results = policy_gradients(net, [data.chunk], ElementwiseRTRL(stride))
    assert apart(summed(results), expected) < EXACT


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
    ],
    ids=["units that read each other", "two layers"],
)
def test_units_that_see_each_other_are_refused(module: nn.Module) -> None:
    net = tt.carry(module.double())
    data = data_for(net, 12, 2, 0)
    with pytest.raises(ConfigError, match="depends on other units"):
        policy_gradients(net, [data.chunk], ElementwiseRTRL(5))


def test_its_example_runs() -> None:
    assert doctest.testmod(rtrl_elementwise) == doctest.TestResults(failed=0, attempted=5)


WIDE = torch.float64
LENGTHS = (23, 10, 8, 31)  # windows of 5 leave shorter ones, so lanes reset within chunks
Loss = nn.MSELoss


def some_recordings(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "inputs": torch.randn(n, 2, dtype=WIDE, generator=generator),
            "targets": torch.randn(n, 1, dtype=WIDE, generator=generator),
        }
        for n in lengths
    ]


def make_net(*, fused: bool = False) -> Carried:
    torch.manual_seed(3)
    net = tt.carry(nn.Sequential(nn.LSTM(2, 6), nn.Linear(6, 1)).to(WIDE), fused=fused)
    with torch.no_grad():
        net.get_parameter("module.0.bias_ih_l0")[6:12] += 3.0  # the state lasts
    return net


def make_stream(lanes: int, window: int = 5, lengths: tuple[int, ...] = LENGTHS) -> tt.Stream:
    return tt.Stream(
        tt.windows(some_recordings(lengths), window), lanes=lanes, chunk=window, seed=1
    )


def train_epochs(
    net: Carried, stream: tt.Stream, policy: Policy, epochs: int = 3
) -> Iterator[tuple[float, Tensor]]:
    """The loss and the outputs of every update; the weights move after each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = None
    for _ in range(epochs):
        epoch = tt.updates(net, stream, Loss(), gradient=policy, policy_state=state)
        for update in epoch:
            optimizer.step()
            optimizer.zero_grad()
            yield float(update.loss), update.outputs
        state = epoch.policy_state


class Oracle:
    """The same by hand: each lane by itself, step by step, and a list of final states.

    A window has ended when its lane starts another one, or with the epoch.
    """

    def __init__(self, net: Carried, stream: tt.Stream) -> None:
        self.net, self.stream = net, stream
        self.before = preceding(stream.recordings)
        self.ended: list[tuple[int, Any]] = []

    def initial(self, recording: int) -> Any:
        """The state that enters a window."""
        ends = [state for r, state in self.ended if r == self.before[recording]]
        return ends[-1] if ends else self.net.initial_state(1)

    def epoch(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[float, Tensor]]:
        chunks = list(self.stream)
        lanes = chunks[0].lanes
        states: list[Any] = [None] * lanes
        playing = [-1] * lanes
        now = playing
        for chunk in chunks:
            rows: list[list[Tensor]] = [[] for _ in range(lanes)]
            for t in range(chunk.steps):
                now, starts = chunk.recording[t].tolist(), chunk.resets[t].tolist()
                starting = [lane for lane in range(lanes) if starts[lane]]
                for lane in starting:
                    if playing[lane] >= 0:
                        self.ended.append((playing[lane], tt.state.detach(states[lane])))
                for lane in starting:
                    states[lane], playing[lane] = self.initial(now[lane]), now[lane]
                for lane in range(lanes):
                    y = torch.zeros(1, 1, 1, dtype=WIDE)
                    if now[lane] >= 0:
                        x = chunk.inputs[t : t + 1, lane : lane + 1]
                        y, states[lane] = self.net(x, states[lane])
                    rows[lane].append(y[0])
            states = [tt.state.detach(state) for state in states]
            columns = [torch.stack(r) for r in rows]
            outputs = torch.cat(columns, dim=1)
            assert chunk.targets is not None
            loss = (outputs - chunk.targets)[chunk.mask].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach()), outputs.detach() * chunk.mask.unsqueeze(2)
        self.ended += [(r, states[k]) for k, r in enumerate(playing) if now[k] == r >= 0]

    def run(self, epochs: int = 3) -> Iterator[tuple[float, Tensor]]:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(epochs):
            yield from self.epoch(optimizer)


class NoiseOracle(Oracle):
    """Noise with the mean and deviation of all states in which windows have ended."""

    def initial(self, recording: int) -> Any:
        del recording
        fresh = self.net.initial_state(1)
        if not self.ended:
            return fresh
        rows = zip(*(tt.state.tensors(state) for _, state in self.ended), strict=True)
        drawn = [self.drawn(torch.cat(leaves)) for leaves in rows]
        return tt.state.map_leaves(lambda _: drawn.pop(0).unsqueeze(0), fresh)

    @staticmethod
    def drawn(rows: Tensor) -> Tensor:
        return rows.mean(0) + rows.std(0, correction=0) * torch.randn_like(rows[0])


ORACLES: dict[str, tuple[Policy, type[Oracle]]] = {
    "carried": (CarriedStart(5), Oracle),
    "noise": (NoiseStart(5), NoiseOracle),
}


@pytest.mark.covering
@pytest.mark.parametrize(("policy", "oracle"), list(ORACLES.values()), ids=list(ORACLES))
@pytest.mark.parametrize(("lanes", "fused"), [(1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("lengths", [LENGTHS, (20, 10, 30)], ids=["uneven", "even"])
def test_windows_start_from_the_states_of_the_definition(
    policy: Policy, oracle: type[Oracle], lanes: int, lengths: tuple[int, ...], *, fused: bool
) -> None:
    stream = make_stream(lanes, lengths=lengths)
    torch.manual_seed(0)
    own = list(train_epochs(make_net(fused=fused), stream, policy))
    torch.manual_seed(0)
    expected = list(oracle(make_net(), make_stream(lanes, lengths=lengths)).run())
    assert len(own) == len(expected) == 3 * len(stream)
    for (loss, outputs), (other, rows) in zip(own, expected, strict=True):
        assert loss == pytest.approx(other, rel=1e-9)
        mask = rows != 0
        assert torch.allclose(outputs[mask], rows[mask], rtol=1e-9, atol=1e-12)


def elementwise() -> Carried:
    return tt.carry(nn.Sequential(MinGRU(FEATURES, UNITS), nn.Linear(UNITS, 2)).double())


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (RESUMED["hidden-cell"], RTRL(5)),
        (elementwise, ElementwiseRTRL(5)),
        (RESUMED["rotation"], CarriedStart(5)),
        (RESUMED["rotation"], NoiseStart(5)),
    ],
    ids=["rtrl", "elementwise", "carried", "noise"],
)
def test_resume_gives_the_same_weights_to_the_bit(
    make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(policy, CarriedStart):  # it continues windows
        windows = tt.windows(recordings(test_updates.LENGTHS), 8)
        monkeypatch.setattr(test_updates, "stream", lambda: tt.Stream(windows, lanes=3, chunk=8))
    through, resumed = run_and_resume(make, policy, 4)
    assert same_bits(through, resumed)
