"""LSTM, GRU and RNN in the compiled core: one call for the forward pass of a layer, one backward.

`fused_step` is a whole update in one call: a stack of layers, a linear readout, its loss and all
gradients.

`reference.py` defines what they compute; `dispatch.py` says when they run. They take float32 and
float64 on the CPU, time first. Under autocast the products of float32 are rounded to bfloat16, in
the forward pass and in its backward pass, wherever that runs. The reference computes gradients of
gradients and the rows of a Jacobian (`is_grads_batched`), from what the forward pass saved.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`C` outputs of the readout.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from throughtime.kernels import reference
from throughtime.kernels.cells import Cell, Weights
from throughtime.kernels.dispatch import product_type
from throughtime.kernels.library import TYPES, checked, core, fields
from throughtime.kernels.reference import States

Grads = tuple[Tensor | None, ...]

# tt_type by the type to which both factors of a product are rounded; with 2, numbers are float32
PRODUCT_TYPES = {**TYPES, torch.bfloat16: 2}
CROSS_ENTROPY, SQUARED_ERROR = 0, 1  # losses of a fused step
INVALID_TARGET, NON_FINITE = 2, 3  # tt_fault; after the first nothing has been written
_POINTERS = (
    *("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "resets"),
    *("y", "h_end", "c_end", "saved", "dy", "dh_end", "dc_end"),
    *("dx", "dh0", "dc0", "dw_ih", "dw_hh", "db_ih", "db_hh", "dw_hr"),
)


class Call(ctypes.Structure):
    """`tt_call` of throughtime.h."""

    _fields_ = [
        *fields(ctypes.c_int32, "kind", "type"),
        *fields(ctypes.c_int64, "steps", "lanes", "inputs", "hidden", "outputs"),
        *fields(ctypes.c_int32, "threads", "accumulate"),
        *fields(ctypes.c_void_p, *_POINTERS),
    ]


class FusedStep(ctypes.Structure):
    """`tt_fused_step` of throughtime.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(Call)),
        *fields(ctypes.c_int32, "count", "loss", "accumulate"),
        *fields(ctypes.c_int64, "steps", "classes", "valid"),
        *fields(ctypes.c_void_p, "w", "b", "targets", "mask", "outputs"),
        *fields(ctypes.c_void_p, "scratch", "dw", "db"),
        ("mean", ctypes.POINTER(ctypes.c_double)),
    ]


def fused_step(call: FusedStep) -> int:
    """Run it; the result is 0, `INVALID_TARGET` or `NON_FINITE`.

    Raises:
        MemoryError: there is no memory for its work.
    """
    return checked(core().tt_fused_step_run(ctypes.byref(call)))


def run(
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Weights,
    resets: Tensor | None = None,
) -> tuple[Tensor, States]:
    """Compute the outputs of every step, `(T, B, P)`, and the states after the last one.

    Args:
        cell: a row of the table.
        x: `(T, B, D)`, T and B at least 1.
        states: entering the first step: h `(B, P)` and, of an LSTM, c `(B, H)`; or each with a
            first dimension of 1, as torch's layers have it. Those that return have the same shape.
        weights: of the layer, of the type and device of `x`.
        resets: `(T, B)` bool, true where zeros enter the step.

    Raises:
        MemoryError: there is no memory for what the backward pass needs.
    """
    h, c = states if len(states) == 2 else (states[0], None)
    inputs = LayerInputs(cell, product_type(x.dtype, x.shape[1]), x, h, c, weights, resets)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs.leaves if t is not None):
        y, h_end, c_end = _Recurrent.apply(inputs[:2], *inputs.tensors)
    else:
        y, h_end, c_end, _ = forward(inputs, keep=False)
    return y, (h_end,) if c_end is None else (h_end, c_end)


class LayerInputs(NamedTuple):
    """The inputs of one layer in one direction, for both passes; see `run`.

    `products` is the type to which both factors of every product are rounded.
    """

    cell: Cell
    products: torch.dtype
    x: Tensor
    h: Tensor
    c: Tensor | None
    weights: Weights
    resets: Tensor | None

    @classmethod
    def of(cls, cell: Cell, products: torch.dtype, *tensors: Any) -> "LayerInputs":
        """From the fields and weights in a row, as `tensors` returns them."""
        x, h, c, *weights, resets = tensors
        return cls(cell, products, x, h, c, Weights(*weights), resets)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of `Call`; the last one are the resets."""
        return self.x, self.h, self.c, *self.weights, self.resets

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """Everything that may need a gradient: x, h, c and the weights."""
        return self.tensors[:-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The first fields of a `Call`."""
        outputs, hidden = self.weights.hh.shape[1], self.weights.hidden
        return self.cell.code, PRODUCT_TYPES[self.products], *self.x.shape, hidden, outputs

    def call(self, name: str, *others: Tensor | None) -> None:
        """Call the library with these tensors and its results or gradients."""
        tensors = [t if t is None else t.contiguous() for t in (*self.tensors, *others)]
        addresses = [t if t is None else t.data_ptr() for t in tensors]
        call = Call(*self.sizes, torch.get_num_threads(), 0, *addresses)
        checked(getattr(core(), name)(ctypes.byref(call)))


def forward(
    inputs: LayerInputs, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute outputs, h and c after them, and what the backward pass needs, if `keep`."""
    x = inputs.x
    y = x.new_empty((*x.shape[:2], inputs.weights.hh.shape[1]))  # whatever the default device
    h_end, c_end = _like(inputs.h), None if inputs.c is None else _like(inputs.c)
    saved = x.new_empty(saved_size(*inputs.sizes)) if keep else None
    inputs.call("tt_forward", y, h_end, c_end, saved)
    return y, h_end, c_end, saved


def backward(
    inputs: LayerInputs,
    y: Tensor,
    saved: Tensor | None,
    cotangents: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> Grads:
    """Compute the gradients of `inputs.leaves` that `needs` selects; None for the others.

    `cotangents` are those of the outputs and of h and c after the last step; None means zeros.
    """
    pairs = zip(inputs.leaves, needs, strict=True)
    grads = tuple([_like(t) if need and t is not None else None for t, need in pairs])
    inputs.call("tt_backward", y, None, None, saved, *cotangents, *grads)
    return grads


class _Recurrent(torch.autograd.Function):
    """The call as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, kind: tuple[Cell, torch.dtype], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        y, h_end, c_end, saved = forward(LayerInputs.of(*kind, *tensors), keep=True)
        # the backward pass usually runs outside autocast, so the type of products is stored
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        # Outputs that are written in place afterwards, by ReLU(inplace=True), are computed again.
        # The alias shares their version and keeps no memory; .data has a version of its own.
        alias = y.detach()
        alias.data = y.new_empty(0)
        ctx.alias, ctx.version = alias, alias._version
        ctx.save_for_backward(*tensors, y.data, saved)
        return y, h_end, c_end

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, y, saved = ctx.saved_tensors
        inputs, needs = LayerInputs.of(*ctx.kind, *tensors), ctx.needs_input_grad[1:-1]
        if ctx.alias._version != ctx.version:
            y = forward(inputs, keep=False)[0]
        # with rows of a Jacobian, from `grad(..., is_grads_batched=True)`
        batched = any(g is not None and is_legacy_batchedtensor(g) for g in cotangents)
        if torch.is_grad_enabled() or batched:
            grads = _vjp_by_reference(inputs, cotangents, needs)
        else:
            grads = backward(inputs, y, saved, cotangents, needs)
        return None, *grads, None


def _vjp_by_reference(
    inputs: LayerInputs, cotangents: Sequence[Tensor | None], needs: Sequence[bool]
) -> Grads:
    """The same gradients by the reference, with a graph if one is being recorded."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views: a tensor that is two of the inputs has a gradient as each
        leaves: list[Any] = [t if t is None else t.view_as(t) for t in inputs.leaves]
        x, h, c, *weights = leaves
        y, ends = reference.run(
            inputs.cell,
            x,
            (h,) if c is None else (h, c),
            Weights(*weights),
            inputs.resets,
            inputs.products,
        )
        pairs = [(t, g) for t, g in zip((y, *ends), cotangents, strict=False) if g is not None]
        grads = iter(
            torch.autograd.grad(
                [t for t, _ in pairs],
                [t for t, need in zip(leaves, needs, strict=True) if need and t is not None],
                [g for _, g in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        )
    return tuple(next(grads) if need else None for need in needs)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def saved_size(*sizes: int) -> int:
    """How many numbers a forward pass saves; `sizes` are the first fields of `Call`."""
    size: int = core().tt_saved(ctypes.byref(Call(*sizes)))
    return size
