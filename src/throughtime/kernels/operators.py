"""The fused recurrent layer as operators of torch, `throughtime::recurrent` and its backward, for
`torch.compile` and `torch.export`.

Both pass over an operator as a whole, with the shapes of its results alone. Where nothing is
compiled the autograd.Function of `recurrent.run` serves, which costs some 40 microseconds less at
every call.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`G` gates.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from throughtime.errors import DataError
from throughtime.kernels import recurrent, reference
from throughtime.kernels.dispatch import LOWERED, by_table, lowers, products_in
from throughtime.kernels.layer import GATES, Kind, Weights
from throughtime.kernels.library import bfloat16, library


def takes(
    kind: Kind,
    hidden: int,
    projected: bool,
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Weights],
) -> bool:
    """Whether a layer that is compiled or exported goes through the operator.

    Otherwise torch.nn's own call is recorded.
    """
    if not isinstance(x, Tensor) or x.device.type != "cpu" or torch.onnx.is_in_onnx_export():
        return False
    dtype, lowered = weights[0].ih.dtype, lowers(weights[0].ih)
    same = all(
        w is None or (w.dtype == dtype and w.device == x.device) for layer in weights for w in layer
    )
    taken = all(t.dtype in LOWERED if lowered else t.dtype == dtype for t in (x, *states))
    return (
        same
        and taken
        and _in_table(
            kind, dtype, hidden, projected, torch.get_autocast_dtype("cpu") if lowered else None
        )
    )


def _in_table(
    kind: Kind, dtype: torch.dtype, hidden: int, projected: bool, autocast: torch.dtype | None
) -> bool:
    return by_table(kind, dtype, hidden, 1, projected, autocast).runs == "fused"


def _saved(kind: Kind, products: torch.dtype, hidden: int, outputs: int) -> int:
    """The numbers that the forward pass keeps for one step of one lane."""
    return recurrent.saved_numbers(
        recurrent.KINDS[kind], recurrent.PRODUCTS[products], 1, 1, 1, int(hidden), int(outputs)
    )


# What torch.compiler.assume_constant_result does, without the import of the compiler, which takes
# longer than that of throughtime.
for _asked in (_in_table, bfloat16):
    _asked.__dict__["_dynamo_marked_constant"] = True


def run(
    kind: Kind,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Weights,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `reference.run`, one node of the graph."""
    graph = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, h, c, *weights)
    )
    keep = graph and not torch.compiler.is_exporting()
    rounded = products_in(x.dtype, x.shape[1]) is torch.bfloat16
    y, h_end, c_end, _ = torch.ops.throughtime.recurrent(
        kind, x, h, c, *weights, resets, keep, rounded
    )
    return y, h_end, None if c is None else c_end


def _check(
    kind: Kind, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights, resets: Tensor | None
) -> None:
    """Refuses what a kernel would misread.

    Where nothing is compiled the layer has looked before.
    """
    (steps, lanes, inputs), rows, outputs, hidden = (
        x.shape,
        weights.hh.shape[0],
        weights.hh.shape[-1],
        weights.hidden,
    )
    sizes = (
        (lanes, outputs),
        (lanes, hidden),
        (rows, inputs),
        (rows, outputs),
        (rows,),
        (rows,),
        (outputs, hidden),
    )
    given = {
        name: (t, size)
        for name, t, size in zip(("h", "c", *Weights._fields), (h, c, *weights), sizes, strict=True)
        if t is not None
    }
    wrong = {
        name: (tuple(t.shape), t.dtype, size)
        for name, (t, size) in given.items()
        if t.shape != size or t.dtype is not x.dtype
    }
    if resets is not None and (resets.shape != (steps, lanes) or resets.dtype is not torch.bool):
        wrong["resets"] = tuple(resets.shape), resets.dtype, (steps, lanes)
    if rows != GATES[kind] * hidden:
        wrong["hh"] = tuple(weights.hh.shape), weights.hh.dtype, (GATES[kind] * hidden, outputs)
    if wrong:
        name, (shape, dtype, size) = next(iter(wrong.items()))
        raise DataError(
            f"{name} of a compiled {kind} is {shape} {dtype}, expected {size}"
            f" {torch.bool if name == 'resets' else x.dtype}: the inputs are {tuple(x.shape)}."
            " Uncompiled, the layer says the same in torch's words; a state that fits is"
            f" net.initial_state(lanes={lanes}), or none"
        )


def _products(x: Tensor, rounded: bool) -> torch.dtype:
    return torch.bfloat16 if rounded else x.dtype


@torch.library.custom_op("throughtime::recurrent", mutates_args=())
def _forward(
    kind: str,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    ih: Tensor,
    hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    hr: Tensor | None,
    resets: Tensor | None,
    keep: bool,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`y`, `h` and `c` after the last step (nothing without a cell), and what a backward pass
    needs, if `keep`.

    Products are bfloat16's if they are `rounded`: the call that autocast was on for runs outside
    it, where it was compiled.
    """
    weights = Weights(ih, hh, b_ih, b_hh, hr)
    _check(cast(Kind, kind), x, h, c, weights, resets)
    if library() is None:  # an exported program on another machine
        y, h_end, c_end = reference.run(cast(Kind, kind), x, h, c, weights, resets, x.dtype)
        saved = x.new_empty(0)
    else:
        given = recurrent.Given(cast(Kind, kind), _products(x, rounded), x, h, c, weights, resets)
        y, h_end, c_end, saved = recurrent.forward(given, keep=keep)
    return y, h_end, x.new_empty(0) if c_end is None else c_end, saved


@_forward.register_fake
def _(
    kind: str,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    ih: Tensor,
    hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    hr: Tensor | None,
    resets: Tensor | None,
    keep: bool,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del ih, b_ih, b_hh, resets
    steps, lanes, _ = x.shape
    hidden = hh.shape[1] if hr is None else hr.shape[1]
    saved = (
        steps * lanes * _saved(cast(Kind, kind), _products(x, rounded), hidden, h.shape[1])
        if keep
        else 0
    )
    return (
        x.new_empty(x.shape[0], *h.shape),
        torch.empty_like(h),
        x.new_empty(0) if c is None else torch.empty_like(c),
        x.new_empty(saved),
    )


@torch.library.custom_op("throughtime::recurrent_backward", mutates_args=())
def _backward(
    kind: str,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    ih: Tensor,
    hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    hr: Tensor | None,
    resets: Tensor | None,
    y: Tensor,
    saved: Tensor,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    needs: Sequence[bool],
    rounded: bool = False,
) -> list[Tensor]:
    """Gradients of x, h, c, ih, hh, b_ih, b_hh and hr, those that are needed."""
    given = recurrent.Given(
        cast(Kind, kind), _products(x, rounded), x, h, c, Weights(ih, hh, b_ih, b_hh, hr), resets
    )
    if not saved.numel():  # of an exported program, which is not made to be trained
        y, _, _, saved = recurrent.forward(given, keep=True)
    found = recurrent.backward(given, y, saved, (dy, dh, dc), needs)
    return [gradient for gradient in found if gradient is not None]


@_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    given = (*args[1:4], *args[4:9])
    return [torch.empty_like(t) for t, needed in zip(given, args[15], strict=True) if needed]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    kind, *tensors, _, rounded = inputs
    ctx.kind, ctx.cell, ctx.rounded = kind, tensors[2] is not None, rounded
    ctx.save_for_backward(*tensors, output[0], output[3])


def _gradients(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """For each argument of `_forward`."""
    needs = [bool(needed) for needed in ctx.needs_input_grad[1:9]]
    ends = given[1], given[2] if ctx.cell else None
    found = iter(
        torch.ops.throughtime.recurrent_backward(
            ctx.kind, *ctx.saved_tensors, given[0], *ends, needs, ctx.rounded
        )
    )
    return None, *(next(found) if needed else None for needed in needs), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
