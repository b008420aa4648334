"""Which code runs a recurrent layer, and why: the compiled kernel, torch.nn, or the plain
definition.

Decided by what is asked for and by the table below, never by a measurement while a program runs: a
run that is resumed on the same processor takes the same code, and so the same bits.

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
from torch._C._functorch import (
    maybe_current_level as transforms,
)  # there is no public way to ask for torch.func
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._device import DeviceContext

from throughtime.kernels.layer import Kind
from throughtime.kernels.library import bfloat16, level, need, why_missing

PLAIN = {
    torch.Tensor,
    torch.nn.Parameter,
}  # a subclass has its own ways: DTensor, fake tensors, masked ones
LOWERED = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # what modules under autocast give; a layer takes it as float32


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
    dtype: (
        torch.dtype
    )  # of products: bfloat16 is float32 under autocast, beside torch.nn under autocast
    hidden: int
    lanes: int
    why: str


# Forward and backward of a layer, all gradients, one thread of a Sapphire Rapids, torch held to the
# same instruction set: .94 to .98 of torch's speed where a row begins, .92 beyond, 1 to 1.6 times
# before it. v2 and base were not measured.
SLOWER = (
    Slower(
        ("v4", "v3"),
        "lstm",
        torch.float32,
        512,
        32,
        "oneDNN's layer is faster from 512 hidden units and 32 lanes on",
    ),
    Slower(
        ("v3",),
        "lstm",
        torch.float32,
        1024,
        1,
        "without AVX-512 oneDNN's layer is faster from 1024 hidden units on",
    ),
    Slower(
        ("v2", "base"),
        "lstm",
        torch.float32,
        256,
        1,
        "without AVX2 oneDNN's layer is faster from 256 hidden units on",
    ),
    Slower(
        ("v2", "base"),
        "lstm",
        torch.float32,
        64,
        8,
        "without AVX2 oneDNN's layer is faster from 64 hidden units and 8 lanes on",
    ),
)
# from which on products in bfloat16 pay: of 4, float32 took .52 to .82 of their time, of 16 1.1 to
# 2 times (by AMX)
LANES = 8
SMALL = 1024  # B * H up to which what torch.nn takes is the calls, not the arithmetic


class Gain(NamedTuple):
    """How many times faster an update of a whole loop became by `tt.fuse`: up to `SMALL` numbers in
    the state, and above.

    A loop by hand with torch's Adam, 100 steps, one lane of 50 units and 32 of 128, one thread of a
    Sapphire Rapids.
    """

    small: float
    large: float


GAINS: dict[
    tuple[Kind, torch.dtype], Gain
] = {  # where torch.nn goes step by step; an LSTM in float32 does so packed or projected
    ("lstm", torch.float64): Gain(7.5, 2.0),
    ("lstm", torch.float32): Gain(8.2, 2.5),
    ("gru", torch.float64): Gain(8.8, 2.1),
    ("gru", torch.float32): Gain(9.1, 2.4),
    ("rnn_tanh", torch.float64): Gain(4.8, 1.7),
    ("rnn_tanh", torch.float32): Gain(4.1, 1.8),
    ("rnn_relu", torch.float64): Gain(4.8, 1.7),
    ("rnn_relu", torch.float32): Gain(4.1, 1.8),
}


def choose(
    kind: Kind,
    hidden: int,
    projected: bool,
    x: Tensor,
    lanes: int,
    weights: Iterable[Tensor | None],
    states: Iterable[Tensor],
) -> Choice:
    """What runs a layer on these tensors, if nothing is `around`.

    Args:
        kind: of layer.
        hidden: H.
        projected: whether it is an LSTM with a projection.
        x: the inputs.
        lanes: B.
        weights: None where there is none.
        states: entering the first step, if they are given.

    Cost: two microseconds.
    """
    if type(x) not in PLAIN:
        return _torch(f"inputs of type {type(x).__name__}")
    dtype = x.dtype
    if x.is_neg():
        return _torch(
            "inputs that are to be read with their signs turned, as the imaginary part of a"
            " conjugate"
        )
    if not x.is_cpu:
        return _torch(f"the kernels are for the CPU, the inputs on {x.device.type}")
    lowered = dtype in LOWERED and torch.is_autocast_enabled("cpu")
    own, taken = (torch.float32, LOWERED) if lowered else (dtype, (dtype,))
    for others, types in ((weights, (own,)), (states, taken)):
        for other in others:
            if other is not None and (
                other.dtype not in types or not other.is_cpu or type(other) not in PLAIN
            ):
                found = (
                    f"a weight or state {other.dtype} on {other.device.type},"
                    f" {type(other).__name__}"
                )
                return _torch(
                    "inputs are"
                    f" {dtype}{', under autocast, whose weights are float32' if lowered else ''},"
                    f" {found}"
                )
    if not x.numel():
        return Choice("reference", "nothing to compute")
    return by_table(
        kind, own, hidden, lanes, projected, torch.get_autocast_dtype("cpu") if lowered else None
    )


def lowers(weight: Tensor) -> bool:
    """Whether autocast asks for fewer bits of a layer with such weights.

    It leaves float64 alone.
    """
    return weight.dtype is torch.float32 and torch.is_autocast_enabled("cpu") and weight.is_cpu


def products_in(dtype: torch.dtype, lanes: int) -> torch.dtype:
    """What both sides of a layer's products are rounded to, here and now; `dtype` itself but under
    autocast, with lanes enough.

    Args:
        dtype: of its weights and states.
        lanes: B.
    """
    if dtype is not torch.float32 or lanes < LANES or not torch.is_autocast_enabled("cpu"):
        return dtype
    return (
        torch.bfloat16
        if torch.get_autocast_dtype("cpu") is torch.bfloat16 and bfloat16()
        else dtype
    )


@cache
def _torch(why: str) -> Choice:
    return Choice("torch.nn", why)


def around() -> Choice | None:
    """What is going on around the call that would not see into a kernel; None where nothing is, and
    `choose` may say.

    Cost: a quarter of a microsecond.
    """
    if function_modes() and any(type(mode) is not DeviceContext for mode in function_mode_stack()):
        return _torch("a TorchFunctionMode looks on, as that of tt.doctor")
    if dispatch_modes():
        return _torch("a TorchDispatchMode looks on")
    if transforms() is not None:
        return Choice("reference", "a transform of torch.func")
    if forward_ad._current_level >= 0:  # as torch.func asks
        return Choice("reference", "derivatives in forward mode")
    return _torch("torch.jit.trace records the call") if tracing() else None


@cache
def by_table(
    kind: Kind,
    dtype: torch.dtype,
    hidden: int,
    lanes: int,
    projected: bool,
    autocast: torch.dtype | None = None,
) -> Choice:
    """What the library, the types and the table of sizes say; the same for the rest of the process.

    Where autocast asks for products that the kernels do not have, they are made in float32, which
    is nearer to the truth. torch.nn would emulate bfloat16, in 4 to 6 times our time (AVX-512
    without its products, updates of an LSTM and a GRU of 128 and 256 units), and its LSTM raises an
    error where oneDNN has none in that type (bfloat16 with AVX2; float16 also on a Sapphire
    Rapids).
    """
    if dtype not in {torch.float32, torch.float64}:
        return _torch(f"the kernels are for float32 and float64, the inputs {dtype}")
    if need("tt.nn") is None:
        return _torch(f"the compiled kernels are missing: {why_missing()}")
    now, products = level() or "", dtype if autocast is None else autocast
    if autocast is not None and not (autocast is torch.bfloat16 and bfloat16()):
        return Choice(
            "fused", f"({now}), float32: no products in {_name(autocast)} with this instruction set"
        )
    if autocast is not None and lanes < LANES:
        return Choice(
            "fused",
            f"({now}), float32: products in {_name(autocast)} are faster from {LANES} lanes on",
        )
    for row in () if projected else SLOWER:
        if (
            now in row.levels
            and (kind, products) == (row.kind, row.dtype)
            and hidden >= row.hidden
            and lanes >= row.lanes
        ):
            return _torch(row.why)
    return Choice(
        "fused",
        (
            f"({now}), {_name(dtype)}"
            if autocast is None
            else f"({now}), {_name(products)} products, float32 states"
        ),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gain(kind: Kind, dtype: torch.dtype, hidden: int, lanes: int, projected: bool) -> float:
    """How many times faster an update is after `tt.fuse`, roughly.

    1 where torch.nn has a fast way of its own, or stays the choice.
    """
    if (kind == "lstm" and dtype == torch.float32 and not projected) or (kind, dtype) not in GAINS:
        return 1.0
    if level() is None or by_table(kind, dtype, hidden, lanes, projected).runs != "fused":
        return 1.0
    measured = GAINS[kind, dtype]
    return measured.small if lanes * hidden <= SMALL else measured.large
