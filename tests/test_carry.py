"""The carry contract: chunks with the state carried compute what the whole sequence computes.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import copy
import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import (
    FEATURES,
    HIDDEN,
    Row,
    apart,
    every_net,
    gradients,
    in_chunks,
    inputs,
    some_nets,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.errors import DataError, ModelError, StateError
from throughtime.testing import check_carry

EXACT = 1e-12
UNEVEN = (1, 7, 2, 13, 5, 23)


def run_net(
    net: Carried, x: Tensor, lengths: tuple[int, ...], resets: Tensor | None = None
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Outputs, final state, and gradients of a loss of every output and the final state."""
    net.zero_grad()
    y, state = in_chunks(net, x, lengths, resets=resets)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + sum(
        leaf.square().sum() for leaf in tt.state.tensors(state)
    )
    torch.as_tensor(loss).backward()
    return y.detach(), tt.state.detach(state), gradients(net)


@every_net
def test_chunks_with_the_state_carried_equal_the_whole(row: Row) -> None:
    net, x = row.net(), inputs(sum(UNEVEN), 3)
    y, state, gradient = run_net(net, x, UNEVEN)
    whole, end, full = run_net(net, x, (len(x),))
    assert (y - whole).abs().max() < EXACT
    assert states_apart(state, end) < EXACT
    assert apart(gradient, full) < EXACT
    assert all(g.abs().max() > 0 for g in full.values())


def torch_outputs(module: nn.Module, x: Tensor) -> Tensor:
    """The outputs of torch.nn, called as its documentation says."""
    if isinstance(module, nn.RNNBase):
        y, _ = module(x.transpose(0, 1) if module.batch_first else x)
        return y.transpose(0, 1) if module.batch_first else y
    state, outputs = None, list[Tensor]()
    for t in range(len(x)):
        state = module(x[t], state)
        outputs.append(state if isinstance(state, Tensor) else state[0])
    return torch.stack(outputs)


@some_nets("lstm", "lstm-2-batch-first-proj", "gru", "rnn", "lstm-cell", "gru-cell", "rnn-cell")
def test_carried_layer_equals_torch_outputs(row: Row) -> None:
    x, net = inputs(20, 3), row.net()
    assert torch.equal(net(x, start(net, x))[0], torch_outputs(row.module(), x))


def run_separately(net: Carried, x: Tensor, resets: Tensor) -> Tensor:
    """The oracle: each lane's recordings, cut at its resets, run alone from the initial state."""
    lanes: list[Tensor] = []
    for lane in range(x.shape[1]):
        bounds = [0, *resets[1:, lane].nonzero().flatten().add(1).tolist(), len(x)]
        alone = [x[a:b, lane : lane + 1] for a, b in pairwise(bounds)]
        lanes.append(torch.cat([net(part, start(net, part))[0] for part in alone]))
    return torch.cat(lanes, dim=1)


@every_net
def test_reset_within_a_chunk_equals_two_recordings(row: Row) -> None:
    net, x = row.net(), inputs(30, 3)
    resets = torch.zeros(30, 3, dtype=torch.bool)
    resets[0] = True
    resets[11, 0] = resets[17, 1] = resets[17, 2] = resets[18, 1] = resets[29, 2] = True
    y, _, gradient = run_net(net, x, (30,), resets)
    pieces, _, same = run_net(net, x, (5, 6, 13), resets)
    net.zero_grad()
    oracle = run_separately(net, x, resets)
    assert (y - oracle).abs().max() < EXACT
    assert (pieces - oracle).abs().max() < EXACT
    assert apart(gradient, same) < EXACT
    unreset, _ = net(x, start(net, x))
    assert (unreset - oracle).abs().max() > 1e-3


@every_net
def test_gradient_does_not_cross_a_reset(row: Row) -> None:
    net, x = row.net(), inputs(30, 2).requires_grad_()
    resets = torch.zeros(30, 2, dtype=torch.bool)
    resets[12, 0] = True
    y, _ = net(x, start(net, x), resets)
    grads = torch.autograd.grad(y[12:].sum(), x)[0]
    assert grads[:12, 0].abs().max() == 0
    assert grads[:12, 1].norm(dim=1).min() > 1e-4
    assert grads[12:, 0].norm(dim=1).min() > 1e-4


def test_inputs_without_lanes_are_refused() -> None:
    net = tt.carry(nn.GRU(FEATURES, HIDDEN))
    with pytest.raises(DataError, match=r"no lanes, expected \(T, B, \.\.\.\).*x\.unsqueeze\(1\)"):
        net(torch.zeros(15, FEATURES), net.initial_state(1))


def test_tokens_are_embedded() -> None:
    net = tt.carry(nn.Sequential(nn.Embedding(11, 5), nn.GRU(5, HIDDEN)).double())
    tokens = torch.randint(11, (9, 1))
    y, _ = net(tokens, net.initial_state(1))
    assert y.shape == (9, 1, HIDDEN)
    assert max(law.deviation for law in check_carry(net, tokens.expand(9, 2))) < EXACT


@every_net
def test_state_has_its_lanes_first_and_is_never_changed(row: Row) -> None:
    net, x = row.net(), inputs(9, 5)
    state = start(net, x)
    assert tt.state.lanes(state) == 5
    _, state = net(x, state)
    assert tt.state.lanes(state) == 5
    before = tt.state.map_leaves(lambda leaf: leaf.detach().clone(), state)
    resets = torch.zeros(9, 5, dtype=torch.bool)
    resets[3, 1] = True
    net(x, state, resets)
    assert states_apart(state, before) == 0


@every_net
def test_state_of_other_lanes_is_refused_naming_the_leaf(row: Row) -> None:
    net, x = row.net(), inputs(5, 4)
    first = next(name for name, _ in tt.state.leaves(start(net, x)))
    with pytest.raises(
        StateError,
        match=(
            rf"leaves .*'{first}': \(4, .*expected 2 lanes"
            r".*initial_state\(lanes=2\)"
        ),
    ):
        net(x[:, :2], start(net, x))


def test_state_leaf_that_is_no_tensor_is_refused() -> None:
    net = tt.carry(nn.LSTM(FEATURES, HIDDEN))
    with pytest.raises(StateError, match=r"is a int, expected a tensor"):
        net(torch.zeros(5, 2, FEATURES), (torch.zeros(2, 1, HIDDEN), 3))


@every_net
def test_deepcopy_works_independently(row: Row) -> None:
    net, x = row.net(), inputs(12, 2)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        expected, _ = net(x, start(net, x))
        for p in net.parameters():
            p.zero_()
        changed, _ = net(x, start(net, x))
        y, state = in_chunks(twin, x, (5, 4))
        end, _ = twin(x, state)
    assert (y - expected).abs().max() < EXACT
    assert (changed - expected).abs().max() > 1e-3
    assert (end - expected).abs().max() > 1e-3  # the twin carries its own state


@every_net
def test_carrying_twice_is_carrying_once(row: Row) -> None:
    net = row.net()
    assert tt.carry(net) is net
    assert {id(p) for p in net.parameters()} == {id(p) for p in net.module.parameters()}


@some_nets("lstm-cell", "gru-cell", "rnn-cell")
def test_cell_loop_is_linear_in_time(row: Row) -> None:
    """Indexing `x[t]` makes a `SelectBackward0` per step, each with a gradient for all of x."""

    def nodes(steps: int, *, mutant: bool = False) -> tuple[int, set[str]]:
        module, x = row.module(), inputs(steps, 2).requires_grad_()
        net = tt.carry(module)
        y = torch_outputs(module, x) if mutant else net(x, start(net, x))[0]
        return _graph(y)

    short, names = nodes(10)
    long, _ = nodes(100)
    steps = (long - short) / 90
    assert "SelectBackward0" not in names
    assert "SelectBackward0" in nodes(10, mutant=True)[1]
    assert long == short + 90 * int(steps)


def _graph(y: Tensor) -> tuple[int, set[str]]:
    """How many nodes the graph of `y` has, and their kinds."""
    pending, visited, kinds = [y.grad_fn], set[Any](), set[str]()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            kinds.add(node.name())
            pending += [parent for parent, _ in node.next_functions]
    return len(visited), kinds


def test_long_sequences_are_split_at_the_limit_of_cudnn_on_cuda_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module("throughtime.carry.carried"), "CUDNN_STEPS", 4)
    calls: list[int] = []
    layer = nn.GRU(FEATURES, HIDDEN).double()
    layer.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    net, x = tt.carry(layer), inputs(11, 2)
    resets = torch.zeros(11, 2, dtype=torch.bool)
    resets[5, 0] = True
    net(x, start(net, x), resets)
    net(x, start(net, x), torch.zeros_like(resets))
    assert calls == [5, 6, 11]


def test_a_call_without_a_state_says_what_to_write() -> None:
    net = tt.carry(nn.GRU(3, 8))
    with pytest.raises(
        StateError, match=r"y, state = net\(x, net\.initial_state\(lanes=2, like=x\)\)"
    ):
        net(torch.zeros(5, 2, 3))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.lstm(x, state)


def test_a_wrong_number_of_features_is_named() -> None:
    for module in (nn.GRU(3, 8), nn.Sequential(nn.GRU(3, 8), nn.Linear(8, 1))):
        net = tt.carry(module)
        with pytest.raises(RuntimeError, match="xpected 3, got 4") as caught:
            net(torch.zeros(5, 2, 4), net.initial_state(2))
        assert "the inputs are (5, 2, 4), torch.float32" in caught.value.__notes__[0]
    net = tt.carry(Tagger(), torch.zeros(5, 2, 3))
    with pytest.raises(ModelError, match="Expected 3, got 4"):
        net(torch.zeros(5, 2, 4), net.initial_state(2))


class DeepTagger(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.GRU(3, 10, 2)


@pytest.mark.parametrize("kind", [lambda: nn.GRU(3, 10, 2), DeepTagger])
def test_a_layer_gets_a_state_of_one_layout_carried_or_from_a_file(kind: Any) -> None:
    """Torch rounds otherwise with a strided one on some processors, and a file keeps no strides."""
    net, x = tt.carry(kind()), torch.randn(300, 2, 3)
    state, states = net.initial_state(2, like=x), list[Tensor]()
    layer = next(m for m in net.modules() if isinstance(m, nn.RNNBase))
    layer.register_forward_pre_hook(lambda _, args: states.append(args[1]))
    for chunk in x.split(10):
        _, state = net(chunk, state)
    assert len(states) == 30
    assert all(map(Tensor.is_contiguous, states))


class Kept(nn.Module):
    """Keeps its state in an attribute, and another one than its cell returns."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(3, 5)
        self.hidden = torch.zeros(1, 5)

    def reset_hidden(self) -> None:
        self.hidden = torch.zeros(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden.expand(len(x), 5)
        self.hidden = hidden * 0.5 + self.cell(x, hidden)
        return self.hidden


def test_a_state_that_is_not_what_its_cell_returns_is_carried_as_its_author_does() -> None:
    module, x = Kept(), torch.randn(9, 2, 3)
    net = tt.carry(module, x)
    y, _ = net(x, net.initial_state(2))
    module.reset_hidden()
    torch.testing.assert_close(y, torch.stack([module(step) for step in x]))


def test_a_state_keeps_its_type_under_autocast() -> None:
    net, x = tt.carry(nn.Sequential(nn.Linear(3, 3), nn.RNNCell(3, 4))), torch.randn(5, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = net(x, net.initial_state(2))
    assert state["1"].dtype == torch.float32
