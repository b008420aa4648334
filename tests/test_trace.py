"""The trace: the gradient of every state and gate, against plain autograd over an unrolled loop; in
loops, apart from everything else, and summed up.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils.rnn import pack_padded_sequence

import throughtime as tt
from policy_data import PolicyData
from recurrences import needs_kernels
from strategies import FEATURES, HIDDEN, Rotation, inputs, remembering, some_nets, start
from throughtime.diagnose._trace_summary import GradientSummary
from throughtime.diagnose.trace import Trace, trace
from throughtime.errors import ConfigError, ModelError, RunError
from throughtime.gradient import Policy
from throughtime.kernels import reference
from throughtime.kernels.cells import Weights, cell_of
from throughtime.kernels.dispatch import Backend
from throughtime.nn import layers

EXACT = 1e-12
STEPS, LANES = 11, 3
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
Seen = dict[str, list[Tensor]]  # by name, the tensor of every step


def layer(kind: str, **options: Any) -> nn.RNNBase:
    return remembering(KINDS[kind](FEATURES, HIDDEN, **options))  # pyright: ignore[reportReturnType]


class Whole(NamedTuple):
    """What the oracle gives: outputs, the states after, and every tensor of every step by name."""

    y: Tensor
    after: tuple[Tensor, ...]
    seen: Seen


def play(
    net: Any,
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: Mapping[str, Tensor],
    resets: Tensor | None = None,
) -> Whole:
    """One direction of one layer step by step, by the reference; tensors by their letters."""
    cell, seen, hidden = cell_of(net), dict[str, list[Tensor]](), list[Tensor]()
    assert cell is not None
    own: Any = (weights.get(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    for step in reference.steps(cell, x, states, Weights(*own, hr=None), resets):
        states = step.states
        hidden.append(states[0])
        for letter, value in (step.gates | dict(zip(cell.states, states, strict=True))).items():
            seen.setdefault(letter, []).append(value)
    return Whole(torch.stack(hidden), states, seen)


def unrolled(
    net: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...], resets: Tensor | None = None
) -> Whole:
    """All layers and directions of a module."""
    seen: Seen = {}
    ends: list[tuple[Tensor, ...]] = []
    y = x
    for k in range(net.num_layers):
        sides: list[Tensor] = []
        for end in ("", "_reverse") if net.bidirectional else ("",):
            own = f"_l{k}{end}"
            weights = {n.removesuffix(own): w for n, w in net.named_parameters() if n.endswith(own)}
            turn = -1 if end else 1
            entering = tuple(leaf[len(ends)] for leaf in states)
            side = play(net, y.flip(0) if end else y, entering, weights, resets)
            seen |= {f"layer{k}{end}.{letter}": v[::turn] for letter, v in side.seen.items()}
            sides.append(side.y.flip(0) if end else side.y)
            ends.append(side.after)
        y = torch.cat(sides, 2)
    return Whole(y, tuple(torch.stack(leaf) for leaf in zip(*ends, strict=True)), seen)


def mixed(y: Tensor, after: Sequence[Tensor]) -> Tensor:
    """A loss of every output and of the last state, so that both ways in matter."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return (y * weights).sum() + (y * y).sum() / 3 + sum((leaf * leaf).sum() for leaf in after)


def states_for(net: nn.RNNBase, lanes: int = LANES) -> tuple[Tensor, ...]:
    rows = net.num_layers * (2 if net.bidirectional else 1)
    sizes = [net.proj_size or HIDDEN, HIDDEN] if isinstance(net, nn.LSTM) else [HIDDEN]
    return tuple(
        torch.randn(rows, lanes, size, dtype=torch.float64).requires_grad_() for size in sizes
    )


def called(
    net: nn.RNNBase, x: Any, states: tuple[Tensor, ...], *resets: Tensor
) -> tuple[Any, tuple[Tensor, ...]]:
    y, after = net(x, states if isinstance(net, nn.LSTM) else states[0], *resets)
    return y, after if isinstance(after, tuple) else (after,)


def gradients_apart(found: Trace, expected: Seen, loss: Tensor) -> float:
    """How far every traced gradient is from autograd's of the unrolled loop.

    Names and steps must be the same.
    """
    flat = [(name, t, value) for name, values in expected.items() for t, value in enumerate(values)]
    gradients = torch.autograd.grad(
        loss, [value for *_, value in flat], retain_graph=True, materialize_grads=True
    )
    assert set(found.names) == set(expected)
    worst = 0.0
    for (name, t, _), gradient in zip(flat, gradients, strict=True):
        worst = max(worst, (found.last.gradients[name][t] - gradient).abs().max().item())
        worst = max(worst, (found[name][t] - gradient.norm(dim=1)).abs().max().item())
        assert len(found[name]) == len(expected[name])
    return worst


def check(
    net: nn.Module,
    leaves: list[Tensor],
    run: Callable[[], tuple[Tensor, tuple[Tensor, ...]]],
    oracle: Callable[[], Whole],
) -> None:
    """The trace has autograd's gradients of the unrolled loop, and changes nothing."""
    y, after = run()
    untraced = torch.autograd.grad(mixed(y, after), leaves)
    with trace(net) as found:
        y_traced, after_traced = run()
        traced = torch.autograd.grad(mixed(y_traced, after_traced), leaves)
    assert torch.equal(y, y_traced)
    assert y.stride() == y_traced.stride()
    assert all(torch.equal(a, b) for a, b in zip(after, after_traced, strict=True))
    assert max((a - b).abs().max().item() for a, b in zip(untraced, traced, strict=True)) < EXACT
    whole = oracle()
    assert gradients_apart(found, whole.seen, mixed(whole.y, whole.after)) < EXACT


# how it runs, resets, and the layer's own options
WAYS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "plain, batch first": ("plain", False, {"batch_first": True}),
    "both ways": ("fused", False, {"bias": False, "bidirectional": True, "num_layers": 2}),
    "resets": ("fused", True, {}),
    "resets by torch.nn": ("torch.nn", True, {}),
}


@needs_kernels
@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_every_gradient_of_a_layer_is_that_of_the_unrolled_loop(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, resetting, options = WAYS[way]
    if runs == "torch.nn":  # as in half precision, or where the kernels are missing
        monkeypatch.setattr(layers, "choose", lambda *_: Backend("torch.nn", "for this test"))
    net, x = layer(kind, **options), inputs(STEPS, LANES).requires_grad_()
    net = net if runs == "plain" else tt.fuse(net)
    states, resets = states_for(net), torch.zeros(STEPS, LANES, dtype=torch.bool)
    resets[0, 0] = resets[4, 1] = resets[7, :2] = True
    given = (resets,) if resetting else ()

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        turned = x.transpose(0, 1) if net.batch_first else x
        y, after = called(net, turned, states, *given)
        return y.transpose(0, 1) if net.batch_first else y, after

    leaves = [x, *states, *net.parameters()]
    check(net, leaves, run, lambda: unrolled(net, x, states, *given))


CELLS = {
    "lstm": lambda: nn.LSTMCell(FEATURES, HIDDEN),
    "gru": lambda: nn.GRUCell(FEATURES, HIDDEN),
    "relu": lambda: nn.RNNCell(FEATURES, HIDDEN, bias=False, nonlinearity="relu"),
}


@pytest.mark.parametrize("kind", CELLS)
def test_every_gradient_of_a_cell_in_a_loop_is_that_of_the_unrolled_loop(kind: str) -> None:
    cell = remembering(CELLS[kind]())
    x = inputs(STEPS, LANES).requires_grad_()
    states = tuple(leaf[0].detach().requires_grad_() for leaf in states_for(layer(kind)))

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        after, hidden = states, list[Tensor]()
        for step in x.unbind(0):
            state = cell(step, after if len(after) == 2 else after[0])
            after = (state,) if isinstance(state, Tensor) else state
            hidden.append(after[0])
        return torch.stack(hidden), after

    def oracle() -> Whole:
        whole = play(cell, x, states, dict(cell.named_parameters()))
        named = {f"cell.{letter}": values for letter, values in whole.seen.items()}
        return whole._replace(seen=named)

    check(cell, [x, *states, *cell.parameters()], run, oracle)


class Doubled(nn.GRU):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, state = super().forward(*args, **kwargs)
        return 2 * y, state


def test_what_a_trace_cannot_follow_is_refused() -> None:
    """Packed sequences, dropout between layers, a layer with a forward of its own."""
    net, x = layer("lstm", num_layers=2, dropout=0.4), inputs(STEPS, LANES)
    with trace(net) as found:
        with pytest.raises(RunError, match="no backward pass was traced yet"):
            found.summary()
        with pytest.raises(ModelError):
            net(x)
        with pytest.raises(ModelError):
            net.eval()(pack_padded_sequence(x, torch.tensor([11, 8, 3], device="cpu")))
        net(x)[0].square().sum().backward()
    assert found.count == 1
    with pytest.raises(ConfigError):
        found["layer2.c"]
    with pytest.raises(ModelError, match="Doubled, whose forward is not that of torch"):
        trace(nn.Sequential(Doubled(3, 4)))


class OwnCell(nn.Module):
    """Turns and squashes its state; returns its output first, then the state."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Rotation()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = (h @ self.core.turn + x @ self.core.into).sin()
        return self.core.read(h), h


def test_every_state_of_a_cell_of_ones_own_is_that_of_the_unrolled_loop() -> None:
    net, zeros = nn.ModuleDict({"cell": OwnCell()}).double(), inputs(1, 1)[0, :, :1] * 0
    with pytest.raises(ModelError, match="returns 2 tensors"), trace(net, names={"cell": ("h",)}):
        net["cell"](inputs(1, 1)[0], zeros.expand(1, HIDDEN))
    with trace(net, names={"cell": ("_", "h")}) as found:
        h, states, outputs = zeros.expand(LANES, HIDDEN), list[Tensor](), list[Tensor]()
        for step in inputs(STEPS, LANES):
            y, h = net["cell"](step, h)
            states.append(h)
            outputs.append(y)
        loss = mixed(torch.stack(outputs)[:-2], ())  # the last loss is two steps before the end
        expected = torch.autograd.grad(loss, states, retain_graph=True, materialize_grads=True)
        loss.backward()
    torch.testing.assert_close(found.last.gradients["cell.h"], torch.stack(expected))


@pytest.mark.parametrize("policy", [tt.Truncated(10, horizon=30), tt.Exact(chunk=7)], ids=str)
@some_nets("hides-layer", "hides-cell")
def test_a_window_of_strides_and_the_pieces_of_a_sweep_are_one_pass(
    row: Any, policy: Policy
) -> None:
    """`tt.Exact` runs backward passes within one, the last piece first."""
    net, data = row.net(), PolicyData.draw(30, 2, 0, resets=0.03)
    counted = 20 if isinstance(policy, tt.Truncated) else 0
    with trace(net, keep=9) as results:
        list(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=policy))
    with trace(net) as plain:
        y, _ = net(data.x, start(net, data.x), data.resets)
        nn.MSELoss()(y[counted:], data.targets[counted:]).backward()
    assert len(results.passes) == results.count == (3 if counted else 1)
    assert set(results.names) == set(plain.names)
    worst = max((results[name] - plain[name]).abs().max().item() for name in plain.names)
    assert worst < EXACT


def looped(net: nn.Module, x: Tensor) -> Tensor:
    """Every h of a cell in a loop."""
    state, hidden = None, list[Tensor]()
    for step in x.unbind(0):
        state = net(step, state)
        hidden.append(state[0])
    return torch.stack(hidden)


def test_the_net_is_never_touched_and_torch_keeps_no_hook() -> None:
    net = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "cell": nn.GRUCell(3, 4)})
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    with trace(net):
        for name, module in net.named_modules():
            assert module.__dict__ == before[name]
        net["lstm"](torch.randn(5, 2, 3))[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"input\.size"), trace(net):
        net["lstm"](torch.randn(5, 2, 7))
    assert not torch_modules._global_forward_hooks
    assert not torch_modules._global_forward_hooks_with_kwargs
    with pytest.raises(ConfigError, match="keep"):
        trace(net, keep=0)
    graph_of_after = net["lstm"](torch.randn(5, 2, 3))[0].grad_fn
    assert "CreditGate" not in type(graph_of_after).__name__


def test_every_backward_pass_is_one_even_over_the_same_graph() -> None:
    net, x = remembering(nn.LSTMCell(FEATURES, HIDDEN)), inputs(STEPS, LANES)
    with trace(net, keep=5) as found:
        y = looped(net, x)
        y[2].sum().backward(retain_graph=True)
        y[-1].sum().backward()
    first, second = found.passes
    assert not first.norms["cell.h"][3:].any()
    assert first.norms["cell.h"][:3].all()
    assert second.norms["cell.h"].all()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.LSTMCell])
def test_only_the_last_passes_are_kept_and_no_graph(kind: Any) -> None:
    net, x = remembering(kind(FEATURES, HIDDEN)), inputs(STEPS, LANES)
    play: Any = looped if kind is nn.LSTMCell else lambda net, x: net(x)[0]
    with trace(net, keep=3) as found:
        alive: list[weakref.ref[Any]] = []
        for _ in range(8):
            y = play(net, x)
            alive.append(weakref.ref(y))
            y.square().sum().backward()
            del y
        gc.collect()
        assert len(found.passes) == 3
        assert found.count == 8
        assert not any(ref() is not None for ref in alive)


LONG = 60


def linear(
    factor: float,
    loss: Callable[[Tensor], Tensor] = lambda y: y[-1],
    *,
    steps: int = LONG,
) -> Trace:
    """A linear RNN of one unit: each step backward multiplies the gradient by `factor`."""
    net = nn.RNN(1, 1, nonlinearity="relu", bias=False).double()
    for name, weight in net.named_parameters():
        nn.init.constant_(weight, factor if "hh" in name else 1.0)
    with trace(net) as found:
        y, _ = net(torch.ones(steps, 1, 1, dtype=torch.float64))
        loss(y).sum().backward()
    return found


def row(found: Trace, name: str = "layer0.h") -> GradientSummary:
    return next(one for one in found.summary().rows if one.name == name)


def test_second_derivatives_through_a_trace_are_those_without_one() -> None:
    net, x = layer("gru"), inputs(STEPS, LANES).requires_grad_()

    def second() -> Tensor:
        (first,) = torch.autograd.grad(net(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with trace(net):
        torch.testing.assert_close(second(), expected, rtol=EXACT, atol=EXACT)


def test_a_gradient_dies_where_it_falls_below_the_threshold() -> None:
    """0.9 to the power 66 is the first below a thousandth."""
    seen = row(linear(0.9, steps=100))
    assert (seen.vanished, seen.lifetime) == (99 - 66, 66)
    assert seen.edge == pytest.approx(0.9**100)
    assert row(linear(0.99)).vanished is None


def test_a_gradient_blows_up_where_losses_alone_could_not_make_it_so_large() -> None:
    seen = row(linear(1.2))
    late = [1.2**lag for lag in range(LONG)]
    first = next(lag for lag, norm in enumerate(late) if norm > 10 * (lag + 1) * max(late[:6]))
    assert seen.exploded == LONG - 1 - first
    assert row(linear(0.5, lambda y: y[4] * torch.inf + y[8], steps=9)).exploded == 4
    assert row(linear(1.0, torch.sum)).largest == pytest.approx(LONG)
    for factor, loss in ((1.0, torch.sum), (0.9, lambda y: y[30])):
        assert row(linear(factor, loss)).exploded is None


@pytest.mark.parametrize(("kind", "gate"), [("lstm", "f"), ("gru", "z")])
def test_time_constants_are_those_of_the_gates_seen(kind: str, gate: str) -> None:
    net, x = layer(kind), inputs(20, LANES)
    states = states_for(net)
    with trace(net) as found:
        called(net, x, states)[0].sum().backward()
    kept = torch.stack(unrolled(net, x, states).seen[f"layer0.{gate}"]).mean((0, 1))
    (pace,) = found.summary().timescales
    assert pace.taus == pytest.approx((-1 / kept.log()).tolist(), rel=1e-12)
    assert min(pace.taus) <= pace.short <= pace.median <= pace.long <= max(pace.taus)
