"""LSTM, GRU and RNN through the compiled core: forward and backward of one layer in one call each.

What they compute is defined in `reference.py`; `dispatch.py` says when they are taken. float32 and
float64 on the CPU, time first; under autocast products of float32 in bfloat16, forward and,
wherever that runs, backward. A gradient of the gradient, and the rows of a Jacobian
(`is_grads_batched`), are computed by the reference, from what was saved.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime.errors import ThroughtimeError
from throughtime.kernels import reference
from throughtime.kernels.dispatch import products_in
from throughtime.kernels.layer import Kind, Weights
from throughtime.kernels.library import level, library

KINDS: dict[Kind, int] = {"lstm": 0, "gru": 1, "rnn_tanh": 2, "rnn_relu": 3}
SEEN: dict[Kind, str] = {
    "lstm": "hcifgo",
    "gru": "hrzn",
    "rnn_tanh": "h",
    "rnn_relu": "h",
}  # whose squared norms are captured
Seen = Callable[
    [Tensor, Tensor, Tensor], None
]  # takes what was captured, h entering the first step and the outputs
Gradients = tuple[Tensor | None, ...]

NUMBERS = {torch.float32: 0, torch.float64: 1}  # tt_type
PRODUCTS = {
    **NUMBERS,
    torch.bfloat16: 2,
}  # tt_type by what both sides of a product are rounded to; all numbers are float32 at 2
_KEEPS = {"lstm", "gru"}  # have a gate that keeps the past
_POINTERS = (
    "x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "resets", "y", "h_end", "c_end", "saved", "dy", "dh_end", "dc_end",
    "dx", "dh0", "dc0", "dw_ih", "dw_hh", "db_ih", "db_hh", "dw_hr", "squares", "entering", "kept",
)  # fmt: skip


class Call(ctypes.Structure):
    """`tt_call` of throughtime.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "type")),
        *((name, ctypes.c_int64) for name in ("steps", "lanes", "inputs", "hidden", "outputs")),
        *((name, ctypes.c_int32) for name in ("threads", "accumulate")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


@cache
def core() -> ctypes.CDLL:
    """The library, with the types of its recurrent calls set."""
    found = library()
    if found is None:
        raise ThroughtimeError(
            "the compiled kernels are not installed; kernels.reference.run computes the same"
        )
    for name, result in (
        ("tt_saved", ctypes.c_int64),
        ("tt_forward", ctypes.c_int),
        ("tt_backward", ctypes.c_int),
    ):
        function = getattr(found, name)
        function.argtypes, function.restype = [ctypes.POINTER(Call)], result
    return found


def run(
    kind: Kind,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Weights,
    resets: Tensor | None = None,
    seen: Seen | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs `(T, B, P)` and the state after the last step, `h` `(B, P)` and, of an LSTM, `c` `(B,
    H)`.

    Args:
        kind: which recurrence.
        x: `(T, B, D)`, T and B at least 1.
        h: `(B, P)` entering the first step.
        c: `(B, H)`, of an LSTM.
        weights: as torch names them; those of `x`'s type and device.
        resets: `(T, B)` bool, true where zeros enter the step.
        seen: called in every backward pass, where `Captured.of` says what it is given.

    Raises:
        MemoryError: there is no room for what the backward pass needs.
    """
    given = Given(kind, products_in(x.dtype, x.shape[1]), x, h, c, weights, resets)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given.leaves):
        y, h_end, c_end = _Recurrent.apply(kind, seen, given.products, x, h, c, *weights, resets)
        return y, h_end, c_end
    y, h_end, c_end, _ = forward(given, keep=False)
    return y, h_end, c_end


class Given(NamedTuple):
    """What both passes of a layer are given, as `run` is.

    `products` the type that both sides of every product are rounded to.
    """

    kind: Kind
    products: torch.dtype
    x: Tensor
    h: Tensor
    c: Tensor | None
    weights: Weights
    resets: Tensor | None

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """What may need a gradient: x, h, c and the weights."""
        return self.x, self.h, self.c, *self.weights

    @property
    def sizes(self) -> tuple[int, ...]:
        """The first fields of a `Call`."""
        return (
            KINDS[self.kind],
            PRODUCTS[self.products],
            *self.x.shape,
            self.weights.hidden,
            self.weights.hh.shape[1],
        )

    def contiguous(self) -> list[Tensor | None]:
        """The tensors, as a `Call` points to them."""
        return _contiguous(*self.leaves, self.resets)


def forward(given: Given, *, keep: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Outputs, the state after them, and what the backward pass needs if it is to be kept (else an empty tensor)."""
    x, sizes = given.x, given.sizes
    steps, lanes, _, hidden, outputs = sizes[2:]
    y, h_end = (
        x.new_empty((steps, lanes, outputs)),
        x.new_empty((lanes, outputs)),
    )  # on the CPU, whatever the default device
    c_end = None if given.c is None else x.new_empty((lanes, hidden))
    saved = x.new_empty(saved_numbers(*sizes) if keep else 0)
    read = given.contiguous()
    made = (y, h_end, c_end, saved if keep else None)
    call = Call(*sizes, torch.get_num_threads(), 0, *map(_pointer, read), *map(_pointer, made))
    check(core().tt_forward(call))
    return y, h_end, c_end, saved


def backward(
    given: Given,
    y: Tensor,
    saved: Tensor,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    captured: Tensor | None = None,
) -> Gradients:
    """The gradients of `given.leaves` that `needs` asks for, in this order; None for the others.

    `grads` are those of outputs, h and c after the last step, None for zeros. `captured`, made by
    `room_for`, takes what `Captured.of` finds in it.
    """
    sizes = given.sizes
    wanted = tuple(
        t.new_empty(t.shape) if need and t is not None else None
        for t, need in zip(given.leaves, needs, strict=True)
    )
    read, after = given.contiguous(), _contiguous(*grads)
    made = (y, None, None, saved)
    seen = () if captured is None else _places(given.kind, captured, *sizes[2:4])
    call = Call(
        *sizes, torch.get_num_threads(), 0, *map(_pointer, (*read, *made, *after, *wanted)), *seen
    )
    check(core().tt_backward(call))
    return wanted


class Captured(NamedTuple):
    """What a backward pass saw, in float64, letters in the order of `SEEN`.

    Attributes:
        squares: `(T, B, S)`, the squared norm of the gradient of each state and gate; S letters.
        entering: `(B, E)`, those of the state entering the first step, h and, of an LSTM, c.
        kept: `(H,)`, the gate that keeps the past (f of an LSTM, z of a GRU), added up over steps
            and lanes; empty for an RNN.
    """

    squares: Tensor
    entering: Tensor
    kept: Tensor

    @classmethod
    def of(cls, kind: Kind, captured: Tensor, steps: int, lanes: int) -> "Captured":
        """Views of it."""
        squares, entering = _counts(kind, steps, lanes)
        parts = captured.split([squares, entering, len(captured) - squares - entering])
        return cls(parts[0].view(steps, lanes, -1), parts[1].view(lanes, -1), parts[2])


def room_for(kind: Kind, steps: int, lanes: int, hidden: int) -> Tensor:
    """One piece of memory for all that is captured: half the cost of three at 5 microseconds in all."""
    squares, entering = _counts(kind, steps, lanes)
    return torch.empty(
        squares + entering + (hidden if kind in _KEEPS else 0), dtype=torch.float64, device="cpu"
    )


def _counts(kind: Kind, steps: int, lanes: int) -> tuple[int, int]:
    return steps * lanes * len(SEEN[kind]), lanes * (2 if kind == "lstm" else 1)


def _places(kind: Kind, captured: Tensor, steps: int, lanes: int) -> tuple[int, int, int | None]:
    """Where squares, entering and kept begin."""
    squares, entering = _counts(kind, steps, lanes)
    at = captured.data_ptr()
    return at, at + 8 * squares, at + 8 * (squares + entering) if kind in _KEEPS else None


class _Recurrent(torch.autograd.Function):
    """The call as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Kind,
        seen: Seen | None,
        products: torch.dtype,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        *weights, resets = rest
        y, h_end, c_end, saved = forward(
            Given(kind, products, x, h, c, Weights(*weights), resets), keep=True
        )
        ctx.kind, ctx.seen, ctx.products = (
            kind,
            seen,
            products,
        )  # autocast is left before the backward pass as a rule
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, c, *weights, resets, y, saved)
        return y, h_end, c_end

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, h, c, *weights, resets, y, saved = ctx.saved_tensors
        seen: Seen | None = ctx.seen
        given = Given(ctx.kind, ctx.products, x, h, c, Weights(*weights), resets)
        needs, again = ctx.needs_input_grad[3:-1], torch.is_grad_enabled()
        if (again and seen is None) or any(g is not None and _batched(g) for g in grads):
            return None, None, None, *_by_reference(given, grads, needs), None
        captured = (
            None
            if seen is None
            else room_for(given.kind, x.shape[0], x.shape[1], given.weights.hidden)
        )
        found = backward(given, y, saved, grads, needs, captured)
        if seen is not None and captured is not None:
            seen(captured, h, y)
        return None, None, None, *(_by_reference(given, grads, needs) if again else found), None


def _by_reference(given: Given, grads: Sequence[Tensor | None], needs: Sequence[bool]) -> Gradients:
    """The same gradients, with a graph if one is being recorded, by the recurrence written out."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        mine = [
            None if t is None else t if again else t.detach().requires_grad_(need)
            for t, need in zip(given.leaves, needs, strict=True)
        ]
        x, h, c, *weights = mine
        # x and h are never None
        made = reference.run(given.kind, x, h, c, Weights(*weights), given.resets, given.products)  # pyright: ignore[reportArgumentType]
        pairs = [
            (m, g) for m, g in zip(made, grads, strict=True) if m is not None and g is not None
        ]
        asked = [t for t, need in zip(mine, needs, strict=True) if need and t is not None]
        found = iter(
            torch.autograd.grad(
                [m for m, _ in pairs],
                asked,
                [g for _, g in pairs],
                create_graph=again,
                allow_unused=True,
            )
        )
    return tuple(next(found) if need else None for need in needs)


def _batched(gradient: Tensor) -> bool:
    """Whether these are rows of a Jacobian, as `torch.autograd.grad(..., is_grads_batched=True)` hands them out."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(gradient))  # pyright: ignore[reportAttributeAccessIssue]


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def saved_numbers(*sizes: int) -> int:
    """How many numbers a forward pass keeps; sizes as the first fields of `Call`."""
    return _saved_numbers(level(), sizes)


@cache
def _saved_numbers(level: str | None, sizes: tuple[int, ...]) -> int:
    """Of an instruction set, whose vectors they fill."""
    del level
    return core().tt_saved(Call(*sizes))


def check(code: int) -> None:
    """Refuses what a call gave, where it is TT_NO_MEMORY."""
    if code == 1:
        raise MemoryError(
            "the kernels of throughtime found no memory for their work; take fewer lanes, or"
            " shorter chunks"
        )
