"""Accepted means proved: what other weights, another start or another output would show.

Shapes: `T` steps, `B` lanes, `D` inputs, `C` outputs.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import in_chunks
from throughtime.errors import ModelError

STEPS, LANES, FEATURES, HIDDEN = 7, 3, 3, 8
EXACT = 1e-12

pytestmark = pytest.mark.usefixtures("float64")


def inputs(steps: int = STEPS) -> Tensor:
    return torch.randn(steps, LANES, FEATURES)


class Recurrent(nn.Module):
    """What the modules share: a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN)


class LearnedStart(Recurrent):
    """A learned start that begins at zeros: values alone do not show it."""

    def __init__(self, *, beside: bool = False) -> None:
        super().__init__()
        self.h0, self.beside = nn.Parameter(torch.zeros(1, 1, HIDDEN)), beside

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.gru(x, self.h0.expand(1, x.shape[1], -1).contiguous() if h is None else h)


class LearnedInside(LearnedStart):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0]


@pytest.mark.parametrize("make", [LearnedStart, LearnedInside])
def test_a_learned_start_that_begins_at_zeros_gets_its_gradient(
    make: Callable[[], LearnedStart],
) -> None:
    module, x = make(), inputs()
    net = tt.carry(module, x)
    in_chunks(net, x, (3, 4))[0].sum().backward()
    y: Any = module(x)
    own = torch.autograd.grad((y if isinstance(y, Tensor) else y[0]).sum(), module.h0)
    assert module.h0.grad is not None
    assert module.h0.grad.abs().max() > 0
    assert (module.h0.grad - own[0]).abs().max() < EXACT


class LearnedByHand(nn.Module):
    """The same without a layer of torch.nn, which would show what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.h0, self.map = nn.Parameter(torch.zeros(HIDDEN)), nn.Linear(FEATURES + HIDDEN, HIDDEN)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.h0.expand(x.shape[1], -1) if h is None else h
        outputs: list[Tensor] = []
        for step in x:
            h = torch.tanh(self.map(torch.cat([step, h], 1)))
            outputs.append(h * 2)
        return torch.stack(outputs), h


def test_a_start_that_no_layer_shows_is_asked_for_by_its_name_and_taken_without_lanes() -> None:
    module, x = LearnedByHand(), inputs()
    with pytest.raises(ModelError, match=r"start=lambda m, lanes: m\.h0"):
        tt.carry(module, x)
    net = tt.carry(module, x, start=lambda m, lanes: m.h0)  # noqa: ARG005
    y, _ = in_chunks(net, x, (3, 4))
    own, _ = module(x)
    assert (y - own).abs().max() < EXACT
    grads = [torch.autograd.grad(out.sum(), module.h0)[0] for out in (y, own)]
    assert (grads[0] - grads[1]).abs().max() < EXACT


class RequiresState(Recurrent):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(x, h)


@pytest.mark.parametrize(
    "start",
    [
        torch.ones(HIDDEN),
        torch.ones(1, HIDDEN),
        torch.ones(1, 1, HIDDEN),
        lambda lanes: torch.ones(1, lanes, HIDDEN),
        lambda m, lanes: torch.ones(1, lanes, m.gru.hidden_size),
        lambda lanes: torch.ones(1, 1, HIDDEN),  # noqa: ARG005
    ],
    ids=["no lanes", "one lane", "in the module's layout", "lanes", "module and lanes", "constant"],
)
def test_a_start_is_taken_for_no_lane_one_lane_and_all_lanes(start: Any) -> None:
    module, x = RequiresState(), inputs()
    expected, _ = module(x, torch.ones(1, LANES, HIDDEN))
    net = tt.carry(module, x, start=start)
    assert (in_chunks(net, x, (3, 4))[0] - expected).abs().max() < EXACT
    assert torch.equal(net.initial_state(5), torch.ones(5, 1, HIDDEN))


class RandomStart(Recurrent):
    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.gru(x, torch.randn(1, x.shape[1], HIDDEN) if h is None else h)


class RandomMethod(Recurrent):
    def init_hidden(self, lanes: int) -> Tensor:
        return torch.randn(1, lanes, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(x, h)


@pytest.mark.parametrize("make", [RandomStart, RandomMethod])
def test_a_random_start_is_refused_with_the_keyword(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"its start is random[\s\S]*start=lambda m, lanes"):
        tt.carry(make(), inputs())


class Heads(Recurrent):
    """An actor and a critic, one of which starts at zero."""

    def __init__(self, zero: str = "") -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 1)
        if zero:
            nn.init.zeros_(self.get_submodule(zero).weight)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y, after = self.gru(x, h)
        return self.actor(y), self.critic(y), after


class Attends(Heads):
    """Logits by attention over the chunk, features, and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y, after = self.gru(x, h)
        return self.actor(self.attention(y, y, y)[0]), y, after


@pytest.mark.parametrize("zero", ["", "actor", "critic"])
def test_more_than_one_output_is_asked_for_whatever_the_weights(zero: str) -> None:
    with pytest.raises(ModelError, match="returns several tensors"):
        tt.carry(Heads(zero), inputs())
    module, x = Heads(zero), inputs()
    assert torch.equal(in_chunks(tt.carry(module, x, output=0), x, ())[0], module(x)[0])


def test_features_beside_logits_that_cannot_be_carried_are_no_outputs() -> None:
    with pytest.raises(ModelError, match=r"returns several tensors|Attention|attention"):
        tt.carry(Attends(), inputs())
    with pytest.raises(ModelError, match="attention"):
        tt.carry(Attends(), inputs(), output=0)


class Stack(nn.Module):
    """Returns the list of its layers' states, each of which may be the output."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(FEATURES, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)])

    def forward(self, x: Tensor, hidden: list[Tensor] | None = None) -> list[Tensor]:
        states: list[Tensor] = []
        for cell, h in zip(self.cells, hidden or [None, None], strict=True):
            x = cell(x, h)
            states.append(x)
        return states


def test_of_a_list_of_states_the_output_is_asked_for() -> None:
    with pytest.raises(ModelError, match="returns several tensors"):
        tt.carry(Stack(), inputs())
    module, x, states, expected = Stack(), inputs(), None, list[Tensor]()
    for step in x:
        states = module(step, states)
        expected.append(states[-1])
    y, _ = in_chunks(tt.carry(module, x, output=1), x, (3, 4))
    assert (y - torch.stack(expected)).abs().max() < EXACT


class Remembers(Recurrent):
    """An attention memory beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 2)

    def forward(
        self, x: Tensor, h: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, after = self.gru(x, h)
        past = y if memory is None else torch.cat([memory, y])
        scores = torch.einsum("tbh,sbh->bts", y, past)
        hidden = torch.ones(len(y), len(past)).tril(len(past) - len(y)) == 0
        mixed = scores.masked_fill(hidden, -1e9).softmax(-1)
        return self.head(torch.einsum("bts,sbh->tbh", mixed, past)), after, past[-4:]


def test_a_memory_beside_the_hidden_state_is_not_dropped() -> None:
    with pytest.raises(ModelError):
        tt.carry(Remembers(), inputs())


class Leaky(nn.Module):
    """A spiking neuron with its potential in an attribute, which is a number before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        potential = self.potential * 0.9 + x
        soft = torch.sigmoid(50 * (potential - 1))
        spikes = (potential > 1).to(x) + soft - soft.detach()
        self.potential = potential * (1 - spikes.detach())
        return spikes


@pytest.mark.parametrize("gain", [0.0, 0.01, 3.0], ids=["dead", "silent", "active"])
def test_the_potential_of_silent_neurons_is_carried_and_leaks_into_no_recording(
    gain: float,
) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), Leaky(), nn.Linear(HIDDEN, 2), Leaky())
    weights = [module.get_parameter(f"{k}.weight") for k in (0, 2)]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(gain)
    net, x = tt.carry(module), inputs()
    state = net.initial_state(LANES, like=x)
    assert [tuple(leaf.shape) for leaf in tt.state.tensors(state)] == [(LANES, HIDDEN), (LANES, 2)]
    with torch.no_grad():
        for weight in weights:
            weight.normal_(0, 2)
    resets = torch.zeros(STEPS, LANES, dtype=torch.bool)
    resets[4] = True
    y, _ = net(x, state, resets)
    assert (y[4:] - in_chunks(net, x[4:], ())[0]).abs().max() < EXACT
    assert torch.equal(in_chunks(net, x, (3, 4))[0], in_chunks(net, x, ())[0])


class Membranes(nn.Module):
    """A neuron whose state grows from one number for each unit to one for each lane."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HIDDEN))

    def init_state(self) -> Tensor:
        return torch.zeros(HIDDEN)

    def forward(self, x: Tensor, mem: Tensor) -> tuple[Tensor, Tensor]:
        mem = 0.9 * mem + x * self.gain
        return torch.tanh(mem), mem


def test_a_start_of_units_becomes_one_of_lanes() -> None:
    net, x = tt.carry(nn.Sequential(nn.Linear(FEATURES, HIDDEN), Membranes())), inputs()
    resets = torch.zeros(STEPS, LANES, dtype=torch.bool)
    resets[3, 1] = True
    y, state = net(x, net.initial_state(LANES, like=x), resets)
    assert [tuple(leaf.shape) for leaf in tt.state.tensors(state)] == [(LANES, HIDDEN)]
    assert (y[3:, 1] - in_chunks(net, x[3:], ())[0][:, 1]).abs().max() < EXACT


class Grows(Recurrent):
    """Keeps all that it has computed."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(x)
        kept = y if past is None else torch.cat([past, y])
        return y + kept.mean(0), kept


def test_a_state_that_grows_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be carried"):
        tt.carry(Grows(), inputs(), output=0)


class Slow(nn.Module):
    """No way of calling it is right, and each takes long."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        time.sleep(1.5)
        return x @ a @ b @ c


@pytest.mark.slow  # ten seconds
def test_a_search_says_that_it_goes_on_and_ends_within_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began = time.monotonic()
    with pytest.raises(ModelError, match="search ended after 10 s"):
        tt.carry(Slow(), inputs())
    assert "has tried" in caplog.text
    assert time.monotonic() - began < 20


def test_a_method_by_its_name_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(ModelError, match=r"call=lambda m, x, state: m\.GRU\(x, state\)"):
        tt.carry(RequiresState(), call="GRU")
