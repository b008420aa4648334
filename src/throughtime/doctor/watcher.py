"""The watcher: a torch mode that records operations and their lines."""

import re
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from throughtime.doctor._calls import CELLS, LAYERS, Calls
from throughtime.doctor._data import MOVES, Operation, RootTable
from throughtime.doctor._frames import (
    Instruction,
    carrier,
    current_frame,
    current_line,
    tensors,
    user_frame,
)
from throughtime.doctor._graph import (
    ATTRIBUTE_GETTER,
    LEAF,
    base_of,
    behind_copies,
    current_mode,
    is_transformed,
    mode_depth,
    sequence,
    version_of,
)
from throughtime.doctor._log import Change, Log
from throughtime.doctor.rules.state import StateRule
from throughtime.errors import DiagnosisError

MAX_OPERATIONS = 20_000  # all of them recorded, from one backward to the next
RECURRENT = LAYERS | CELLS
DETACHES = frozenset(["detach", "data", "detach_"])
KEPT_IN_PLACE = DETACHES | {"requires_grad_"}  # they leave the values as they are
# add_, __setitem__ and __iadd__, but not __int__ and so on
IN_PLACE = re.compile("[^_].*_|__setitem__|__i(?!nt__|nvert__|ndex__|ter__).*")
CLIP_FILE = clip_grad.__file__
GETTERS = {"data", "grad", "T", "mT", "H"}
QUESTIONS = {"dim", "size", "numel", "stride", "is_complex", "is_floating_point", "is_contiguous",
             "storage_offset", "__len__"}  # fmt: skip


class Watcher(TorchFunctionMode):
    """Records operations, and passes on those that matter."""

    def __init__(self, log: Log, state: StateRule) -> None:
        super().__init__()
        self.log, self.table = log, RootTable()
        self.calls = state.calls = Calls(log, self.table, state)
        self._instructions: dict[tuple[int, int], Instruction] = {}
        self.busy = False  # the doctor itself is at work, or an optimizer
        self.paused = 0  # the depth of the stack of modes below this one, while it is no mode
        self.closed = False  # after the doctor; on a user's stack it then only passes on
        self.awake = True  # operations are recorded
        self.internal_error: Exception | None = None
        self.operations = 0  # recorded since the last backward

    def pause(self) -> None:
        """Stop being the current mode while nothing that matters is at work."""
        if current_mode() is self:
            self.paused = mode_depth()
            self.__exit__(None, None, None)

    def resume(self) -> None:
        """Be the current mode again, unless inside a mode of the user's that began meanwhile."""
        if self.paused == mode_depth() + 1:
            self.paused = 0
            self.__enter__()

    def close(self) -> None:
        """Stop being the current mode, unless another is above it."""
        self.closed = True
        self.pause()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asleep = not self.awake and operation_name(func) not in RECURRENT
        if self.closed or self.busy or asleep or is_question(func) or is_replaced():
            return func(*args, **kwargs)
        iterates = func is Tensor.__iter__
        result = torch.unbind(*args) if iterates else func(*args, **kwargs)
        caller = current_frame(1)
        if operation_name(func) == "grad" and isinstance(func, ATTRIBUTE_GETTER):
            self._note_read(args[0], caller)
        elif frame := user_frame(caller, skip_optimizer=False):
            function = torch.unbind if iterates else func
            self.guarded(self._record, function, args, kwargs, result, frame, frame is caller)
        return iter(result) if iterates else result

    def _note_read(self, parameter: Tensor, frame: FrameType) -> None:
        """Note a gradient that is read, but not to clear it or to measure its norm."""
        log, line = self.log, current_line()
        if frame.f_code.co_filename != CLIP_FILE:
            for each in log.backwards[-1:]:
                each.used |= frame.f_code.co_name != "zero_grad"
        elif {**(frame.f_back or frame).f_locals, **frame.f_locals}.get("max_norm") != float("inf"):
            last = next(reversed(log.events), None)
            if not isinstance(last, Change) or last.line != line:  # one for all parameters
                log.append(Change("l", frozenset([id(parameter)]), line))

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run the doctor's own work: unwatched, and without failing the user's loop."""
        was_busy, self.busy = self.busy, True
        try:
            return work(*args)
        except DiagnosisError:
            raise
        except Exception as error:  # noqa: BLE001  # the report says that the doctor failed
            self.internal_error, self.closed = error, True
            return None
        finally:
            self.busy = was_busy

    def instruction_at(self, frame: FrameType) -> Instruction:
        """The instruction that a frame runs; always the same object for the same one."""
        new = Instruction(frame.f_code, frame.f_lasti)  # it keeps the code alive
        return self._instructions.setdefault((id(frame.f_code), frame.f_lasti), new)

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType, is_direct: bool
    ) -> None:
        name = operation_name(func)
        inputs, outputs = tensors((*args, *kwargs.values())), tensors(result)
        self.operations += 1
        if self.operations > MAX_OPERATIONS:
            self.awake = self.table.complete = False
            self.log.results.clear()  # they are not followed to their end
        changes = IN_PLACE.fullmatch(name) is not None and bool(inputs)
        outputs = inputs[:1] if changes else outputs
        if not outputs:
            return
        op = Operation(name, func, args, kwargs, inputs, outputs, self.instruction_at(frame))
        if changes and self._record_change(inputs[0], op):
            return
        first, learned = outputs[0], any(t.requires_grad for t in inputs)
        is_discrete = not (first.is_floating_point() or first.is_complex())
        op.is_choice = not first.requires_grad and (
            func is torch.autograd.grad or (learned and is_discrete)
        )
        if name in {"view", "reshape"}:
            self.calls.viewed = weakref.ref(first), inputs[0].shape, op.instruction
        if first.grad_fn:
            self._record_graph(op)
        if name in RECURRENT:
            self.calls.layer_or_cell(op)
            return
        for out in () if changes else outputs[: 1 if name in MOVES else None]:
            self.table.follow(op, out)
        if name in DETACHES and inputs[0].requires_grad:
            self.calls.detached(inputs[0], op.instruction)
        if is_direct:
            self.calls.by_hand(op, frame)

    def _record_graph(self, op: Operation) -> None:
        """Record the results that have a graph, what they sum and what they are compared with."""
        first, log = op.outputs[0], self.log
        for out in op.outputs:
            if (number := sequence(out.grad_fn)) < LEAF:
                log.add_node(number, op.instruction)
        if op.name not in DETACHES and log.chunk and op.instruction not in log.carried:
            self._record_carried(op)
        if op.name in RECURRENT:
            return
        log.results.setdefault(op.instruction, {})[log.chunk] = weakref.ref(first)
        sizes = [t.numel() for t in op.inputs if t.dim() and not t.requires_grad]
        if sizes and any(t.grad_fn for t in op.inputs):
            # one comparison at each step, or of the whole chunk
            before = log.targets if op.instruction is log.compared_at else 0
            log.compared_at, log.targets = op.instruction, before + sizes[0]

    def _record_change(self, target: Tensor, op: Operation) -> bool:
        """Record a change in place.

        Returns:
            Whether it changes a parameter, by hand or to initialize it; its views have no graph.
        """
        number = max(self.log.node_numbers[-1:], default=-1)
        self.log.in_place.append((version_of(target), target.shape, op.instruction, number))
        is_parameter = isinstance(base_of(target), nn.Parameter)
        if not is_parameter and op.name not in KEPT_IN_PLACE:
            self.table.change(op)
        return is_parameter

    def _record_carried(self, op: Operation) -> None:
        """Record the variables that carry states with an earlier graph into an operation."""
        weighted = any(t.is_leaf and t.requires_grad for t in op.inputs)  # no sum of losses
        paths = [
            carrier(t, current_frame())
            for t in op.inputs
            if t.grad_fn
            and sequence(behind_copies(t.grad_fn)) <= self.log.boundary
            and (t.numel() > 1 or weighted)
        ]
        if paths:
            self.log.carried[op.instruction] = paths


def is_replaced() -> bool:
    """Whether torch compiles or transforms the operations."""
    return torch.compiler.is_compiling() or is_transformed()


@lru_cache(maxsize=4096)
def is_question(func: Any) -> bool:
    """Whether an operation asks for the form of a tensor, not for its values."""
    name = operation_name(func)
    return (isinstance(func, ATTRIBUTE_GETTER) and name not in GETTERS) or name in QUESTIONS


@lru_cache(maxsize=4096)
def operation_name(func: Any) -> str:
    """The name of an operation; for a getter that of the attribute."""
    name = getattr(func, "__name__", "")
    return (
        str(getattr(getattr(func, "__self__", None), "__name__", "")) if name == "__get__" else name
    )
