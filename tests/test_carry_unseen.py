"""What modules of public code showed: starts of convolutions, counts, items that are no tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from throughtime.carry import _calls, _inside, _laws, _search, _trial
from throughtime.carry.carried import Carried
from throughtime.errors import ModelError

EXACT, FEATURES, LANES, CONTEXT = 1e-12, 3, 3, 10  # more steps than a trial has


class Convolutions(nn.Module):
    """Each convolution pads itself, as in a TCN: not the same as zeros before the inputs."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(FEATURES, 5, 3), nn.Conv1d(5, 4, 3, dilation=4)
        self.gru = nn.GRU(4, 4, batch_first=True) if recurrent else None

    def forward(self, x: Tensor) -> Tensor:
        z = x.transpose(1, 2)
        for conv, past in ((self.first, 2), (self.second, 8)):
            z = torch.relu(conv(functional.pad(z, (past, 0))))
        y = z.transpose(1, 2)
        return y if self.gru is None else self.gru(y)[0]


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


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs(steps: int = 20, lanes: int = LANES) -> Tensor:
    return torch.randn(steps, lanes, FEATURES)


def spoiled(module: nn.Module, context: int, x: Tensor) -> float:
    """The largest difference from the module's own calls: chunks, then lanes that restart."""
    with torch.no_grad():
        return _spoiled(module, tt.carry(module, x, context=context), x)


def _spoiled(module: nn.Module, net: Carried, x: Tensor) -> float:
    wanted = module(x.transpose(0, 1)).transpose(0, 1)
    deviation = 0.0
    for chunk in (1, 3, 7, len(x)):
        state, outputs = net.initial_state(LANES), list[Tensor]()
        for part in x.split(chunk):
            y, state = net(part, state)
            outputs.append(y)
        deviation = max(deviation, float((torch.cat(outputs) - wanted).abs().max()))
    resets = torch.zeros(x.shape[:2], dtype=torch.bool)
    for lane, step in ((0, 6), (0, 8), (2, 13)):
        resets[step, lane] = True
    y, _ = net(x, net.initial_state(LANES), resets)
    for lane, bounds in ((0, (0, 6, 8)), (1, (0,)), (2, (0, 13))):
        rows = [
            module(x[start:stop, lane].unsqueeze(0))[0]
            for start, stop in zip(bounds, (*bounds[1:], len(x)), strict=True)
        ]
        deviation = max(deviation, float((y[:, lane] - torch.cat(rows)).abs().max()))
    return deviation


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_recording_of_convolutions_starts_as_in_the_modules_own_call(
    recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Convolutions(recurrent), inputs()
    assert spoiled(module, CONTEXT, x) < EXACT
    monkeypatch.setattr(_laws.Laboratory, "_start", lambda _: 0.0)
    assert spoiled(module, CONTEXT, x) > 1e-3  # the mutant: zeros before the inputs are accepted


def test_gradients_of_convolutions_are_those_of_one_call() -> None:
    module, x = Convolutions(recurrent=True), inputs()
    net = tt.carry(module, x, context=CONTEXT)
    state, loss = net.initial_state(LANES), torch.zeros(())
    for part in x.split(6):
        y, state = net(part, state)
        loss = loss + y.square().sum()
    whole = module(x.transpose(0, 1)).square().sum()
    pairs = [torch.autograd.grad(value, [*module.parameters()]) for value in (loss, whole)]
    assert max(float((a - b).abs().max()) for a, b in zip(*pairs, strict=True)) < EXACT


def test_the_start_of_convolutions_is_right_after_training_too() -> None:
    """A ReLU that is dead at the first weights hides what zeros before the inputs change."""
    module, x = Convolutions(recurrent=False), inputs()
    with torch.no_grad():
        module.first.bias.fill_(-5.0)  # type: ignore[union-attr]
    net = tt.carry(module, x, context=CONTEXT)
    with torch.no_grad():
        module.first.bias.fill_(0.5)  # type: ignore[union-attr]
        assert _spoiled(module, net, x) < EXACT


def test_a_convolution_without_padding_starts_after_zeros() -> None:
    module, x = Unpadded(), inputs()
    net = tt.carry(module, x, context=4)
    y, _ = net(x, net.initial_state(LANES))
    wanted = module(torch.cat([torch.zeros(4, LANES, FEATURES), x]))
    assert float((y - wanted).detach().abs().max()) < EXACT


def test_a_count_of_calls_that_changes_outputs_much_later_is_a_state() -> None:
    with pytest.raises(ModelError, match="attributes beside its state"):
        tt.carry(Counting(), inputs())
    tt.carry(Counting(limit=10**9), inputs())  # it only counts


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
    y, _ = (net := tt.carry(module, x))(x, net.initial_state(LANES))
    assert torch.equal(y, module(x.transpose(0, 1))[0].transpose(0, 1))


@pytest.mark.parametrize("make", [Neuron, MadeLater])
def test_a_state_in_a_dict_or_in_an_attribute_that_a_method_makes(
    make: Callable[[], nn.Module],
) -> None:
    x = inputs()
    net = tt.carry(nn.Sequential(nn.Linear(FEATURES, FEATURES), make()), x)
    y, _ = net(x, net.initial_state(LANES))
    linear, module = net.module.children()
    if isinstance(module, MadeLater):
        module.init_sequence(LANES)
    wanted = torch.stack([module(linear(step)) for step in x])
    assert float((y - wanted).detach().abs().max()) < EXACT


def test_a_private_dict_is_put_back_between_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    tt.carry(Neuron(), inputs())
    monkeypatch.setattr(_trial, "OF_EVERY_MODULE", _inside.OF_EVERY_MODULE | {"_memories"})
    with pytest.raises(ModelError):
        tt.carry(Neuron(), inputs())


def test_a_weight_that_a_hook_computes_is_no_state() -> None:
    module = Convolutions(recurrent=False)
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(module.first)
    assert spoiled(module, CONTEXT, inputs()) < EXACT


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

    assert "torch.full((lanes, 4), VALUE)" in said(Starting())  # zeros were tried
    assert "context=10" in said(Convolutions(recurrent=False))
    text = said(Policy(), call=lambda m, x, state: m(x, state), start=torch.zeros(4))
    assert "call returned 3 items, expected (outputs, next state)" in text
    assert "Write:" not in text

    class Lengths(Starting):
        def forward(self, x: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)[0] * lengths[:, None]

    assert "requires 'lengths', and all lanes" in said(Lengths())

    class Named(Starting):
        def forward(self, x: Any, state: Tensor) -> Any:  # type: ignore[override]
            return super().forward(torch.cat([x["speed"], x["angle"]], 1), state)

    assert "inputs=lambda x: {'speed': x[..., :N], 'angle': x[..., :N]})" in said(Named())

    class BatchFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(FEATURES, 4, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.gru(x + y)[0]

    assert "x.transpose(0, 1)" in said(BatchFirst(), inputs=lambda x: (x, x))
    assert _search.PATIENCE > _search.REPORT
    assert _calls.SEEN not in tt.carry(Unpadded(), inputs(), context=4).initial_state(2)


class CutsNowAndThen(nn.Module):
    """Detaches its state every 16 calls, which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.calls = nn.GRUCell(FEATURES, 4), 0
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = x.new_zeros(len(x), 4) if self.hidden is None else self.hidden
        self.hidden = self.cell(x, hidden if self.calls % 16 else hidden.detach())
        return self.hidden


def test_a_count_of_calls_that_cuts_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="attributes beside its state"):
        tt.carry(CutsNowAndThen(), inputs())
    monkeypatch.setattr(_laws.Laboratory, "_uneven", lambda *_: 0.0)
    tt.carry(CutsNowAndThen(), inputs())  # accepted, and wrong: the law is needed


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
    with pytest.raises(ModelError) as refused:
        tt.carry(module, x)
    line = str(refused.value).partition("Write: tt.carry(module, ")[2].partition("), where call")[0]
    net = tt.carry(module, x, **eval(f"dict({line})"))
    assert float((net(x, net.initial_state(LANES))[0] - module(x)).detach().abs().max()) < EXACT


class Joined(nn.Module):
    """Keeps h and c in one tensor, as agents do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(FEATURES, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.cell(x, (memory[:, :4], memory[:, 4:]))
        return self.head(h), torch.cat([h, c], 1)


def test_h_and_c_may_be_one_tensor() -> None:
    module, x = Joined(), inputs()
    net = tt.carry(module, x)
    memory, wanted = torch.zeros(LANES, 8), list[Tensor]()
    for step in x:
        y, memory = module(step, memory)
        wanted.append(y)
    assert torch.equal(net.initial_state(2), torch.zeros(2, 8))
    got, _ = net(x, net.initial_state(LANES))
    assert float((got - torch.stack(wanted)).detach().abs().max()) < EXACT
