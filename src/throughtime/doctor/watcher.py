"""The watcher: a torch mode that records operations and their lines."""

import re
import weakref
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from throughtime.doctor._autograd import behind_copies
from throughtime.doctor._calls import CELLS, LAYERS, Calls, Operation
from throughtime.doctor._data import MOVES, RootTable
from throughtime.doctor._frames import (
    STATE,
    Instruction,
    carrying_variable,
    current_frame,
    current_line,
    user_frame,
)
from throughtime.doctor._log import Event, Log, Sum
from throughtime.doctor._torch_private import (
    ATTRIBUTE_GETTER,
    LEAF,
    base_of,
    current_mode,
    is_transformed,
    mode_depth,
    root_of,
    sequence,
    version_of,
)
from throughtime.doctor.rules.state import StateRule
from throughtime.errors import DiagnosisError

MAX_OPERATIONS = 20_000  # all of them recorded, from one backward to the next
MIN_UNSENT = 4  # forward passes in a sum that no backward goes through
RECURRENT = LAYERS | CELLS
DETACHES = frozenset(["detach", "data", "detach_"])
KEPT_IN_PLACE = DETACHES | {"requires_grad_"}  # they leave the values as they are
VIEWS = {"view", "reshape"}
STEPS = {"__getitem__", "unbind", "select"}  # those that take a part
# add_, __setitem__ and __iadd__, but not __int__ and so on
IN_PLACE = re.compile("[^_].*_|__setitem__|__i(?!nt__|nvert__|ndex__|ter__).*")
CLIP_FILE = clip_grad.__file__
GETTERS = {"data", "grad", "T", "mT", "H"}
QUESTIONS = {"dim", "size", "numel", "stride", "is_complex", "is_floating_point", "is_contiguous",
             "storage_offset", "__len__"}  # fmt: skip


class Role(Enum):
    """What an operation is to the doctor."""

    RECURRENT = 1
    QUESTION = 2  # of the form of a tensor, not of its values
    OTHER = 3


class Loss(NamedTuple):
    """A single value with a graph: what it sums."""

    tensor: Any  # a weak reference
    lineage: frozenset[Instruction]  # what computed it and its terms
    chunk: int
    depth: int  # chunks that it goes through
    passes: int  # calls of models that it goes through
    call: int  # the last of them


class Watcher(TorchFunctionMode):
    """Records operations, and passes on those that matter."""

    def __init__(self, log: Log, state: StateRule, emit: Callable[[Event], None]) -> None:
        super().__init__()
        self.log, self.emit, self.table = log, emit, RootTable()
        self.calls = state.calls = Calls(log, self.table, state)
        self.losses: dict[int, Loss] = {}
        # the last detaches: the result, the number of the tensor's node, the instruction
        self.detached: list[tuple[Any, int, Instruction]] = []
        self.kept_detaches: set[Instruction] = set()
        self._instructions: dict[tuple[int, int], Instruction] = {}
        self.busy = False  # the doctor itself is at work
        self.paused = 0  # the depth of the stack of modes below this one, while it is no mode
        self.closed = False  # after the doctor; on a user's stack it then only passes on
        self.full = True  # every operation is recorded, not only recurrent ones and those of data
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
        if current_mode() is self:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        role = role_of(func)
        if self.closed or self.busy or (role is Role.QUESTION and not self.detached):
            return func(*args, **kwargs)
        if not self.full and role is not Role.RECURRENT:
            result = func(*args, **kwargs)
            if func is not Tensor.detach and _is_new_data(result) and not _is_replaced():
                self._record_for(current_frame(1), func, args, kwargs, result)
            return result
        if _is_replaced():
            self.detached.clear()  # they may be used unwatched
            return func(*args, **kwargs)
        if self.detached and func is not Tensor.detach:
            self.settle_detaches()
        iterates = func is Tensor.__iter__
        if iterates:
            func = torch.unbind
        result = func(*args, **kwargs)
        if isinstance(func, ATTRIBUTE_GETTER) and operation_name(func) == "grad":
            self._note_read(args, current_frame(1))
        if role is not Role.QUESTION and (
            isinstance(result, (Tensor, tuple, list)) or func is Tensor.__setitem__
        ):
            self._record_for(current_frame(1), func, args, kwargs, result)
        return iter(result) if iterates else result

    def _record_for(self, caller: FrameType, *operation: Any) -> None:
        """Record an operation that the user's code or a library has called."""
        frame = user_frame(caller, skip_optimizer=False)
        if frame:
            self.guarded(self._record, *operation, frame, frame is caller)
        if frame is not caller and not caller.f_code.co_filename.startswith(STATE):
            self.detached.clear()  # a library's own

    def _note_read(self, args: Any, frame: FrameType) -> None:
        """Note a read of a gradient, by the user's code or to clip it."""
        if user_frame(frame) is frame:
            self.log.reads += 1
        elif frame.f_code.co_filename == CLIP_FILE and frame.f_back:
            outer = frame if "max_norm" in frame.f_locals else frame.f_back
            if outer.f_locals.get("max_norm") != float("inf"):  # which only measures the norm
                self.log.clip(id(args[0]), current_line())

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
        key = id(frame.f_code), frame.f_lasti  # the instruction keeps the code alive
        instruction = self._instructions.get(key)
        if instruction is None:
            instruction = self._instructions[key] = Instruction(frame.f_code, frame.f_lasti)
        return instruction

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType, is_direct: bool
    ) -> None:
        name = operation_name(func)
        inputs, outputs = tensors((*args, *kwargs.values())), tensors(result)
        if name == "grad" and isinstance(func, ATTRIBUTE_GETTER):
            self.note_gradients(args)
            return
        self.operations += 1
        self.full &= self.operations <= MAX_OPERATIONS
        changes = is_in_place(name) and bool(inputs)
        outputs = inputs[:1] if changes else outputs
        if not outputs:
            return
        op = Operation(name, func, args, kwargs, inputs, outputs, self.instruction_at(frame))
        if changes and self._record_change(inputs[0], op):
            return
        first, learned = outputs[0], any(t.requires_grad for t in inputs)
        op.is_choice = not first.requires_grad and (
            func is torch.autograd.grad or (learned and _is_discrete(first))
        )
        if name in VIEWS | STEPS:
            self._record_view(op)
        if name in DETACHES and inputs[0].requires_grad and not inputs[0].is_leaf:
            self._record_detach(op)
        if first.grad_fn and (self.full or name in RECURRENT):
            self._record_graph(op)
        if name in RECURRENT:
            self.calls.layer_or_cell(op)
            return
        for out in () if changes else outputs[: 1 if name in MOVES else None]:
            self.table.follow(op, out)
        if self.full and is_direct:
            self.calls.by_hand(op, frame)

    def _record_graph(self, op: Operation) -> None:
        """Record the results that have a graph, what they sum and what they are compared with."""
        first, log = op.outputs[0], self.log
        self._record_nodes(op)
        if op.name not in DETACHES:
            self._record_carried(op)
        if op.name in RECURRENT:
            return
        log.results.setdefault(op.instruction, {})[log.chunk] = weakref.ref(first)
        if first.numel() == 1 or op.name == "stack":
            self._record_sum(op)
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
        if not target.is_inference():  # which has no version counter, and no backward needs it
            numbers = self.log.node_numbers
            number = numbers[-1] if numbers else -1
            self.log.in_place.append((version_of(target), target.shape, op.instruction, number))
        is_parameter = isinstance(root_of(target), nn.Parameter)
        if not is_parameter and op.name not in KEPT_IN_PLACE:
            self.table.change(op)
        return is_parameter

    def _record_view(self, op: Operation) -> None:
        """Record a part of a tensor, or a view that exchanges its sizes and mixes the rows."""
        before, after = op.inputs[0], op.outputs[0]
        if op.name in STEPS:
            if after.dim() < before.dim():
                learned = any(t.requires_grad for t in op.inputs)
                self.calls.part = self.table.view(before, new=not learned)
            return
        sizes = [[n for n in tensor.shape if n > 1] for tensor in (before, after)]
        if sizes[0] == sizes[1] or sorted(sizes[0]) != sorted(sizes[1]):
            return
        view = self.table.view(before, new=not before.requires_grad)
        if not view or view.root.shape != after.shape:  # a view of a view may be as it was
            self.calls.viewed = weakref.ref(after), op.instruction

    def _record_detach(self, op: Operation) -> None:
        source, instruction = op.inputs[0], op.instruction
        number = LEAF if source.grad_fn is None else sequence(source.grad_fn)
        self.detached.append((weakref.ref(op.outputs[0]), number, instruction))
        view = self.table.view(source, new=False)
        if view and (call := view.root.behind):
            view.root.detach = instruction
            others = [c for c in call.parents if c.unit is not call.unit and c.chunk == call.chunk]
            at = None if any(c.has_graph for c in others) else instruction
            for each in (call, *others):
                each.last_detach = at

    def settle_detaches(self) -> None:
        """At the next operation: a result that is gone before any has used it was not kept."""
        gone = {entry[2] for entry in self.detached if entry[0]() is None}
        for _, number, instruction in self.detached:
            if instruction not in gone:
                self.kept_detaches.add(instruction)
                # nor is another detach of the same tensor lost
                self.log.lost_states.discard(self.log.lost_detaches.get(number, instruction))
            elif instruction not in self.kept_detaches:  # the last one of a loop is not kept either
                self.log.lost_detaches[number] = instruction
        self.detached.clear()

    def _record_sum(self, op: Operation) -> None:
        """Count the chunks, and the forward passes within one chunk, in a sum of losses."""
        out, log = op.outputs[0], self.log
        known = [loss for t in op.inputs if t.numel() == 1 and t.grad_fn
                 and (loss := self.losses.get(id(t))) and loss.tensor() is t]  # fmt: skip
        sums = [loss for loss in known if op.instruction in loss.lineage]
        terms = [loss for loss in known if op.instruction not in loss.lineage]
        depth = max((s.depth + (s.chunk < log.chunk) for s in sums), default=0)
        calls = {loss.call for loss in terms} or {log.call}
        before = max((max(s.passes, 1) for s in sums), default=0)
        passes = before + len(calls - {s.call for s in sums})
        lineage = frozenset([op.instruction]).union(*(loss.lineage for loss in known))
        if out.numel() == 1:
            self.losses[id(out)] = Loss(
                weakref.ref(out), lineage, log.chunk, depth, passes, max(calls)
            )
        crosses = any(s.chunk < log.chunk for s in sums)
        total = Sum(op.instruction, log.chunk, depth if crosses else 0, passes)
        if passes >= MIN_UNSENT and terms:
            last = log.sums.get(op.instruction)
            if before < MIN_UNSENT and last and log.chunk <= last.chunk + 1:
                log.sent.add(op.instruction)  # it begins anew: a value of a single chunk
                del log.sums[op.instruction]
            if op.instruction not in log.sent:
                total.numbers = sequence(out.grad_fn), sequence(terms[-1].tensor().grad_fn)
                log.sums[op.instruction] = total
        self.emit(total)

    def _record_carried(self, op: Operation) -> None:
        """Record the variables that carry states with an earlier graph into an operation."""
        log = self.log
        if not log.chunk or op.instruction in log.carried:
            return
        weighted = any(t.is_leaf and t.requires_grad for t in op.inputs)  # no sum of losses
        variables = [
            carrying_variable(t, current_frame())
            for t in op.inputs
            if t.grad_fn
            and sequence(behind_copies(t.grad_fn)) <= log.boundary
            and (t.numel() > 1 or weighted)
        ]
        if variables:
            log.carried[op.instruction] = variables

    def note_gradients(self, leaves: Any) -> None:
        """Note that the loop uses the gradients of tensors that were detached."""
        views = (self.table.view(tensor, new=False) for tensor in tensors(leaves))
        self.log.used_gradients |= {v.root.detach for v in views if v and v.root.detach}

    def _record_nodes(self, op: Operation) -> None:
        self.log.current.add(op.instruction)
        for out in op.outputs:
            node = out.grad_fn
            number = sequence(node) if node else LEAF
            if number < LEAF:
                self.log.add_node(number, op.instruction)

    def next_chunk(self) -> None:
        """Drop what the next chunk does not need; called after each backward."""
        self.settle_detaches()
        self.calls.chunk_start = next(self.table.numbers)
        self.losses = {i: loss for i, loss in self.losses.items() if loss.tensor() is not None}
        self.table.drop_freed()


def _is_replaced() -> bool:
    """Whether torch compiles or transforms the operations."""
    return torch.compiler.is_compiling() or is_transformed()


def _is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_new_data(result: Any) -> bool:
    """Whether a result is neither a view nor computed with a graph."""
    return isinstance(result, Tensor) and not result.requires_grad and base_of(result) is None


def tensors(tree: Any, depth: int = 3) -> list[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    if not isinstance(tree, (tuple, list)) or not depth:
        return []
    return [tensor for branch in tree for tensor in tensors(branch, depth - 1)]


@lru_cache(maxsize=4096)
def role_of(func: Any) -> Role:
    """The role of an operation."""
    name = operation_name(func)
    getter = isinstance(func, ATTRIBUTE_GETTER) and name not in GETTERS
    return (
        Role.RECURRENT
        if name in RECURRENT
        else Role.QUESTION
        if getter or name in QUESTIONS
        else Role.OTHER
    )


@lru_cache(maxsize=4096)
def operation_name(func: Any) -> str:
    """The name of an operation; for a getter that of the attribute."""
    name = getattr(func, "__name__", "")
    return (
        str(getattr(getattr(func, "__self__", None), "__name__", "")) if name == "__get__" else name
    )


def is_in_place(name: str) -> bool:
    """Whether an operation changes its first argument."""
    return IN_PLACE.fullmatch(name) is not None
