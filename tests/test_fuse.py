"""`tt.fuse` changes what runs and nothing else; carried, nets of `tt.nn` are nets of `torch.nn`,
their resets inside the call.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import copy
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import throughtime as tt
from policy_data import PolicyData, data_for, deviation, plain, policy_gradients
from recurrences import needs_kernels
from strategies import (
    FEATURES,
    HIDDEN,
    NETS,
    HidesLayer,
    HidesTwoLayers,
    Row,
    apart,
    every_net,
    gradients,
    in_chunks,
    inputs,
    named,
    recordings,
    remembering,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.errors import DataError
from throughtime.nn.layers import Recurrent
from throughtime.testing import check_carry

fusing: Any = import_module("throughtime.nn.fuse")  # the function has the name of its module
pytestmark = needs_kernels
EXACT = 1e-12


class Takes(nn.Module):
    """Maps `(x, state)` to `(y, state)` and applies resets itself."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.gru = tt.nn.GRU(FEATURES, HIDDEN, batch_first=batch_first)
        self.seen = 0

    def forward(
        self, x: Tensor, state: Tensor | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.seen += resets is not None
        return self.gru(x, state, resets)


class InPieces(HidesLayer):
    """Its layer plays the first half of the steps, then the rest."""

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.lstm(x[: len(x) // 2 + 1])
        if len(x) > 1:
            rest, _ = (
                self.lstm(x[len(x) // 2 + 1 :], state)
                if len(x) // 2 + 1 < len(x)
                else (y[:0], state)
            )
            y = torch.cat([y, rest])
        return self.head(y)


FUSED = (
    *NETS,
    Row(
        "two-layers-deep",
        lambda: nn.Sequential(
            nn.GRU(FEATURES, 5, num_layers=2), nn.RNN(5, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2)
        ),
    ),
    Row("takes-resets", Takes),
    Row("takes-resets-batch-first", lambda: Takes(batch_first=True)),
    Row("in-pieces", InPieces),
    Row("hidden-in-a-chain", lambda: nn.Sequential(HidesLayer(outputs=FEATURES), HidesTwoLayers())),
)
every_fused_net = pytest.mark.parametrize("row", FUSED, ids=lambda row: row.name)
SPLIT = {row.name for row in NETS if "cell" in row.name or "state" in row.name} | {
    *("learnt-start", "in-pieces", "takes-resets", "takes-resets-batch-first"),
    *("hides-layer", "hides-layer-batch-first", "hides-two-layers", "hidden-in-a-chain"),
}
WHOLE = {row.name for row in FUSED} - SPLIT - {"sequential", "sequential-of-user-modules"}


def fused(row: Row) -> Carried:
    return tt.carry(row.module(), batch_first=row.batch_first, fused=True)


def everything(net: Carried, x: Tensor, resets: Tensor) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Outputs, state and gradients of a loss on all of them, over chunks of uneven lengths."""
    net.zero_grad()
    y, state = in_chunks(net, x, (7, 1, 13), resets=resets)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    (loss + torch.stack([leaf.square().sum() for leaf in tt.state.tensors(state)]).sum()).backward()
    return y.detach(), tt.state.detach(state), gradients(net)


def test_layers_change_their_class_and_nothing_else() -> None:
    net = HidesTwoLayers().double()
    calls: list[str] = []
    net.lstm.register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: id(p) for name, p in net.named_parameters()}
    layers, optimizer, x = (
        [net.lstm, net.block["gru"]],
        torch.optim.SGD(net.parameters(), lr=0.1),
        inputs(9, 2),
    )
    expected, words = net.eval()(x), repr(net)
    assert tt.fuse(net) is net
    assert [net.lstm, net.block["gru"]] == layers
    assert {name: id(p) for name, p in net.named_parameters()} == before
    assert (repr(net), net.lstm.training) == (words, False)
    assert [type(layer) for layer in layers] == [tt.nn.LSTM, tt.nn.GRU]
    assert (net(x) - expected).abs().max() < EXACT
    net(x).sum().backward()
    optimizer.step()
    assert (net(x) - expected).abs().max() > 1e-3
    assert calls == ["hook"] * 4
    assert [type(m) for m in tt.fuse(tt.fuse(net)).modules()] == [type(m) for m in net.modules()]


def test_a_bare_layer_and_one_used_twice_are_fused_once() -> None:
    layer = nn.RNN(FEATURES, HIDDEN)
    assert tt.fuse(layer) is layer
    assert type(layer) is tt.nn.RNN
    shared = nn.GRU(FEATURES, FEATURES)
    net = tt.fuse(nn.Sequential(shared, nn.Identity(), shared))
    assert net[0] is net[2] is shared


class Own(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  # torch's name
        y, state = super().forward(input, hx)
        return 2 * y, state


def test_what_is_not_torch_s_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.ModuleDict(
        {
            "own": Own(FEATURES, HIDDEN),
            "cell": nn.LSTMCell(3, 4),
            "wrapped": nn.GRU(3, 4),
            "gru": nn.GRU(3, 4),
        }
    )
    wrapped = net["wrapped"]
    wrapped.forward = wrapped.forward  # as a wrapper puts its own there
    kinds = {name: type(m) for name, m in net.items()}
    with caplog.at_level(logging.WARNING, "throughtime"):
        tt.fuse(net)
    assert {name for name, m in net.items() if type(m) is not kinds[name]} == {"gru"}
    assert "'own': a Own" in caplog.text
    assert "inherit from tt.nn.LSTM" in caplog.text
    assert "'wrapped': its forward was replaced" in caplog.text
    assert "cell" not in caplog.text


def test_parametrized_layers_are_fused_with_their_parametrization() -> None:
    layer = nn.LSTM(FEATURES, HIDDEN).double()
    parametrizations.weight_norm(layer, "weight_hh_l0")
    x, names = inputs(9, 2), [n for n, _ in layer.named_parameters()]
    expected, _ = layer(x)
    tt.fuse(layer)
    assert isinstance(layer, tt.nn.LSTM)
    assert tt.nn.backend(layer, x).name == "fused"
    assert [n for n, _ in layer.named_parameters()] == names
    y, _ = layer(x)
    assert (y - expected).abs().max() < EXACT
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is tt.nn.LSTM
    assert (layer(x)[0] - expected).abs().max() < EXACT


@every_net
def test_fused_net_is_the_net(row: Row) -> None:
    net, mine, x = row.net(), fused(row), inputs(31, 3)
    resets = torch.rand(31, 3) < 0.15
    (y, state, gradient), (expected, end, full) = (
        everything(mine, x, resets),
        everything(net, x, resets),
    )
    assert (y - expected).abs().max() < EXACT
    assert states_apart(state, end) < EXACT
    assert apart(gradient, full) < EXACT
    assert [law.name for law in check_carry(mine, x[:28])] == [
        law.name for law in check_carry(net, x[:28])
    ]


@every_fused_net
def test_resets_inside_the_call_are_resets_between_calls(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, resets = fused(row), inputs(31, 3), torch.rand(31, 3) < 0.15
    resets[7] = True  # one of them at the first step of a chunk
    everything(
        net, x, torch.zeros_like(resets)
    )  # a module that hides its layers shows how it calls them
    whole = net.adapter.takes_resets()
    actual = everything(net, x, resets)
    monkeypatch.setattr(type(net.adapter), "takes_resets", lambda *_: False)
    apart_calls = everything(net, x, resets)
    assert whole == (row.name in WHOLE)
    assert (actual[0] - apart_calls[0]).abs().max() < EXACT
    assert states_apart(actual[1], apart_calls[1]) < EXACT
    assert apart(actual[2], apart_calls[2]) < EXACT
    late = everything(net, x, resets.roll(1, 0))  # the mutant: a step too late
    assert (late[0] - apart_calls[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_resets_do_not_split_the_call(name: str) -> None:
    row = next(row for row in FUSED if row.name == name)
    net, calls = fused(row), list[int]()
    x, resets = inputs(20, 3), torch.rand(20, 3) < 0.3
    state = start(net, x)
    assert net.adapter.takes_resets()  # with a trial, where one is needed
    layer = next(m for m in net.modules() if isinstance(m, Recurrent))
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    net(x, state, resets)
    assert calls == [1]
    torch.manual_seed(0)
    split, counted = row.net(), list[int]()
    if not any(isinstance(m, Recurrent) for m in split.modules()):
        next(m for m in split.modules() if isinstance(m, nn.RNNBase)).register_forward_pre_hook(
            lambda *_: counted.append(1)
        )
        split(x, start(split, x), resets)
        assert len(counted) > 5


@pytest.mark.parametrize("name", ["hides-layer", "hides-two-layers", "hidden-in-a-chain"])
def test_whether_the_call_stays_whole_does_not_depend_on_the_calls_before(name: str) -> None:
    """A resumed run is a new net in the middle of a stream: it gives the same bits."""
    row = next(row for row in FUSED if row.name == name)
    x, resets = inputs(20, 2), torch.rand(20, 2) < 0.3
    old, new = fused(row), fused(row)
    for lanes in (1, 2, 3):
        old(inputs(7, lanes), start(old, inputs(7, lanes)))
    drawn = torch.get_rng_state()
    (y, state, gradient), (again, end, same) = (
        everything(old, x, resets),
        everything(new, x, resets),
    )
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(y, again)
    assert states_apart(state, end) == apart(gradient, same) == 0


class WithItsOwn(HidesLayer):
    """Hands its layer resets of its own: none at all, or every step."""

    every = False

    def forward(self, x: Tensor) -> Tensor:
        y, _ = (
            self.lstm(x, None, torch.full(x.shape[:2], self.every)) if self.every else self.lstm(x)
        )
        return self.head(y)


def test_resets_of_the_module_s_own_are_kept() -> None:
    module = tt.fuse(remembering(WithItsOwn()))
    net, x, resets = tt.carry(module), inputs(9, 2), torch.zeros(9, 2, dtype=torch.bool)
    start(net, x)  # with a reset at every step the module would be refused: it has no memory
    vars(module)["every"] = True
    resets[4] = True
    expected = module(x)
    assert (net(x, start(net, x))[0] - expected).abs().max() < EXACT
    assert (net(x, start(net, x), resets)[0] - expected).abs().max() < EXACT


def test_resets_of_another_shape_are_refused() -> None:
    net, x = fused(named("lstm")), inputs(5, 2)
    with pytest.raises(DataError, match=r"resets have shape \(2, 5\), expected \(5, 2\)"):
        net(x, start(net, x), torch.zeros(2, 5, dtype=torch.bool))


POLICIES: dict[str, Callable[[], Any]] = {
    "truncated": lambda: tt.Truncated(stride=7),
    "overlapping": lambda: tt.Truncated(stride=5, horizon=13),
    "exact": lambda: tt.Exact(chunk=6),
    "adaptive": lambda: tt.Adaptive(tolerance=0.2, min=4, max=16),
}


@pytest.mark.covering
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", ["lstm", "two-layers-deep", "hides-layer", "takes-resets", "in-pieces"]
)
def test_every_policy_has_the_gradients_of_torch_nn(policy: str, name: str) -> None:
    row = next(row for row in FUSED if row.name == name)
    net, mine = row.net(), fused(row)
    data = data_for(net, 41, 2, resets=0.08, masked=0.1)
    make = POLICIES[policy]
    expected = policy_gradients(net, [data.chunk], make())
    assert len(expected) > 1 or policy == "exact"
    assert deviation(policy_gradients(mine, [data.chunk], make()), expected) < 1e-11


def test_policies_on_fused_nets_are_plain_autograd() -> None:
    """The same against one backward pass for every stretch, written by hand."""
    net, whole = fused(named("hides-layer")), [0, 10, 20, 30]
    data = PolicyData.draw(30, 3, 1, resets=0.1)
    assert (
        deviation(
            policy_gradients(net, [data.chunk], tt.Truncated(stride=10)), plain(net, data, whole)
        )
        < EXACT
    )


@pytest.mark.parametrize(
    "name", ["lstm", pytest.param("gru", marks=pytest.mark.slow), "hides-layer", "takes-resets"]
)
def test_whatever_runs_a_net_runs_a_fused_one(name: str) -> None:
    row = next(row for row in FUSED if row.name == name)
    pair = row.net(), fused(row)
    x, resets = inputs(33, 2), torch.rand(33, 2) < 0.1
    width = pair[0](x, start(pair[0], x))[0].shape[2]
    data = recordings([40, 31, 57], outputs=width)
    actual = list[list[Tensor]]()
    for net in pair:
        x_live = x.clone().requires_grad_()
        rolled, _ = tt.rollout(net, x_live, start(net, x), resets=resets, chunk=8)
        (dx,) = torch.autograd.grad(rolled.square().sum(), x_live)
        predictor = tt.Predictor(net, lanes=2)
        steps = torch.cat(
            [predictor(part, new) for part, new in zip(x.split(4), resets.split(4), strict=True)]
        )
        scored = tt.evaluate(net, tt.Stream(data, lanes=2, chunk=16), nn.MSELoss())
        reached = tt.reach(net, tt.Stream(data, lanes=2, chunk=16), nn.MSELoss(), max_lag=20)
        audited = tt.audit(net, tt.Stream(data, lanes=2, chunk=16), nn.MSELoss(), horizons=(8, 16))
        numbers = [scored.loss, *reached.norms, audited.norm, *(row.bias for row in audited.rows)]
        actual.append([rolled.detach(), dx, steps.detach(), torch.tensor(numbers)])
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(*actual, strict=True))


def test_trace_and_doctor_see_a_fused_net() -> None:
    """The doctor looks on through a mode of torch, in which torch's own layers play."""
    pair = named("hides-layer").net(), fused(named("hides-layer"))
    x, norms = inputs(12, 2), list[Any]()
    for net in pair:
        with tt.trace(net) as trace:
            y, _ = net(x, start(net, x))
            y.square().sum().backward()
        norms.append(trace)
    plain_norms, fused_norms = (actual.last.norms for actual in norms)
    assert len(plain_norms) > 5
    for name, expected in plain_norms.items():
        torch.testing.assert_close(fused_norms[name], expected, rtol=1e-9, atol=0)
    with tt.doctor() as doctor:
        state = start(pair[1], x)
        for chunk in inputs(36, 2).split(12):
            y, state = pair[1](chunk, tt.state.detach(state))
            y.sum().backward()
    assert not doctor.findings


def test_carry_fuses_only_when_asked() -> None:
    assert type(tt.carry(nn.GRU(3, 4)).module) is nn.GRU
    net = tt.carry(nn.GRU(3, 4))
    assert tt.carry(net, fused=True) is net
    assert type(net.module) is tt.nn.GRU
    net(torch.zeros(5, 2, 3), net.initial_state(2), torch.zeros(5, 2, dtype=torch.bool))
    twin = copy.deepcopy(net)
    assert type(twin.module) is tt.nn.GRU


def updated(module: nn.Module, updates: int) -> None:
    stream = tt.Stream(recordings([4 * updates], outputs=2), lanes=1, chunk=4)
    for _ in tt.updates(tt.carry(module), stream, nn.MSELoss(), gradient=tt.Truncated(stride=4)):
        pass


def test_advice_comes_once_after_a_while_where_much_is_to_gain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chain(layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer, nn.Linear(HIDDEN, 2)).double()

    monkeypatch.setattr(fusing, "_advised", list[str]())
    with caplog.at_level(logging.WARNING, "throughtime"):
        updated(chain(nn.GRU(FEATURES, HIDDEN)), fusing.ADVISE_AFTER - 1)  # too short
        updated(chain(tt.nn.GRU(FEATURES, HIDDEN)), fusing.ADVISE_AFTER)  # fused
        assert caplog.text == ""
        for _ in range(2):
            updated(chain(nn.GRU(FEATURES, HIDDEN)), fusing.ADVISE_AFTER)
    assert len(caplog.records) == 1
    assert "layer 'module.0' is a GRU of torch.nn" in caplog.text
    assert "tt.carry(module, fused=True)" in caplog.text


def test_no_advice_where_torch_is_fast_or_the_kernels_are_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "_advised", list[str]())
    with caplog.at_level(logging.WARNING, "throughtime"):
        fusing.advise(nn.LSTM(FEATURES, HIDDEN), 1)  # float32, which oneDNN plays
        fusing.advise(nn.GRU(FEATURES, HIDDEN, device="meta"), 1)
        monkeypatch.setattr(fusing, "library", lambda: None)
        fusing.advise(nn.GRU(FEATURES, HIDDEN), 1)
        assert caplog.text == ""
        monkeypatch.undo()
        monkeypatch.setattr(fusing, "_advised", list[str]())
        fusing.advise(nn.LSTM(FEATURES, HIDDEN, proj_size=2), 1)
        assert "LSTM of torch.nn" in caplog.text
