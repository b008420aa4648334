"""The trace of updates that would otherwise run in one call of the kernels.

A traced update is made with a graph; the others, as `every` skips them, in one call.

Shapes: `T` steps, `B` lanes.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from processes import PATIENCE
from recurrences import needs_kernels
from test_fused_update import LAYERS, by_graph, calls, make, recordings
from throughtime.carry import Carried
from throughtime.diagnose._trace_record import History
from throughtime.diagnose.trace import SAMPLED, BackwardRecord, Trace, trace
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
    assert one.names == other.names
    worst = max((one[name] - other[name]).abs().max().item() for name in one.names)
    for name in one.names if edges else ():
        norms, others = one.edges(name), other.edges(name)
        assert norms.keys() == others.keys()
        worst = max(worst, *(abs(norms[at] - others[at]) for at in norms), 0.0)
    means, others = one.mean_retention_gate(), other.mean_retention_gate()
    assert means.keys() == others.keys()
    return max(worst, *((means[name] - others[name]).abs().max().item() for name in means), 0.0)


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
    return {name: record[name].clone() for name in record.names}


def test_a_record_does_not_change_after_it_is_read() -> None:
    net, read, copies = make("gru"), list[BackwardRecord](), list[dict[str, Tensor]]()
    with trace(net, keep=2) as result:
        for at, _ in enumerate(updates(net)):
            if at % 2:
                read.append(result.last)
                copies.append(copied(result.last))
    assert len(read) > 3
    assert all(
        torch.equal(record[name], norms)
        for record, then in zip(read, copies, strict=True)
        for name, norms in then.items()
    )


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
            torch.equal(one[name], norms)
            for one, then in zip(result.passes, before, strict=True)
            for name, norms in then.items()
        )
        with torch.no_grad():
            next(net.parameters())[1, 2] = torch.nan
        with pytest.raises(RunError, match="is not finite"):
            train(net)
        assert result.count == count + 1  # the trace says where it exploded
        assert not result["0.layer0.h"].isfinite().all()


def test_updates_and_passes_of_one_s_own_are_counted_alike() -> None:
    net = make("gru")
    x = torch.randn(7, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    at = 0
    with trace(net, keep=9) as result:
        for at, _ in enumerate(updates(net)):
            if at in {2, 3}:
                y, _ = net(x, net.initial_state(lanes=2))
                torch.autograd.grad(y.square().sum(), list(net.parameters()))
                assert len(result["0.layer0.h"]) == 7
    assert result.count == at + 3


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
    last, expected = other.last, both.last
    assert max((last[name] - expected[f"1.{name}"]).abs().max() for name in last.names) < EXACT


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
    "tensors": lambda net: trace(net, keep=9, tensors=True),
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
        assert max((one[name] - other[name]).abs().max() for name in other.names) < EXACT
    assert "1.y" in result.names or opened != "another-module"


def test_both_edges_of_a_window_that_is_cut_in_two_are_recorded() -> None:
    net = make("lstm")
    with trace(net) as result:
        train(net, policy=tt.Truncated(7, horizon=20))
        edges = [result.last.edges("0.layer0.h") for _ in updates(net, tt.Truncated(7, horizon=20))]
    assert max(map(len, edges)) == 2


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


def test_another_thread_reads_whole_passes() -> None:
    """A record that is read while updates are made is one of their passes."""
    net = make("lstm")
    with trace(net, keep=1000) as result:
        train(net)
        train(net)
    expected, net, read = [copied(one) for one in result.passes], make("lstm"), list[Any]()
    over, reading = threading.Event(), threading.Event()
    with trace(net) as result:

        def read_passes() -> None:
            while not over.is_set():
                read.extend(result.passes)
                if len(read) > 1:
                    reading.set()

        reader = threading.Thread(target=read_passes)
        reader.start()
        try:
            for update, _ in enumerate(chain(updates(net), updates(net))):
                assert update < 3 or reading.wait(PATIENCE)  # a busy machine may start it late
        finally:
            over.set()
            reader.join()
    assert all(
        any(all(torch.equal(record[n], norms) for n, norms in one.items()) for one in expected)
        for record in set(read)
    )


@pytest.mark.covering
@pytest.mark.parametrize("every", [2, 3, 100])
@pytest.mark.parametrize("kind", ["lstm", "stacked"])
def test_of_so_many_updates_one_is_traced_and_the_others_are_single_calls(
    kind: str, every: int, calls: list[int]
) -> None:
    net = NETS[kind]()
    with trace(net, keep=100) as expected:
        train(net)
        train(net)
    assert not calls
    net = NETS[kind]()
    with trace(net, keep=100, every=every) as result:
        train(net)
        train(net)
    chosen = expected.passes[::every]
    assert len(calls) == expected.count - len(chosen)
    assert result.count == len(chosen) == len(result.passes)
    pairs = zip(result.passes, chosen, strict=True)
    assert max(differs(one, other) for one, other in pairs) < EXACT
    assert not SAMPLED


@pytest.mark.parametrize(
    "policy",
    [tt.Exact(chunk=7), tt.Truncated(6, horizon=20)],
    ids=["exact", "horizon"],
)
def test_an_update_of_any_policy_is_one_pass_of_so_many(policy: Any) -> None:
    """However many runs of autograd's engine it takes."""
    net = make("gru")
    with trace(net, keep=100) as expected:
        for _ in range(3):
            train(net, policy=policy)
    net = make("gru")
    with trace(net, keep=100, every=2) as result:
        for _ in range(3):
            train(net, policy=policy)
    chosen = expected.passes[::2]
    assert len(chosen) == result.count > 1
    pairs = zip(result.passes, chosen, strict=True)
    assert max(differs(one, other) for one, other in pairs) < 1e-10


def loop(kind: str, chunks: int, passes: int, **options: Any) -> tuple[Trace, Tensor, list[bool]]:
    """A hand-written loop, several chunks for each backward pass; which calls were traced."""
    torch.manual_seed(0)
    net: nn.Module = {
        "torch": nn.LSTM(3, 4, num_layers=2),
        "fused": tt.nn.GRU(3, 4),
        "cell": nn.LSTMCell(3, 4),
    }[kind].double()
    data = torch.randn(passes, chunks, 5, 2, 3, dtype=torch.float64)
    traced = list[bool]()
    with trace(net, keep=100, **options) as result:
        for part in data:
            state, total = None, torch.zeros(())
            for chunk in part:
                if isinstance(net, nn.LSTMCell):
                    for x in chunk:
                        state = net(x, state)
                    assert isinstance(state, tuple)
                    y = state[0]
                else:
                    y, state = net(chunk, state)
                with torch.no_grad():  # as a validation in between
                    net(chunk[0] if isinstance(net, nn.LSTMCell) else chunk)
                total = total + y.square().mean()
                graph: Any = y.grad_fn
                names = [graph.name(), *(node.name() for node, _ in graph.next_functions if node)]
                traced.append(any("TracedSteps" in name for name in names))
            total.backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight.sub_(0.1 * torch.as_tensor(weight.grad))
            net.zero_grad()
    return result, torch.cat([weight.detach().flatten() for weight in net.parameters()]), traced


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["torch", "fused", "cell"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_of_so_many_backward_passes_of_a_loop_one_is_traced(kind: str, chunks: int) -> None:
    expected, weights, traced = loop(kind, chunks, 8)
    assert all(traced)
    result, sampled, traced = loop(kind, chunks, 8, every=3)
    assert traced == [number % 3 == 0 for number in range(8) for _ in range(chunks)]
    assert result.count == len(result.passes) == 3
    pairs = zip(result.passes, expected.passes[::3], strict=True)
    assert max(differs(one, other) for one, other in pairs) < EXACT
    assert (weights - sampled).abs().max() < EXACT


def test_a_decision_at_every_forward_call_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: calls are counted, not backward passes."""

    def decide(self: History) -> bool:
        self.index += 1
        return self.index % self.every == 0

    monkeypatch.setattr(History, "decide", decide)
    with pytest.raises(AssertionError):
        test_of_so_many_backward_passes_of_a_loop_one_is_traced("torch", 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_belongs_to_its_backward_pass(reentrant: bool) -> None:
    """Of a checkpointed net, and so in every pass."""
    from torch.utils.checkpoint import checkpoint

    net = nn.LSTM(3, 4).double()

    def called(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, after = net(x, (h, c))
        return y, *after

    with trace(net, keep=9, every=2) as result:
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(12, 2, 3, dtype=torch.float64, generator=generator).requires_grad_()
            state, outputs = [torch.zeros(1, 2, 4, dtype=torch.float64)] * 2, list[Tensor]()
            for part in x.split(4):
                y, *state = checkpoint(called, part, *state, use_reentrant=reentrant)
                outputs.append(y)
            torch.cat(outputs).square().mean().backward()
    assert result.count == 2
    assert [len(one["layer0.h"]) for one in result.passes] == [12, 12]


def test_updates_of_another_net_are_not_counted() -> None:
    net, other = make("lstm"), make("gru")
    with trace(net, keep=9, every=2) as result:
        for _ in zip(updates(net), updates(other), strict=False):
            pass
        count = result.count
        train(other)
    assert result.count == count > 1
    assert "forward" not in vars(next(other.module.children()))


def test_a_trace_may_be_closed_within_a_loop_that_it_samples(calls: list[int]) -> None:
    net, at = make("lstm"), 0
    with trace(net, every=3) as result:
        for at, _ in enumerate(updates(net)):
            if at == 4:
                result.close()
    assert result.count == 2
    assert "forward" not in vars(next(net.module.children()))
    assert len(calls) == at - 1


def test_the_graph_gives_what_single_calls_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first test compares two implementations."""
    net, other = make("lstm"), make("lstm")
    train(net)
    by_graph(monkeypatch)
    train(other)
    assert not torch.equal(weights(net), weights(other))
    assert (weights(net) - weights(other)).abs().max() < EXACT
