"""A stack of recurrent layers, a linear readout, its loss and all gradients in one call.

Shapes: `T` steps, `B` lanes, `P` outputs of the last layer, `C` outputs of the readout.
"""

import ctypes
from functools import cache

from throughtime.kernels.recurrent import Call, check, core

CROSS_ENTROPY, SQUARED_ERROR = 0, 1
INVALID_TARGET, NON_FINITE = 2, 3  # tt_fault; after the first nothing has been written


class FusedStep(ctypes.Structure):
    """`tt_fused_step` of throughtime.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(Call)),
        *((name, ctypes.c_int32) for name in ("count", "loss", "accumulate")),
        *((name, ctypes.c_int64) for name in ("steps", "classes", "valid")),
        *((name, ctypes.c_void_p) for name in ("w", "b", "targets", "mask", "outputs")),
        *((name, ctypes.c_void_p) for name in ("scratch", "dw", "db")),
        ("mean", ctypes.POINTER(ctypes.c_double)),
    ]


def scratch_size(call: FusedStep) -> int:
    """How many numbers the scratch memory of a call holds, by its layers, steps and classes."""
    return _library().tt_fused_step_scratch(call)


def step(call: FusedStep) -> int:
    """Run it; the result is 0, `INVALID_TARGET` or `NON_FINITE`.

    Raises:
        MemoryError: there is no memory for its work.
    """
    code: int = _library().tt_fused_step_run(call)
    check(code)
    return code


@cache
def _library() -> ctypes.CDLL:
    """The library, with the types of these calls set."""
    result = core()
    scratch, run = result.tt_fused_step_scratch, result.tt_fused_step_run
    scratch.argtypes = run.argtypes = [ctypes.POINTER(FusedStep)]
    scratch.restype, run.restype = ctypes.c_int64, ctypes.c_int
    return result
