"""Accepted means proved: what other weights, another start, signature or style would show.

Shapes: `T` steps, `B` lanes, `D` inputs, `C` outputs.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import in_chunks
from throughtime.carry import Carried
from throughtime.errors import DataError, ModelError

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


def test_a_start_that_no_layer_shows_is_asked_for_and_taken_without_lanes() -> None:
    module, x = LearnedByHand(), inputs()
    with pytest.raises(
        ModelError, match=r"start=lambda m, lanes: torch\.full\(\(lanes, 8\), VALUE"
    ):
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


class RandomMethod(RequiresState):
    def init_hidden(self, lanes: int) -> Tensor:
        return torch.randn(1, lanes, HIDDEN)


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
    """No way of calling it is right."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x @ a @ b


def test_a_search_says_that_it_goes_on_and_ends_within_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count(0, 3)  # each trial takes three
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    with pytest.raises(ModelError, match="search ended after 10 s of processor time"):
        tt.carry(Slow(), inputs())
    assert "still tries" in caplog.text
    assert next(seconds) == 15


def test_a_method_by_its_name_is_refused_with_the_line_to_write() -> None:
    name: Any = "forward"
    with pytest.raises(ModelError, match=r"call=lambda m, x, state: m\.forward\(x, state\)"):
        tt.carry(RequiresState(), call=name)


INPUTS, UNITS = 4, 5


class Cell(nn.Module):
    """What the modules share: a GRU cell and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(INPUTS, UNITS), nn.Linear(UNITS, 2)

    def play(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        for step in x:
            h = 0.5 * h + 0.5 * self.cell(step, h)  # not what the cell returns: hooks are wrong
            outputs.append(self.head(h))
        return torch.stack(outputs), h


EMPTY = torch.zeros(0, 0, 0)


class EmptyDefault(nn.Module):
    """A causal convolution whose cache is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(INPUTS, 2, 3)

    def forward(self, x: Tensor, cache: Tensor = EMPTY) -> tuple[Tensor, Tensor]:
        x = x.permute(1, 2, 0)
        padded = nn.functional.pad(x, (2, 0)) if cache.size(2) == 0 else torch.cat([cache, x], 2)
        return torch.tanh(self.conv(padded)).permute(2, 0, 1), padded[:, :, -2:]


class TupleDefault(Cell):
    """A method takes the state as well, and fills it where it is None."""

    def _init_hidden(self, hx: Any, batch_size: int) -> tuple[Tensor, Tensor]:
        h, memory = (None, None) if hx is None else hx
        h = torch.zeros(batch_size, UNITS) if h is None else h
        return h, torch.full((batch_size, 1), 1e-3) if memory is None else memory

    def forward(self, x: Tensor, hx: Any = (None, None)) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, memory = self._init_hidden(hx, x.shape[1])
        y, h = self.play(x, h)
        decays = 0.9 ** torch.arange(1.0, len(x) + 1).view(-1, 1, 1)
        return y + memory * decays, (h, memory * decays[-1])


class KeywordOnly(Cell):
    def forward(
        self, x: Tensor, *, state: Tensor | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        y, h = self.play(x, x.new_zeros(x.shape[1], UNITS) if state is None else state)
        return y / temperature, h


class UnnamedStates(Cell):
    """Two optional arguments with names that say nothing, returned in a list."""

    def forward(
        self, x: Tensor, r1: Tensor | None = None, r2: Tensor | None = None
    ) -> list[Tensor]:
        y, r1 = self.play(x, x.new_zeros(x.shape[1], UNITS) if r1 is None else r1)
        r2 = x.new_zeros(x.shape[1], 2) if r2 is None else r2
        sums = torch.cumsum(torch.cat([r2.unsqueeze(0), y]), 0)[1:]
        return [sums.sum(2), r1, sums[-1]]


class OnRequest(Cell):
    """Returns its state in evaluation, and on request."""

    def forward(
        self, x: Tensor, state: Tensor | None = None, use_cache: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        use_cache = not self.training if use_cache is None else use_cache
        y, h = self.play(x, x.new_zeros(x.shape[1], UNITS) if state is None else state)
        return y, h if use_cache else None


class MaskPerRow(Cell):
    """Masks of dropout, drawn when it was made, for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("masks", torch.rand(8, INPUTS).round() * 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        masks = self.get_buffer("masks")
        x = x * masks[: x.shape[1]] if self.training else x
        return self.play(x, x.new_zeros(x.shape[1], UNITS) if h is None else h)


class KeepsLastHidden(nn.Module):
    """Its first call makes an attribute that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, UNITS)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, self.hidden = self.lstm(x.view(*x.shape[:2], INPUTS))
        return y, self.hidden


class MadeForLanes(nn.Module):
    """Adds a buffer with a row for each lane of the batch size that it was made with."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(INPUTS, UNITS)
        self.register_buffer("rows", torch.zeros(lanes, UNITS))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, h = self.gru(x, hidden)
        return y + self.rows, h


class UndefinedWithoutState(nn.Module):
    """Raises an error of the interpreter if it gets no state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(INPUTS, UNITS)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if h is None:
            h = weight.new_zeros(1, x.shape[1], UNITS)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        return self.gru(x, h)


def assert_author(net: Carried, x: Tensor, expected: Tensor) -> None:
    """Outputs and gradients are those of the author's loop, however the steps are divided."""
    leaves = list(net.module.parameters())
    weights = torch.randn(expected.shape)
    grads = torch.autograd.grad((expected * weights).sum(), leaves, materialize_grads=True)
    for lengths in ((STEPS,), (3, 4), (1,) * STEPS):
        y, _ = in_chunks(net, x, lengths)
        assert torch.allclose(y, expected, rtol=0, atol=EXACT), lengths
        got = torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True)
        for a, b in zip(got, grads, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=EXACT * (1 + float(b.abs().max()))), lengths


AUTHORS: list[tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = [
    (EmptyDefault, lambda m, x: m(x)[0]),
    (TupleDefault, lambda m, x: m(x)[0]),
    (KeywordOnly, lambda m, x: m(x)[0]),
    (UnnamedStates, lambda m, x: m(x)[0]),
    (MaskPerRow, lambda m, x: m(x)[0]),
    (KeepsLastHidden, lambda m, x: m.lstm(x)[0]),
    (lambda: MadeForLanes(LANES), lambda m, x: m(x)[0]),
    (UndefinedWithoutState, lambda m, x: m.gru(x)[0]),
]


@pytest.mark.parametrize(("make", "author"), AUTHORS)
def test_a_module_is_carried_as_its_author_calls_it(
    make: Callable[[], nn.Module], author: Callable[[Any, Tensor], Tensor]
) -> None:
    module, x = make(), torch.randn(STEPS, LANES, INPUTS)
    net = tt.carry(module, x)
    module.eval()
    assert_author(net, x, author(module, x))


def test_a_state_that_is_returned_on_request_is_asked_for_in_a_written_call() -> None:
    module, x = OnRequest(), torch.randn(STEPS, LANES, INPUTS)
    with pytest.raises(ModelError, match="in training mode"):
        tt.carry(module, x)
    net = tt.carry(module, x, call=lambda m, x, h: m(x, h, use_cache=True))
    expected = module.eval()(x)[0]
    assert torch.equal(net(x, net.initial_state(LANES))[0], expected)


class OneLanePolicy(nn.Module):
    """Two heads, no forward; its steps go into a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(INPUTS, UNITS), nn.LSTM(UNITS, UNITS)
        self.last = nn.Linear(UNITS, 2)

    def pi(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        y, hidden = self.lstm(torch.relu(self.first(x)).view(-1, 1, UNITS), hidden)
        return self.last(y).softmax(2), hidden


def test_a_method_that_reshapes_to_one_lane_is_carried_on_one_lane() -> None:
    module = OneLanePolicy()
    x = torch.randn(STEPS, 1, INPUTS)
    expected, _ = module.pi(x[:, 0], None)
    assert_author(tt.carry(module, call=lambda m, x, h: m.pi(x, h)), x, expected)


def test_a_module_without_forward_is_told_to_name_a_method() -> None:
    with pytest.raises(ModelError, match=r"has no forward[^$]*tt\.carry\(module, call=lambda m, x"):
        tt.carry(OneLanePolicy(), torch.randn(STEPS, 1, INPUTS))


class Frequencies(nn.Module):
    """Outputs `(B, C, T, F)` of inputs `(B, C, T, F)`; each layer runs over another axis."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.GRU(2, 2, batch_first=True, bidirectional=True)
        self.along = nn.GRU(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lanes, _, steps, bins = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(lanes * steps, bins, 2)
        rows = self.across(rows)[0].reshape(lanes, steps, bins, 4).transpose(1, 2)
        y, _ = self.along(rows.reshape(lanes * bins, steps, 4))
        return y.reshape(lanes, bins, steps, 2).permute(0, 3, 2, 1)


def test_time_may_be_the_third_of_four_dimensions() -> None:
    module = Frequencies()
    x = torch.randn(STEPS, LANES, 2, 6)
    expected = module(x.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
    assert_author(tt.carry(module, inputs=lambda x: x.permute(1, 2, 0, 3)), x, expected)


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(INPUTS, UNITS)

    def forward(self, category: Tensor, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(torch.cat([category, x], 1), hidden)
        return hidden * 2, hidden

    def init_hidden(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, UNITS)


def test_a_second_input_is_named_with_the_line_that_splits_the_inputs() -> None:
    x = torch.randn(STEPS, LANES, INPUTS)
    with pytest.raises(ModelError, match=r"inputs=lambda x: \(x\[\.\.\., :N\], x\[\.\.\., N:"):
        tt.carry(Conditioned(), x)
    module, h, expected = Conditioned(), torch.zeros(LANES, UNITS), list[Tensor]()
    for step in x:
        y, h = module(step[:, :2], step[:, 2:], h)
        expected.append(y)
    net = tt.carry(module, inputs=lambda x: (x[..., :2], x[..., 2:]))
    assert_author(net, x, torch.stack(expected))


class Overflows(nn.Module):
    """A cubic recurrence: bounded for small weights, infinite after a few steps for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, UNITS)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], UNITS) if state is None else state
        outputs: list[Tensor] = []
        for step in x.unbind(1):
            h = h**3 + self.linear(step)
            outputs.append(h)
        return torch.stack(outputs, 1), h


def test_a_net_that_overflows_within_the_trials_is_refused() -> None:
    module = Overflows()
    with torch.no_grad():
        module.linear.weight.mul_(6)
    with pytest.raises(ModelError, match="the outputs are not finite"):
        tt.carry(module, torch.randn(STEPS, LANES, INPUTS))


class Spikes(nn.Module):
    """Takes both parts of its state or remembers them itself, and returns spikes first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(INPUTS))
        self.register_buffer("syn", torch.zeros(0), persistent=False)
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def forward(
        self, x: Tensor, syn: Tensor | None = None, mem: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x * self.scale
        self.syn = self.syn if syn is None else syn
        self.mem = self.mem if mem is None else mem
        if self.syn.shape != x.shape:
            self.syn = torch.zeros_like(x)
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        self.syn = 0.9 * self.syn + x
        self.mem = 0.8 * self.mem + self.syn - (self.mem > 1).to(x)
        soft = torch.sigmoid(self.mem - 1)
        spikes = (self.mem > 1).to(x) + (soft - soft.detach())
        return spikes, self.syn, self.mem


def test_spikes_are_not_taken_for_the_state_that_is_kept_in_buffers() -> None:
    module = Spikes()
    # nearly all spike in the trials, not afterwards
    net = tt.carry(module, torch.rand(STEPS, LANES, INPUTS) * 8, output=0)
    x = torch.rand(STEPS, LANES, INPUTS) * 0.5
    syn = mem = torch.zeros(LANES, INPUTS)
    expected: list[Tensor] = []
    for step in x:
        spikes, syn, mem = module(step, syn, mem)
        expected.append(spikes)
    assert_author(net, x, torch.stack(expected))


class HalfSpikes(Spikes):
    """Takes one part of its state only; the other stays in a buffer."""

    def forward(self, x: Tensor, mem: Tensor | None = None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        spikes, _, mem = super().forward(x, None, mem)
        return spikes, mem


def test_what_a_module_keeps_beside_its_argument_is_part_of_the_state() -> None:
    module = HalfSpikes()
    net = tt.carry(module, torch.rand(STEPS, LANES, INPUTS) * 8, output=0)
    x, mem, expected = torch.rand(STEPS, LANES, INPUTS) * 0.5, None, list[Tensor]()
    module.syn = torch.zeros(0)
    for step in x:
        spikes, mem = module(step, mem)
        expected.append(spikes)
    module.syn = module.mem = torch.zeros(0)
    assert_author(net, x, torch.stack(expected))


class BreaksInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(INPUTS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ZeroDivisionError("rate 0")
        return self.gru(x)[0]


def test_an_error_in_training_mode_only_is_said_to_be_one() -> None:
    x = torch.randn(STEPS, LANES, INPUTS)
    with pytest.raises(ModelError, match="in training mode, its forward raised ZeroDivisionError"):
        tt.carry(BreaksInTraining(), x)
    module = BreaksInTraining().eval()
    assert_author(tt.carry(module, x), x, module(x))


class FillsItsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(INPUTS, UNITS)
        self.register_buffer("filled", torch.zeros(1, INPUTS))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.filled.shape != x.shape:
            self.filled = torch.zeros_like(x)
        h = self.gru(self.filled.copy_(x), h)
        return h * 2, h


def test_a_buffer_that_every_call_fills_again_is_filled_in_a_copy() -> None:
    module, h, expected = FillsItsBuffer(), torch.zeros(LANES, UNITS), list[Tensor]()
    x = torch.randn(STEPS, LANES, INPUTS)
    for step in x:
        h = module.gru(step, h)
        expected.append(h * 2)
    assert_author(tt.carry(module, x), x, torch.stack(expected))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_module_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="before it is scripted"):
        tt.carry(torch.jit.script(nn.Linear(INPUTS, 2)), torch.randn(STEPS, LANES, INPUTS))


def test_a_chunk_without_steps_is_refused() -> None:
    net = tt.carry(nn.GRU(INPUTS, UNITS))
    x = torch.randn(STEPS, LANES, INPUTS)
    with pytest.raises(DataError, match=r"the chunk \(0, 3, 4\) has no steps"):
        net(x[:0], net.initial_state(LANES, like=x))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e7])
def test_examples_that_are_not_finite_or_large_do_not_decide(value: float) -> None:
    x = torch.randn(STEPS, LANES, INPUTS)
    net = tt.carry(KeepsLastHidden(), torch.full_like(x, value))
    assert_author(net, x, cast(nn.LSTM, net.module.lstm)(x)[0])


class StartsUnseen(nn.Module):
    """The first output does not show that a part of the state starts from one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(INPUTS))

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        v, w = (x * 0, x * 0 + 1) if state is None else state
        return v, (0.5 * v + x * self.scale + w, 0.9 * w)


def test_a_start_that_is_not_zeros_is_asked_for() -> None:
    with pytest.raises(ModelError, match=r"no state than.*start=lambda m, lanes"):
        tt.carry(StartsUnseen(), torch.randn(STEPS, LANES, INPUTS))
