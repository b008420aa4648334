"""The definition of every recurrent layer in plain PyTorch, step by step. Kernels must equal it.

    LSTM   i, f, o = sigmoid, g = tanh   of   W_ih x + b_ih + W_hh h + b_hh
           c' = f c + i g
           h' = o tanh(c'),   or   W_hr o tanh(c')
    GRU    r, z = sigmoid   of   W_ih x + b_ih + W_hh h + b_hh
           n = tanh(W_in x + b_in + r (W_hn h + b_hn))
           h' = (1 - z) n + z h
    RNN    h' = tanh or relu   of   W_ih x + b_ih + W_hh h + b_hh

These are the equations of torch.nn. The code here has gradients of any order and runs on every
device, for every floating type, and under `torch.func`.

With `products=torch.bfloat16`, both factors of every product W v above are rounded to bfloat16
first: to nearest, ties to even. The products of the backward pass are rounded the same way; the
gradient otherwise passes through a rounding unchanged (straight through). Sums, biases, gates,
states, outputs and gradients keep their type.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`G` gates.

References: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9 (1997),
with the forget gate of Gers et al. (2000) and the projection of Sak et al. (2014); K. Cho et al.,
EMNLP (2014), with the reset gate after the product; J. L. Elman (1990). Rounded products with sums
in float32: D. Kalamkar et al., A study of BFLOAT16 for deep learning training, arXiv:1905.12322
(2019).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from throughtime.kernels.cells import GRU, LSTM, RNN_RELU, RNN_TANH, Cell, Weights

States = tuple[Tensor, ...]  # in the order of `Cell.states`


class Step(NamedTuple):
    """The result of one step of a cell.

    Attributes:
        states: after the step, in the order of `Cell.states`; `(B, P)` and `(B, H)`.
        gates: the value of each gate by name, after its nonlinearity, `(B, H)`. That of an RNN is
            its state.
    """

    states: States
    gates: dict[str, Tensor]


def run(
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Weights,
    resets: Tensor | None = None,
    products: torch.dtype | None = None,
) -> tuple[Tensor, States]:
    """Compute the outputs of every step, and the states after the last one.

    Args:
        cell: a row of the table.
        x: `(T, B, D)`. Without steps, outputs are empty and the states are returned as they came.
        states: entering the first step: h `(B, P)` and, of an LSTM, c `(B, H)`; or each with a
            first dimension of 1, as torch's layers have it. Those that return have the same shape.
        weights: of the layer, of the same type.
        resets: `(T, B)` bool, true where the state entering the step becomes zeros, even if it was
            NaN. No gradient crosses a reset.
        products: the type to which both factors of every product are rounded, whatever autocast
            says. None: torch's own products, or autocast's.

    Returns:
        `y (T, B, P)`, and the states as they came in.

    Cost: some ten calls of torch for each step.
    """
    rounded = None if products is x.dtype else products
    first = states[0].shape[:-2]
    if first:
        states = tuple([state.squeeze(0) for state in states])
    outputs: list[Tensor] = []
    with nullcontext() if products is None else torch.autocast(x.device.type, enabled=False):
        for result in steps(cell, x, states, weights, resets, rounded):
            states = result.states
            outputs.append(states[0])
        y = torch.stack(outputs) if outputs else states[0].new_empty(0, *states[0].shape)
    return y, tuple([state.unsqueeze(0) for state in states]) if first else states


def steps(
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Weights,
    resets: Tensor | None = None,
    rounded: torch.dtype | None = None,
) -> Iterator[Step]:
    """Each step of a layer.

    Args:
        cell: a row of the table.
        x: `(T, B, D)`.
        states: entering the first step.
        weights: of the layer.
        resets: as of `run`.
        rounded: as of `step`.
    """
    for t, by_x in enumerate(_linear(x, weights.ih, weights.b_ih, rounded).unbind(0)):
        if resets is not None:
            lanes = resets[t].unsqueeze(1)
            states = tuple([leaf.masked_fill(lanes, 0) for leaf in states])
        result = step(cell, by_x, states, weights, rounded)
        states = result.states
        yield result


def step(
    cell: Cell,
    by_x: Tensor,
    states: States,
    weights: Weights,
    rounded: torch.dtype | None = None,
) -> Step:
    """One step of a cell.

    Hooks on the returned states and gates receive total gradients, through every later step.

    Args:
        cell: a row of the table.
        by_x: `(B, G*H)`, what enters the gates from the inputs, biases included.
        states: entering the step, zeros in lanes that are reset.
        weights: of the layer.
        rounded: the type to which both factors of every product are rounded. None: torch's own.
    """
    result = _STEPS[cell](by_x, _linear(states[0], weights.hh, weights.b_hh, rounded), states)
    if weights.hr is None:
        return result
    h, *others = result.states
    return Step((_linear(h, weights.hr, None, rounded), *others), result.gates)


def _lstm(by_x: Tensor, by_h: Tensor, states: States) -> Step:
    i, f, g, o = (by_x + by_h).chunk(4, dim=1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * states[1] + i * g
    return Step((o * c.tanh(), c), {"i": i, "f": f, "g": g, "o": o})


def _gru(by_x: Tensor, by_h: Tensor, states: States) -> Step:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = by_x.chunk(3, dim=1), by_h.chunk(3, dim=1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * h_n).tanh()
    return Step((n + z * (states[0] - n),), {"r": r, "z": z, "n": n})


def _rnn(nonlinearity: Callable[[Tensor], Tensor], by_x: Tensor, by_h: Tensor, _: States) -> Step:
    h = nonlinearity(by_x + by_h)
    return Step((h,), {"h": h})


_STEPS: dict[Cell, Callable[[Tensor, Tensor, States], Step]] = {
    LSTM: _lstm,
    GRU: _gru,
    RNN_TANH: partial(_rnn, torch.tanh),
    RNN_RELU: partial(_rnn, torch.relu),
}


def _linear(x: Tensor, w: Tensor, b: Tensor | None, rounded: torch.dtype | None) -> Tensor:
    if rounded is None:
        return functional.linear(x, w, b)
    y: Tensor = _RoundedProduct.apply(x, w, rounded)
    return y if b is None else y + b


class _RoundedProduct(torch.autograd.Function):
    """`x (..., K)` by `w (N, K)`, both rounded: `(..., N)`.

    Its derivatives are products of the same kind.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, rounded: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # a backward pass may run under it
            return functional.linear(x.to(rounded).to(x.dtype), w.to(rounded).to(w.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
        del output
        x, w, ctx.rounded = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,), (x, w), rounded = grads, ctx.saved_tensors, ctx.rounded
        needs_x, needs_w, _ = ctx.needs_input_grad
        dx = dw = None
        if needs_x:
            dx = _RoundedProduct.apply(dy, w.T, rounded)
        if needs_w:
            columns = x.reshape(-1, w.shape[1]).T
            dw = _RoundedProduct.apply(dy.reshape(-1, len(w)).T, columns, rounded)
        return dx, dw, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (dx, dw, _), (x, w) = tangents, ctx.saved_tensors
        parts = [
            _RoundedProduct.apply(a, b, ctx.rounded)
            for a, b in ((dx, w), (x, dw))
            if a is not None and b is not None
        ]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
