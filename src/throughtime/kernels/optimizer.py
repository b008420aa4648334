"""The compiled step of an optimizer: a table of pointers, filled once, checked at every step and
run in one call.

The kernel sees addresses only, so the table holds for as long as every tensor in it is where it
was, as it was. What a step of six tensors may cost is 10 us in all, of which a single call of
torch's is 0.1 us per tensor: one tensor costs seven of them.

    entry      one parameter with its gradient and what the optimizer keeps of it
    table      all entries of a step, over all groups, in the order of the parameters
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import is_not
from typing import Any, ClassVar

import torch
from torch import Tensor

from throughtime.kernels.library import library, why_missing

RULES = {"sgd": 0, "adam": 1, "adamw": 2}  # tt_rule
TYPES = {torch.float32: 0, torch.float64: 1}  # tt_type
_data_ptr, _numel, _stride, _is_neg = Tensor.data_ptr, Tensor.numel, Tensor.stride, Tensor.is_neg


class _Group(ctypes.Structure):
    _fields_: ClassVar = [  # tt_group
        *(
            (name, ctypes.c_double)
            for name in ("lr", "decay", "momentum", "dampening", "beta1", "beta2", "eps")
        ),
        *((name, ctypes.c_int32) for name in ("rule", "nesterov", "amsgrad", "maximize")),
    ]


class _Entry(ctypes.Structure):
    _fields_: ClassVar = [  # tt_tensor
        *((name, ctypes.c_void_p) for name in ("param", "first", "second", "largest", "step")),
        *((name, ctypes.c_int64) for name in ("start", "size")),
        *((name, ctypes.c_int32) for name in ("group", "type", "step_type", "fresh")),
        *((name, ctypes.c_double) for name in ("rate", "root")),
    ]


class _Step(ctypes.Structure):
    _fields_: ClassVar = [  # tt_optim
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tensors", "groups", "grads")),
        ("max_norm", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("clip", "threads")),
    ]


@dataclass(frozen=True)
class Entry:
    """A parameter, and what the optimizer keeps of it in tensors of the same form.

    Attributes:
        param: float32 or float64, on the CPU, without gaps.
        group: which group it belongs to.
        first: momentum of SGD, or Adam's mean of gradients.
        second: Adam's mean of squared gradients.
        largest: the largest of these, for amsgrad.
        step: Adam's number of steps, one float32 or float64.
        fresh: SGD's momentum starts from the gradient of this step.
    """

    param: Tensor
    group: int
    first: Tensor | None = None
    second: Tensor | None = None
    largest: Tensor | None = None
    step: Tensor | None = None
    fresh: bool = False

    def tensors(self) -> Iterable[Tensor]:
        """All that is there."""
        return (
            tensor
            for tensor in (self.param, self.first, self.second, self.largest, self.step)
            if tensor is not None
        )


class Table:
    """All entries of a step.

    `fits` says whether it still holds; `run` takes the step, and may be called only where it does.
    """

    def __init__(self, entries: Sequence[Entry], grads: Sequence[Tensor], groups: int) -> None:
        starts = [0, *accumulate(entry.param.numel() for entry in entries)]
        self._entries = (_Entry * len(entries))(
            *(_packed(entry, start) for entry, start in zip(entries, starts, strict=False))
        )
        self._groups, self._grads = (_Group * groups)(), (ctypes.c_uint64 * len(entries))()
        self._step = _Step(
            len(entries), *map(ctypes.addressof, (self._entries, self._groups, self._grads))
        )
        self._call, self._where = _optimize(), ctypes.c_void_p(ctypes.addressof(self._step))
        self._params = [entry.param for entry in entries]
        self._tensors = list(chain.from_iterable(entry.tensors() for entry in entries))
        self._places = list(map(_data_ptr, self._tensors))
        self._forms = _forms(self._params, grads)

    def configure(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Takes over the numbers of every group, under the names of `tt_group`.

        Whether one is a tensor, which may change unseen.
        """
        for group, numbers in zip(self._groups, groups, strict=True):
            for name, number in numbers.items():
                setattr(group, name, number.item() if isinstance(number, Tensor) else number)
        return any(isinstance(number, Tensor) for numbers in groups for number in numbers.values())

    def fits(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
        """Whether parameters, gradients and state are where and what they were.

        The addresses of gradients may be others.
        """
        if len(params) != len(self._params) or any(map(is_not, params, self._params)):
            return False
        try:
            return (
                list(map(_data_ptr, self._tensors)) == self._places
                and _forms(params, grads) == self._forms
            )
        except RuntimeError:  # a sparse gradient has no strides
            return False

    def run(self, grads: Sequence[Tensor], max_norm: float | None) -> float:
        """The norm of the gradients where `max_norm` is given, else 0.

        Parameters and state are those after the step.
        """
        self._grads[:] = list(map(_data_ptr, grads))
        self._step.clip, self._step.max_norm = max_norm is not None, max_norm or 0.0
        self._step.threads = torch.get_num_threads()
        norm = self._call(self._where)
        torch.autograd.graph.increment_version(self._params)  # a graph that saved them must notice
        return norm


def _optimize() -> Callable[[ctypes.c_void_p], float]:
    core = library()
    if core is None:
        raise RuntimeError(f"a table is for the compiled core: {why_missing()}")
    core.tt_optimize.argtypes, core.tt_optimize.restype = [ctypes.c_void_p], ctypes.c_double
    return core.tt_optimize


def _packed(entry: Entry, start: int) -> _Entry:
    state = (entry.first, entry.second, entry.largest, entry.step)
    return _Entry(
        entry.param.data_ptr(),
        *(None if tensor is None else tensor.data_ptr() for tensor in state),
        start,
        entry.param.numel(),
        entry.group,
        TYPES[entry.param.dtype],
        0 if entry.step is None else TYPES[entry.step.dtype],
        entry.fresh,
    )


def _forms(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[object]:
    """All that the kernel takes for granted of gradients, which are others at every step, and the sizes of what it writes."""
    sizes = map(_numel, chain(grads, params))
    return [
        *map(type, grads),
        *[grad.dtype for grad in grads],
        *sizes,
        *map(_stride, grads),
        *map(_is_neg, grads),
    ]


def misfit(tensor: Tensor, like: Tensor) -> str | None:
    """Why the kernel cannot read `tensor` as it reads `like`, which is a parameter or the tensor itself; None where it can."""
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
    if not _dense(tensor) or tensor.is_neg() or tensor.data_ptr() % tensor.element_size():
        return (
            f"has gaps or repeats in memory (shape {tuple(tensor.shape)}, strides"
            f" {tensor.stride()}), expected none"
        )
    if _order(tensor) != _order(like):
        return (
            f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected"
            f" {tuple(like.shape)} and {like.stride()}"
        )
    return None


def overlap(params: Sequence[Tensor]) -> bool:
    """Whether two of them share memory, so that the order of their updates counts."""
    spans = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size())
        for param in params
        if param.numel()
    )
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _order(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides; of a dimension of one entry no stride is ever used."""
    shape = tuple(tensor.shape)
    return shape, tuple(
        stride for size, stride in zip(shape, tensor.stride(), strict=True) if size != 1
    )


def _dense(tensor: Tensor) -> bool:
    """Whether every place between the first entry and the last holds exactly one entry."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True
