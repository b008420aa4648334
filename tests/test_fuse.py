"""`tt.fuse` changes what runs and nothing else; carried, nets of `tt.nn` are nets of `torch.nn`,
their resets inside the call.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import throughtime as tt
from recurrences import needs_kernels
from strategies import (
    FEATURES,
    HIDDEN,
    HidesLayer,
    HidesTwoLayers,
    Row,
    apart,
    gradients,
    in_chunks,
    inputs,
    recordings,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.nn.layers import Recurrent

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


FUSED = (
    Row("chain", lambda: nn.Sequential(nn.GRU(FEATURES, 5, 2), nn.RNN(5, HIDDEN), nn.Tanh())),
    Row("batch-first", lambda: nn.Sequential(nn.LSTM(FEATURES, 5, batch_first=True))),
    Row("hides-layer", lambda: HidesLayer(batch_first=True)),
    Row("takes-resets", Takes),
    Row("hidden-in-a-chain", lambda: nn.Sequential(HidesLayer(outputs=FEATURES), HidesTwoLayers())),
)
WHOLE = {"chain", "batch-first"}


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
    net, x = HidesTwoLayers().double(), inputs(9, 2)
    before, layers = [id(p) for p in net.parameters()], [net.lstm, net.block["gru"]]
    expected, words = net.eval()(x), repr(net)
    assert tt.fuse(net) is net
    assert [net.lstm, net.block["gru"]] == layers
    assert [id(p) for p in net.parameters()] == before
    assert (repr(net), net.lstm.training) == (words, False)
    assert [type(layer) for layer in layers] == [tt.nn.LSTM, tt.nn.GRU]
    assert (net(x) - expected).abs().max() < EXACT
    assert [type(m) for m in tt.fuse(tt.fuse(net)).modules()] == [type(m) for m in net.modules()]


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


@pytest.mark.parametrize("row", FUSED, ids=lambda row: row.name)
def test_resets_inside_the_call_are_those_of_torch_nn_between_calls(row: Row) -> None:
    """And those inside do not split it."""
    net, plain, calls = fused(row), row.net(), list[int]()
    x, resets = inputs(31, 3), torch.rand(31, 3) < 0.15
    resets[7] = True  # one of them at the first step of a chunk
    # a module that hides its layers shows how it calls them
    everything(net, x, torch.zeros_like(resets))
    assert net.adapter.takes_resets == (row.name in WHOLE)
    (y, state, grads), (expected, end, full) = (everything(n, x, resets) for n in (net, plain))
    assert (y - expected).abs().max() < EXACT
    assert states_apart(state, end) < EXACT
    assert apart(grads, full) < EXACT
    late = everything(net, x, resets.roll(1, 0))  # the mutant: a step too late
    assert (late[0] - expected).abs().max() > 1e-3
    layer = next(m for m in net.modules() if isinstance(m, Recurrent))
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    net(x, start(net, x), resets)
    assert (len(calls) == 1) == (row.name in WHOLE)


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
