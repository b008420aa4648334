"""The definition of every recurrent layer: plain PyTorch, step by step, which a kernel must equal.

    LSTM   i, f, o = sigmoid, g = tanh of  W_ih x + b_ih + W_hh h + b_hh      c' = f c + i g      h' = o tanh(c')  or  W_hr o tanh(c')
    GRU    r, z = sigmoid of  W_ih x + b_ih + W_hh h + b_hh      n = tanh(W_in x + b_in + r (W_hn h + b_hn))      h' = (1 - z) n + z h
    RNN    h' = tanh or relu of  W_ih x + b_ih + W_hh h + b_hh

as torch.nn computes them. It has gradients of any order, runs on every device and floating type, and under `torch.func`.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection, `G` gates.

References: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9 (1997), with the forget gate of Gers et al.
(2000) and the projection of Sak et al. (2014); K. Cho et al., EMNLP (2014), with the reset gate after the product; J. L. Elman (1990).
"""

import torch
from torch import Tensor
from torch.nn import functional

from throughtime.kernels.layer import Kind, Weights


def run(
    kind: Kind, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights, resets: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The outputs of every step, and the state after the last one.

    Args:
        kind: of layer.
        x: `(T, B, D)`; no step at all gives empty outputs and hands the state on.
        h: `(B, P)`, entering the first step.
        c: `(B, H)`, of an LSTM only.
        weights: of the layer, of the same type.
        resets: `(T, B)` bool, true where the state entering the step is zeros, whatever it was, NaN included; no gradient crosses.

    Returns:
        `y (T, B, P)`, `h (B, P)`, and `c (B, H)` of an LSTM.

    Cost: some ten calls of torch for each step.
    """
    driven = functional.linear(x, weights.ih, weights.b_ih)
    fresh = [None] * len(x) if resets is None else resets.unsqueeze(2).unbind(0)
    outputs: list[Tensor] = []
    for z, new in zip(driven.unbind(0), fresh, strict=True):
        if new is not None:
            h = h.masked_fill(new, 0)
            c = None if c is None else c.masked_fill(new, 0)
        h, c = _step(kind, z, h, c, weights)
        outputs.append(h)
    return torch.stack(outputs) if outputs else driven.new_empty(0, *h.shape), h, c


def _step(kind: Kind, z: Tensor, h: Tensor, c: Tensor | None, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """One step; `z` is what the input contributes to the gates, biases included."""
    back = functional.linear(h, weights.hh, weights.b_hh)
    if c is not None:
        i, f, g, o = (z + back).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if weights.hr is None else functional.linear(h, weights.hr)), c
    if kind == "gru":
        (x_r, x_z, x_n), (h_r, h_z, h_n) = z.chunk(3, dim=1), back.chunk(3, dim=1)
        gate, n = (x_z + h_z).sigmoid(), (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
        return n + gate * (h - n), None
    return ((z + back).tanh() if kind == "rnn_tanh" else (z + back).relu()), None
