"""Which code runs a recurrent layer, and why: the compiled kernel, torch.nn, or the plain definition.

Decided by what is asked for and by the table below, never by a measurement while a program runs: a run that is resumed on the same
processor takes the same code, and so the same bits.

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
from torch._C._functorch import maybe_current_level as transforms  # there is no public way to ask for torch.func
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._device import DeviceContext

from throughtime.kernels.layer import Kind
from throughtime.kernels.library import level, need, why_missing

PLAIN = {torch.Tensor, torch.nn.Parameter}  # a subclass has its own ways: DTensor, fake tensors, masked ones


class Choice(NamedTuple):
    """What runs, and why it and nothing faster; `str` says both."""

    runs: Literal["fused", "torch.nn", "reference"]
    why: str

    def __str__(self) -> str:
        """`fused (v4), float32`, or `torch.nn: packed input`."""
        return f"fused {self.why}" if self.runs == "fused" else f"{self.runs}: {self.why}"


class Slower(NamedTuple):
    """Where torch.nn is the faster one: from so many hidden units and lanes on, both."""

    levels: tuple[str, ...]
    kind: Kind
    dtype: torch.dtype
    hidden: int
    lanes: int
    why: str


NARROW = ("v3", "v2", "base")  # instruction sets without AVX-512
SLOWER = (
    Slower(("v4",), "lstm", torch.float32, 1024, 32, "oneDNN's layer is faster from 1024 hidden units and 32 lanes on"),
    Slower(NARROW, "lstm", torch.float32, 256, 1, "without AVX-512 oneDNN's layer is faster from 256 hidden units on"),
    Slower(NARROW, "lstm", torch.float32, 64, 8, "without AVX-512 oneDNN's layer is faster from 64 hidden units and 8 lanes on"),
)
SMALL = 1024  # B * H up to which what torch.nn takes is the calls, not the arithmetic


class Gain(NamedTuple):
    """How many times faster an update of a whole loop became by `tt.fuse`: up to `SMALL` numbers in the state, and above."""

    small: float
    large: float


GAINS: dict[tuple[Kind, torch.dtype], Gain] = {  # where torch.nn goes step by step; an LSTM in float32 does so packed or projected
    ("lstm", torch.float64): Gain(6.4, 2.6),
    ("lstm", torch.float32): Gain(6.4, 2.6),
    ("gru", torch.float64): Gain(7.1, 2.7),
    ("gru", torch.float32): Gain(8.5, 2.8),
    ("rnn_tanh", torch.float64): Gain(4.4, 2.6),
    ("rnn_tanh", torch.float32): Gain(4.4, 2.4),
    ("rnn_relu", torch.float64): Gain(4.4, 2.6),
    ("rnn_relu", torch.float32): Gain(4.4, 2.4),
}


def choose(kind: Kind, hidden: int, projected: bool, x: Tensor, lanes: int, others: Iterable[Tensor | None]) -> Choice:
    """What runs a layer on these tensors, if nothing is `around`.

    Args:
        kind: of layer.
        hidden: H.
        projected: whether it is an LSTM with a projection.
        x: the inputs.
        lanes: B.
        others: weights and states, None where there is none.

    Cost: two microseconds.
    """
    if type(x) not in PLAIN:
        return _torch(f"inputs of type {type(x).__name__}")
    dtype = x.dtype
    if x.is_neg():
        return _torch("inputs that are to be read with their signs turned, as the imaginary part of a conjugate")
    if not x.is_cpu:
        return _torch(f"the kernels are for the CPU, the inputs on {x.device.type}")
    if torch.is_autocast_enabled("cpu"):
        return _torch("autocast")
    for other in others:
        if other is None:
            continue
        if other.dtype is not dtype or not other.is_cpu or type(other) not in PLAIN:
            return _torch(f"inputs are {dtype}, a weight or state {other.dtype} on {other.device.type}, {type(other).__name__}")
    if not x.numel():
        return Choice("reference", "nothing to compute")
    return by_table(kind, dtype, hidden, lanes, projected)


@cache
def _torch(why: str) -> Choice:
    return Choice("torch.nn", why)


def around() -> Choice | None:
    """What is going on around the call that would not see into a kernel; None where nothing is, and `choose` may say.

    Cost: a quarter of a microsecond.
    """
    if function_modes() and any(type(mode) is not DeviceContext for mode in function_mode_stack()):
        return _torch("a TorchFunctionMode looks on, as that of tt.doctor")
    if dispatch_modes():
        return _torch("a TorchDispatchMode looks on")
    if transforms() is not None:
        return Choice("reference", "a transform of torch.func")
    if forward_ad._current_level >= 0:  # noqa: SLF001  # as torch.func asks
        return Choice("reference", "derivatives in forward mode")
    return _torch("torch.jit.trace records the call") if tracing() else None


@cache
def by_table(kind: Kind, dtype: torch.dtype, hidden: int, lanes: int, projected: bool) -> Choice:
    """What the library, the types and the table of sizes say; the same for the rest of the process."""
    if dtype not in {torch.float32, torch.float64}:
        return _torch(f"the kernels are for float32 and float64, the inputs {dtype}")
    if need("tt.nn") is None:
        return _torch(f"the compiled kernels are missing: {why_missing()}")
    now = level() or ""
    for row in () if projected else SLOWER:
        if now in row.levels and (kind, dtype) == (row.kind, row.dtype) and hidden >= row.hidden and lanes >= row.lanes:
            return _torch(row.why)
    return Choice("fused", f"({now}), {str(dtype).removeprefix('torch.')}")


def gain(kind: Kind, dtype: torch.dtype, hidden: int, lanes: int, projected: bool) -> float:
    """How many times faster an update is after `tt.fuse`, roughly; 1 where torch.nn has a fast way of its own, or stays the choice."""
    if (kind == "lstm" and dtype == torch.float32 and not projected) or (kind, dtype) not in GAINS:
        return 1.0
    if level() is None or by_table(kind, dtype, hidden, lanes, projected).runs != "fused":
        return 1.0
    measured = GAINS[kind, dtype]
    return measured.small if lanes * hidden <= SMALL else measured.large
