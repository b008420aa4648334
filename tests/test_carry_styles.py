"""Modules in styles that public code has: each is called by its author's loop and by `tt.carry`.

Shapes: `T` steps, `B` lanes, `D` inputs, `C` outputs.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import in_chunks
from throughtime.carry import Carried
from throughtime.errors import DataError, ModelError

STEPS, LANES, FEATURES, HIDDEN = 7, 3, 4, 5
EXACT = 1e-12

pytestmark = pytest.mark.usefixtures("float64")


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


class KeepsLastHidden(nn.Module):
    """Its first call makes an attribute that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, self.hidden = self.lstm(x.view(*x.shape[:2], FEATURES))
        return y, self.hidden


def test_an_attribute_that_the_first_call_makes_is_not_missed() -> None:
    net = tt.carry(KeepsLastHidden())
    x = torch.randn(STEPS, LANES, FEATURES)
    assert_author(net, x, cast(nn.LSTM, net.module.lstm)(x)[0])
    assert not hasattr(KeepsLastHidden(), "hidden")


class LanesFirstLayers(nn.Module):
    """A policy whose state is `(B, L, H)`, multiplied by masks that are 0 at a restart."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN, layers)

    def forward(self, x: Tensor, hxs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        kept = (hxs * masks.unsqueeze(-1)).transpose(0, 1).contiguous()
        y, h = self.gru(x.unsqueeze(0), kept)
        return y.squeeze(0), h.transpose(0, 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_an_argument_that_marks_restarts_is_a_constant_of_a_written_call(layers: int) -> None:
    x = torch.randn(STEPS, LANES, FEATURES)
    with pytest.raises(ModelError, match=r"masks=x\.new_ones\(\*x\.shape\[:-1\], 1\)"):
        tt.carry(LanesFirstLayers(layers), x)
    net = tt.carry(
        LanesFirstLayers(layers),
        call=lambda m, x, state: m(x, hxs=state, masks=x.new_ones(*x.shape[:-1], 1)),
        start=lambda lanes: torch.zeros(lanes, layers, HIDDEN),
    )
    assert_author(net, x, cast(nn.GRU, net.module.gru)(x)[0])


class OneLanePolicy(nn.Module):
    """Two heads, no forward; its steps go into a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(FEATURES, HIDDEN), nn.LSTM(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 2)

    def pi(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        y, hidden = self.lstm(torch.relu(self.first(x)).view(-1, 1, HIDDEN), hidden)
        return self.last(y).softmax(2), hidden


def test_a_method_that_reshapes_to_one_lane_is_carried_on_one_lane() -> None:
    module = OneLanePolicy()
    x = torch.randn(STEPS, 1, FEATURES)
    expected, _ = module.pi(x[:, 0], None)
    assert_author(tt.carry(module, call=lambda m, x, h: m.pi(x, h)), x, expected)


def test_a_module_without_forward_is_told_to_name_a_method() -> None:
    with pytest.raises(ModelError, match=r"has no forward[^$]*tt\.carry\(module, call=lambda m, x"):
        tt.carry(OneLanePolicy(), torch.randn(STEPS, 1, FEATURES))


class Modulates(nn.Module):
    """Maps `(x, h)` to the shape of `h` at each step, as a cell does, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(h) * self.gate(x)


class Modulated(nn.Module):
    """A layer, and a part of its own that is called at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.part = nn.GRU(FEATURES, HIDDEN), Modulates()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        return torch.stack([self.part(a, b) for a, b in zip(x, y, strict=True)])


def test_a_part_that_is_called_as_a_cell_is_none_if_the_layers_alone_are_right() -> None:
    module, x = Modulated(), torch.randn(STEPS, LANES, FEATURES)
    net = tt.carry(module, x)
    assert "'part'" not in net.explain()
    assert_author(net, x, module(x))


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
        self.cell = nn.GRUCell(FEATURES, HIDDEN)

    def forward(self, category: Tensor, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(torch.cat([category, x], 1), hidden)
        return hidden * 2, hidden

    def init_hidden(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, HIDDEN)


def test_a_second_input_is_named_with_the_line_that_splits_the_inputs() -> None:
    x = torch.randn(STEPS, LANES, FEATURES)
    with pytest.raises(ModelError, match=r"requires 'x' beside.*inputs=lambda x: \(x\[\.\.\., :2"):
        tt.carry(Conditioned(), x)
    module, h, expected = Conditioned(), torch.zeros(LANES, HIDDEN), list[Tensor]()
    for step in x:
        y, h = module(step[:, :2], step[:, 2:], h)
        expected.append(y)
    net = tt.carry(module, inputs=lambda x: (x[..., :2], x[..., 2:]))
    assert_author(net, x, torch.stack(expected))


class Overflows(nn.Module):
    """A cubic recurrence: bounded for small weights, infinite after a few steps for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, HIDDEN)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], HIDDEN) if state is None else state
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
        tt.carry(module, torch.randn(STEPS, LANES, FEATURES))


class Spikes(nn.Module):
    """Takes both parts of its state or remembers them itself, and returns spikes first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_spikes_are_not_taken_for_the_state_that_is_kept_in_buffers(seed: int) -> None:
    torch.manual_seed(seed)
    module = Spikes()
    # nearly all spike in the trials, not afterwards
    net = tt.carry(module, torch.rand(STEPS, LANES, FEATURES) * 8, output=0)
    x = torch.rand(STEPS, LANES, FEATURES) * 0.5
    syn = mem = torch.zeros(LANES, FEATURES)
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
    net = tt.carry(module, torch.rand(STEPS, LANES, FEATURES) * 8, output=0)
    x, mem, expected = torch.rand(STEPS, LANES, FEATURES) * 0.5, None, list[Tensor]()
    module.syn = torch.zeros(0)
    for step in x:
        spikes, mem = module(step, mem)
        expected.append(spikes)
    module.syn = module.mem = torch.zeros(0)
    assert_author(net, x, torch.stack(expected))


class MadeForLanes(nn.Module):
    """Adds a buffer with a row for each lane of the batch size that it was made with."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN)
        self.register_buffer("rows", torch.zeros(lanes, HIDDEN))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, h = self.gru(x, hidden)
        return y + self.rows, h


@pytest.mark.parametrize("lanes", [3, 5])
def test_a_module_made_for_a_number_of_lanes_is_tried_with_that_number(lanes: int) -> None:
    module = MadeForLanes(lanes)
    x = torch.randn(STEPS, lanes, FEATURES)
    assert_author(tt.carry(module), x, module(x)[0])


class DropsWeights(nn.Module):
    """Sets a weight of its layer at every call; in evaluation that registers a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(FEATURES + HIDDEN, HIDDEN)
        self.raw = nn.Parameter(self.cell.weight.detach().clone())
        del self.cell._parameters["weight"]

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.cell.weight = nn.functional.dropout(self.raw, 0.5, self.training)
        h = x.new_zeros(x.shape[0], HIDDEN) if h is None else h
        h = torch.tanh(self.cell(torch.cat([x, h], 1)))
        return h * 2, h


def test_a_parameter_that_evaluation_registers_does_not_stay_between_trials() -> None:
    module = DropsWeights()
    net = tt.carry(module, torch.randn(STEPS, LANES, FEATURES))
    assert module.training
    assert "weight" not in module.cell._parameters
    module.eval()
    x = torch.randn(STEPS, LANES, FEATURES)
    h, expected = None, list[Tensor]()
    for step in x:
        y, h = module(step, h)
        expected.append(y)
    assert_author(net, x, torch.stack(expected))


class BreaksInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ZeroDivisionError("rate 0")
        return self.gru(x)[0]


def test_an_error_in_training_mode_only_is_said_to_be_one() -> None:
    x = torch.randn(STEPS, LANES, FEATURES)
    with pytest.raises(ModelError, match="in training mode, its forward raised ZeroDivisionError"):
        tt.carry(BreaksInTraining(), x)
    module = BreaksInTraining().eval()
    assert_author(tt.carry(module, x), x, module(x))


class FillsItsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(FEATURES, HIDDEN)
        self.register_buffer("filled", torch.zeros(1, FEATURES))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.filled.shape != x.shape:
            self.filled = torch.zeros_like(x)
        h = self.gru(self.filled.copy_(x), h)
        return h * 2, h


def test_a_buffer_that_every_call_fills_again_is_filled_in_a_copy() -> None:
    module, h, expected = FillsItsBuffer(), torch.zeros(LANES, HIDDEN), list[Tensor]()
    x = torch.randn(STEPS, LANES, FEATURES)
    for step in x:
        h = module.gru(step, h)
        expected.append(h * 2)
    assert_author(tt.carry(module, x), x, torch.stack(expected))


class UndefinedWithoutState(nn.Module):
    """Raises an error of the interpreter if it gets no state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if h is None:
            h = weight.new_zeros(1, x.shape[1], HIDDEN)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        return self.gru(x, h)


def test_any_error_of_a_call_is_one_way_of_calling_less() -> None:
    module = UndefinedWithoutState()
    x = torch.randn(STEPS, LANES, FEATURES)
    assert_author(tt.carry(module), x, module.gru(x)[0])


class StartsInFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h * 2, h

    def init_hidden(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, HIDDEN, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_start_in_the_dtype_of_the_weights_follows_them(dtype: torch.dtype) -> None:
    module = StartsInFloat32().float()
    x = torch.randn(STEPS, LANES, FEATURES, dtype=torch.float32)
    net = tt.carry(module, x)
    y, _ = in_chunks(net.to(dtype), x.to(dtype), (3, 4))
    assert y.dtype == dtype


UNMEASURABLE: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("scripted", lambda: torch.jit.script(nn.Linear(FEATURES, 2)), "TorchScript.*was scripted"),
    ("meta", lambda: nn.Sequential(KeepsLastHidden().to("meta")), r"meta device.*to_empty"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(("name", "make", "reason"), UNMEASURABLE, ids=[u[0] for u in UNMEASURABLE])
def test_what_cannot_be_measured_is_refused_with_what_to_do(
    name: str, make: Callable[[], nn.Module], reason: str
) -> None:
    del name
    with pytest.raises(ModelError, match=reason):
        tt.carry(make(), torch.randn(STEPS, LANES, FEATURES))


def test_a_chunk_without_steps_is_refused() -> None:
    net = tt.carry(nn.GRU(FEATURES, HIDDEN))
    x = torch.randn(STEPS, LANES, FEATURES)
    with pytest.raises(DataError, match=r"the chunk \(0, 3, 4\) has no steps"):
        net(x[:0], net.initial_state(LANES, like=x))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e7])
def test_examples_that_are_not_finite_or_large_do_not_decide(value: float) -> None:
    x = torch.randn(STEPS, LANES, FEATURES)
    net = tt.carry(KeepsLastHidden(), torch.full_like(x, value))
    assert_author(net, x, cast(nn.LSTM, net.module.lstm)(x)[0])


class WritesIntoItsList(nn.Module):
    """Layers of cells whose states it keeps in the list that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(FEATURES, FEATURES) for _ in range(2)])

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        for i, cell in enumerate(self.cells):
            x = states[i] = cell(x, states[i])
        return x * 2, states

    def init_states(self, lanes: int) -> list[Tensor]:
        return [torch.zeros(lanes, FEATURES) for _ in self.cells]


def test_a_module_may_write_into_the_list_of_its_states() -> None:
    module = WritesIntoItsList()
    x, states, expected = torch.randn(STEPS, LANES, FEATURES), module.init_states(LANES), []
    for step in x:
        y, states = module(step, states)
        expected.append(y)
    net = tt.carry(module)
    assert_author(net, x, torch.stack(expected))
    state = net.initial_state(LANES)
    net(x, state)
    assert all(not leaf.any() for leaf in tt.state.tensors(state))


class AdaptiveThreshold(nn.Module):
    """Its threshold starts at one, for all lanes, and is a part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def initial_state(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(inputs), torch.ones(())

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        v, threshold = self.initial_state(x) if state is None else state
        v = 0.9 * v + x * self.scale
        soft = torch.sigmoid(v - threshold)
        spikes = (v > threshold).to(x) + (soft - soft.detach())
        return spikes, (v - spikes * threshold, 0.9 * threshold + 0.1 * spikes)


def test_a_start_that_saturated_spikes_do_not_show_is_not_missed() -> None:
    module = AdaptiveThreshold()
    net = tt.carry(module, torch.rand(STEPS, LANES, FEATURES) * 8)
    x, state, expected = torch.rand(STEPS, LANES, FEATURES), None, list[Tensor]()
    for step in x:
        y, state = module(step, state)
        expected.append(y)
    assert_author(net, x, torch.stack(expected))


class StartsUnseen(nn.Module):
    """The first output does not show that a part of the state starts from one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        v, w = (x * 0, x * 0 + 1) if state is None else state
        return v, (0.5 * v + x * self.scale + w, 0.9 * w)


def test_a_start_that_is_not_zeros_is_asked_for() -> None:
    x = torch.randn(STEPS, LANES, FEATURES)
    module = StartsUnseen()
    with pytest.raises(ModelError, match=r"no state than.*start=lambda m, lanes"):
        tt.carry(module, x)

    def start(lanes: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(lanes, FEATURES), torch.ones(lanes, FEATURES)

    state, expected = None, list[Tensor]()
    for step in x:
        y, state = module(step, state)
        expected.append(y)
    assert_author(tt.carry(module, start=start), x, torch.stack(expected))
