"""What the backward pass of consecutive steps needs, and what it gives.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = H or the size of a projection,
`G` gates.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """The weights of one direction of one layer, as torch.nn names them."""

    ih: Tensor  # (G*H, D)
    hh: Tensor  # (G*H, P)
    b_ih: Tensor | None
    b_hh: Tensor | None
    hr: Tensor | None  # (P, H), of a projection

    @classmethod
    def of(cls, given: list[Tensor], biases: bool) -> "Weights":
        """In the order in which torch hands them to its kernels."""
        b_ih, b_hh = given[2:4] if biases else (None, None)
        rest = given[4 if biases else 2 :]
        return cls(given[0], given[1], b_ih, b_hh, rest[0] if rest else None)


class Steps(NamedTuple):
    """Steps of one direction, in the order in which it plays them: what went in and what came out."""

    x: Tensor  # (T, B, D)
    h: Tensor  # (T, B, P), entering each step
    y: Tensor  # (T, B, P), the h after each step
    # of an LSTM, the c entering the first step, (B, H); of its cell, each step, (T, B, H)
    c: Tensor
    weights: Weights
    relu: bool = False

    def sums(self) -> tuple[Tensor, Tensor]:
        """What the gates see of the inputs and of h, `(T, B, G*H)` each: all steps at once, since every h is known."""
        w = self.weights
        return torch.nn.functional.linear(self.x, w.ih, w.b_ih), torch.nn.functional.linear(
            self.h, w.hh, w.b_hh
        )


class Cotangents(NamedTuple):
    """Gradients from outside the recurrence."""

    dy: Tensor  # (T, B, P), of each h, that of the last state included
    dc: Tensor | None  # (B, H), of the last c
    late: Tensor | None  # (T, B, H), the same where lanes end at different steps


class Told(NamedTuple):
    """What is shown of a span: total gradients, through every path to the loss."""

    seen: dict[str, Tensor]  # of h, c and each gate's value, (T, B, P) or (T, B, H)
    entering: tuple[Tensor, ...]  # of the h, and the c, entering the first step
    kept: Tensor | None  # (T, B, H), the gate that says how much of the past is kept


class Pulled(NamedTuple):
    """What is shown, and what the weights' and the inputs' gradients are made of."""

    told: Told
    by_x: Tensor  # (T, B, G*H), of what the gates see of the inputs
    by_h: Tensor  # (T, B, G*H), of what they see of h
    by_hr: Tensor | None = None  # of the projection


def rows_of(steps: Tensor) -> Tensor:
    """`(T, B, N)` as `(T * B, N)`.

    `flatten` has no rule for a batch of gradients (`is_grads_batched`).
    """
    return steps.reshape(-1, steps.shape[2])


def together(found: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Steps found from the last to the first, each column as `(T, ...)`."""
    return tuple(torch.stack(column[::-1]) for column in zip(*found, strict=True))
