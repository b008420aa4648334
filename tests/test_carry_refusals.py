"""Errors of carry: each states the reason and the line to write."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import (
    FEATURES,
    HIDDEN,
    Rotation,
    TensorState,
    in_chunks,
    inputs,
    named,
    remembering,
    start,
)
from throughtime.errors import DataError, ModelError, StateError

EXACT = 1e-12


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[1],), len(x)))
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0])[0]


class SharedState(Rotation):
    """A leaf that all lanes share cannot be reset for one of them."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        h, seen = (self.zeros(x), x.new_zeros(1)) if state is None else state
        y, h = self.play(x, h)
        return y, (h, seen + 1)


REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    (
        "bidirectional layer",
        lambda: nn.LSTM(FEATURES, HIDDEN, bidirectional=True),
        r"layer 'LSTM' is bidirectional.*starts at the end",
    ),
    (
        "bidirectional layer inside",
        lambda: nn.Sequential(nn.GRU(FEATURES, HIDDEN, bidirectional=True)),
        r"layer '0' is bidirectional.*bidirectional=False",
    ),
    (
        "no recurrent layer",
        lambda: nn.Linear(FEATURES, HIDDEN),
        r"Linear cannot be carried: no recurrent layer",
    ),
    (
        "chain without state",
        lambda: nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh()),
        r"none of the modules in this nn.Sequential",
    ),
    ("packed sequence", Packs, r"layer 'gru' gets a PackedSequence; a stream needs no packing"),
    ("shared state", SharedState, r"state leaf '1' has shape \(1,\) and \(1,\) for 3 and 2 lanes"),
]


@pytest.mark.parametrize(
    ("make", "reason"), [pytest.param(m, r, id=name) for name, m, r in REFUSED]
)
def test_module_that_cannot_be_carried_is_refused_with_the_reason(
    make: Callable[[], nn.Module], reason: str
) -> None:
    x = inputs(7, 2)

    def run_twice() -> None:
        net = tt.carry(remembering(make()))
        for _ in range(2):
            net(x, start(net, x))

    with pytest.raises((ModelError, StateError), match=reason):
        run_twice()


class Disagrees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.GRU(FEATURES, HIDDEN, batch_first=True)
        self.b = nn.GRU(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[0].transpose(0, 1))[0]


def test_layers_that_disagree_about_batch_first_are_decided_by_trial() -> None:
    module, x = remembering(Disagrees()), inputs(9, 2)
    y, _ = in_chunks(tt.carry(module), x, (4, 2))
    assert (y - module(x.transpose(0, 1))).abs().max() < EXACT


def test_layout_needs_inputs_once_for_a_module_without_initial_state() -> None:
    net, x = named("dict-state").net(), inputs(3, 2)
    with pytest.raises(
        StateError, match=r"not known yet: call net.initial_state\(lanes, like=inputs\)"
    ):
        net.initial_state(2)
    net.initial_state(2, like=x)
    assert tt.state.lanes(net.initial_state(5)) == 5


class Noisy(TensorState):
    """Draws random numbers even in evaluation mode.

    Part of it was put into that mode by its owner.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        torch.rand(3)
        return super().forward(self.parts(x), state)


def test_trial_changes_nothing() -> None:
    net, x = (
        tt.carry(
            nn.Sequential(
                remembering(Noisy()), nn.Linear(2, FEATURES).double(), remembering(Noisy())
            )
        ),
        inputs(3, 2),
    )
    modes, random = [m.training for m in net.modules()], torch.get_rng_state()
    assert len(set(modes)) == 2
    net.initial_state(2, like=x)
    assert [m.training for m in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in net.parameters())
    net(x, net.initial_state(2))
    assert not torch.equal(torch.get_rng_state(), random)


def test_wrong_dtype_is_explained_in_a_note() -> None:
    net = tt.carry(nn.GRU(FEATURES, HIDDEN))
    with pytest.raises(ValueError, match=r"dtype|type") as caught:
        net(inputs(4, 2), net.initial_state(2))
    assert any("tt.Stream(..., dtype=torch.float32)" in note for note in caught.value.__notes__)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def test_a_module_with_hooks_keeps_no_graph_after_its_forward() -> None:
    x = torch.randn(5, 2, 3)
    net = tt.carry(Hidden(), x)
    net(x, net.initial_state(2))
    copy.deepcopy(net)  # refused by torch while a graph hangs on the module
    tt.testing.check_carry(net, x)


@pytest.mark.parametrize("shape", [(4, 2), (9, 2), (5, 1), (2, 5)])
def test_resets_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    net = tt.carry(nn.GRU(3, 4))
    with pytest.raises(DataError, match=r"resets have shape .* expected \(5, 2\)"):
        net(torch.randn(5, 2, 3), net.initial_state(2), torch.zeros(shape, dtype=torch.bool))


STATES = {  # of another structure, or of other layers: it would start from zeros
    "0": [(torch.zeros(2, 1, 4),), torch.zeros(2, 1, 4), (torch.zeros(2, 1, 5),) * 2],
    "layer.0": [(), {"other": torch.zeros(2, 1, 4)}],
}


@pytest.mark.parametrize(
    ("leaf", "state"), [(leaf, state) for leaf, states in STATES.items() for state in states]
)
def test_a_state_of_another_structure_is_refused_showing_both(leaf: str, state: Any) -> None:
    x = torch.randn(5, 2, 3)
    net = tt.carry(nn.LSTM(3, 4) if leaf == "0" else Hidden(), x)
    with pytest.raises(
        StateError, match=rf"the state has the leaves .*this net carries .*'{leaf}': \(2, 1, 4\)"
    ):
        net(x, state)


class Nesting(nn.Module):
    """Layers at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.layer = nn.ModuleDict({"gru": nn.GRU(3, 4)}), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.part["gru"](x)[0])[0]


def test_a_module_replaced_after_carry_is_refused() -> None:
    chain = tt.carry(nn.Sequential(nn.GRU(3, 8), nn.Linear(8, 2)))
    hidden = tt.carry(Hidden(), torch.randn(5, 2, 3))
    inner = tt.carry(Nesting(), torch.randn(5, 2, 3))
    chain.module.add_module("1", nn.Linear(8, 5))
    hidden.module.add_module("layer", nn.LSTM(3, 4))
    inner.module.add_module("part", Nesting().part)  # one of two layers, and its parent
    for net in (chain, hidden, inner):
        with pytest.raises(ModelError, match=r"replaced after tt\.carry"):
            net(torch.randn(5, 2, 3), net.initial_state(2))


class KeepsMask(nn.Module):
    """Makes a mask at its first call, and would need another one for other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, last = self.layer(x, h)
        if self.mask is None:
            self.mask = torch.eye(len(x))
        return torch.einsum("st,tbh->sbh", self.mask, y), last


def test_what_a_call_leaves_for_one_of_another_length_is_tried() -> None:
    """Each call alone is right, and so is a repeated one."""
    x = torch.randn(7, 2, 3)
    module = KeepsMask()
    expected = module.layer(x)[0]
    net = tt.carry(module, x)
    y, _ = in_chunks(net, x, (3, 4))
    torch.testing.assert_close(y, expected)


class Branching(nn.Module):
    """Computes otherwise where gradients are on, as layers with a fast path for inference do."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if torch.is_grad_enabled() else x


class BranchingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.layer = Branching(), nn.GRU(FEATURES, HIDDEN)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.layer(self.front(x), h)


@pytest.mark.parametrize(
    "module_of",
    [lambda: nn.Sequential(Branching(), nn.GRU(FEATURES, HIDDEN)), BranchingNet],
    ids=["chain", "class"],
)
def test_a_module_that_computes_otherwise_with_gradients_is_carried(
    module_of: Callable[[], nn.Module],
) -> None:
    x, net = inputs(7, 2), tt.carry(module_of().double())
    y, _ = net(x, net.initial_state(2, like=x))
    assert (in_chunks(net, x, (3, 4))[0] - y).abs().max() < EXACT
    layer = next(part for part in net.modules() if isinstance(part, nn.GRU))
    assert (layer(2 * x)[0] - y).abs().max() < EXACT


class SilentReadout(nn.Module):
    """Spikes where a potential, kept in an attribute beside the state, is high: never, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(FEATURES, HIDDEN), nn.Linear(HIDDEN, 2)
        self.potential: Tensor | None = None

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        y, hx = self.gru(x, hx)
        potential = torch.zeros_like(y[0]) if self.potential is None else self.potential
        potentials = list[Tensor]()
        for step in y:
            potential = 0.9 * potential + step
            potentials.append(potential)
        self.potential = potential
        trace = torch.stack(potentials)
        return self.head(y + (trace > 9).to(y)), trace, hx


def test_state_beside_the_state_is_found_though_no_output_shows_it_yet() -> None:
    with pytest.raises(ModelError, match=r"depends on attributes beside its state"):
        tt.carry(SilentReadout(), torch.randn(20, 2, FEATURES), output=0)


def test_a_chain_that_picks_the_outputs_of_a_layer_is_told_to_drop_that() -> None:
    class First(nn.Module):
        def forward(self, v: tuple[Tensor, Tensor]) -> Tensor:
            return v[0]

    module, x = nn.Sequential(nn.LSTM(3, 8), First(), nn.Linear(8, 2)), torch.randn(5, 2, 3)
    with pytest.raises(ModelError, match="drop a module that picks them"):
        tt.carry(module, x)


@pytest.mark.parametrize(
    ("reentrant", "reason"),
    [(True, "use_reentrant"), (False, "run again inside a backward pass")],
)
def test_activation_checkpointing_of_a_hidden_layer_is_refused(
    reentrant: bool, reason: str
) -> None:
    from torch.utils.checkpoint import checkpoint

    class Saves(Hidden):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda v: self.layer(v)[0], x, use_reentrant=reentrant)
            assert isinstance(y, Tensor)
            return y

    with pytest.raises(ModelError, match=reason):
        tt.carry(Saves(), torch.randn(5, 2, 3))


def test_threads_that_share_a_net_do_not_share_their_states() -> None:
    net = tt.carry(Hidden()).eval()
    xs = [torch.randn(40, 1, 3) for _ in range(4)]
    expected = [tt.Predictor(net)(x) for x in xs]

    def play(x: Tensor) -> Tensor:
        predictor = tt.Predictor(net)
        return torch.cat([predictor(part) for part in x.split(1)])

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for outputs, whole in zip(pool.map(play, xs), expected, strict=True):
                torch.testing.assert_close(outputs, whole)


def test_a_parameter_called_initial_state_is_no_method() -> None:
    class Learns(Hidden):
        def __init__(self) -> None:
            super().__init__()
            self.initial_state = nn.Parameter(torch.zeros(1))

    net = tt.carry(Learns(), torch.zeros(2, 1, 3))
    assert net.initial_state(2)["layer"][0].shape == (2, 1, 4)
