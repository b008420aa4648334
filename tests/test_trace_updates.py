"""The trace of updates that would otherwise run in one call of the kernels.

A traced update is made with a graph; the others, as `every` skips them, in one call.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from test_fused_update import LAYERS, calls, make, recordings
from throughtime.carry import Carried
from throughtime.diagnose._trace_summary import BackwardRecord
from throughtime.diagnose.trace import Trace, trace
from throughtime.errors import ModelError, RunError

pytestmark = needs_kernels
__all__ = ["calls"]  # a fixture

EXACT = 1e-12
NETS: dict[str, Callable[[], Carried]] = {name: lambda name=name: make(name) for name in LAYERS}


def stacked() -> Carried:
    """Modules of one and two layers, behind one that prepares the inputs."""
    torch.manual_seed(3)
    layers = nn.Tanh(), tt.nn.LSTM(5, 7, num_layers=2), tt.nn.GRU(7, 6), nn.Linear(6, 4)
    return tt.carry(nn.Sequential(*layers).double())


def fronted() -> Carried:
    """Behind a front that learns."""
    torch.manual_seed(3)
    return tt.carry(
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), tt.nn.LSTM(6, 7), nn.Linear(7, 4)).double()
    )


NETS["stacked"], NETS["behind a front"] = stacked, fronted


def updates(net: Carried, policy: Any = None, *, zero: bool = True) -> Iterator[Any]:
    """An epoch, with a step of plain descent after each update.

    Recordings of several lengths give resets, masks and a ragged end.
    """
    stream = tt.Stream(
        recordings(torch.float64, 4, regress=False), lanes=3, chunk=16, dtype=torch.float64
    )
    for update in tt.updates(
        net, stream, nn.CrossEntropyLoss(), gradient=policy or tt.Truncated(6)
    ):
        yield update
        with torch.no_grad():
            for weight in net.parameters():
                weight.sub_(0.05 * torch.as_tensor(weight.grad))
        if zero:
            net.zero_grad()


def train(net: Carried, **options: Any) -> None:
    for _ in updates(net, **options):
        pass


def weights(net: Carried) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


def plain(make: Callable[[], Carried]) -> Carried:
    """The same net with layers of torch.nn."""
    net = make()
    for name, layer in list(net.module.named_children()):
        if isinstance(layer, nn.RNNBase):
            base: Any = type(layer).__mro__[2]
            options: dict[str, Any] = {}
            if base is nn.RNN:
                options["nonlinearity"] = layer.nonlinearity
            if base is nn.LSTM:
                options["proj_size"] = layer.proj_size
            other = base(
                layer.input_size,
                layer.hidden_size,
                num_layers=layer.num_layers,
                bias=layer.bias,
                dtype=torch.float64,
                **options,
            )
            other.load_state_dict(layer.state_dict())
            setattr(net.module, name, other)
    return tt.carry(net.module)


def differs(one: BackwardRecord, other: BackwardRecord, *, edges: bool = True) -> float:
    """The largest difference between two passes in any value."""
    worst = 0.0
    for part in ("norms", "retention", *["edges"][:edges]):
        values, others = getattr(one, part), getattr(other, part)
        assert values.keys() == others.keys()
        worst = max(worst, *((values[n] - others[n]).abs().max().item() for n in others), 0.0)
    return worst


@pytest.mark.covering
@pytest.mark.parametrize("zero", [True, False], ids=["one-by-one", "added-up"])
@pytest.mark.parametrize("kind", NETS)
def test_a_traced_epoch_is_that_of_torch_nn_and_trains_as_single_calls_do(
    kind: str, zero: bool, calls: list[int]
) -> None:
    net = NETS[kind]()
    train(net, zero=zero)
    untraced, count = weights(net), len(calls)
    net = NETS[kind]()
    with trace(net, keep=100) as result:
        train(net, zero=zero)
    assert (weights(net) - untraced).abs().max() < EXACT
    assert len(calls) == count == result.count > 5
    net = plain(NETS[kind])
    with trace(net, keep=100) as expected:
        train(net, zero=zero)
    assert result.count == expected.count
    pairs = zip(result.passes, expected.passes, strict=True)
    # torch.nn is called anew at each reset, so it has edges of its own
    assert max(differs(one, other, edges=False) for one, other in pairs) < EXACT


def copied(record: BackwardRecord) -> dict[str, Tensor]:
    return {name: norms.clone() for name, norms in record.norms.items()}


def test_an_error_leaves_the_passes_that_were_made() -> None:
    """A class that does not exist; then a gradient that is not finite."""
    net = make("lstm")
    with trace(net, keep=2) as result:
        train(net)
        count, before = result.count, [copied(one) for one in result.passes]
        net.zero_grad()
        wrong = tt.Stream(
            {"inputs": torch.randn(12, 5), "targets": torch.full((12,), 4)},
            lanes=1,
            chunk=12,
            dtype=torch.float64,
        )
        with pytest.raises(ModelError, match="the targets of the stream need 5"):
            next(tt.updates(net, wrong, nn.CrossEntropyLoss(), gradient=tt.Truncated(12)))
        assert result.count == count
        assert all(
            torch.equal(one.norms[name], norms)
            for one, then in zip(result.passes, before, strict=True)
            for name, norms in then.items()
        )
        with torch.no_grad():
            next(net.parameters())[1, 2] = torch.nan
        with pytest.raises(RunError, match="is not finite"):
            train(net)
        assert result.count == count + 1  # the trace says where it exploded
        assert not result["0.layer0.h"].isfinite().all()


def test_each_layer_may_have_a_trace_of_its_own(calls: list[int]) -> None:
    net = stacked()
    _, below, above, _ = net.module.children()
    with trace(above, keep=9) as one:
        train(net)
        with trace(below, keep=9) as other:
            train(net)
    assert one.count == 2 * other.count > 0
    assert not calls
    with trace(stacked(), keep=9) as both:
        train(net := stacked())
    assert not both.count
    with trace(net := stacked(), keep=one.count) as both:
        train(net)
        train(net)
    assert max((other[name] - both[f"1.{name}"]).abs().max() for name in other.names) < EXACT


def wrap(net: Carried) -> None:
    layer = next(net.module.children())
    layer.forward = partial(layer.forward)


def wrapped_before(net: Carried) -> Trace:
    wrap(net)
    return trace(net, keep=9)


def wrapped_after(net: Carried) -> Trace:
    result = trace(net, keep=9)
    wrap(net)
    return result


def hooked(net: Carried) -> Trace:
    next(net.module.children()).register_forward_hook(lambda *_: None)
    return trace(net, keep=9)


MORE: dict[str, Callable[[Carried], Trace]] = {
    "another-module": lambda net: trace(net, keep=9, names={"1": ("y",)}),
    "wrapped-before": wrapped_before,
    "wrapped-after": wrapped_after,
    "hooked": hooked,
}


@pytest.mark.parametrize("opened", MORE)
def test_options_and_wrappers_change_no_norm(opened: str, calls: list[int]) -> None:
    net = make("lstm")
    with MORE[opened](net) as result:
        train(net)
    net = make("lstm")
    with trace(net, keep=9) as expected:
        train(net)
    assert not calls
    assert len(result.passes) == len(expected.passes)
    for one, other in zip(result.passes, expected.passes, strict=True):
        assert max((one.norms[n] - norms).abs().max() for n, norms in other.norms.items()) < EXACT
    assert "1.y" in result.names or opened != "another-module"


def test_a_closed_trace_records_nothing_and_updates_are_single_calls_again(
    calls: list[int],
) -> None:
    net = make("lstm")
    with trace(net) as result:
        train(net)
        norms, count = copied(result.last), result.count
    train(net)
    assert len(calls) == count == result.count
    assert all(torch.equal(result[name], before) for name, before in norms.items())


@pytest.mark.covering
@pytest.mark.parametrize("every", [2, 3, 100])
@pytest.mark.parametrize("kind", ["lstm", "stacked"])
def test_of_so_many_updates_one_is_traced_and_the_others_are_single_calls(
    kind: str, every: int, calls: list[int]
) -> None:
    net = NETS[kind]()
    with trace(net, keep=100) as expected:
        train(net)
    assert not calls
    net = NETS[kind]()
    result, epoch = trace(net, keep=100), updates(net)
    for number in count():
        with result if number % every == 0 else nullcontext():
            if next(epoch, None) is None:
                break
    chosen = expected.passes[::every]
    assert len(calls) == expected.count - len(chosen)
    assert result.count == len(chosen) == len(result.passes)
    pairs = zip(result.passes, chosen, strict=True)
    assert max(differs(one, other) for one, other in pairs) < EXACT


def test_updates_of_another_net_are_not_counted() -> None:
    net, other = make("lstm"), make("gru")
    with trace(net, keep=9) as result:
        train(net)
        count = result.count
        train(other)
    assert result.count == count > 1
