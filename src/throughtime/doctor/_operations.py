"""What an operation does to a state: it copies, selects, masks, or changes it in place."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from throughtime.doctor._records import Operation


# Operations by name. Recurrent layers and cells,
LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
RECURRENT = LAYERS | CELLS
# those that select rows, that take a part, that cast or copy:
ROWS = frozenset(["__getitem__", "index_select", "flip", "roll"])
STEPS = frozenset(["__getitem__", "unbind", "select"])
SLICES = frozenset(["__getitem__", "unbind", "split", "chunk", "select", "narrow", "transpose"])
CASTS = frozenset(["to", "float", "double", "half", "clone", "contiguous"])
CLONES = frozenset(["clone", "__deepcopy__"])
DETACHES = frozenset(["detach", "data", "detach_"])
IN_PLACE_ZEROS = frozenset(["zero_", "fill_"])
# those that pass a state on unchanged,
COPY_OR_VIEW = (
    DETACHES
    | ROWS
    | SLICES
    | CASTS
    | {
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "t",
        "permute",
        "cpu",
        "cuda",
        "expand",
        "requires_grad_",
        "type",
        "movedim",
        "__deepcopy__",
    }
)
# and those that mask or reset some of its values.
EDITS = frozenset(
    [
        "mul",
        "__mul__",
        "__rmul__",
        "where",
        "masked_fill",
        "masked_fill_",
        "mul_",
        "__imul__",
        "add",
        "__add__",
        "lerp",
        "index_copy",
        "index_fill",
    ]
)
MASKS = EDITS - {"add", "__add__", "index_copy", "index_fill"}
GETTERS = {"data", "grad", "T", "mT", "H"}


@lru_cache(maxsize=1024)
def operation_name(func: Any) -> str:
    """The name of an operation; for a getter that of the attribute."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


@lru_cache(maxsize=1024)
def is_in_place(name: str) -> bool:
    """Whether an operation changes its first argument."""
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.startswith("_"))
        or (name.startswith("__i") and name not in {"__int__", "__invert__", "__index__"})
    )


def is_edit(op: "Operation") -> bool:
    """Whether an operation may reset values of a state: a factor other than 0 and 1 does not."""
    factor = [arg for arg in op.args if not isinstance(arg, Tensor)]
    is_decay = "mul" in op.name and len(factor) == 1 and factor[0] not in {0, 1}
    return op.name == "__setitem__" or (op.name in EDITS and not is_decay)


def puts_lanes_back(op: "Operation") -> bool:
    """Whether lanes chosen by a tensor or list of indices are written into a state of all lanes."""
    if op.name != "__setitem__" or len(op.args) != 3:
        return op.name == "index_copy"
    key, value = op.args[1:]
    parts = key if isinstance(key, tuple) else (key,)
    return isinstance(value, Tensor) and any(isinstance(part, (Tensor, list)) for part in parts)


def has_mask(op: "Operation") -> bool:
    """Whether an operation masks a result by data: by numbers from 0 to 1.

    Zeros of the shape of the result are a state at the start, not a mask.
    """
    if op.name not in MASKS or all(r is None for r in op.records):
        return False
    shape = op.outputs[0].shape
    masks = (
        t for t, r in op.pairs() if t.dim() and t.numel() and not t.requires_grad and r is None
    )
    return any(
        t.dtype == torch.bool
        or (bool((t >= 0).all() & (t <= 1).all()) and (t.shape != shape or bool(t.any())))
        for t in masks
        if not t.is_complex()
    )
