"""The trace: the gradient of every state and gate, against plain autograd over an unrolled loop.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import throughtime as tt
from strategies import FEATURES, HIDDEN, Rotation, inputs, remembering, start
from throughtime.diagnose.trace import Trace, trace
from throughtime.errors import ModelError

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


def play(
    kind: str,
    x: Sequence[Tensor],
    h: Tensor,
    c: Tensor | None,
    weights: Mapping[str, Tensor],
    seen: dict[str, list[Tensor]],
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """One direction of one layer, step by step, as the documentation of torch.nn defines it.

    Notes every tensor by its letter.
    """
    w_ih, w_hh, w_hr = weights["weight_ih"], weights["weight_hh"], weights.get("weight_hr")
    b_ih, b_hh = weights.get("bias_ih", 0.0), weights.get("bias_hh", 0.0)
    hidden: list[Tensor] = []
    for step in x:
        a, b = step @ w_ih.T + b_ih, h @ w_hh.T + b_hh
        now: dict[str, Tensor] = {}
        if kind == "lstm":
            assert c is not None
            i, f, g, o = (a + b).chunk(4, 1)
            now |= {"i": i.sigmoid(), "f": f.sigmoid(), "g": g.tanh(), "o": o.sigmoid()}
            c = now["f"] * c + now["i"] * now["g"]
            h = now["o"] * c.tanh()
            h = h if w_hr is None else h @ w_hr.T
            now |= {"c": c}
        elif kind == "gru":
            (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
            now |= {"r": (ar + br).sigmoid(), "z": (az + bz).sigmoid()}
            now |= {"n": (an + now["r"] * bn).tanh()}
            h = (1 - now["z"]) * now["n"] + now["z"] * h
        else:
            h = (a + b).tanh() if kind == "tanh" else (a + b).relu()
        for letter, value in {**now, "h": h}.items():
            seen.setdefault(letter, []).append(value)
        hidden.append(h)
    return hidden, h, c


class Whole(NamedTuple):
    """What the oracle gives: outputs, the states after, and every tensor of every step by name."""

    y: Tensor
    after: tuple[Tensor, ...]
    seen: Seen


def unrolled(kind: str, net: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...]) -> Whole:
    """All layers and directions of a module."""
    named = dict(net.named_parameters())
    seen: Seen = {}
    ends: list[tuple[Tensor, Tensor | None]] = []
    y = x
    for k in range(net.num_layers):
        sides: list[Tensor] = []
        for end in ("", "_reverse") if net.bidirectional else ("",):
            weights = {
                name.removesuffix(f"_l{k}{end}"): w
                for name, w in named.items()
                if name.endswith(f"_l{k}{end}")
            }
            at, found = len(ends), dict[str, list[Tensor]]()
            steps = list(y.unbind(0))
            entering = states[0][at], states[1][at] if kind == "lstm" else None
            hidden, h, c = play(kind, steps[::-1] if end else steps, *entering, weights, found)
            seen |= {
                f"layer{k}{end}.{letter}": values[::-1] if end else values
                for letter, values in found.items()
            }
            sides.append(torch.stack(hidden[::-1] if end else hidden))
            ends.append((h, c))
        y = torch.cat(sides, 2)
    after = (
        torch.stack([h for h, _ in ends]),
        *([torch.stack([torch.as_tensor(c) for _, c in ends])] if kind == "lstm" else []),
    )
    return Whole(y, after, seen)


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


def called(net: nn.RNNBase, x: Any, states: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    y, after = net(x, states if isinstance(net, nn.LSTM) else states[0])
    return y, after if isinstance(after, tuple) else (after,)


def apart(found: Trace, expected: Seen, loss: Tensor) -> float:
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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-layers": {"num_layers": 2},
    "no-bias": {"bias": False},
    "batch-first": {"batch_first": True},
    "both-ways": {"bidirectional": True, "num_layers": 2},
}


@every_kind
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_gradient_of_a_layer_is_that_of_the_unrolled_loop(
    kind: str, options: dict[str, Any]
) -> None:
    net = layer(kind, **options)
    check_layer(kind, net)


@pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN"
)  # said by torch
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one-layer", "both-ways"]
)
def test_every_gradient_of_a_projected_lstm_is_that_of_the_unrolled_loop(
    options: dict[str, Any],
) -> None:
    check_layer("lstm", layer("lstm", proj_size=2, **options))


def check_layer(kind: str, net: nn.RNNBase) -> None:
    x, states = inputs(STEPS, LANES).requires_grad_(), states_for(net)
    leaves = [x, *states, *net.parameters()]

    def plain() -> tuple[Tensor, tuple[Tensor, ...]]:
        torch.manual_seed(5)
        y, after = called(net, x.transpose(0, 1) if net.batch_first else x, states)
        return y, after

    y, after = plain()
    untraced = torch.autograd.grad(
        mixed(y.transpose(0, 1) if net.batch_first else y, after), leaves
    )
    with trace(net) as found:
        y_traced, after_traced = plain()
        loss = mixed(y_traced.transpose(0, 1) if net.batch_first else y_traced, after_traced)
        traced = torch.autograd.grad(loss, leaves)
    assert torch.equal(y, y_traced)
    assert y.stride() == y_traced.stride()
    assert all(torch.equal(a, b) for a, b in zip(after, after_traced, strict=True))
    assert max((a - b).abs().max().item() for a, b in zip(untraced, traced, strict=True)) < EXACT
    torch.manual_seed(5)
    whole = unrolled(kind, net, x, states)
    assert apart(found, whole.seen, mixed(whole.y, whole.after)) < EXACT


CELLS = {
    "lstm": lambda: nn.LSTMCell(FEATURES, HIDDEN),
    "gru": lambda: nn.GRUCell(FEATURES, HIDDEN),
    "tanh": lambda: nn.RNNCell(FEATURES, HIDDEN),
    "relu": lambda: nn.RNNCell(FEATURES, HIDDEN, nonlinearity="relu"),
    "no-bias": lambda: nn.LSTMCell(FEATURES, HIDDEN, bias=False),
}


@pytest.mark.parametrize("kind", CELLS)
def test_every_gradient_of_a_cell_in_a_loop_is_that_of_the_unrolled_loop(kind: str) -> None:
    cell = remembering(CELLS[kind]())
    kind = "lstm" if kind == "no-bias" else kind
    x = inputs(STEPS, LANES).requires_grad_()
    states = tuple(
        torch.randn(LANES, HIDDEN, dtype=torch.float64).requires_grad_()
        for _ in range(2 if kind == "lstm" else 1)
    )
    leaves = [x, *states, *cell.parameters()]

    def looped() -> tuple[Tensor, tuple[Tensor, ...]]:
        state: Any = states if kind == "lstm" else states[0]
        hidden: list[Tensor] = []
        for step in x.unbind(0):
            state = cell(step, state)
            hidden.append(state[0] if kind == "lstm" else state)
        return torch.stack(hidden), state if kind == "lstm" else (state,)

    y, after = looped()
    untraced = torch.autograd.grad(mixed(y, after), leaves)
    with trace(cell) as found:
        y_traced, after_traced = looped()
        traced = torch.autograd.grad(mixed(y_traced, after_traced), leaves)
    assert torch.equal(y, y_traced)
    assert all(torch.equal(a, b) for a, b in zip(after, after_traced, strict=True))
    assert max((a - b).abs().max().item() for a, b in zip(untraced, traced, strict=True)) < EXACT
    seen: dict[str, list[Tensor]] = {}
    weights = dict(cell.named_parameters())
    hidden, h, c = play(
        kind, list(x.unbind(0)), states[0], states[-1] if kind == "lstm" else None, weights, seen
    )
    loss = mixed(torch.stack(hidden), (h,) if c is None else (h, c))
    assert apart(found, {f"cell.{letter}": values for letter, values in seen.items()}, loss) < EXACT


def test_packed_sequences_and_dropout_between_layers_are_refused() -> None:
    net, x = layer("lstm", num_layers=2, dropout=0.4), inputs(STEPS, LANES)
    with trace(net) as found:
        with pytest.raises(ModelError, match=r"or dropout between its layers.*eval\(\) mode"):
            net(x)
        with pytest.raises(ModelError, match=r"packed sequence.*pad the sequences"):
            net.eval()(pack_padded_sequence(x, torch.tensor([11, 8, 3], device="cpu")))
        net(x)[0].square().sum().backward()
    assert found.count == 1


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.GRU):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            y, state = super().forward(*args, **kwargs)
            return 2 * y, state

    with pytest.raises(ModelError, match="Doubled, whose forward is not that of torch"):
        trace(nn.Sequential(Doubled(3, 4)))


def test_an_unbatched_sequence_is_one_lane() -> None:
    net, x = layer("lstm"), inputs(STEPS, 1)
    with trace(net) as found:
        y, _ = net(x[:, 0])
        mixed(y, ()).backward()
    whole = unrolled("lstm", net, x, (torch.zeros(1, 1, HIDDEN, dtype=torch.float64),) * 2)
    expected = torch.autograd.grad(mixed(whole.y, ()), whole.seen["layer0.c"])
    assert (found["layer0.c"][:, 0] - torch.stack(expected).norm(dim=(1, 2))).abs().max() < EXACT


@every_kind
def test_under_autocast_outputs_are_the_untraced_ones(kind: str) -> None:
    net, x = KINDS[kind](16, 32, num_layers=2), torch.randn(20, 4, 16)

    def run() -> tuple[Tensor, list[Tensor]]:
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = net(x)
        y.float().square().mean().backward()
        return y, [torch.as_tensor(p.grad).clone() for p in net.parameters()]

    y, gradients = run()
    with trace(net):
        y_traced, traced = run()
    assert y.dtype == y_traced.dtype
    assert torch.equal(y, y_traced)
    for a, b in zip(traced, gradients, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() < 0.03 * b.norm()


class OwnCell(nn.Module):
    """Turns and squashes its state; returns its output first, then the state."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Rotation()

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h = (state["h"] @ self.core.turn + x @ self.core.into).sin()
        return self.core.read(h), {"h": h, "sum": state["sum"] + 0.1 * h}


class Looping(nn.Module):
    """Calls its own cell once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = OwnCell()

    def initial_state(self, lanes: int) -> dict[str, Tensor]:
        zeros = self.cell.core.turn.new_zeros(lanes, HIDDEN)
        return {"h": zeros, "sum": zeros}

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found: list[Tensor] = []
        for step in x.unbind(0):
            y, state = self.cell(step, state)
            found.append(y + state["sum"][:, :2])
        return torch.stack(found), state


def test_every_state_of_a_cell_of_ones_own_is_that_of_the_unrolled_loop() -> None:
    net, x = Looping().double(), inputs(STEPS, LANES)
    with trace(net, names={"cell": ("_", "h", "sum")}) as found:
        y, _ = net(x, net.initial_state(LANES))
        mixed(y[:-2], ()).backward()  # the last loss is two steps before the end
    state, steps, outputs = net.initial_state(LANES), dict[str, list[Tensor]](), list[Tensor]()
    for step in x.unbind(0):
        out, state = net.cell(step, state)
        outputs.append(out + state["sum"][:, :2])
        for name, leaf in state.items():
            steps.setdefault(f"cell.{name}", []).append(leaf)
    loss = mixed(torch.stack(outputs)[:-2], ())
    assert apart(found, steps, loss) < EXACT


def test_names_that_do_not_fit_are_refused() -> None:
    net, x = Looping().double(), inputs(2, 1)
    with pytest.raises(ModelError, match=r"no recurrent layer.*names=\{"):
        trace(net)
    with pytest.raises(AttributeError, match="has no attribute `cel`"):
        trace(net, names={"cel": ("h",)})
    with (
        trace(net, names={"cell": ("h",)}),
        pytest.raises(ModelError, match="returns 3 tensors, names has 1"),
    ):
        net(x, net.initial_state(1))


def test_several_calls_of_one_layer_are_consecutive_steps() -> None:
    net, x, states = layer("lstm"), inputs(STEPS, LANES), states_for(layer("lstm"))
    with trace(net) as found:
        outputs, state = list[Tensor](), states
        for part in x.split([4, 1, 6]):
            y, state = net(part, state)
            outputs.append(y)
        mixed(torch.cat(outputs), state).backward()
    whole = unrolled("lstm", net, x, states)
    assert apart(found, whole.seen, mixed(whole.y, whole.after)) < EXACT


def test_the_edge_is_the_gradient_of_the_state_that_enters() -> None:
    net, x, states = layer("lstm"), inputs(STEPS, LANES), states_for(layer("lstm"))
    with trace(net) as found:
        y, _ = net(x, states)
        mixed(y, ()).backward()
        seen = found.last.edges
        mixed(
            net(x, tuple(leaf.detach() for leaf in states))[0], ()
        ).backward()  # what is cut off is told as well
    expected = [torch.as_tensor(leaf.grad)[0].norm(dim=1) for leaf in states]
    for edges in (seen, found.last.edges):
        assert list(edges) == ["layer0.h", "layer0.c"]
        for edge, norms in zip(edges.values(), expected, strict=True):
            torch.testing.assert_close(edge, norms, rtol=EXACT, atol=0)


def test_a_reset_stops_the_gradient_of_its_lane_only() -> None:
    net, x = tt.carry(layer("lstm")), inputs(STEPS, LANES)
    resets = torch.zeros(STEPS, LANES, dtype=torch.bool)
    resets[6, 1] = True
    with trace(net) as found:
        y, _ = net(x, start(net, x), resets)
        y[-1].sum().backward()
    norms = found["layer0.c"]
    assert norms.shape == (STEPS, LANES)
    assert not norms[:6, 1].any()
    assert norms[6:].all()
    assert norms[:6, [0, 2]].all()
