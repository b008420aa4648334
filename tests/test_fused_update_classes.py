"""A net written as a class is updated in one call where its forward can be read, and only there.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from strategies import lawless
from test_fused_update import Seen, assert_same, by_graph, calls, epoch, recordings
from throughtime.carry import Carried
from throughtime.kernels.workspace import Workspace

pytestmark = needs_kernels
__all__ = ["calls"]  # a fixture

HIDDEN, CLASSES = 9, 4
POLICIES = [tt.Truncated(12), tt.Truncated(7, horizon=20)]


class Net(nn.Module):
    """The parts that most of these nets have."""

    def __init__(self, layer: Callable[..., nn.Module] = tt.nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.rnn = layer(5, HIDDEN, **options)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.uses_other = False

    def put_head_last(self) -> None:
        head = self.head
        del self.head
        self.head = head

    def __getitem__(self, index: int) -> nn.Module:
        """The readout, as the last module of a chain."""
        return [*self.children()][index]


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(self.drop(y))


class State(Net):
    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Docstrings are no code."""
        y, state = self.rnn(x, state)
        return self.head(y), state


class Pair(Net):
    def forward(self, x: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        if hidden is None:
            zeros = torch.zeros(1, x.size(1), 9, device=x.device, dtype=x.dtype)
            hidden = (zeros, zeros)
        h, c = hidden
        y, (h, c) = self.rnn(x, (h, c))
        return self.head(y), (h, c)


class Front(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lift = nn.LayerNorm(5), nn.Linear(5, 5)
        self.put_head_last()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.lift(self.norm(x)))
        y, _ = self.rnn(x)
        return self.head(y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([tt.nn.GRU(5, 6), tt.nn.GRU(6, HIDDEN)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class Outer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x))


class Loops(Outer):
    """Has a list of layers and a state for each."""

    def forward(self, x: Tensor, states: Any = None) -> Any:
        after = ()
        for i, (layer, state) in enumerate(zip(self.rnn.layers, states or (None, None))):  # noqa: B905
            x, state = layer(x, hx=state)  # noqa: PLW2901
            after = (*after, state)
            if i + 1 < len(self.rnn.layers):
                x = self.drop(x)
        return self.head(x), after


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "batch first": lambda: Plain(tt.nn.GRU, batch_first=True),
    "stacked": lambda: Plain(tt.nn.LSTM, num_layers=2),
    "state": State,
    "pair": Pair,
    "front": Front,
    "loops": Loops,
}


def make(name: Callable[[], nn.Module]) -> Carried:
    torch.manual_seed(3)
    return tt.carry(name().double())


@pytest.mark.covering
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=["ce", "mse"])
@pytest.mark.parametrize("net", NETS)
def test_a_class_is_updated_in_one_call_as_by_the_graph(
    net: str,
    loss_fn: nn.Module,
    policy: Any,
    zero: bool,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = epoch(make(NETS[net]), loss_fn, policy, zero=zero)
    assert len(calls) == len(result.losses)
    by_graph(monkeypatch)
    assert_same(result, epoch(make(NETS[net]), loss_fn, policy, zero=zero), 1e-12)


class WritesAttribute(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.uses_other = True
        y, _ = self.rnn(x)
        return self.head(y)


class BranchesOnValues(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        if x.abs().max() > 1e6:
            y = torch.tanh(y)
        return self.head(y)


class Doubles(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(y) * 2


class AddsInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        z = self.head(y)
        z += 1
        return z


FLAG = True


class ReadsGlobal(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(torch.tanh(y) if FLAG else y)


REFUSED = [
    *(WritesAttribute, BranchesOnValues, Doubles, AddsInPlace, ReadsGlobal),
]


@pytest.mark.parametrize("net", REFUSED)
def test_a_forward_that_may_do_something_else_is_run_with_a_graph(
    net: type[Net], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nets = make(net), make(net)
    result = epoch(nets[0], nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not calls
    by_graph(monkeypatch)
    assert_same(result, epoch(nets[1], nn.CrossEntropyLoss(), tt.Truncated(12)), 1e-12)
    (first, second) = (net.module for net in nets)
    assert isinstance(first, Net)
    assert isinstance(second, Net)
    assert first.uses_other == second.uses_other


class Chooses(Net):
    """Has branches on plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, CLASSES)
        self.put_head_last()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        if self.uses_other:
            return torch.tanh(self.other(y))
        if not self.training:
            y = self.drop(y)
        return self.head(y)


def set_flag(net: Net) -> None:
    net.uses_other = True


def replace_layer(net: Net) -> None:
    net.add_module("head", nn.Sequential(nn.Linear(HIDDEN, CLASSES), nn.Tanh()).double())


def hook_layer(net: Net) -> None:
    net.rnn.register_forward_hook(lambda _, __, result: (2 * result[0], result[1]))


def swap_names(net: Net) -> None:
    """The same modules in the same order, the names of two exchanged."""
    head, other = net.head, net.get_submodule("other")
    del net.other, net.head
    net.head, net.other = other, head  # pyright: ignore[reportAttributeAccessIssue]


CHANGES = [
    *(set_flag, replace_layer, hook_layer, swap_names),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_updates_is_noticed(
    change: Callable[[Net], None], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> list[Tensor]:
        net = make(Chooses)
        data = recordings(torch.float64, CLASSES, regress=False)
        stream = tt.Stream(data, lanes=3, chunk=16, dtype=torch.float64)
        results: list[Tensor] = []
        updates = tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(12))
        for number, update in enumerate(updates):
            results += [update.loss, update.outputs]
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            results += [grad.clone() for grad in grads]
            net.zero_grad()
            if number == 1:
                assert isinstance(net.module, Net)
                torch.manual_seed(5)
                change(net.module)
        return results

    results = losses()
    assert len(calls) >= 2
    by_graph(monkeypatch)
    for one, other in zip(results, losses(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_learned_start_is_not_taken_for_zeros(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starts(State):
        def initial_state(self, lanes: int) -> Any:
            ones = torch.ones(1, lanes, HIDDEN, dtype=torch.float64)
            return ones, ones

    result = epoch(make(Starts), nn.CrossEntropyLoss(), tt.Truncated(12))
    assert 0 < len(calls) < len(result.losses)  # those without a reset
    by_graph(monkeypatch)
    assert_same(result, epoch(make(Starts), nn.CrossEntropyLoss(), tt.Truncated(12)), 1e-12)


class Normed(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(tt.nn.GRU, **options)
        self.tail = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.put_head_last()

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.head(self.tail(y)), state


def chain(*tail: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(tt.nn.LSTM(5, HIDDEN), *deepcopy(tail), nn.Linear(HIDDEN, CLASSES))


TAILS: dict[str, Callable[[], nn.Module]] = {
    "normed, batch first": lambda: Normed(batch_first=True),
    "chain with dropout": chain(nn.Dropout(0.4)),
}


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every update whose tail runs by autograd on the outputs of the kernel."""
    made: list[int] = []
    true = Workspace._run_around

    def counted(workspace: Workspace, tail: Any) -> int:
        made.append(1)
        return true(workspace, tail)

    monkeypatch.setattr(Workspace, "_run_around", counted)
    return made


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("net", TAILS)
def test_a_tail_runs_by_autograd_on_the_outputs_of_the_kernel(
    net: str, policy: tt.Truncated, tails: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one with dropout in windows longer than a stride, which run steps again."""
    loss_fn, zero = (nn.MSELoss(), True) if "drop" in net else (nn.CrossEntropyLoss(), False)
    result = epoch(make(TAILS[net]), loss_fn, policy, zero=zero)
    run_again = "drop" in net and policy is POLICIES[1]
    assert run_again == (len(tails) < len(result.losses))
    by_graph(monkeypatch)
    assert_same(result, epoch(make(TAILS[net]), loss_fn, policy, zero=zero), 1e-12)


class Stepped(Net):
    """Its tail has buffers, which a graph would update as often as it calls the net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(
            nn.Flatten(0, 1), nn.BatchNorm1d(HIDDEN), nn.Unflatten(0, (-1, 3))
        )
        self.put_head_last()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(self.norm(y))


@pytest.mark.parametrize(
    "net",
    [Stepped, chain(nn.LayerNorm(HIDDEN), nn.Hardtanh(inplace=True))],
    ids=["buffers", "in place"],
)
def test_a_tail_that_must_not_run_on_the_outputs_of_the_kernel(
    net: Callable[[], nn.Module], tails: list[int], calls: list[int]
) -> None:
    # batch statistics mix lanes and steps
    carried = lawless(make(net), torch.randn(5, 3, 5, dtype=torch.float64))
    epoch(carried, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not tails
    assert not calls


WORDS, WIDTH = 11, 6


def embedding(**options: Any) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.Embedding(WORDS, WIDTH, **options)]


def hooked() -> list[nn.Module]:
    table = nn.Embedding(WORDS, WIDTH)
    table.weight.register_hook(lambda gradient: 2 * gradient)
    return [table]


FRONTS: dict[str, Callable[[], list[nn.Module]]] = {
    "words": embedding(),
    "sparse": embedding(sparse=True),
    "hooked": hooked,
}


def make_with_front(front: Callable[[], list[nn.Module]]) -> Carried:
    torch.manual_seed(3)
    layers = [tt.nn.LSTM(WIDTH, 9), tt.nn.GRU(9, WIDTH)]
    return tt.carry(nn.Sequential(*front(), *layers, nn.Linear(WIDTH, CLASSES)).double())


def front_epoch(net: Carried, gradient: Any, *, zero: bool = True) -> Seen:
    torch.manual_seed(4)
    data = [
        {"inputs": torch.randint(WORDS, (n,)), "targets": torch.randint(CLASSES, (n,))}
        for n in (57, 23, 31, 40)
    ]
    return epoch(net, nn.CrossEntropyLoss(), gradient, zero=zero, data=data)


@pytest.mark.covering
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("front", FRONTS)
def test_a_front_learns_what_the_graph_would_teach_it(
    front: str, policy: Any, zero: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = front_epoch(make_with_front(FRONTS[front]), policy, zero=zero)
    assert len(calls) == len(found.losses)
    by_graph(monkeypatch)
    assert_same(found, front_epoch(make_with_front(FRONTS[front]), policy, zero=zero), 1e-12)
