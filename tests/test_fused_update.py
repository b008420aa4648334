"""A fused update equals the update with a graph, and runs only where no result can differ.

Nets are chains, and classes whose forward can be read. Shapes: `T` steps, `B` lanes, `C` classes.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from strategies import lawless
from throughtime.carry import Carried
from throughtime.gradient import executor
from throughtime.kernels import recurrent as kernel
from throughtime.kernels.workspace import Workspace

pytestmark = needs_kernels
FEATURES, HIDDEN, CLASSES, WORDS, WIDE = 5, 9, 4, 11, torch.float64
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
STRIDE, WINDOW = tt.Truncated(12), tt.Truncated(7, horizon=20)
Make = Callable[[], nn.Module]


class Seen(NamedTuple):
    """What an epoch of updates gave."""

    losses: list[Tensor]
    outputs: list[Tensor]
    states: list[Tensor]
    gradients: list[Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The function of every update that the kernel made: in one call, or around a tail."""
    made: list[str] = []

    def note(owner: Any, name: str) -> None:
        true = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (made.append(name), true(*given))[1])

    note(kernel, "fused_step")
    note(Workspace, "_run_around")
    return made


def by_graph(course: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "try_fused", lambda *_: None)
        return course()


def assert_same(one: Seen, other: Seen, tolerance: float = 1e-12) -> None:
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b) > 0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def carried(make: Make, dtype: torch.dtype = WIDE, **options: Any) -> Carried:
    torch.manual_seed(3)
    return tt.carry(make().to(dtype), **options)


def stream_of(net: Carried, loss_fn: nn.Module, classes: int, lanes: int) -> tt.Stream:
    torch.manual_seed(4)
    dtype, recordings = next(net.parameters()).dtype, list[dict[str, Tensor]]()
    words = isinstance(next(net.module.children()), nn.Embedding)
    for n in (57, 23, 31, 40):
        x = torch.randint(WORDS, (n,)) if words else torch.randn(n, FEATURES)
        values = isinstance(loss_fn, nn.MSELoss)
        y = torch.randn(n, classes).to(dtype) if values else torch.randint(classes, (n,))
        recordings.append({"inputs": x, "targets": y})
    return tt.Stream(recordings, lanes=lanes, chunk=16, dtype=None if words else dtype)


def epoch(
    net: Carried,
    loss_fn: nn.Module = CE,
    gradient: Any = STRIDE,
    *,
    zero: bool = True,
    change: Callable[[Any], None] = lambda _: None,
    classes: int = CLASSES,
    lanes: int = 3,
) -> Seen:
    """Updates with a step of plain descent after each, and a change of the net after the second."""
    stream, seen = stream_of(net, loss_fn, classes, lanes), Seen([], [], [], [])
    for number, update in enumerate(tt.updates(net, stream, loss_fn, gradient=gradient)):
        seen.losses.append(update.loss)
        seen.outputs.append(update.outputs)
        seen.states.extend(leaf.clone() for leaf in tt.state.tensors(update.state))
        for weight in net.parameters():
            if weight.grad is not None:
                seen.gradients.append(weight.grad.to_dense().clone())
                with torch.no_grad():
                    weight.sub_(0.05 * seen.gradients[-1])
        if zero:
            net.zero_grad()
        if number == 1:
            change(net)
    return seen


def chain(
    layer: Callable[..., nn.Module] = tt.nn.LSTM,
    *tail: nn.Module,
    front: tuple[Make, ...] = (),
    **options: Any,
) -> Make:
    def make() -> nn.Module:
        head = nn.Linear(options.get("proj_size", HIDDEN), CLASSES)
        rnn = layer(FEATURES, HIDDEN, **options)
        return nn.Sequential(*(part() for part in front), rnn, *deepcopy(tail), head)

    return make


class Net(nn.Module):
    """The parts that most of these nets have."""

    def __init__(self, layer: Callable[..., nn.Module] = tt.nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.rnn = layer(FEATURES, HIDDEN, **options)
        self.drop = nn.Dropout(0.0)
        self.norm, self.lift = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(HIDDEN, CLASSES)


class Plain(Net):
    def __init__(self, layer: Callable[..., nn.Module] = tt.nn.LSTM, **options: Any) -> None:
        super().__init__(layer, **options)
        del self.norm, self.lift
        self.uses_other = False

    def forward(self, x: Tensor) -> Any:
        y, _ = self.rnn(x)
        return self.head(self.drop(y))


class State(Plain):
    def forward(self, x: Tensor, state: Any = None) -> Any:
        """Docstrings are no code."""
        y, state = self.rnn(x, state)
        return self.head(y), state


class Pair(Plain):
    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        if hidden is None:
            zeros = torch.zeros(1, x.size(1), 9, device=x.device, dtype=x.dtype)
            hidden = (zeros, zeros)
        h, c = hidden
        y, (h, c) = self.rnn(x, (h, c))
        return self.head(y), (h, c)


class OwnZeros(Plain):
    def start(self, x: Tensor) -> Any:
        zeros = torch.zeros(1, x.size(1), 9, dtype=x.dtype)
        return zeros, zeros

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x, self.start(x))
        return self.head(y)


class Front(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.lift(self.norm(x)))
        y, _ = self.rnn(x)
        return self.head(y)


class Loops(Plain):
    """Has a list of layers and a state for each."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.ModuleList([tt.nn.GRU(FEATURES, 6), tt.nn.GRU(6, HIDDEN)])

    def forward(self, x: Tensor, states: Any = None) -> Any:
        after = ()
        for i, (layer, state) in enumerate(zip(self.rnn, states or (None, None))):  # noqa: B905
            x, state = layer(x, hx=state)  # noqa: PLW2901
            after = (*after, state)
            if i + 1 < len(self.rnn):
                x = self.drop(x)
        return self.head(x), after


def hooked_table() -> nn.Module:
    table = nn.Embedding(WORDS, FEATURES)
    table.weight.register_hook(lambda gradient: 2 * gradient)
    return table


IN_ONE_CALL: dict[str, Make] = {
    "lstm": chain(),
    "gru without bias": chain(tt.nn.GRU, bias=False),
    "tanh": chain(tt.nn.RNN),
    "relu": chain(tt.nn.RNN, nonlinearity="relu"),
    "two layers": chain(num_layers=2),
    "projected": chain(proj_size=3),
    "words": chain(tt.nn.GRU, front=(lambda: nn.Embedding(WORDS, FEATURES),)),
    "sparse": chain(front=(lambda: nn.Embedding(WORDS, FEATURES, sparse=True),)),
    "hooked words": chain(front=(hooked_table,)),
    "plain": Plain,
    "batch first": lambda: Plain(tt.nn.GRU, batch_first=True),
    "state": State,
    "pair": Pair,
    "own zeros": OwnZeros,
    "front": Front,
    "loops": Loops,
}


@pytest.mark.parametrize("net", IN_ONE_CALL)
def test_one_call_gives_what_the_graph_gives(net: str, calls: list[str]) -> None:
    for *options, zero in ((CE, STRIDE, True), (MSE, WINDOW, False)):

        def course(options: Any = options, zero: bool = zero) -> Seen:
            return epoch(carried(IN_ONE_CALL[net]), *options, zero=zero)

        found = course()
        assert calls == ["fused_step"] * len(found.losses)
        assert_same(found, by_graph(course))
        assert len(calls) == len(found.losses)
        calls.clear()


@pytest.mark.parametrize(("classes", "width"), [(33, 1), (3000, 64)])  # by a BLAS, in parts
def test_one_call_in_single_precision(classes: int, width: int, calls: list[str]) -> None:
    def course() -> Seen:
        layers = tt.nn.LSTM(FEATURES, width), nn.Linear(width, classes)
        return epoch(carried(lambda: nn.Sequential(*layers), torch.float32), classes=classes)

    torch.manual_seed(0)
    found = course()
    assert calls
    torch.manual_seed(0)
    assert_same(found, by_graph(course), 1e-5)


def test_the_loss_of_outputs_far_from_zero_is_that_of_their_differences(calls: list[str]) -> None:
    net = carried(chain(tt.nn.GRU))
    nn.init.zeros_(net.get_parameter("module.1.weight"))
    nn.init.constant_(net.get_parameter("module.1.bias"), 1e30)
    assert epoch(net).losses[0] == pytest.approx(math.log(CLASSES))
    assert calls


def hooked_weight(net: Carried) -> None:
    next(net.parameters()).register_hook(lambda gradient: gradient * 2)


def frozen(net: Carried) -> None:
    next(net.parameters()).requires_grad_(False)


def wrapped(net: Carried) -> None:
    readout = list(net.module.children())[-1]
    plain = readout.forward
    readout.forward = lambda x: plain(x) * 2


def weight_normed(net: Carried) -> None:
    nn.utils.parametrizations.weight_norm(list(net.module.children())[-1])


def replaced_outside(net: Carried) -> None:
    plain = net.forward

    def doubled(x: Tensor, state: Any = None, resets: Tensor | None = None) -> tuple[Tensor, Any]:
        y, after = plain(x, state, resets)
        return 2 * y, after

    net.forward = doubled


def tied(net: Carried) -> None:
    layer = next(net.module.children())
    layer.bias_hh_l0 = layer.bias_ih_l0


class Doubled(tt.nn.LSTM):
    def forward(self, *given: Any, **named: Any) -> Any:
        y, after = super().forward(*given, **named)
        return 2 * y, after


def subclassed(net: Carried) -> None:
    next(net.module.children()).__class__ = Doubled


class WritesAttribute(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.uses_other = True
        y, _ = self.rnn(x)
        return self.head(y)


class BranchesOnValues(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        if x.abs().max() > 1e6:
            y = torch.tanh(y)
        return self.head(y)


class Doubles(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(y) * 2


class AddsInPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        z = self.head(y)
        z += 1
        return z


FLAG = True


class ReadsGlobal(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(torch.tanh(y) if FLAG else y)


class Stepped(Plain):
    """Its tail has buffers, which a graph would update as often as it calls the net."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(self.steps(y.flatten(0, 1)).view_as(y))


def tail_in_place() -> nn.Module:
    return chain(tt.nn.LSTM, nn.LayerNorm(HIDDEN), nn.Hardtanh(inplace=True))()


def dropout_between() -> nn.Module:
    return chain(num_layers=2, dropout=0.5)()


MORE_THAN_IT_SEEMS: list[Callable[[Carried], None]] = [
    *(hooked_weight, frozen, wrapped, weight_normed, replaced_outside, tied, subclassed),
]
UNREADABLE: list[Make] = [
    *(WritesAttribute, BranchesOnValues, Doubles, AddsInPlace, ReadsGlobal, Stepped),
    *(tail_in_place, dropout_between),
]
BY_GRAPH: list[tuple[Make, Callable[[Carried], None]]] = [
    *((chain(), change) for change in MORE_THAN_IT_SEEMS),
    *((make, lambda _: None) for make in UNREADABLE),
]


@pytest.mark.parametrize(("make", "change"), BY_GRAPH)
def test_what_may_compute_something_else_is_run_with_a_graph(
    make: Make, change: Callable[[Carried], None], calls: list[str]
) -> None:
    def course() -> Seen:
        # batch statistics mix lanes and steps
        net = lawless(carried(make), torch.randn(5, 3, FEATURES, dtype=WIDE))
        change(net)
        return epoch(net)

    found = course()
    assert not calls
    assert_same(found, by_graph(course))


def test_dropout_between_layers_is_fused_in_evaluation_mode(calls: list[str]) -> None:
    epoch(carried(dropout_between).eval())
    assert calls


def test_a_traced_update_is_made_by_the_graph_and_trains_alike(calls: list[str]) -> None:
    nets = carried(chain()), carried(chain())
    with tt.trace(nets[0]) as trace:
        traced = epoch(nets[0])
    assert not calls
    assert_same(traced, epoch(nets[1]))
    assert len(calls) == trace.count


def test_nets_that_change_are_followed(calls: list[str]) -> None:
    """A copy, other parameters in their places, another type."""

    def course() -> list[Seen]:
        net = carried(chain())
        seen = [epoch(net), epoch(deepcopy(net))]
        layer: Any = next(net.module.children())
        layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 0.5)
        return [*seen, epoch(net), epoch(net.float())]

    found = course()
    assert len(calls) == sum(len(seen.losses) for seen in found)
    for one, other, tolerance in zip(found, by_graph(course), (*[1e-12] * 3, 1e-4), strict=True):
        assert_same(one, other, tolerance)


class Chooses(Plain):
    """Has branches on plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        if self.uses_other:
            return torch.tanh(self.other(y))
        if not self.training:
            y = self.drop(y)
        return self.head(y)


def moved(net: Any) -> None:
    for weight in net.parameters():
        weight.data = weight.detach().clone()


def one_gradient_less(net: Any) -> None:
    next(net.parameters()).grad = None


def flag_set(net: Any) -> None:
    net.module.uses_other = True


def layer_replaced(net: Any) -> None:
    torch.manual_seed(5)
    net.module.head = nn.Sequential(nn.Linear(HIDDEN, CLASSES), nn.Tanh()).to(WIDE)


def layer_hooked(net: Any) -> None:
    net.module.rnn.register_forward_hook(lambda _, __, result: (2 * result[0], result[1]))


def names_swapped(net: Any) -> None:
    """The same modules in the same order, the names of two exchanged."""
    head, other = net.module.head, net.module.other
    del net.module.other, net.module.head
    net.module.head, net.module.other = other, head


@pytest.mark.parametrize(
    "change",
    [moved, one_gradient_less, flag_set, layer_replaced, layer_hooked, names_swapped],
)
def test_a_change_between_two_updates_is_noticed(
    change: Callable[[Any], None], calls: list[str]
) -> None:
    def course() -> Seen:
        return epoch(carried(Chooses), zero=False, change=change)

    found = course()
    assert len(calls) >= 2
    assert_same(found, by_graph(course))


def test_a_start_of_ones_is_not_taken_for_zeros(calls: list[str]) -> None:
    def course() -> Seen:
        return epoch(carried(State, start=(torch.ones(HIDDEN),) * 2))

    result = course()
    assert 0 < len(calls) < len(result.losses)  # those without a reset
    assert_same(result, by_graph(course))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(tt.nn.GRU, batch_first=True)
        del self.norm, self.lift
        self.tail = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.head(self.tail(y)), state


TAILS: dict[str, tuple[Make, nn.Module]] = {
    "norm": (Normed, CE),
    "drop": (chain(tt.nn.LSTM, nn.Dropout(0.4)), MSE),
    "weighted loss": (chain(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0]).double())),
    "smoothed loss": (chain(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "ignored class": (chain(), nn.CrossEntropyLoss(ignore_index=1)),
}


@pytest.mark.parametrize("policy", [STRIDE, WINDOW], ids=str)
@pytest.mark.parametrize("name", TAILS)
def test_a_tail_or_loss_runs_by_autograd_on_the_outputs_of_the_kernel(
    name: str, policy: tt.Truncated, calls: list[str]
) -> None:
    """Not one with dropout in windows longer than a stride, which run steps again."""
    make, loss_fn = TAILS[name]

    def course() -> Seen:
        return epoch(carried(make), loss_fn, policy, zero=name == "drop")

    found = course()
    assert "fused_step" not in calls
    assert (len(calls) < len(found.losses)) == (name == "drop" and policy is WINDOW)
    assert_same(found, by_graph(course))


def test_threads_change_no_bit() -> None:
    seen: list[Seen] = []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            net = carried(
                lambda: nn.Sequential(tt.nn.LSTM(FEATURES, 130), nn.Linear(130, CLASSES)),
                torch.float32,
            )
            seen.append(epoch(net, gradient=tt.Truncated(40), lanes=14))  # fewer run on one thread
        finally:
            torch.set_num_threads(1)
    assert_same(seen[0], seen[1], 0.0)


def other_inputs(net: Any) -> None:
    net.module[0].weight_ih_l0 = nn.Parameter(torch.randn(36, 7, dtype=WIDE))


def other_units(net: Any) -> None:
    net.module[0].weight_hh_l0.data = torch.randn(20, 5, dtype=WIDE)


def other_gradient(net: Any) -> None:
    next(net.parameters()).grad.resize_(3)


@pytest.mark.parametrize("change", [other_inputs, other_units, other_gradient])
def test_what_does_not_fit_any_more_never_reaches_the_kernel(
    change: Callable[[Any], None], calls: list[str]
) -> None:
    net = carried(chain())
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        epoch(net, zero=False, change=change)
    assert len(calls) == 2 + (change is other_gradient)  # whose sum is torch's


@pytest.mark.parametrize("which", ["lanes", "units", "alone"])
def test_a_state_that_does_not_fit_never_reaches_the_kernel(which: str, calls: list[str]) -> None:
    net = carried(chain())
    h, c = net.initial_state(lanes=3)["0"]
    wrong = {"lanes": (h[:2], c[:2]), "units": (h[..., :4], c[..., :4]), "alone": h}
    stream = stream_of(net, CE, CLASSES, 3)
    stream._start()
    state = {"0": wrong[which], "1": ()}
    updates = tt.updates(net, stream, CE, gradient=STRIDE, state=state)
    with pytest.raises((RuntimeError, ValueError, AttributeError)):
        next(updates)
    assert not calls
