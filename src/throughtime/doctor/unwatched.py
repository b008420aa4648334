"""Layers and cells of torch while the watcher is off: their states are followed by the memory they
lie in.

This costs a few microseconds per call, and it cannot follow a state through a copy; what it cannot
follow it says nothing of.
"""

from types import FrameType
from typing import Any

from torch import Tensor, nn

from throughtime.doctor.carry import Carrying
from throughtime.doctor.notes import Step, tensors
from throughtime.doctor.watch import Watcher


class Unwatched:
    """What module hooks tell of recurrent layers."""

    def __init__(self, watcher: Watcher, carrying: Carrying) -> None:
        self.watcher, self.carrying = watcher, carrying
        self.running: dict[int, tuple[Any, Step | None]] = {}  # by module: the chunk and its step

    def enters(self, module: nn.Module, given: Any, frame: FrameType | None) -> None:
        """Before a layer is called: the first step of a chunk is judged, the others only remembered."""
        clock = self.watcher.clock
        now, step = self.running.get(id(module), (None, None))
        data = given[0] if given and isinstance(given[0], Tensor) else None
        if (
            step is not None
            and data is not None
            and isinstance(module, nn.RNNCellBase)
            and now == (clock.chunk, clock.batch, clock.training)
        ):
            step.data, step.lanes = data if step.data is not None else None, None
            return
        step = (
            self._first(module, given, data, frame)
            if frame is not None and data is not None
            else None
        )
        self.running[id(module)] = (clock.chunk, clock.batch, clock.training), step

    def _first(self, module: nn.Module, given: Any, data: Tensor, frame: FrameType) -> Step | None:
        layer = isinstance(module, nn.RNNBase)
        if data.dim() != (3 if layer else 2):
            return None
        known = self.watcher.known(data)
        own = not data.requires_grad and (known is None or not known.learned)
        first = bool(getattr(module, "batch_first", False))
        lane, time = (0 if first else 1, 1 if first else 0) if layer else (0, None)
        steps, state = (
            (1 if time is None else data.shape[time]),
            list(tensors(given[1] if len(given) > 1 else ())),
        )
        unit, key = id(next(module.parameters())), (frame.f_code, frame.f_lasti)
        made = {"unknown": len(given) < 2}  # a state by keyword is not told to hooks on all modules
        return self.carrying.step(
            unit, key, data if own else None, state, steps, (lane, time), made
        )

    def leaves(self, module: nn.Module, result: Any) -> None:
        """After it: what it gave is remembered, without its graph once the chunk is over."""
        step = self.running.get(id(module), (None, None))[1]
        if step is not None and result is not None:
            layer = isinstance(module, nn.RNNBase)
            self.watcher.given[step.unit] = result[1] if layer else result, step, 1 if layer else 0
