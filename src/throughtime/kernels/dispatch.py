"""Which code runs a recurrent layer, and why: compiled kernel, torch.nn or reference.

The request and the tables below decide, never a measurement while a program runs. A run that is
resumed on the same processor takes the same code, and so computes the same bits.

Shapes: `B` lanes, `H` hidden.
"""

from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_tracing as tracing  # torch.jit.is_tracing without its detour
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes

# torch.func has no public function that says whether a transform is active
from torch._C._functorch import maybe_current_level as transforms
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._device import DeviceContext

from throughtime.kernels.cells import LSTM, Cell
from throughtime.kernels.library import TYPES, bfloat16, level, need, why_missing

# a subclass has a behaviour of its own: DTensor, fake tensors, masked tensors
PLAIN = {torch.Tensor, torch.nn.Parameter}
# what modules under autocast return; a layer takes it as float32
AUTOCAST_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Backend(NamedTuple):
    """The code that runs, and why nothing faster does; `str` gives both."""

    name: Literal["fused", "torch.nn", "reference"]
    reason: str

    def __str__(self) -> str:
        """`fused (v4), float32`, or `torch.nn: packed input`."""
        return f"fused {self.reason}" if self.name == "fused" else f"{self.name}: {self.reason}"


class TorchFaster(NamedTuple):
    """A case in which torch.nn is faster: from so many hidden units and so many lanes on.

    `dtype` is that of the products. bfloat16 means float32 under autocast, compared with torch.nn
    under autocast.
    """

    levels: tuple[str, ...]
    cell: Cell
    dtype: torch.dtype
    hidden: int
    lanes: int
    reason: str


# Forward and backward of a layer with all gradients, one thread of a Sapphire Rapids, torch held to
# the same instruction set. Our speed over torch's: 0.94 to 0.98 where a row begins, 0.92 beyond,
# 1 to 1.6 before it. v2 and base were not measured. All without resets, at which torch.nn is called
# again: LSTM, 512 hidden units, 256 lanes of 128 steps, resets at 3 %, forward: 3.2 s, ours 2.3.
TORCH_FASTER = tuple(
    TorchFaster(levels, LSTM, torch.float32, *sizes, f"oneDNN's layer is faster {where}")
    for levels, sizes, where in (
        (("v4", "v3"), (512, 32), "from 512 hidden units and 32 lanes on"),
        (("v3",), (1024, 1), "without AVX-512 from 1024 hidden units on"),
        (("v2", "base"), (256, 1), "without AVX2 from 256 hidden units on"),
        (("v2", "base"), (64, 8), "without AVX2 from 64 hidden units and 8 lanes on"),
    )
)
# Products in bfloat16 pay from so many lanes on. With 4 lanes float32 took 0.52 to 0.82 of their
# time, with 16 lanes 1.1 to 2 times (AMX).
ROUNDING_LANES = 8


def choose(
    cell: Cell,
    hidden: int,
    by_steps: bool,
    x: Tensor,
    lanes: int,
    weights: Iterable[Tensor | None],
    states: Iterable[Tensor],
) -> Backend:
    """The backend of a layer for these tensors, if no `active_torch_modes` forbid the kernel.

    Args:
        cell: a row of the table.
        hidden: H.
        by_steps: whether torch.nn would make several calls: with a projection, or at resets.
        x: the inputs.
        lanes: B.
        weights: None for those that do not exist.
        states: entering the first step, if the caller passed them.

    Cost: two microseconds.
    """
    if type(x) not in PLAIN:
        return _torch(f"inputs of type {type(x).__name__}")
    dtype = x.dtype
    if x.is_neg():
        return _torch("inputs with the negative bit set, as the imaginary part of a conjugate")
    if not x.is_cpu:
        return _torch(f"the kernels are for the CPU, the inputs on {x.device.type}")
    autocast = dtype in AUTOCAST_TYPES and torch.is_autocast_enabled("cpu")
    own, accepted = (torch.float32, AUTOCAST_TYPES) if autocast else (dtype, (dtype,))
    for tensors, types in ((weights, (own,)), (states, accepted)):
        for tensor in tensors:
            if tensor is not None and (
                type(tensor) not in PLAIN or tensor.dtype not in types or not tensor.is_cpu
            ):
                expected = ", under autocast, whose weights are float32" if autocast else ""
                got = f"{tensor.dtype} on {tensor.device.type}, {type(tensor).__name__}"
                return _torch(f"inputs are {dtype}{expected}, a weight or state {got}")
    target = torch.get_autocast_dtype("cpu") if autocast else None
    return static_backend(cell, own, hidden, lanes, by_steps, target)


def autocast_applies(weight: Tensor) -> bool:
    """Whether autocast lowers the precision of a layer with such weights; it skips float64."""
    # not is_cpu: torch's weights for gradients by sample have no such attribute
    return (
        weight.dtype is torch.float32
        and torch.is_autocast_enabled("cpu")
        and weight.device.type == "cpu"
    )


def autocast_rounds(dtype: torch.dtype) -> bool:
    """Whether autocast asks for products in bfloat16 of a layer whose weights are `dtype`."""
    return (
        dtype is torch.float32
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
    )


def rounded_type(dtype: torch.dtype, lanes: int) -> torch.dtype:
    """The type of the factors where autocast asks for bfloat16: that of `dtype` with few lanes."""
    return torch.bfloat16 if lanes >= ROUNDING_LANES and bfloat16() else dtype


def product_type(dtype: torch.dtype, lanes: int) -> torch.dtype:
    """The type to which both factors of a layer's products are rounded in this context.

    It is `dtype` itself, except under autocast to bfloat16 with enough lanes. Without autocast the
    lanes are not compared: a compiler would fix them.

    Args:
        dtype: of its weights and states.
        lanes: B.
    """
    return rounded_type(dtype, lanes) if autocast_rounds(dtype) else dtype


@cache
def _torch(reason: str) -> Backend:
    return Backend("torch.nn", reason)


def active_torch_modes() -> Backend | None:
    """The backend that the active torch mode or transform requires, or None without one.

    Cost: a quarter of a microsecond.
    """
    if function_modes() and any(type(mode) is not DeviceContext for mode in function_mode_stack()):
        return _torch("a TorchFunctionMode is active, such as that of tt.doctor")
    if dispatch_modes():
        return _torch("a TorchDispatchMode is active")
    if transforms() is not None:
        return Backend("reference", "a transform of torch.func")
    if forward_ad._current_level >= 0:  # as torch.func asks
        return Backend("reference", "derivatives in forward mode")
    return _torch("torch.jit.trace records the call") if tracing() else None


@cache
def static_backend(
    cell: Cell,
    dtype: torch.dtype,
    hidden: int,
    lanes: int,
    by_steps: bool,
    autocast: torch.dtype | None = None,
) -> Backend:
    """The backend by library, types and table of sizes; constant within a process.

    If the kernels lack the products that autocast asks for, they compute them in float32, which is
    more accurate. torch.nn would emulate bfloat16 in 4 to 6 times our time (AVX-512 without such
    products, updates of an LSTM and a GRU of 128 and 256 units). Its LSTM raises an error where
    oneDNN lacks the type: bfloat16 with AVX2, and float16 even on a Sapphire Rapids.
    """
    if dtype not in TYPES:
        return _torch(f"the kernels are for float32 and float64, the inputs {dtype}")
    if need("tt.nn") is None:
        return _torch(f"the compiled kernels are missing: {why_missing()}")
    now, products = level() or "", dtype if autocast is None else autocast
    name = str(products).removeprefix("torch.")
    lacking = autocast is not torch.bfloat16 or not bfloat16()
    if autocast is not None and (lacking or lanes < ROUNDING_LANES):
        many = f"products in {name} are faster from {ROUNDING_LANES} lanes on"
        reason = f"no products in {name} with this instruction set" if lacking else many
        return Backend("fused", f"({now}), float32: {reason}")
    for row in () if by_steps else TORCH_FASTER:
        if (
            now in row.levels
            and (cell, products) == (row.cell, row.dtype)
            and hidden >= row.hidden
            and lanes >= row.lanes
        ):
            return _torch(row.reason)
    states = "" if autocast is None else " products, float32 states"
    return Backend("fused", f"({now}), {name}{states}")
