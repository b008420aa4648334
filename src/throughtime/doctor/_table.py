"""The table of records: which tensors the watched operations made, and what they depend on."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from throughtime.doctor._autograd import leaf_ids
from throughtime.doctor._frames import Instruction, is_lost_detach
from throughtime.doctor._operations import (
    CASTS,
    CLONES,
    COPIES,
    COPY_OR_VIEW,
    DETACHES,
    ELEMENTWISE,
    PACK,
    ROWS,
    SELECTIONS,
    SLICES,
    STEPS,
    dim_of,
    has_mask,
    is_edit,
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
from throughtime.doctor._torch_private import LEAF, base_of, sequence

MAX_LINEAGE = 400  # instructions in a lineage


def _union(a: frozenset[Any], b: frozenset[Any] | set[Any]) -> frozenset[Any]:
    """The union; `a` itself if that is all, as in most steps of a loop."""
    return a if b is a or b <= a else a | b


class RecordTable:
    """The records of tensors, by their identity.

    Args:
        clock: the position in the loop.
        on_detach: called with a detach and the record of the detached tensor.
    """

    def __init__(
        self, clock: Clock, on_detach: Callable[[DetachRecord, TensorRecord], object]
    ) -> None:
        self.clock, self.on_detach = clock, on_detach
        self.records: dict[int, TensorRecord] = {}  # by the id of the tensor
        self.layers = LayerOutputs()
        # calls of detach whose result is discarded: by the sequence number of the tensor, and those
        # of states
        self.lost_detaches: dict[int, Instruction] = {}
        self.lost_states: set[Instruction] = set()

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

    def records_of(self, name: str, inputs: list[Tensor]) -> list[TensorRecord | None]:
        """The records of the inputs of an operation."""
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
        elif name in COPY_OR_VIEW and inputs and records[0] is None and inputs[0].requires_grad:
            records[0] = self.layers.record_of(inputs[0])  # returned while the watcher was off
        return records

    def add_copy(self, op: Operation) -> None:
        """Add the records of data that were copied or taken from other data."""
        for out in op.outputs:
            if (
                self._is_followed(op)
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
            elif (
                op.name in STEPS and isinstance(op.args[0], Tensor) and op.args[0].dim() > out.dim()
            ):
                self.records[id(out)] = TensorRecord(
                    self.clock.chunk, op.instruction, weakref.ref(out), whole=op.args[0]
                )
            elif op.name in {"zero_", "fill_"}:
                self.records.pop(id(out), None)

    def _is_followed(self, op: Operation) -> bool:
        """Whether the elements of a copy have a position in its source.

        Arithmetic before the loop makes other data. A tensor that is joined with itself has no
        single position.
        """
        if op.name in {"cat", "stack"} and op.args:
            return len(set(map(id, op.inputs))) == len(op.inputs)
        in_loop = op.name not in ELEMENTWISE or self.clock.recurrent is not None
        return op.name in COPIES and in_loop and bool(op.args)

    def store(self, outputs: list[Tensor], result: TensorRecord, separate: bool) -> None:
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

    def computed(self, op: Operation) -> TensorRecord:
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

    def passed_on(self, op: Operation, record: TensorRecord) -> TensorRecord:
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
        result.edited = record.edited or is_edit(op)
        result.copies += name in CLONES
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
        self.add_copy(replace(op, args=args, inputs=[data], records=[None], outputs=outputs))
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

    def drop_freed(self) -> None:
        """Drop the records of freed tensors."""
        self.records = {i: r for i, r in self.records.items() if r.ref() is not None}
