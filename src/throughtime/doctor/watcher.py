"""The watcher: a torch mode that records operations, their lines and what results depend on."""

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from throughtime.doctor._autograd import leaf_ids
from throughtime.doctor._frames import (
    Instruction,
    Variable,
    carrying_variable,
    current_frame,
    is_lost_detach,
    user_frame,
    variable_path,
)
from throughtime.doctor._operations import (
    CASTS,
    COPIES,
    COPY_OR_VIEW,
    DETACHES,
    EDITS,
    GETTERS,
    PACK,
    ROWS,
    SELECTIONS,
    SLICES,
    dim_of,
    has_mask,
    is_in_place,
    operation_name,
    puts_lanes_back,
    selection,
)
from throughtime.doctor._outputs import LayerOutputs
from throughtime.doctor._records import (
    CELLS,
    EMPTY,
    Clock,
    CopyRecord,
    DetachRecord,
    Operation,
    TensorRecord,
    tensors,
)
from throughtime.doctor._torch_private import (
    ATTRIBUTE_GETTER,
    LEAF,
    base_of,
    current_mode,
    mode_depth,
    next_sequence,
    sequence,
    version_of,
)
from throughtime.errors import DiagnosisError

MAX_OPERATIONS = 20_000  # operations watched without a break
PURGE = 4_096  # operations after which freed tensors are dropped, if no backward comes
MAX_LINEAGE = 400  # instructions in a lineage
MAX_CHANGES = 5_000  # in-place changes remembered


def _union(a: frozenset[Any], b: frozenset[Any] | set[Any]) -> frozenset[Any]:
    """The union; `a` itself if that is all, as in most steps of a loop."""
    return a if b is a or b <= a else a | b


class Watcher(TorchFunctionMode):
    """Records operations while it is the current mode, and passes those that matter to the rules.

    Args:
        clock: the position in the loop.
        on_operation: called with an operation that depends on parameters and the record of its
            results.
        on_detach: called with a detach and the record of the detached tensor.
        on_error: called with an error, the inputs of the operation that raises it, their records.
    """

    def __init__(
        self,
        clock: Clock,
        on_operation: Callable[[Operation, TensorRecord], None],
        on_detach: Callable[[DetachRecord, TensorRecord], object],
        on_error: Callable[[RuntimeError, list[Tensor], list[TensorRecord | None]], object],
    ) -> None:
        super().__init__()
        self.clock, self.on_operation, self.on_detach = clock, on_operation, on_detach
        self.on_error = on_error
        self.records: dict[int, TensorRecord] = {}  # by the id of the tensor
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
        # calls of detach whose result is discarded: by the sequence number of the tensor, and those
        # of states
        self.lost_detaches: dict[int, Instruction] = {}
        self.lost_states: set[Instruction] = set()
        self.used_gradients: set[Instruction] = set()  # detaches whose gradient the loop uses
        self.layers = LayerOutputs()
        self.busy = False  # the doctor itself is at work
        self.closed = False  # after the doctor; on a user's stack it then only passes on
        self.active = False
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
        if self.closed or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        iterates = func is Tensor.__iter__
        if iterates:
            func = torch.unbind
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if not self.busy:
                inputs = [*tensors(args), *tensors(tuple(kwargs.values()))]
                self.on_error(error, inputs, [self.record_or_base(t) for t in inputs])
            raise
        if (
            not self.busy
            and self.operations <= MAX_OPERATIONS
            and (isinstance(result, (Tensor, tuple, list)) or func is Tensor.__setitem__)
            and (
                not isinstance(func, ATTRIBUTE_GETTER) or self._is_recorded(func, current_frame(1))
            )
        ):
            frame = user_frame(current_frame(1), skip_optimizer=False)
            if frame is not None:
                self.guarded(self._record, func, args, kwargs, result, frame)
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

    def record_of(self, tensor: Tensor) -> TensorRecord | None:
        """The record of a tensor."""
        record = self.records.get(id(tensor))
        return record if record is not None and record.ref() is tensor else None

    def record_or_base(self, tensor: Tensor) -> TensorRecord | None:
        """The record of a tensor, or of the tensor that it is a view of."""
        record = self.record_of(tensor)
        base = base_of(tensor) if record is None else None
        return record if base is None else self.record_of(base)

    def record_of_state(self, tensor: Tensor) -> TensorRecord | None:
        """The record of a state, also of one that was passed on while the watcher was off."""
        return self.record_or_base(tensor) or self.layers.record_of(tensor)

    def pass_data_on(self, data: Any, result: Any) -> None:
        """Record the data behind the outputs of a module that is called while this is off."""
        frame = user_frame(current_frame(1))
        if not isinstance(data, Tensor) or not isinstance(result, Tensor) or frame is None:
            return
        record = self.record_or_base(data)
        if record is not None and record.learned:
            data = record.data
        if data is not None and not data.requires_grad:
            instruction = self.instruction_at(frame)
            self.records[id(result)] = TensorRecord(
                self.clock.chunk, instruction, weakref.ref(result), learned=True, data=data
            )

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
        table = self.records
        records = [
            record
            if (record := table.get(id(t))) is not None and record.ref() is t
            else self.record_or_base(t)
            for t in inputs
        ]
        if name in CELLS:
            for i in range(1, 3 if name == "lstm_cell" else 2):
                records[i] = records[i] or self.layers.record_of(inputs[i])
        if is_in_place(name) and inputs:
            result = inputs[0]
            self._record_change(inputs[0], instruction)
        op = Operation(name, func, args, kwargs, inputs, records, tensors(result), instruction)
        learned = [r for r in records if r is not None and r.learned]
        if not learned and not any(t.requires_grad for t in inputs):
            self._record_copy(op)
        elif op.outputs:
            self._record_learned(op, learned)

    def _record_change(self, target: Tensor, instruction: Instruction) -> None:
        if target.is_inference():  # has no version counter, and no backward needs it
            return
        number = self.node_numbers[-1] if self.node_numbers else -1
        self.in_place.append((version_of(target), target.shape, instruction, number))

    def _record_copy(self, op: Operation) -> None:
        for out in op.outputs:
            if (
                op.name in COPIES
                and base_of(out) is None
                and not out.requires_grad
                and out is not op.args[0]
            ):
                origin = CopyRecord(
                    op.name, op.func, op.args, op.kwargs, out.shape, self.clock.loading
                )
                self.records[id(out)] = TensorRecord(
                    self.clock.chunk, op.instruction, weakref.ref(out), origin=origin
                )
            elif op.name in {"zero_", "fill_"}:
                self.records.pop(id(out), None)

    def _record_learned(self, op: Operation, learned: list[TensorRecord]) -> None:
        name, instruction, first = op.name, op.instruction, op.outputs[0]
        # a choice, such as a sampled token, is data, and so is a gradient
        is_choice = not (first.is_floating_point() or first.is_complex())
        is_choice |= op.func is torch.autograd.grad and not first.requires_grad
        passes_on = name == "requires_grad_" and learned
        if (
            name in {"zero_", "fill_"}
            or is_choice
            or (first.is_leaf and first.requires_grad and not passes_on)
        ):
            self.records.pop(id(first), None)
            return
        if instruction not in self.current:
            self.current.add(instruction)
            self.files.add(instruction.code.co_filename)
        self._record_nodes(op)
        if instruction not in self.carried and any(r.chunk < self.clock.chunk for r in learned):
            self._record_carried(op)
        one = len(set(map(id, learned))) == 1 and (
            name != "index_copy" or self.record_or_base(first) is learned[0]
        )
        if one and (name in COPY_OR_VIEW or name in EDITS):
            result = self._passed_on(op, learned[0])
        elif puts_lanes_back(op):  # the result has states of several calls
            result = self._computed(op)
            result.source = None
        else:
            result = self._computed(op)
            self.on_operation(op, result)
        separate = name == "unbind" and result.lane_dim == dim_of(op)
        if result.rows is not None and separate and len(result.rows) != len(op.outputs):
            separate, result.edited = False, True
        self._store(op.outputs, result, separate)

    def _record_carried(self, op: Operation) -> None:
        """Record the variables that carry states with an earlier graph into an operation."""
        weighted = any(t.is_leaf and t.requires_grad for t in op.inputs)  # no sum of losses
        variables = [
            carrying_variable(tensor, current_frame())
            for tensor, record in op.pairs()
            if record is not None
            and record.learned
            and record.chunk < self.clock.chunk
            and tensor.grad_fn is not None
            and (tensor.numel() > 1 or weighted)
        ]
        if variables:
            self.carried[op.instruction] = variables

    def note_gradients(self, leaves: Any) -> None:
        """Note that the loop uses the gradients of tensors that were detached."""
        for tensor in tensors(leaves):
            record = self.record_of(tensor)
            if record is not None and record.detach is not None:
                self.used_gradients.add(record.detach.instruction)

    def _store(self, outputs: list[Tensor], result: TensorRecord, separate: bool) -> None:
        """Store the record of each output; they may be the separate lanes of a state."""
        lane_dims, time_dims, data = result.lane_dim, result.time_dim, result.data
        lanes = result.rows
        for i, out in enumerate(outputs):
            record = result if i == 0 else result.copy()
            if separate:
                record.rows, record.lane_dim = [i if lanes is None else lanes[i]], None
            record.ref = weakref.ref(out)
            if isinstance(lane_dims, list):
                record.lane_dim = lane_dims[i]
            if isinstance(time_dims, list):
                record.time_dim = time_dims[i]
            if isinstance(data, (tuple, list)):
                record.data = data[i] if i < len(data) else None
            self.records[id(out)] = record

    def _record_nodes(self, op: Operation) -> None:
        for out in op.outputs:
            node = out.grad_fn
            number = sequence(node) if node is not None else LEAF
            if number < LEAF and (not self.node_numbers or number > self.node_numbers[-1]):
                self.node_numbers.append(number)
                self.node_instructions.append(op.instruction)

    def _computed(self, op: Operation) -> TensorRecord:
        """The record of a new value, with what it inherits from the inputs."""
        instruction = op.instruction
        clock = self.clock
        result = TensorRecord(clock.chunk, instruction, learned=True, edited=True, call=clock.call)
        lineage, path = EMPTY, EMPTY
        data = source = None
        for tensor, record in op.pairs():
            if record is None or not record.learned:
                if data is None and not tensor.requires_grad:
                    data = tensor
                continue
            if data is None:
                data = record.data
            source = source or record.source
            lineage = _union(lineage, record.lineage)
            result.masked |= record.masked
            detach = record.detach
            if detach and (result.detach is None or detach.count > result.detach.count):
                result.detach = detach
            if tensor.requires_grad:
                path = _union(path, record.path)
                result.repeated |= record.repeated or instruction in record.path
            if not op.is_recurrent and instruction in record.lineage:
                op.loop_inputs.append((tensor, record))
        result.masked |= has_mask(op)
        if op.name == "stack":
            self._stack_lanes(op, result)
        if len(lineage) < MAX_LINEAGE:
            lineage, path = _union(lineage, {instruction}), _union(path, {instruction})
        result.lineage, result.path, result.source = lineage, path, source
        result.data = self._packed(op, data) if op.name == PACK else data
        return result

    @staticmethod
    def _stack_lanes(op: Operation, result: TensorRecord) -> None:
        """Record a state that was put together from lanes of one state."""
        first = op.records[0]
        lanes = [r.rows for r in op.records if r is not None and r.rows and r.lane_dim is None]
        sources = {id(r.source) if r is not None and not r.edited else 0 for r in op.records}
        if first is not None and len(lanes) == len(op.records) and len(sources) == 1:
            result.rows, result.edited = [rows[0] for rows in lanes], first.edited
            result.lane_dim = dim_of(op)

    def _passed_on(self, op: Operation, record: TensorRecord) -> TensorRecord:
        """The record of the same state in another form: detached, copied, masked, rows selected."""
        instruction, name = op.instruction, op.name
        result = record.copy()
        result.instruction = instruction
        result.repeated = record.repeated or instruction in record.path
        source = next((t for t in op.inputs if self.record_or_base(t) is record), op.inputs[0])
        if name in DETACHES and source.requires_grad and not isinstance(source, nn.Parameter):
            result.detach = self._detached(instruction, record, source)
            number = LEAF if source.grad_fn is None else sequence(source.grad_fn)
            if name == "detach" and is_lost_detach(instruction):
                self.lost_detaches[number] = instruction
                if record.source is not None or record.repeated:
                    self.lost_states.add(instruction)
            else:  # another detach of the same tensor is not lost
                self.lost_states.discard(self.lost_detaches.get(number, instruction))
            result.path, result.repeated = EMPTY, False
            self.on_detach(result.detach, record)
        elif instruction not in record.path and len(record.path) < MAX_LINEAGE:
            result.path = record.path | {instruction}
        result.edited = record.edited or name in EDITS or name == "__setitem__"
        result.masked |= has_mask(op)
        if op.args and source is op.args[0]:
            if name in SELECTIONS:
                self._select(op, source, result)
            elif result.time_dim is not None and name not in DETACHES | CASTS:
                result.time_dim = None
            if record.data is not None and name in SLICES | ROWS:
                result.data = self._sliced(op, source, record.data)
        if instruction not in record.lineage and len(record.lineage) < MAX_LINEAGE:
            result.lineage = record.lineage | {instruction}
        return result

    def _detached(
        self, instruction: Instruction, record: TensorRecord, source: Tensor
    ) -> DetachRecord:
        """The record of a detach; it counts those of the same line and weights in this chunk."""
        weights = EMPTY if record.repeated else leaf_ids(source.grad_fn)
        last, chunk = record.detach, self.clock.chunk
        repeats = (
            last is not None
            and (last.instruction, last.chunk) == (instruction, chunk)
            and not record.repeated
            and weights & last.weights
        )
        count = last.count + 1 if last and repeats else 1
        detach = DetachRecord(instruction, chunk, count, weights)
        if record.source is not None:
            record.source.detach = detach
        return detach

    def _sliced(self, op: Operation, source: Tensor, data: Tensor) -> Any:
        """The same part of the data, if data and source have the same leading dimensions."""
        if data.dim() >= source.dim() or data.shape != source.shape[: data.dim()]:
            return None
        return self._same_of_data(op, data)

    def _packed(self, op: Operation, data: Tensor | None) -> Any:
        """The data packed like the results, if they have the same steps and lanes."""
        if data is None or data.shape[:2] != op.args[0].shape[:2]:
            return None
        return self._same_of_data(op, data)

    def _same_of_data(self, op: Operation, data: Tensor) -> Any:
        """What a selection takes from the data behind its input, recorded as a copy of them."""
        try:
            part = op.func(data, *op.args[1:], **op.kwargs)
        except (IndexError, RuntimeError, TypeError):
            return None
        args, outputs = (data, *op.args[1:]), tensors(part)
        self._record_copy(replace(op, args=args, inputs=[data], records=[None], outputs=outputs))
        return part

    @staticmethod
    def _select(op: Operation, source: Tensor, result: TensorRecord) -> None:
        """Record which lanes or which step a selection takes from a state."""
        lane, time, dims = result.lane_dim, result.time_dim, source.dim()
        result.time_dim = None
        if time is not None and time < dims:
            steps, new_dim = selection(op, source, time)
            if len(steps) == 1:
                result.position = steps[0]
            elif len(steps) == source.shape[time]:
                result.time_dim = new_dim
        if lane is None or lane >= dims:
            return
        rows = result.rows
        if rows is not None and len(rows) != source.shape[lane]:
            result.rows, result.edited = None, True
            return
        taken, result.lane_dim = selection(op, source, lane)
        result.rows = taken if rows is None else [rows[i] for i in taken]

    def _drop_freed(self) -> None:
        """Drop the records of freed tensors."""
        self.records = {i: r for i, r in self.records.items() if r.ref() is not None}

    def next_chunk(self) -> None:
        """Drop what the next chunk does not need; called after each backward."""
        self.boundary = next_sequence() - 1
        self.layers.release_graphs()
        self._drop_freed()
        self.earlier |= self.current
        self.current = set()
        count = len(self.node_numbers)
        if count > 50_000:
            del self.node_numbers[: count // 2], self.node_instructions[: count // 2]
