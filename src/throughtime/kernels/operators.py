"""The fused layer as operators of torch, for `torch.compile` and `torch.export`.

`throughtime::recurrent` and its backward are opaque to the compiler, which reads only the shapes of
their results. Without a compiler, the autograd.Function of `recurrent.run` serves: it costs about
40 microseconds less at every call.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`G` gates.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from throughtime.errors import DataError
from throughtime.kernels import recurrent, reference
from throughtime.kernels.cells import CELLS, Cell, Weights
from throughtime.kernels.dispatch import (
    AUTOCAST_TYPES,
    autocast_applies,
    autocast_rounds,
    rounded_type,
    static_backend,
)
from throughtime.kernels.library import library
from throughtime.kernels.recurrent import LayerInputs
from throughtime.kernels.reference import States


def takes(
    cell: Cell,
    hidden: int,
    projected: bool,
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Weights],
) -> bool:
    """Whether a layer that is compiled or exported uses the operator, not torch.nn's own call."""
    if not isinstance(x, Tensor) or x.device.type != "cpu" or torch.onnx.is_in_onnx_export():
        return False
    dtype, autocast = weights[0].ih.dtype, autocast_applies(weights[0].ih)
    if not all(
        w is None or (w.dtype == dtype and w.device == x.device) for layer in weights for w in layer
    ):
        return False
    if not all(t.dtype in AUTOCAST_TYPES if autocast else t.dtype == dtype for t in (x, *states)):
        return False
    target = torch.get_autocast_dtype("cpu") if autocast else None
    return _is_fused(cell.name, dtype, hidden, projected, target)


def _is_fused(
    cell: str, dtype: torch.dtype, hidden: int, projected: bool, autocast: torch.dtype | None
) -> bool:
    return static_backend(CELLS[cell], dtype, hidden, 1, projected, autocast).name == "fused"


# As torch.compiler.assume_constant_result does, without importing the compiler, which takes longer
# than importing throughtime.
_is_fused.__dict__["_dynamo_marked_constant"] = True


def run(
    cell: Cell, x: Tensor, states: States, weights: Weights, resets: Tensor | None = None
) -> tuple[Tensor, States]:
    """As `reference.run`, recorded as one node of the graph."""
    h, c = states if len(states) == 2 else (states[0], None)
    needs_graph = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, h, c, *weights)
    )
    keep = needs_graph and not torch.compiler.is_exporting()
    y, h_end, c_end, _ = torch.ops.throughtime.recurrent(
        cell.name, x, h, c, *weights, resets, keep, autocast_rounds(x.dtype)
    )
    return y, (h_end,) if c is None else (h_end, c_end)


def _check(inputs: LayerInputs) -> None:
    """Refuse sizes that a kernel would misread; outside a compiler the layer has checked them."""
    cell, _, x, _, _, weights, _ = inputs
    (steps, lanes, features), hidden, outputs = x.shape, weights.hidden, weights.hh.shape[-1]
    rows = len(cell.gates) * hidden
    expected = {
        "h": (lanes, outputs),
        "c": (lanes, hidden),
        "ih": (rows, features),
        "hh": (rows, outputs),
        "b_ih": (rows,),
        "b_hh": (rows,),
        "hr": (outputs, hidden),
        "resets": (steps, lanes),
    }
    for (name, shape), t in zip(expected.items(), inputs.tensors[1:], strict=True):
        dtype = torch.bool if name == "resets" else x.dtype
        if t is not None and (t.shape[-len(shape) :] != shape or t.dtype is not dtype):
            raise DataError(
                f"{name} of a compiled {cell.name} is {tuple(t.shape)} {t.dtype}, expected {shape}"
                f" {dtype}: the inputs are {tuple(x.shape)}. Uncompiled, the layer raises torch's"
                f" own error; a state that fits is net.initial_state(lanes={lanes}), or none"
            )


_INPUTS = (
    "str cell, Tensor x, Tensor h, Tensor? c, Tensor ih, Tensor hh, Tensor? b_ih, Tensor? b_hh,"
    " Tensor? hr, Tensor? resets"
)
_COTANGENTS = "Tensor? dy, Tensor? dh, Tensor? dc"


def _layer_inputs(cell: str, *tensors: Any, rounded: bool = False) -> LayerInputs:
    """From arguments in the order of `_INPUTS`; `rounded` as of `_forward`."""
    x: Tensor = tensors[0]
    products = rounded_type(x.dtype, x.shape[1]) if rounded else x.dtype
    return LayerInputs.of(CELLS[cell], products, *tensors)


@torch.library.custom_op(
    "throughtime::recurrent",
    mutates_args=(),
    schema=f"({_INPUTS}, bool keep, bool rounded) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*args: Any) -> tuple[Tensor, ...]:
    """Compute `y`, and `h` and `c` after the last step; if `keep`, save for a backward pass.

    `c` is empty for a cell without it. With `rounded`, products are those of autocast to bfloat16,
    which was active at compile time and is not when the operator runs. The number of lanes that
    runs decides then, as in the layer itself: one that decided while compiling would be fixed.
    """
    *tensors, keep, rounded = args
    inputs = _layer_inputs(*tensors, rounded=rounded)
    cell, _, x, h, c, weights, resets = inputs
    _check(inputs)
    # an exported program on another machine; no steps, which a kernel would misread
    if library() is None or not x.numel():
        states = (h,) if c is None else (h, c)
        y, ends = reference.run(cell, x, states, weights, resets, x.dtype)
        ends = [end.clone() for end in ends]  # an operator returns no tensor that it was given
        return y, ends[0], x.new_empty(0) if c is None else ends[1], x.new_empty(0)
    y, h_end, c_end, saved = recurrent.forward(inputs, keep=keep)
    c_end, saved = (x.new_empty(0) if t is None else t for t in (c_end, saved))
    return y, h_end, c_end, saved


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *tensors, keep, _ = args
    cell, products, x, h, c, weights, _ = _layer_inputs(*tensors)  # products save as much as others
    steps, lanes, _ = x.shape
    saved = 0
    if keep:
        sizes = 1, 1, 1, int(weights.hidden), int(h.shape[-1])
        saved = recurrent.saved_size(cell.code, recurrent.PRODUCT_TYPES[products], *sizes)
    return (
        x.new_empty(steps, lanes, h.shape[-1]),
        torch.empty_like(h),
        x.new_empty(0) if c is None else torch.empty_like(c),
        x.new_empty(steps * lanes * saved),
    )


@torch.library.custom_op(
    "throughtime::recurrent_backward",
    mutates_args=(),
    schema=(
        f"({_INPUTS}, Tensor y, Tensor saved, {_COTANGENTS}, bool[] needs, bool rounded)"
        " -> Tensor[]"
    ),
)
def _backward(*args: Any) -> list[Tensor]:
    """Compute the gradients of x, h, c, ih, hh, b_ih, b_hh and hr that are needed."""
    *tensors, y, saved, dy, dh, dc, needs, rounded = args
    inputs = _layer_inputs(*tensors, rounded=rounded)
    if not inputs.x.numel():  # the state passes through no steps
        passed = (None, dh, dc, *[None] * len(inputs.weights))
        return [
            torch.zeros_like(leaf) if grad is None else grad.clone()
            for leaf, grad, need in zip(inputs.leaves, passed, needs, strict=True)
            if need and leaf is not None
        ]
    if not saved.numel():  # of an exported program, which saves nothing for training
        y, _, _, saved = recurrent.forward(inputs, keep=True)
    grads = recurrent.backward(inputs, y, saved, (dy, dh, dc), needs)
    return [grad for grad in grads if grad is not None]


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    needs = args[-2]
    return [torch.empty_like(t) for t, need in zip(args[1:9], needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    cell, *tensors, _, rounded = inputs
    ctx.cell, ctx.has_c, ctx.rounded = cell, tensors[2] is not None, rounded
    ctx.save_for_backward(*tensors, output[0], output[3])


def _vjp(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of each argument of `_forward`."""
    needs = [bool(need) for need in ctx.needs_input_grad[1:9]]
    dy, dh, dc, _ = cotangents
    grads = iter(
        torch.ops.throughtime.recurrent_backward(
            ctx.cell, *ctx.saved_tensors, dy, dh, dc if ctx.has_c else None, needs, ctx.rounded
        )
    )
    return None, *(next(grads) if need else None for need in needs), None, None, None


_forward.register_autograd(_vjp, setup_context=_setup_context)
