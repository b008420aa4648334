"""A stack of recurrent layers, a linear readout, its loss and all gradients in one call.

Shapes: `T` steps, `B` lanes, `P` outputs of the last layer, `C` outputs of the readout.
"""

import ctypes
from functools import cache

from torch import Tensor

from throughtime.kernels.cells import CELLS, Cell
from throughtime.kernels.recurrent import Call, Captured, check, core, room_for

CROSS_ENTROPY, SQUARED_ERROR = 0, 1
INVALID_TARGET, NON_FINITE = 2, 3  # tt_fault; after the first nothing has been written


class FusedStep(ctypes.Structure):
    """`tt_whole` of throughtime.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(Call)),
        *((name, ctypes.c_int32) for name in ("count", "loss", "accumulate")),
        *((name, ctypes.c_int64) for name in ("steps", "classes", "valid")),
        *((name, ctypes.c_void_p) for name in ("w", "b", "targets", "mask", "outputs")),
        *((name, ctypes.c_void_p) for name in ("room", "dw", "db")),
        ("mean", ctypes.POINTER(ctypes.c_double)),
    ]


class Room:
    """Memory for what the call of a layer captures in its backward pass.

    Attributes:
        cell: of the layer.
        shape: steps and lanes.
        captured: all of it; `Captured.of` takes it apart.
    """

    def __init__(self, call: Call) -> None:
        self.cell: Cell = next(cell for cell in CELLS.values() if cell.code == call.kind)
        self._call, self.shape = call, (call.steps, call.lanes)
        self.captured: Tensor = room_for(self.cell, *self.shape, call.hidden)
        parts = Captured.of(self.cell, self.captured, *self.shape)
        self._squares, self._entering, self._kept = (
            part.data_ptr() if part.numel() else None for part in parts
        )

    def point(self) -> None:
        """The call captures it here from now on."""
        call = self._call
        call.squares, call.entering, call.kept = self._squares, self._entering, self._kept


def scratch_size(call: FusedStep) -> int:
    """How many numbers the scratch memory of a call holds, by its layers, steps and classes."""
    return int(_scratch_size()(call))


@cache
def _scratch_size() -> "ctypes._NamedFuncPointer":
    function = core().tt_whole_room
    function.argtypes, function.restype = [ctypes.POINTER(FusedStep)], ctypes.c_int64
    return function


@cache
def _step() -> "ctypes._NamedFuncPointer":
    function = core().tt_whole_step
    function.argtypes, function.restype = [ctypes.POINTER(FusedStep)], ctypes.c_int
    return function


def step(call: FusedStep) -> int:
    """Run it; the result is 0, `INVALID_TARGET` or `NON_FINITE`.

    Raises:
        MemoryError: there is no memory for its work.
    """
    code = _step()(call)
    check(code)
    return code
