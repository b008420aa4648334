"""The watcher: a torch mode that records operations and their lines."""

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
    carrying_variable,
    current_frame,
    user_frame,
)
from throughtime.doctor._log import Event, Log, Sum
from throughtime.doctor._records import (
    COPY_OR_VIEW,
    DETACHES,
    EDITS,
    GETTERS,
    IN_PLACE_ZEROS,
    STEPS,
    Operation,
    TensorRecord,
    is_in_place,
    operation_name,
    puts_lanes_back,
    tensors,
)
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
from throughtime.doctor.rules.layout import note_layout
from throughtime.errors import DiagnosisError

MAX_OPERATIONS = 20_000  # operations watched without a break
PURGE = 4_096  # operations after which freed tensors are dropped, if no backward comes
MIN_UNSENT = 4  # forward passes in a sum that no backward goes through


class Watcher(TorchFunctionMode):
    """Records operations while it is the current mode, and passes on those that matter."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log, self.table, self.data = log, RecordTable(log), RootTable()
        # of the rules: what follows operations, and what is called at an event
        self.on_operation: Callable[[Operation, TensorRecord], None]
        self.emit: Callable[[Event], None]
        self._instructions: dict[tuple[int, int], Instruction] = {}
        self.busy = False  # the doctor itself is at work
        self.closed = False  # after the doctor; on a user's stack it then only passes on
        self.active = False
        # units read copies: what comes before the first unit of a chunk is always watched
        self.follows_data = False
        self.internal_error: Exception | None = None
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
        if self.log.node_numbers:
            self.log.add_node(next_sequence() - 1, None)

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
        result = func(*args, **kwargs)
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
            self.log.reads += 1
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
                    root.random, root.chunk = self.log.loading, self.log.chunk

    def _record_change(self, target: Tensor, instruction: Instruction) -> None:
        if target.is_inference():  # has no version counter, and no backward needs it
            return
        number = self.log.node_numbers[-1] if self.log.node_numbers else -1
        self.log.in_place.append((version_of(target), target.shape, instruction, number))

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
        self.log.current.add(instruction)
        self._record_nodes(op)
        if name not in DETACHES:
            states = (r for r in learned if r.source is not None or r.repeated)
            self.log.lost_states.update(r.lost for r in states if r.lost is not None)
        crosses = name not in DETACHES and any(r.chunk < self.log.chunk for r in learned)
        if crosses and instruction not in self.log.carried:
            self._record_carried(op)
        one = len(set(map(id, learned))) == 1 and (
            name != "index_copy" or self.table.record_or_base(first) is learned[0]
        )
        if one and (name in COPY_OR_VIEW or name in EDITS):
            self._follow_data(op)
            result = self.table.passed_on(op, learned[0])
            detach, detaches = result.detach, self.log.detaches
            if detach is not None and detach is not learned[0].detach:
                detaches[instruction] = max(detaches.get(instruction, 0), detach.count)
        elif puts_lanes_back(op):  # the result has states of several calls
            result = self.table.computed(op)
            result.source = None
        else:
            result = self.table.computed(op)
            self._follow_data(op)
            self.on_operation(op, result)
            note_layout(self.data, op, result)
            self._record_sum(op, result)
        self.table.store(op.outputs, result)

    def _record_sum(self, op: Operation, result: TensorRecord) -> None:
        """Count the chunks, and the forward passes within one chunk, in a sum of losses."""
        out, log = op.outputs[0], self.log
        if op.is_recurrent or out.grad_fn is None or (out.numel() > 1 and op.name != "stack"):
            return
        known = [(t, r) for t, r in op.pairs() if r and t.numel() == 1 and t.grad_fn is not None]
        sums = [r for _, r in op.loop_inputs if any(r is record for _, record in known)]
        terms = [(t, r) for t, r in known if all(r is not each for each in sums)]
        crosses = any(r.chunk < log.chunk for r in sums)
        result.depth = max((r.depth + (r.chunk < log.chunk) for r in sums), default=0)
        calls = {r.call for _, r in terms}
        before = max((max(r.passes, 1) for r in sums), default=0)
        result.passes = before + len(calls - {r.call for r in sums})
        result.call = max(calls, default=result.call)
        total = Sum(op.instruction, log.chunk, result.depth if crosses else 0, result.passes)
        if result.passes >= MIN_UNSENT and terms:
            last = log.sums.get(op.instruction)
            if before < MIN_UNSENT and last and log.chunk <= last.chunk + 1:
                log.sent.add(op.instruction)  # it begins anew: a value of a single chunk
                del log.sums[op.instruction]
            if op.instruction not in log.sent:
                total.numbers = sequence(out.grad_fn), sequence(terms[-1][0].grad_fn)
                log.sums[op.instruction] = total
        self.emit(total)

    def _record_carried(self, op: Operation) -> None:
        """Record the variables that carry states with an earlier graph into an operation."""
        weighted = any(t.is_leaf and t.requires_grad for t in op.inputs)  # no sum of losses
        variables = [
            carrying_variable(tensor, current_frame())
            for tensor, record in op.pairs()
            if record is not None
            and record.chunk < self.log.chunk
            and tensor.grad_fn is not None
            and (tensor.numel() > 1 or weighted)
        ]
        if variables:
            self.log.carried[op.instruction] = variables

    def note_gradients(self, leaves: Any) -> None:
        """Note that the loop uses the gradients of tensors that were detached."""
        for tensor in tensors(leaves):
            record = self.table.record_of(tensor)
            if record is not None and record.detach is not None:
                self.log.used_gradients.add(record.detach.instruction)

    def _record_nodes(self, op: Operation) -> None:
        for out in op.outputs:
            node = out.grad_fn
            number = sequence(node) if node is not None else LEAF
            if number < LEAF:
                self.log.add_node(number, op.instruction)

    def _drop_freed(self) -> None:
        self.table.drop_freed()
        self.data.drop_freed()

    def next_chunk(self) -> None:
        """Drop what the next chunk does not need; called after each backward."""
        self.data.cuts.clear()
        self.table.settle_detaches()
        self.table.release_graphs()
        self._drop_freed()
