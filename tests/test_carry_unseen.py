"""What modules of public code showed: starts of convolutions, counts, items that are no tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from strategies import in_chunks
from throughtime.carry import Carried, _inside, _search
from throughtime.errors import ModelError

EXACT, FEATURES, LANES, CONTEXT = 1e-12, 3, 3, 10  # more steps than a trial has

pytestmark = pytest.mark.usefixtures("float64")


class Convolutions(nn.Module):
    """Each convolution pads itself, as in a TCN: not the same as zeros before the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(FEATURES, 5, 3), nn.Conv1d(5, 4, 3, dilation=4)

    def forward(self, x: Tensor) -> Tensor:
        z = x.transpose(1, 2)
        for conv, past in ((self.first, 2), (self.second, 8)):
            z = torch.relu(conv(functional.pad(z, (past, 0))))
        return z.transpose(1, 2)


class Unpadded(nn.Module):
    """It has no output without its past: a recording starts after zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(FEATURES, 4, 5), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(torch.tanh(self.conv(x.permute(1, 2, 0))).permute(2, 0, 1))[0]


class Counting(nn.Module):
    """Estimates a level in the first 500 calls, which it counts in an attribute."""

    def __init__(self, limit: int = 500) -> None:
        super().__init__()
        self.cell, self.limit = nn.GRUCell(FEATURES, 4), limit
        self.reset()

    def reset(self) -> None:
        self.hidden: Any = None
        self.level: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden, self.level = x.new_zeros(len(x), 4), torch.zeros_like(x)
        if self.calls < self.limit:
            self.level = self.level + x.abs() / 50
        self.calls += 1
        self.hidden = self.cell(x - self.level, self.hidden)
        return self.hidden


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.actor = nn.GRUCell(FEATURES, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        memory = self.cell(x, memory)
        return torch.distributions.Categorical(logits=self.actor(memory)), memory[:, 0], memory


class OneStep(nn.Module):
    """With a state it takes chunks of one step and returns such."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, 4)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        if state is not None:
            (step,) = x.unbind(1)
            h = self.cell(step, state)
            return h.unsqueeze(1), h
        h, outputs = x.new_zeros(len(x), 4), list[Tensor]()
        for step in x.unbind(1):
            h = self.cell(step, h)
            outputs.append(h)
        return torch.stack(outputs, 1), h


class Neuron(nn.Module):
    """Its state is in a dict, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[str, Any] = {"v": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        v = self._memories["v"]
        v = torch.full_like(x, v) if isinstance(v, float) else v
        self._memories["v"] = v + (x - v) / 2
        return torch.sigmoid(self._memories["v"])


class MadeLater(nn.Module):
    """A method makes the attribute that holds the state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, 4)

    def init_sequence(self, batch_size: int) -> None:
        self.previous = (torch.zeros(batch_size, 4), torch.ones(batch_size, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.previous = self.cell(x, self.previous)
        return self.previous[0]


class Leftover(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.hidden = self.gru(x, self.hidden)
        return y


class Starting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, 4)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        state = self.cell(x, x.new_ones(len(x), 4) if state is None else state)
        return state, state


def inputs(steps: int = 20) -> Tensor:
    return torch.randn(steps, LANES, FEATURES)


def played(net: Carried, x: Tensor) -> Tensor:
    return in_chunks(net, x, (6, 6, 6))[0]


def apart(y: Tensor, wanted: Tensor) -> float:
    return float((y - wanted).detach().abs().max())


def line_of(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """The keywords that the refusal of a module tells to write."""
    with pytest.raises(ModelError) as refused:
        tt.carry(module, x)
    line = str(refused.value).partition("Write: tt.carry(module, ")[2].partition("), where call")[0]
    return eval(f"dict({line})")


def test_convolutions_that_pad_inside_are_refused_and_right_with_one_padding() -> None:
    """Zeros between two layers with biases are not those before the inputs."""
    module, x = Convolutions(), inputs()
    with pytest.raises(ModelError, match="pad the inputs once, by all its steps"):
        tt.carry(module, x, context=CONTEXT)

    class Padded(Convolutions):
        def forward(self, x: Tensor) -> Tensor:
            z = functional.pad(x.transpose(1, 2), (CONTEXT, 0))
            return self.second(torch.relu(self.first(z))).relu().transpose(1, 2)

    module = Padded()
    y = played(tt.carry(module, x, context=CONTEXT), x)
    wanted = module(x.transpose(0, 1)).transpose(0, 1)
    assert apart(y, wanted) < EXACT
    pairs = [torch.autograd.grad(z.square().sum(), [*module.parameters()]) for z in (y, wanted)]
    assert max(apart(*pair) for pair in zip(*pairs, strict=True)) < EXACT


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("hook", [lambda conv: conv, torch.nn.utils.weight_norm])
def test_a_convolution_without_padding_starts_after_zeros(hook: Callable[[Any], Any]) -> None:
    """A weight that a hook computes is no state."""
    module, x = Unpadded(), inputs()
    hook(module.conv)
    net = tt.carry(module, x, context=4)
    assert apart(played(net, x), module(functional.pad(x, (0, 0, 0, 0, 4, 0)))) < EXACT


def test_a_count_of_calls_that_changes_outputs_much_later_is_a_state() -> None:
    for limit in (500, 10**9):  # whether it only counts cannot be measured
        with pytest.raises(ModelError, match="calls change a number"):
            tt.carry(Counting(limit), inputs())


def test_outputs_that_are_no_tensor_are_asked_for() -> None:
    for output in (None, "all"):
        with pytest.raises(ModelError, match=r"returns a Categorical, .*output="):
            tt.carry(Policy(), inputs(), output=output)
    net = tt.carry(
        Policy(),
        inputs(),
        call=lambda m, x, state: ((row := m(x, state))[0].logits, row[2]),
        start=lambda _, lanes: torch.zeros(lanes, 4),
    )
    assert net(inputs(), net.initial_state(LANES))[0].shape == (20, LANES, 2)


def test_the_dimension_of_a_chunk_of_one_step_is_no_feature() -> None:
    module, x = OneStep(), inputs()
    assert apart(played(tt.carry(module, x), x), module(x.transpose(0, 1))[0].transpose(0, 1)) == 0


@pytest.mark.parametrize("make", [Neuron, MadeLater])
def test_a_state_in_a_dict_or_in_an_attribute_that_a_method_makes(
    make: Callable[[], nn.Module],
) -> None:
    x = inputs()
    net = tt.carry(nn.Sequential(nn.Linear(FEATURES, FEATURES), make()), x)
    y = played(net, x)
    linear, module = net.module.children()
    if isinstance(module, MadeLater):
        module.init_sequence(LANES)
    assert apart(y, torch.stack([module(linear(step)) for step in x])) < EXACT


def test_a_private_dict_is_put_back_between_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inside, "OF_EVERY_MODULE", _inside.OF_EVERY_MODULE | {"_memories"})
    with pytest.raises(ModelError):
        tt.carry(Neuron(), inputs())


def test_what_an_earlier_call_has_left_is_no_start() -> None:
    module = Leftover()
    module(inputs())
    with pytest.raises(ModelError, match="what an earlier call has left"):
        tt.carry(module, inputs())
    module.hidden = None
    tt.carry(module, inputs())


def test_lines_are_those_that_work() -> None:
    def said(module: nn.Module, **options: Any) -> str:
        with pytest.raises(ModelError) as error:
            tt.carry(module, inputs(), **options)
        return str(error.value)

    class TwoStarts(Leftover):
        def init_hidden(self, lanes: int) -> Tensor:
            return torch.ones(1, lanes, 4)

        def forward(self, x: Tensor, state: Any = None) -> Any:
            return self.gru(x, state)

    class Truncates(Starting):
        def forward(self, x: Tensor, state: Any = None) -> Any:
            outputs = list[Tensor]()
            for t, step in enumerate(x):
                y, state = super().forward(step, state.detach() if t == 9 else state)
                outputs.append(y)
            return torch.stack(outputs), state

    assert "torch.full((lanes, 4), VALUE)" in said(Starting())  # zeros were tried
    assert "Say what a recording starts from" in said(TwoStarts())
    assert "no gradient" in said(Truncates())
    assert "pad the inputs once" in said(Convolutions())
    assert "Write: tt.carry(module, context=4)" in said(Unpadded())
    text = said(Policy(), call=lambda m, x, state: m(x, state), start=torch.zeros(4))
    assert "call returns no pair, expected (outputs, next state)" in text
    assert "Write:" not in text

    class Lengths(Starting):
        def forward(self, x: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)[0] * lengths[:, None]

    assert "(x, torch.full((x.shape[1],), len(x)))" in said(Lengths())

    class Named(Starting):
        def forward(self, x: Any, state: Tensor) -> Any:  # type: ignore[override]
            return super().forward(torch.cat([x["speed"], x["angle"]], 1), state)

    assert "inputs=lambda x: {'name': x[..., :N]}" in said(Named())

    class BatchFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(FEATURES, 4, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.gru(x + y)[0]

    assert "x.transpose(0, 1)" in said(BatchFirst(), inputs=lambda x: (x, x))
    assert _search.PATIENCE > _search.REPORT


class Allocates(nn.Module):
    """A step beside a forward of sequences, and a method that makes the state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(FEATURES + 4, 4)

    def allocate_inference_cache(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 4)

    def forward(self, x: Tensor) -> Tensor:
        cache, outputs = self.allocate_inference_cache(x.shape[1]), list[Tensor]()
        for step in x:
            y, cache = self.step(step, cache)
            outputs.append(y)
        return torch.stack(outputs)

    def step(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.tanh(self.cell(torch.cat([x, cache], 1)))
        return cache * 2, cache


def test_the_line_for_a_step_names_the_method_that_makes_its_state() -> None:
    module, x = Allocates(), inputs()
    assert apart(played(tt.carry(module, x, **line_of(module, x)), x), module(x)) < EXACT


class ProjectsState(nn.Module):
    """What a chunk receives is no longer what the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.project = nn.GRU(FEATURES, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.gru(x, h if h is None else torch.tanh(self.project(h)))


def test_layers_inside_do_not_hide_what_a_module_does_to_its_state() -> None:
    with pytest.raises(ModelError, match="ProjectsState cannot be carried"):
        tt.carry(ProjectsState(), inputs())


# ------------------------------------------------------------ results that may be turned


class HiddenFirst(nn.Module):
    """Returns the state before outputs that have its size."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES + 4, 4), nn.Linear(4, 4)

    def init_hidden(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, 4)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.into(torch.cat([x, hidden], 1)))
        return hidden, self.out(hidden)


class HiddenTakenFirst(nn.Module):
    """Takes the state before the inputs, and returns it last."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(FEATURES, 4), nn.Linear(4, 4)

    def forward(self, prev_hidden: Tensor, obs: Tensor) -> Any:
        h = self.cell(obs, prev_hidden)
        return self.out(h), h


class HiddenAlwaysFirst(HiddenTakenFirst):
    def forward(self, prev_hidden: Tensor, obs: Tensor) -> Any:
        y, hidden = super().forward(prev_hidden, obs)
        return hidden, y


class Swapped(nn.Module):
    """Returns its two states in another order than it takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(FEATURES, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        h_new, c_new = self.cell(x, (h, c))
        return self.out(h_new), c_new, h_new


def zeros_of(count: int) -> tuple[Tensor, ...]:
    return (torch.zeros(LANES, 4),) * count


Author = Callable[[Any, Tensor, Any], Any]
TURNED: list[tuple[Callable[[], nn.Module], int, Author]] = [
    (HiddenFirst, 1, lambda m, x, s: m(x, *s)[::-1]),
    (lambda: HiddenFirst().requires_grad_(False), 1, lambda m, x, s: m(x, *s)[::-1]),
    (HiddenTakenFirst, 1, lambda m, x, s: m(*s, x)),
    (HiddenAlwaysFirst, 1, lambda m, x, s: m(*s, x)[::-1]),
    (Swapped, 2, lambda m, x, s: [m(x, *s)[i] for i in (0, 2, 1)]),
]


@pytest.mark.parametrize(("make", "states", "author"), TURNED)
def test_where_a_result_may_be_turned_the_line_says_how(
    make: Callable[[], nn.Module], states: int, author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = make(), inputs()
    state, wanted = zeros_of(states), list[Tensor]()
    for step in x:
        y, *state = author(module, step, tuple(state))
        wanted.append(y)
    net = tt.carry(module, x, **line_of(module, x))
    assert apart(played(net, x), torch.stack(wanted)) < EXACT
    if make not in (HiddenTakenFirst, HiddenAlwaysFirst):
        monkeypatch.setattr(_search.Search, "_check_order", lambda *_: None)
        net = tt.carry(make(), x)  # accepted, and wrong: the question is needed
        assert apart(played(net, x), torch.stack(wanted)) > EXACT


class ReturnsItsStateIfAsked(nn.Module):
    """A loop of its own, with a flag by which it is asked for its state."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(FEATURES, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, state: Tensor | None = None, return_state: bool = False) -> Any:
        h, ys = x.new_zeros(x.shape[1], 4) if state is None else state, list[Tensor]()
        for step in x:
            h = torch.tanh(self.inputs(step) + self.hidden(h))
            ys.append(h)
        return (torch.stack(ys), h) if return_state else torch.stack(ys)


def test_the_line_for_a_flag_takes_outputs_and_state_in_their_order() -> None:
    module, x = ReturnsItsStateIfAsked(), inputs()
    with pytest.raises(ModelError) as refused:
        tt.carry(module, x)
    line = str(refused.value).partition("Write: tt.carry(module, ")[2].partition("), where call")[0]
    net = tt.carry(module, x, **eval(f"dict({line})", {"torch": torch, "N": 4}))
    assert apart(played(net, x), module(x)) < EXACT


class SharedCovariance(nn.Module):
    """A filter whose gain is that of the first lane: all lanes have it until one restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.map = nn.Parameter(torch.tensor(0.3)), nn.Linear(FEATURES, FEATURES)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mean, variance = state
        variance = variance[:1].expand_as(variance) / 2 + self.noise
        mean = mean + variance / (variance + 1) * (self.map(x) - mean)
        return mean * 2, (mean, variance)


def test_a_state_that_one_lane_reads_of_another_is_refused() -> None:
    def start(lanes: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(lanes, FEATURES), torch.ones(lanes, 1)

    with pytest.raises(ModelError, match="one lane change another lane"):
        tt.carry(SharedCovariance(), inputs(), start=start)


class Joins(nn.Module):
    """A step that joins its inputs and its state."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(FEATURES + 4, 4)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.map(torch.cat([x, h], 1)))
        return h * 2, h


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_a_start_of_no_lane_is_taken_by_a_step_that_joins_it(shape: tuple[int, ...]) -> None:
    net = tt.carry(Joins(), inputs(), start=torch.full(shape, 0.5))
    assert torch.equal(net.initial_state(2), torch.full((2, 4), 0.5))


def test_a_start_that_fails_is_not_replaced_by_zeros_in_the_line() -> None:
    def start(lanes: int) -> Tensor:
        raise NameError(f"name 'VALUE' is not defined, for {lanes} lanes")

    with pytest.raises(ModelError, match="'VALUE' is not defined") as refused:
        tt.carry(Joins(), inputs(), start=start)
    assert "Write:" not in str(refused.value)


class MeanState(nn.Module):
    """What it returns as its state is a mean over the steps of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 4)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(x, h)
        return y, y.mean(0, keepdim=True)


class Halves(nn.Module):
    """Halves its attribute at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 4)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.h = self.gru(x, self.h if self.h is None else self.h / 2)
        return y


@pytest.mark.parametrize("make", [MeanState, Halves])
def test_a_state_that_depends_on_the_lengths_of_calls_is_refused(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises(ModelError, match="chunks with the state carried do not give"):
        tt.carry(make(), inputs())


class StartsFromInputs(nn.Module):
    """Its start is computed from the first inputs; no parameter of it is the start."""

    def __init__(self) -> None:
        super().__init__()
        self.init, self.cell = nn.Linear(FEATURES, 4), nn.GRUCell(FEATURES, 4)
        self.h0 = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, h: Any = None) -> tuple[Tensor, Tensor]:
        h = self.cell(x, self.init(x) * self.h0 if h is None else h)
        return h, h


def test_a_parameter_is_no_start_because_of_its_name() -> None:
    with pytest.raises(ModelError, match="than from the start that was tried") as refused:
        tt.carry(StartsFromInputs(), inputs())
    assert "m.h0" not in str(refused.value)
    assert "m.init" not in str(refused.value)
