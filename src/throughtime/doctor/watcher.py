"""The watcher: a torch mode that records operations and their lines."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from throughtime.doctor._data import MOVES, RootTable
from throughtime.doctor._frames import (
    STATE,
    Instruction,
    Variable,
    carrying_variable,
    current_frame,
    user_frame,
    variable_path,
)
from throughtime.doctor._operations import (
    COPY_OR_VIEW,
    DETACHES,
    EDITS,
    GETTERS,
    IN_PLACE_ZEROS,
    STEPS,
    is_in_place,
    operation_name,
    puts_lanes_back,
)
from throughtime.doctor._records import Clock, Operation, TensorRecord, tensors
from throughtime.doctor._table import RecordTable
from throughtime.doctor._torch_private import (
    ATTRIBUTE_GETTER,
    LEAF,
    current_mode,
    is_transformed,
    mode_depth,
    next_sequence,
    root_of,
    sequence,
    version_of,
)
from throughtime.errors import DiagnosisError

MAX_OPERATIONS = 20_000  # operations watched without a break
PURGE = 4_096  # operations after which freed tensors are dropped, if no backward comes
MAX_CHANGES = 5_000  # in-place changes remembered


class Watcher(TorchFunctionMode):
    """Records operations while it is the current mode, and passes on those that matter."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.table, self.data = clock, RecordTable(clock), RootTable()
        # by name of the event, the methods of the rules that handle it
        self.handlers = dict[str, list[Callable[..., Any]]]()
        self.node_numbers: list[int] = []  # sequence numbers of nodes, ascending
        self.node_instructions: list[Instruction | None] = []  # where they were created
        self.boundary = -1  # the largest sequence number before the last backward
        # in-place changes: version after it, shape, instruction, last sequence number
        self.in_place = deque[tuple[int, Any, Instruction, int]](maxlen=MAX_CHANGES)
        self.earlier: set[Instruction] = set()  # instructions of earlier chunks
        self.current: set[Instruction] = set()  # and of this one
        self.files: set[str] = set()
        self._instructions: dict[tuple[int, int], Instruction] = {}
        # states that entered with a graph of an earlier chunk, by the instruction that took them
        self.carried: dict[Instruction, list[Variable]] = {}
        self.used_gradients: set[Instruction] = set()  # detaches whose gradient the loop uses
        self.busy = False  # the doctor itself is at work
        self.closed = False  # after the doctor; on a user's stack it then only passes on
        self.active = False
        # units read copies: what comes before the first unit of a chunk is always watched
        self.follows_data = False
        self.internal_error: Exception | None = None
        self.grad_reads = 0  # the user's reads of `.grad`
        self.operations = 0  # recorded since it was last switched on
        self._depth = mode_depth()

    def on(self) -> None:
        """Become the current mode, unless the user has one of their own open."""
        if not self.active and mode_depth() == self._depth:
            self._mark_gap()
            self.__enter__()
            self.active = True

    def _mark_gap(self) -> None:
        """Record a node of no instruction: those created while the watcher was off end there."""
        if self.node_numbers:
            self.node_numbers.append(next_sequence() - 1)
            self.node_instructions.append(None)

    def off(self) -> None:
        """Stop being the current mode, unless another is above it."""
        if self.active and current_mode() is self:
            self.__exit__(None, None, None)
            self.active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.closed or torch.compiler.is_compiling() or is_transformed():
            self.table.detached.clear()  # they may be used unwatched
            return func(*args, **kwargs)
        if self.table.detached and not self.busy and func is not Tensor.detach:
            self.table.settle_detaches()
        iterates = func is Tensor.__iter__
        if iterates:
            func = torch.unbind
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if not self.busy:
                inputs = [*tensors(args), *tensors(tuple(kwargs.values()))]
                records = [self.table.record_or_base(t) for t in inputs]
                self.notify("on_operation_error", error, inputs, records)
            raise
        if (
            not self.busy
            and self.operations <= MAX_OPERATIONS
            and (isinstance(result, (Tensor, tuple, list)) or func is Tensor.__setitem__)
            and (
                not isinstance(func, ATTRIBUTE_GETTER) or self._is_recorded(func, current_frame(1))
            )
        ):
            caller = current_frame(1)
            frame = user_frame(caller, skip_optimizer=False)
            if frame is not None:
                self.guarded(self._record, func, args, kwargs, result, frame)
            if frame is not caller and not caller.f_code.co_filename.startswith(STATE):
                self.table.detached.clear()  # a library's own
        return iter(result) if iterates else result

    def _is_recorded(self, getter: Any, frame: FrameType) -> bool:
        """Whether the getter of an attribute gives another form of its tensor."""
        name = operation_name(getter)
        if name == "grad" and user_frame(frame) is frame:  # not a library's read
            self.grad_reads += 1
        return name in GETTERS

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run the doctor's own work: unwatched, and without failing the user's loop."""
        was_busy, self.busy = self.busy, True
        try:
            return work(*args)
        except DiagnosisError:
            raise
        except Exception as error:  # noqa: BLE001  # the report says that the doctor failed
            self.internal_error, self.operations = error, MAX_OPERATIONS + 1
            return None
        finally:
            self.busy = was_busy

    def notify(self, event: str, *args: Any) -> list[Any]:
        """Pass an event to the rules, unwatched; a failing rule does not stop the loop."""
        return self.guarded(lambda: [handle(*args) for handle in self.handlers[event]]) or []

    def pass_data_on(self, module: nn.Module, data: Any, result: Any) -> None:
        """Record the data behind the outputs of a module that is called while this is off."""
        if not isinstance(data, Tensor) or not isinstance(result, Tensor):
            return
        frame = user_frame(current_frame(1))
        known = self.data.view(data, new=not data.requires_grad)
        if frame is not None and known and self.data.view(result, new=False) is None:
            instruction = self.instruction_at(frame)
            name = type(module).__name__.lower()
            op = Operation(name, None, (), {}, [data], [None], [result], instruction)
            self.data.result(op, [data], result)

    def instruction_of(self, number: int) -> Instruction | None:
        """The instruction that created the node of this sequence number."""
        position = bisect_left(self.node_numbers, number)
        return self.node_instructions[position] if position < len(self.node_numbers) else None

    def state_name(self, instruction: Instruction | None, matches: Callable[[Any], bool]) -> str:
        """The path of a state: as recorded where it entered, or of the first value that matches."""
        variables = self.carried.get(instruction, []) if instruction is not None else []
        paths = (variable.path for variable in variables)
        return next(filter(None, paths), "") or variable_path(matches, current_frame())

    def instruction_at(self, frame: FrameType) -> Instruction:
        """The instruction that a frame runs; always the same object for the same one."""
        key = id(frame.f_code), frame.f_lasti  # the instruction keeps the code alive
        instruction = self._instructions.get(key)
        if instruction is None:
            instruction = self._instructions[key] = Instruction(frame.f_code, frame.f_lasti)
        return instruction

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType) -> None:
        name, instruction = operation_name(func), self.instruction_at(frame)
        if name == "grad" and isinstance(func, ATTRIBUTE_GETTER):
            self.note_gradients(args)
            return
        self.operations += 1
        if self.operations % PURGE == 0:
            self._drop_freed()
        inputs = tensors(args)
        if kwargs:
            inputs += tensors(tuple(kwargs.values()))
        records = self.table.records_of(name, inputs)
        if is_in_place(name) and inputs:
            result = inputs[0]
            self._record_change(inputs[0], instruction)
            if not result.requires_grad:
                self.data.change(result, inputs[1:], whole=name == "copy_")
            if isinstance(root_of(result), nn.Parameter):
                return  # it is initialized or updated by hand; its views have no graph
        op = Operation(name, func, args, kwargs, inputs, records, tensors(result), instruction)
        learned = [r for r in records if r is not None]
        if op.outputs and (learned or any(t.requires_grad for t in inputs)):
            self._record_learned(op, learned)
        elif not is_in_place(name):
            self._follow_data(op)

    def _follow_data(self, op: Operation) -> None:
        """Record what the results of an operation were read from, states apart."""
        inputs = op.inputs[:1] if op.is_recurrent else op.inputs
        sources = [t for t in inputs if not (t.is_leaf and t.requires_grad)]
        states = {id(tensor) for tensor, _ in op.loop_inputs}
        sources = [t for t in sources if id(t) not in states] or sources
        single = op.is_recurrent or op.name in MOVES
        for out in op.outputs[: 1 if single else None]:
            if out.numel() > 1 or not out.requires_grad:
                root = self.data.result(op, sources, out)
                if root is None and op.name in STEPS and not op.outputs[0].requires_grad:
                    self.data.note_cut(op.inputs[0], out)
                elif root is not None:
                    root.random, root.chunk = self.clock.loading, self.clock.chunk

    def _record_change(self, target: Tensor, instruction: Instruction) -> None:
        if target.is_inference():  # has no version counter, and no backward needs it
            return
        number = self.node_numbers[-1] if self.node_numbers else -1
        self.in_place.append((version_of(target), target.shape, instruction, number))

    def _record_learned(self, op: Operation, learned: list[TensorRecord]) -> None:
        name, instruction, first = op.name, op.instruction, op.outputs[0]
        # a choice, such as a sampled token, is data, and so is a gradient
        op.is_choice = not (first.is_floating_point() or first.is_complex())
        op.is_choice |= op.func is torch.autograd.grad and not first.requires_grad
        passes_on = name == "requires_grad_" and learned
        if (
            name in IN_PLACE_ZEROS
            or op.is_choice
            or (first.is_leaf and first.requires_grad and not passes_on)
        ):
            self.table.records.pop(id(first), None)
            self._follow_data(op)
            return
        if instruction not in self.current:
            self.current.add(instruction)
            self.files.add(instruction.code.co_filename)
        self._record_nodes(op)
        if name not in DETACHES:
            states = (r for r in learned if r.source is not None or r.repeated)
            self.table.lost_states.update(r.lost for r in states if r.lost is not None)
        crosses = name not in DETACHES and any(r.chunk < self.clock.chunk for r in learned)
        if crosses and instruction not in self.carried:
            self._record_carried(op)
        one = len(set(map(id, learned))) == 1 and (
            name != "index_copy" or self.table.record_or_base(first) is learned[0]
        )
        if one and (name in COPY_OR_VIEW or name in EDITS):
            self._follow_data(op)
            result = self.table.passed_on(op, learned[0])
            if result.detach is not learned[0].detach:
                self.notify("on_detach", result.detach)
        elif puts_lanes_back(op):  # the result has states of several calls
            result = self.table.computed(op)
            result.source = None
        else:
            result = self.table.computed(op)
            self._follow_data(op)
            for handle in self.handlers["on_operation"]:
                handle(op, result)
        self.table.store(op.outputs, result)

    def _record_carried(self, op: Operation) -> None:
        """Record the variables that carry states with an earlier graph into an operation."""
        weighted = any(t.is_leaf and t.requires_grad for t in op.inputs)  # no sum of losses
        variables = [
            carrying_variable(tensor, current_frame())
            for tensor, record in op.pairs()
            if record is not None
            and record.chunk < self.clock.chunk
            and tensor.grad_fn is not None
            and (tensor.numel() > 1 or weighted)
        ]
        if variables:
            self.carried[op.instruction] = variables

    def note_gradients(self, leaves: Any) -> None:
        """Note that the loop uses the gradients of tensors that were detached."""
        for tensor in tensors(leaves):
            record = self.table.record_of(tensor)
            if record is not None and record.detach is not None:
                self.used_gradients.add(record.detach.instruction)

    def _record_nodes(self, op: Operation) -> None:
        for out in op.outputs:
            node = out.grad_fn
            number = sequence(node) if node is not None else LEAF
            if number < LEAF and (not self.node_numbers or number > self.node_numbers[-1]):
                self.node_numbers.append(number)
                self.node_instructions.append(op.instruction)

    def _drop_freed(self) -> None:
        self.table.drop_freed()
        self.data.drop_freed()

    def next_chunk(self) -> None:
        """Drop what the next chunk does not need; called after each backward."""
        self.boundary = next_sequence() - 1
        self.data.cuts.clear()
        self.table.settle_detaches()
        self.table.release_graphs()
        self._drop_freed()
        self.earlier |= self.current
        self.current = set()
        count = len(self.node_numbers)
        if count > 50_000:
            del self.node_numbers[: count // 2], self.node_instructions[: count // 2]
