"""A stack of recurrent layers, a linear readout, its loss and all gradients in one call of the compiled core.

Shapes: `T` steps, `B` lanes, `P` outputs of the last layer, `C` outputs of the readout.
"""

import ctypes
from functools import cache

from throughtime.kernels.recurrent import Call, check, core

CROSS_ENTROPY, SQUARED = 0, 1
NO_CLASS, NOT_FINITE = 2, 3  # tt_fault; the first leaves everything as it was


class Whole(ctypes.Structure):
    """`tt_whole` of throughtime.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(Call)),
        *((name, ctypes.c_int32) for name in ("count", "loss", "accumulate")),
        *((name, ctypes.c_int64) for name in ("steps", "classes", "valid")),
        *((name, ctypes.c_void_p) for name in ("w", "b", "targets", "mask", "outputs", "dw", "db")),
        ("mean", ctypes.POINTER(ctypes.c_double)),
    ]


@cache
def _step() -> "ctypes._NamedFuncPointer":
    function = core().tt_whole_step
    function.argtypes, function.restype = [ctypes.POINTER(Whole)], ctypes.c_int
    return function


def step(whole: Whole) -> int:
    """Runs it; 0, `NO_CLASS` or `NOT_FINITE`.

    Raises:
        MemoryError: there is no room for its work.
    """
    code = _step()(whole)
    check(code)
    return code
