"""A fused update equals the update with a graph, and runs only where no result can differ."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.gradient import executor
from throughtime.kernels import recurrent as kernel
from throughtime.kernels.library import library

pytestmark = pytest.mark.skipif(
    library() is None,
    reason="the compiled core is not installed: every update is made with a graph",
)

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "lstm": tt.nn.LSTM,
    "gru": tt.nn.GRU,
    "tanh": tt.nn.RNN,
    "relu": lambda *sizes, **options: tt.nn.RNN(*sizes, nonlinearity="relu", **options),
    "two": lambda d, h, **options: tt.nn.LSTM(d, h, num_layers=2, **options),
    "projected": lambda d, h, **options: tt.nn.LSTM(d, h, proj_size=3, **options),
    "bare": lambda d, h, **options: tt.nn.GRU(d, h, bias=False, **options),
}


class Seen(NamedTuple):
    """What an epoch of updates gave."""

    losses: list[Tensor]
    outputs: list[Tensor]
    states: list[Tensor]
    gradients: list[Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the call was made."""
    made: list[int] = []
    true = kernel.fused_step

    def counted(what: kernel.FusedStep) -> int:
        made.append(what.steps)
        return true(what)

    monkeypatch.setattr(kernel, "fused_step", counted)
    return made


def by_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "try_fused", lambda *_: None)


def make(
    kind: str, dtype: torch.dtype = torch.float64, classes: int = 4, width: int = 9
) -> Carried:
    torch.manual_seed(3)
    layer = LAYERS[kind](5, width, dtype=dtype)
    out = getattr(layer, "proj_size", 0) or width
    return tt.carry(nn.Sequential(layer, nn.Linear(out, classes, dtype=dtype)))


def recordings(dtype: torch.dtype, classes: int, *, regress: bool) -> list[dict[str, Tensor]]:
    torch.manual_seed(4)
    found = []
    for length in (57, 23, 31, 40):
        targets = (
            torch.randn(length, classes, dtype=dtype)
            if regress
            else torch.randint(classes, (length,))
        )
        found.append({"inputs": torch.randn(length, 5, dtype=dtype), "targets": targets})
    return found


def epoch(
    net: Carried,
    loss_fn: nn.Module,
    gradient: Any,
    *,
    lanes: int = 3,
    zero: bool = True,
    data: list[dict[str, Tensor]] | None = None,
) -> Seen:
    """Updates with a step of plain descent after each."""
    weights, dtype = list(net.parameters()), None
    if data is None:
        dtype = weights[0].dtype
        classes = net.module[-1].out_features  # pyright: ignore[reportIndexIssue]
        regress = isinstance(loss_fn, nn.MSELoss)
        data = recordings(dtype, classes, regress=regress)
    stream = tt.Stream(data, lanes=lanes, chunk=16, dtype=dtype)
    seen = Seen([], [], [], [])
    for update in tt.updates(net, stream, loss_fn, gradient=gradient):
        seen.losses.append(update.loss)
        seen.outputs.append(update.outputs)
        seen.states.extend(leaf.clone() for leaf in tt.state.tensors(update.state))
        trained = [weight for weight in weights if weight.grad is not None]
        gradients = [torch.as_tensor(weight.grad).to_dense().clone() for weight in trained]
        seen.gradients.extend(gradients)
        with torch.no_grad():
            for weight, gradient in zip(trained, gradients, strict=True):
                weight.sub_(0.05 * gradient)
        if zero:
            net.zero_grad()
    return seen


def assert_same(one: Seen, other: Seen, tolerance: float) -> None:
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b) > 0
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.covering
@pytest.mark.parametrize(
    "policy",
    [tt.Truncated(12), tt.Truncated(7, horizon=20)],
    ids=str,
)
@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=["classes", "values"]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_call_gives_what_the_graph_gives(
    kind: str, loss_fn: nn.Module, policy: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = epoch(make(kind), loss_fn, policy)
    assert len(calls) == len(found.losses)
    by_graph(monkeypatch)
    assert_same(found, epoch(make(kind), loss_fn, policy), 1e-12)
    assert len(calls) == len(found.losses)


@pytest.mark.parametrize(("classes", "width"), [(33, 1), (3000, 64)])  # by a BLAS, in parts
def test_one_call_in_single_precision(
    classes: int, width: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nets = [make("lstm", torch.float32, classes, width) for _ in range(2)]
    found = epoch(nets[0], nn.CrossEntropyLoss(), tt.Truncated(20))
    assert calls
    by_graph(monkeypatch)
    assert_same(found, epoch(nets[1], nn.CrossEntropyLoss(), tt.Truncated(20)), 1e-5)


def test_the_loss_of_outputs_far_from_zero_is_that_of_their_differences(calls: list[int]) -> None:
    net = make("gru")
    *_, readout = net.module.children()
    assert isinstance(readout, nn.Linear)
    nn.init.zeros_(readout.weight)
    nn.init.constant_(readout.bias, 1e30)
    assert epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12)).losses[0] == pytest.approx(
        math.log(4)
    )
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


@pytest.mark.parametrize(
    "change",
    [hooked_weight, frozen, wrapped, weight_normed, replaced_outside, tied, subclassed],
)
def test_a_net_that_is_more_than_it_seems_is_run_with_a_graph(
    change: Callable[[Carried], None], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nets = make("lstm"), make("lstm")
    for net in nets:
        change(net)
    found = epoch(nets[0], nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not calls
    by_graph(monkeypatch)
    assert_same(found, epoch(nets[1], nn.CrossEntropyLoss(), tt.Truncated(12)), 1e-12)


@pytest.mark.parametrize(
    "options", [{"weight": torch.ones(4).double()}, {"label_smoothing": 0.1}, {"ignore_index": 1}]
)
def test_other_losses_are_run_with_a_graph(options: dict[str, Any], calls: list[int]) -> None:
    epoch(make("gru"), nn.CrossEntropyLoss(**options), tt.Truncated(20))
    assert not calls


def test_a_traced_update_is_made_by_the_graph_and_trains_alike(calls: list[int]) -> None:
    nets = make("lstm"), make("lstm")
    with tt.trace(nets[0]) as trace:
        traced = epoch(nets[0], nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not calls
    assert_same(traced, epoch(nets[1], nn.CrossEntropyLoss(), tt.Truncated(12)), 1e-12)
    assert len(calls) == trace.count


def test_dropout_between_layers_is_run_with_a_graph_while_training(calls: list[int]) -> None:
    net = tt.carry(
        nn.Sequential(
            tt.nn.LSTM(5, 6, num_layers=2, dropout=0.5, dtype=torch.float64),
            nn.Linear(6, 4, dtype=torch.float64),
        )
    )
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not calls
    net.eval()
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert calls


def test_nets_that_change_are_followed(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another type, other parameters in their places, a copy."""

    def course(net: Carried) -> list[Seen]:
        first = epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
        copy = deepcopy(net)
        second = epoch(copy, nn.CrossEntropyLoss(), tt.Truncated(12))
        layer = next(net.module.children())
        layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 0.5)  # pyright: ignore[reportCallIssue]
        return [
            first,
            second,
            epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12)),
            epoch(net.float(), nn.CrossEntropyLoss(), tt.Truncated(12)),
        ]

    found = course(make("lstm"))
    assert len(calls) == sum(len(seen.losses) for seen in found)
    by_graph(monkeypatch)
    for one, other, tolerance in zip(
        found, course(make("lstm")), (1e-12, 1e-12, 1e-12, 1e-4), strict=True
    ):
        assert_same(one, other, tolerance)


def moved(net: Carried) -> None:
    for weight in net.parameters():
        weight.data = weight.detach().clone()


def some_gradients(net: Carried) -> None:
    next(net.parameters()).grad = None


@pytest.mark.parametrize("change", [moved, some_gradients])
def test_weights_and_gradients_may_move_between_updates(
    change: Callable[[Carried], None], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def course() -> list[Tensor]:
        net = make("lstm")
        stream = tt.Stream(
            recordings(torch.float64, 4, regress=False), lanes=3, chunk=16, dtype=torch.float64
        )
        for _ in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(12)):
            with torch.no_grad():
                for weight in net.parameters():
                    weight.sub_(0.05 * torch.as_tensor(weight.grad))
            change(net)
        return [
            *net.parameters(),
            *(
                torch.as_tensor(weight.grad)
                for weight in net.parameters()
                if weight.grad is not None
            ),
        ]

    found = course()
    assert calls
    by_graph(monkeypatch)
    for one, other in zip(found, course(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_threads_change_no_bit() -> None:
    threads = torch.get_num_threads()
    try:
        seen: list[Seen] = []
        for count in (1, 2):
            torch.set_num_threads(count)
            seen.append(
                epoch(
                    make("lstm", torch.float32, 4, width=130),
                    nn.CrossEntropyLoss(),
                    tt.Truncated(40),
                    lanes=14,  # fewer run on one thread
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert_same(seen[0], seen[1], 0.0)


__all__ = ["calls"]  # a fixture


def other_inputs(net: Carried) -> None:
    layer = next(net.module.children())
    layer.weight_ih_l0 = nn.Parameter(torch.randn(36, 7, dtype=torch.float64))


def other_units(net: Carried) -> None:
    next(net.module.children()).weight_hh_l0.data = torch.randn(20, 5, dtype=torch.float64)


@pytest.mark.parametrize("change", [other_inputs, other_units])
def test_what_does_not_fit_any_more_never_reaches_the_kernel(
    change: Callable[[Carried], None], calls: list[int]
) -> None:
    net = make("lstm")
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    before = len(calls)
    change(net)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert len(calls) == before


def test_a_gradient_of_another_size_never_reaches_the_kernel(calls: list[int]) -> None:
    net = make("lstm")
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12), zero=False)
    small = torch.as_tensor(next(net.parameters()).grad).resize_(3)
    before = small.clone()
    with pytest.raises(RuntimeError, match="must match the size"):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert calls
    assert torch.equal(small, before)


def states(net: Carried) -> dict[str, Any]:
    h, c = net.initial_state(lanes=3)["0"]
    return {
        "lanes": (h[:2], c[:2]),
        "units": (h[..., :4], c[..., :4]),
        "alone": h,
    }


@pytest.mark.parametrize("which", ["lanes", "units", "alone"])
def test_a_state_that_does_not_fit_never_reaches_the_kernel(which: str, calls: list[int]) -> None:
    net = make("lstm")
    stream = tt.Stream(
        recordings(torch.float64, 4, regress=False), lanes=3, chunk=16, dtype=torch.float64
    )
    stream._start()
    updates = tt.updates(
        net,
        stream,
        nn.CrossEntropyLoss(),
        gradient=tt.Truncated(12),
        state={"0": states(net)[which], "1": ()},
    )
    with pytest.raises((RuntimeError, ValueError, AttributeError)):
        next(updates)
    assert not calls
