"""A stack of recurrent layers, a linear readout, its loss and all gradients in one call of the
compiled core.

Shapes: `T` steps, `B` lanes, `P` outputs of the last layer, `C` outputs of the readout.
"""

import ctypes
from functools import cache

from torch import Tensor

from throughtime.kernels.layer import Kind
from throughtime.kernels.recurrent import KINDS, Call, Captured, check, core, room_for

CROSS_ENTROPY, SQUARED = 0, 1
NO_CLASS, NOT_FINITE = 2, 3  # tt_fault; the first leaves everything as it was


class Whole(ctypes.Structure):
    """`tt_whole` of throughtime.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(Call)),
        *((name, ctypes.c_int32) for name in ("count", "loss", "accumulate")),
        *((name, ctypes.c_int64) for name in ("steps", "classes", "valid")),
        *(
            (name, ctypes.c_void_p)
            for name in ("w", "b", "targets", "mask", "outputs", "room", "dw", "db")
        ),
        ("mean", ctypes.POINTER(ctypes.c_double)),
    ]


_KINDS: dict[int, Kind] = {number: kind for kind, number in KINDS.items()}


class Room:
    """Memory for what the call of a layer captures in its backward pass.

    Attributes:
        kind: of the layer.
        shape: steps and lanes.
        captured: all of it; `Captured.of` finds in it what is what.
    """

    def __init__(self, call: Call) -> None:
        self.kind: Kind = _KINDS[call.kind]
        self._call, self.shape = call, (call.steps, call.lanes)
        self.captured: Tensor = room_for(self.kind, *self.shape, call.hidden)
        parts = Captured.of(self.kind, self.captured, *self.shape)
        self._squares, self._entering, self._kept = (
            part.data_ptr() if part.numel() else None for part in parts
        )

    def point(self) -> None:
        """The call captures it here from now on."""
        call = self._call
        call.squares, call.entering, call.kept = self._squares, self._entering, self._kept


def room_numbers(whole: Whole) -> int:
    """The numbers that it must be given to work with, by its layers, steps and classes."""
    return int(_room_numbers()(whole))


@cache
def _room_numbers() -> "ctypes._NamedFuncPointer":
    function = core().tt_whole_room
    function.argtypes, function.restype = [ctypes.POINTER(Whole)], ctypes.c_int64
    return function


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
