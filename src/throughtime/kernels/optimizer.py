"""The compiled step of an optimizer: a table of pointers, run in one call.

The table is filled once and checked at every step. The kernel receives only addresses, so the table
is valid as long as every tensor in it keeps its memory and layout. A step of six tensors may cost
10 us in all. One call of torch costs 0.1 us per tensor, and one tensor needs seven of them.
"""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import is_not
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from throughtime.kernels.library import TYPES, core, fields

RULES = {"sgd": 0, "adam": 1, "adamw": 2}  # tt_rule
# fields of tt_group that have the names of torch's options
OPTIONS = (
    *("lr", "weight_decay", "momentum", "dampening", "eps"),
    *("nesterov", "amsgrad", "maximize"),
)
_data_ptr, _numel, _stride, _is_neg = Tensor.data_ptr, Tensor.numel, Tensor.stride, Tensor.is_neg


class GroupStruct(ctypes.Structure):
    """`tt_group` of throughtime.h."""

    _fields_: ClassVar = [
        *fields(ctypes.c_double, "lr", "weight_decay", "momentum", "dampening"),
        *fields(ctypes.c_double, "beta1", "beta2", "eps"),
        *fields(ctypes.c_int32, "rule", "nesterov", "amsgrad", "maximize"),
    ]


class TensorStruct(ctypes.Structure):
    """`tt_tensor` of throughtime.h."""

    _fields_: ClassVar = [
        *fields(ctypes.c_void_p, "param", "first", "second", "largest", "step"),
        *fields(ctypes.c_int64, "start", "size"),
        *fields(ctypes.c_int32, "group", "type", "step_type"),
        *fields(ctypes.c_double, "rate", "root"),
    ]


class OptimizerStruct(ctypes.Structure):
    """`tt_optim` of throughtime.h."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64),
        *fields(ctypes.c_void_p, "tensors", "groups", "grads"),
        ("max_norm", ctypes.c_double),
        *fields(ctypes.c_int32, "clip", "threads"),
    ]


class ParamEntry(NamedTuple):
    """A parameter, and the state of its optimizer in tensors of the same layout.

    Attributes:
        param: float32 or float64, on the CPU, without gaps.
        group: the number of its group.
        first: momentum of SGD, or Adam's mean of gradients.
        second: Adam's mean of squared gradients.
        largest: the largest of these means so far, for amsgrad.
        step: Adam's number of steps, one float32 or float64.
    """

    param: Tensor
    group: int
    first: Tensor | None = None
    second: Tensor | None = None
    largest: Tensor | None = None
    step: Tensor | None = None

    def struct(self, start: int) -> TensorStruct:
        """The entry for the kernel; `start` counts the numbers in the entries before it."""
        state = (self.first, self.second, self.largest, self.step)
        return TensorStruct(
            self.param.data_ptr(),
            *(None if tensor is None else tensor.data_ptr() for tensor in state),
            start,
            self.param.numel(),
            self.group,
            TYPES[self.param.dtype],
            0 if self.step is None else TYPES[self.step.dtype],
        )


class StepTable:
    """All entries of a step, over all groups, in the order of the parameters.

    `fits` says whether it is still valid; `run` takes the step, and may only be called if it is.
    """

    def __init__(self, entries: Sequence[ParamEntry], grads: Sequence[Tensor], groups: int) -> None:
        starts = [0, *accumulate(entry.param.numel() for entry in entries)]
        self._entries = (TensorStruct * len(entries))(*map(ParamEntry.struct, entries, starts))
        self._groups, self._grads = (GroupStruct * groups)(), (ctypes.c_uint64 * len(entries))()
        self._struct = OptimizerStruct(
            len(entries), *map(ctypes.addressof, (self._entries, self._groups, self._grads))
        )
        self._call, self._pointer = core().tt_optimize, ctypes.pointer(self._struct)
        self._params = [entry.param for entry in entries]
        self._tensors = [field for entry in entries for field in entry if isinstance(field, Tensor)]
        self._addresses = list(map(_data_ptr, self._tensors))
        self._layouts = _layouts(self._params, grads)

    def configure(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Set the numbers of every group, under the names of `tt_group`.

        Returns:
            Whether one of them is a tensor, which may change in place.
        """
        for group, numbers in zip(self._groups, groups, strict=True):
            for name, number in numbers.items():
                setattr(group, name, number.item() if isinstance(number, Tensor) else number)
        return any(isinstance(number, Tensor) for numbers in groups for number in numbers.values())

    def fits(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
        """Whether parameters, gradients and state have their memory and layout of before.

        Gradients may have moved.
        """
        if len(params) != len(self._params) or any(map(is_not, params, self._params)):
            return False
        try:
            return (
                list(map(_data_ptr, self._tensors)) == self._addresses
                and _layouts(params, grads) == self._layouts
            )
        except RuntimeError:  # a sparse gradient has no strides
            return False

    def run(self, grads: Sequence[Tensor], max_norm: float | None) -> float:
        """Take the step; the result is the norm of the gradients, 0 without `max_norm`."""
        self._grads[:] = list(map(_data_ptr, grads))
        self._struct.clip, self._struct.max_norm = max_norm is not None, max_norm or 0.0
        self._struct.threads = torch.get_num_threads()
        norm: float = self._call(self._pointer)
        # autograd reports a graph that saved the old values
        torch.autograd.graph.increment_version(self._params)
        return norm


def _layouts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[object]:
    """What the kernel assumes of gradients, new at every step, and the sizes of what it writes."""
    return [
        *map(type, grads),
        *[grad.dtype for grad in grads],
        *map(_numel, chain(grads, params)),
        *map(_stride, grads),
        *map(_is_neg, grads),
    ]


def mismatch(tensor: Tensor, like: Tensor) -> str | None:
    """Why the kernel cannot read `tensor` in step with the parameter `like`; None if it can."""
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        return f"is a {type(tensor).__name__}, expected a plain tensor"
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return (
            f"is on {tensor.device} with layout {tensor.layout}, expected a strided tensor on"
            " the CPU"
        )
    if tensor.dtype not in TYPES or tensor.dtype != like.dtype:
        return (
            f"has dtype {tensor.dtype}, expected"
            f" {'float32 or float64' if tensor is like else like.dtype}"
        )
    # torch lays out a copy alike if every address from the first entry to the last holds one entry
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if not dense or tensor.is_neg() or tensor.data_ptr() % tensor.element_size():
        return (
            f"has gaps or repeats in memory (shape {tuple(tensor.shape)}, strides"
            f" {tensor.stride()}), expected none"
        )
    if _strides(tensor) != _strides(like):
        return (
            f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected"
            f" {tuple(like.shape)} and {like.stride()}"
        )
    return None


def overlap(params: Sequence[Tensor]) -> bool:
    """Whether two of them share memory, so the order of their updates would matter."""
    spans = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size())
        for param in params
        if param.numel()
    )
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Size and stride of each dimension; with a single entry, the stride is never used."""
    return [
        (size, stride if size != 1 else 0)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
