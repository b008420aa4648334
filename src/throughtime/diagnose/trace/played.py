"""A layer under watch: torch's own kernel forward, the explicit recurrence backward.

The kernel gives the outputs, so they are those of the untraced net to the bit. It does not say what
happened between its steps: on the way back the gates are computed again from its inputs and
outputs, and the recurrence of `lstm.py`, `gru.py` or `rnn.py` gives the gradients of inputs,
weights and states together with those of every step.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = H or the size of a projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime.diagnose.trace import gru, lstm, rnn
from throughtime.diagnose.trace.order import Order
from throughtime.diagnose.trace.span import Cotangents, Pulled, Steps, Weights, rows_of
from throughtime.diagnose.trace.track import Noting, Shown
from throughtime.errors import ModelError

PULLS = {"lstm": lstm.pull, "gru": gru.pull, "rnn_tanh": rnn.pull, "rnn_relu": rnn.pull}


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer, both directions.

    Attributes:
        kind: a key of `PULLS`.
        kernel: torch's, of inputs, the states and the weights.
        tracks: one for each direction, told what was seen.
        starts: the step of each track at which the call begins.
        biases: whether there are any.
        sizes: of packed data, the lanes of each step; they come in order of length, and `lanes`
            puts them back.
    """

    kind: str
    kernel: Callable[[Tensor, tuple[Tensor, ...], list[Tensor]], tuple[Tensor, ...]]
    tracks: Sequence[Noting]
    starts: Sequence[int]
    biases: bool
    sizes: Tensor | None = None
    lanes: Tensor | None = None

    @property
    def states(self) -> int:
        return 2 if self.kind == "lstm" else 1

    def __call__(
        self, x: Tensor, states: tuple[Tensor, ...], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What the kernel returns: outputs, and the states after the last step."""
        return Played.apply(self, x, *states, *weights)

    def run(
        self, x: Tensor, states: tuple[Tensor, ...], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The kernel, as it computes with a graph: on a CPU that of the LSTM in float32 rounds otherwise without one."""
        if self.kind != "lstm" or x.is_cuda or x.dtype == torch.float64:
            return self.kernel(x, states, list(weights))
        with torch.enable_grad():
            given = [t.detach().requires_grad_(t.requires_grad) for t in (x, *states, *weights)]
            found = self.kernel(
                given[0], tuple(given[1 : 1 + len(states)]), given[1 + len(states) :]
            )
        return tuple(t.detach() for t in found)


class Played(torch.autograd.Function):
    """The call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        states, weights = given[: call.states], given[call.states :]
        found = call.run(x, states, weights)
        ctx.call = call
        ctx.set_materialize_grads(False)
        own = [
            t.clone() for t in found[:2]
        ]  # the outputs and the last h: the caller may write into what it was given
        ctx.save_for_backward(*own, x, *states, *weights)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as under create_graph=True
            raise ModelError(
                "a second derivative through a traced layer: its backward pass is played step by"
                " step, without a graph. Make the backward pass with create_graph=True outside"
                " `with tt.trace(net)`, or call trace.close() before"
            )
        call: Call = ctx.call
        y, last, x, *given = ctx.saved_tensors  # asked for once: a checkpoint hands them out once
        seen = _Seen(x, given[: call.states], given[call.states :], y, grads)
        with torch.autocast(x.device.type, enabled=False):
            sides = [_side(call, seen, index) for index in range(len(call.tracks))]
            pulled = [PULLS[call.kind](side.steps, side.given) for side in sides]
            for index, (side, found) in enumerate(zip(sides, pulled, strict=True)):
                _note(call, index, side.order, found, (seen.states[0][index], last[index]))
            return (None, *_gradients(sides, pulled, (x, *given), ctx.needs_input_grad[1:]))


class _Seen(NamedTuple):
    """What a call was given, returned, and is told on the way back."""

    x: Tensor  # (T, B, D), or packed
    states: Sequence[Tensor]  # (directions, B, P) and (directions, B, H)
    weights: Sequence[Tensor]
    y: Tensor  # (T, B, directions * P), or packed
    grads: Sequence[Tensor | None]  # of y and the states


class _Side(NamedTuple):
    """One direction of a call."""

    order: Order
    steps: Steps
    given: Cotangents


def _side(call: Call, seen: _Seen, index: int) -> _Side:
    kind = torch.promote_types(
        seen.weights[0].dtype, torch.float32
    )  # under autocast, and for half types, wider than the kernel
    per = len(seen.weights) // len(call.tracks)
    weights = Weights.of(
        [w.to(kind) for w in seen.weights[per * index : per * (index + 1)]], call.biases
    )
    order = Order.of(call.sizes, bool(index), seen.x.device)
    h, c = (s[index].to(kind) for s in (seen.states[0], seen.states[-1]))
    y = order.played(_own(seen.y, call, index).to(kind))
    direct, *ends = seen.grads
    dy = torch.zeros_like(y) if direct is None else order.played(_own(direct, call, index).to(kind))
    given = _cotangents(order, dy, [None if g is None else g[index].to(kind) for g in ends])
    before = torch.cat([h.unsqueeze(0), y[:-1]])
    return _Side(
        order,
        Steps(order.played(seen.x.to(kind)), before, y, c, weights, call.kind == "rnn_relu"),
        given,
    )


def _own(y: Tensor, call: Call, index: int) -> Tensor:
    """The columns of one direction."""
    return y if len(call.tracks) == 1 else y.chunk(2, -1)[index]


def _cotangents(order: Order, dy: Tensor, ends: Sequence[Tensor | None]) -> Cotangents:
    """The gradients from outside the recurrence: of every h, of the last c, or of the last c of every lane at its own step."""
    dh, dc = ends[0], ends[1] if len(ends) > 1 else None
    if dh is not None:
        spread = order.at_the_end(dh, len(dy))
        dy = torch.cat([dy[:-1], (dy[-1] + dh).unsqueeze(0)]) if spread is None else dy + spread
    late = None if dc is None else order.at_the_end(dc, len(dy))
    return Cotangents(dy, dc if late is None else None, late)


def _note(
    call: Call, index: int, order: Order, pulled: Pulled, ends: tuple[Tensor, Tensor]
) -> None:
    """Hands the track what was seen, in the order of time and of lanes as the caller has them."""
    told = pulled.told
    seen = {leaf: order.timed(gradient) for leaf, gradient in told.seen.items()}
    entering = {} if order.reverse else dict(zip("hc", told.entering, strict=False))
    if call.lanes is not None:
        seen = {leaf: gradient[:, call.lanes] for leaf, gradient in seen.items()}
        entering = {leaf: gradient[call.lanes] for leaf, gradient in entering.items()}
    kept = None
    if told.kept is not None:
        count = (
            told.kept.shape[0] * told.kept.shape[1]
            if order.there is None
            else int(order.there.sum())
        )
        kept = order.timed(told.kept).sum((0, 1)), count
    call.tracks[index].note(call.starts[index], Shown(seen, entering, kept, [ends[0]], [ends[1]]))


def _gradients(
    sides: Sequence[_Side],
    pulled: Sequence[Pulled],
    given: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Those of the inputs, the states and the weights, each in its own type."""
    parts = [
        side.order.laid_back(found.by_x @ side.steps.weights.ih)
        for side, found in zip(sides, pulled, strict=True)
    ]
    by_x = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    by_state = [
        torch.stack(leaf) for leaf in zip(*(found.told.entering for found in pulled), strict=True)
    ]
    by_weight = [
        g for side, found in zip(sides, pulled, strict=True) for g in _by_weights(side.steps, found)
    ]
    return [
        g.to(t.dtype) if need else None
        for g, t, need in zip([by_x, *by_state, *by_weight], given, needed, strict=True)
    ]


def _by_weights(steps: Steps, pulled: Pulled) -> list[Tensor]:
    by_x, by_h = rows_of(pulled.by_x), rows_of(pulled.by_h)
    found = [by_x.T @ rows_of(steps.x), by_h.T @ rows_of(steps.h)]
    if steps.weights.b_ih is not None:
        found += [by_x.sum(0), by_h.sum(0)]
    return found if pulled.by_hr is None else [*found, pulled.by_hr]
