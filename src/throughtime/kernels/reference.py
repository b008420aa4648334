"""The definition of every recurrent layer: plain PyTorch, step by step, which a kernel must equal.

    LSTM   i, f, o = sigmoid, g = tanh of  W_ih x + b_ih + W_hh h + b_hh      c' = f c + i g      h'
    = o tanh(c')  or  W_hr o tanh(c')
    GRU    r, z = sigmoid of  W_ih x + b_ih + W_hh h + b_hh      n = tanh(W_in x + b_in + r (W_hn h
    + b_hn))      h' = (1 - z) n + z h
    RNN    h' = tanh or relu of  W_ih x + b_ih + W_hh h + b_hh

as torch.nn computes them. It has gradients of any order, runs on every device and floating type,
and under `torch.func`.

Where `products` is bfloat16, both sides of every product W v above are rounded to it first, to
nearest and ties to even; so are both sides of every product of the backward pass, which otherwise
goes through a rounding as if it were none (straight through). Sums, biases, gates, states, outputs
and gradients keep their type.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`G` gates.

References: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9 (1997),
with the forget gate of Gers et al. (2000) and the projection of Sak et al. (2014); K. Cho et al.,
EMNLP (2014), with the reset gate after the product; J. L. Elman (1990); rounded products with sums
in float32: D. Kalamkar et al., A study of BFLOAT16 for deep learning training, arXiv:1905.12322
(2019).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from throughtime.kernels.layer import Kind, Weights


def run(
    kind: Kind,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Weights,
    resets: Tensor | None = None,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The outputs of every step, and the state after the last one.

    Args:
        kind: of layer.
        x: `(T, B, D)`; no step at all gives empty outputs and hands the state on.
        h: `(B, P)`, entering the first step.
        c: `(B, H)`, of an LSTM only.
        weights: of the layer, of the same type.
        resets: `(T, B)` bool, true where the state entering the step is zeros, whatever it was, NaN
            included; no gradient crosses.
        products: what both sides of every product are rounded to, whatever autocast says; None:
            torch's own, and autocast's.

    Returns:
        `y (T, B, P)`, `h (B, P)`, and `c (B, H)` of an LSTM.

    Cost: some ten calls of torch for each step.
    """
    if products is not None:
        with torch.autocast(x.device.type, enabled=False):
            return _run(kind, x, h, c, weights, resets, None if products is x.dtype else products)
    return _run(kind, x, h, c, weights, resets, None)


def _run(
    kind: Kind,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Weights,
    resets: Tensor | None,
    rounded: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    driven = _linear(x, weights.ih, weights.b_ih, rounded)
    fresh = [None] * len(x) if resets is None else resets.unsqueeze(2).unbind(0)
    outputs: list[Tensor] = []
    for z, new in zip(driven.unbind(0), fresh, strict=True):
        if new is not None:
            h = h.masked_fill(new, 0)
            c = None if c is None else c.masked_fill(new, 0)
        h, c = _step(kind, z, h, c, weights, rounded)
        outputs.append(h)
    return torch.stack(outputs) if outputs else driven.new_empty(0, *h.shape), h, c


def _step(
    kind: Kind,
    z: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Weights,
    rounded: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """One step; `z` is what the input contributes to the gates, biases included."""
    back = _linear(h, weights.hh, weights.b_hh, rounded)
    if c is not None:
        i, f, g, o = (z + back).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if weights.hr is None else _linear(h, weights.hr, None, rounded)), c
    if kind == "gru":
        (x_r, x_z, x_n), (h_r, h_z, h_n) = z.chunk(3, dim=1), back.chunk(3, dim=1)
        gate, n = (x_z + h_z).sigmoid(), (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
        return n + gate * (h - n), None
    return ((z + back).tanh() if kind == "rnn_tanh" else (z + back).relu()), None


def _linear(x: Tensor, w: Tensor, b: Tensor | None, rounded: torch.dtype | None) -> Tensor:
    if rounded is None:
        return functional.linear(x, w, b)
    y: Tensor = _Product.apply(x, w, rounded)
    return y if b is None else y + b


class _Product(torch.autograd.Function):
    """`x (..., K)` by `w (N, K)`, both rounded: `(..., N)`. Its derivatives are products of the same kind."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, rounded: torch.dtype) -> Tensor:
        with torch.autocast(
            x.device.type, enabled=False
        ):  # which may be on where the backward pass is
            return functional.linear(x.to(rounded).to(x.dtype), w.to(rounded).to(w.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
        del output
        x, w, ctx.rounded = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,), (x, w) = grads, ctx.saved_tensors
        by_x, by_w, _ = ctx.needs_input_grad
        dx = _Product.apply(dy, w.T, ctx.rounded) if by_x else None
        dw = (
            _Product.apply(dy.reshape(-1, len(w)).T, x.reshape(-1, w.shape[1]).T, ctx.rounded)
            if by_w
            else None
        )
        return dx, dw, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (dx, dw, _), (x, w) = tangents, ctx.saved_tensors
        parts = [
            _Product.apply(a, b, ctx.rounded)
            for a, b in ((dx, w), (x, dw))
            if a is not None and b is not None
        ]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
