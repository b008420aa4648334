"""The table of records: which tensors the watched operations made, and what they depend on."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from throughtime.doctor._autograd import leaf_ids
from throughtime.doctor._frames import Instruction
from throughtime.doctor._log import Log
from throughtime.doctor._records import (
    CASTS,
    CELLS,
    CLONES,
    COPY_OR_VIEW,
    DETACHES,
    EDITS,
    EMPTY,
    DetachRecord,
    Operation,
    TensorRecord,
    Unit,
    UnitCall,
    is_edit,
    numbers,
    tensors,
)
from throughtime.doctor._torch_private import LEAF, base_of, sequence, storage_of

MAX_LINEAGE = 400  # instructions in a lineage


class RecordTable:
    """The records of tensors, by their identity; `log` is the position in the loop.

    A state that was passed on while the watcher was off has no record. It lies in the same memory,
    with or without its graph, as what a unit returned last, or has its values.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.records: dict[int, TensorRecord] = {}  # by the id of the tensor
        # the last outputs of each recurrent unit with their call and dimension of lanes; without
        # their graph, with the record of a state
        self.latest: dict[Unit, tuple[Any, UnitCall, int]] = {}
        self.outputs: dict[Unit, tuple[list[Tensor], TensorRecord]] = {}
        self.kept_detaches: set[Instruction] = set()
        # the last detaches: the result, the number and the record of the tensor, the instruction
        self.detached: list[tuple[Any, int, TensorRecord, Instruction]] = []

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
        return self.record_or_base(tensor) or self._record_of_output(tensor)

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
                records[i] = records[i] or self._record_of_output(inputs[i])
        elif name in COPY_OR_VIEW and inputs and records[0] is None and inputs[0].requires_grad:
            records[0] = self._record_of_output(inputs[0])  # returned while the watcher was off
        return records

    def _record_of_output(self, tensor: Tensor) -> TensorRecord | None:
        """The record of a state that is an output: in its memory, or with its values.

        The values came back as a copy, such as one through NumPy.
        """
        if not (self.latest or self.outputs) or tensor.layout is not torch.strided:
            return None
        self.release_graphs()
        storage = storage_of(tensor)
        for outputs, record in self.outputs.values():
            if any(storage_of(output) == storage for output in outputs):
                return record
        for outputs, record in self.outputs.values():
            if any(_is_copy(tensor, output) for output in outputs):
                return replace(record, copies=1)
        return None

    def release_graphs(self) -> None:
        """Keep the last outputs of the units without their graphs."""
        for unit, (tree, call, lane_dim) in self.latest.items():
            outputs = tensors(tree)
            record = TensorRecord(
                call.chunk,
                call.instruction,
                weakref.ref(outputs[0]),
                source=call,
                detach=call.detach,
                index=numbers(outputs[0], lane_dim, None, call.steps),
            )
            self.outputs[unit] = [output.detach() for output in outputs], record
        self.latest.clear()

    def store(self, outputs: list[Tensor], result: TensorRecord) -> None:
        """Store the record of each output; the numbers may be one for each."""
        index = result.index
        for i, out in enumerate(outputs):
            record = result if i == 0 else result.copy()
            record.ref = weakref.ref(out)
            if index is not None and not isinstance(index, Tensor):
                record.index = index[i] if i < len(index) else None
            self.records[id(out)] = record

    def computed(self, op: Operation) -> TensorRecord:
        """The record of a new value, with what it inherits from the inputs."""
        instruction = op.instruction
        log = self.log
        result = TensorRecord(log.chunk, instruction, edited=True, call=log.call)
        lineage, path = EMPTY, EMPTY
        source = None
        for tensor, record in op.pairs():
            if record is None:
                continue
            source = source or record.source
            lineage = _union(lineage, record.lineage)
            detach = record.detach
            if detach and (result.detach is None or detach.count > result.detach.count):
                result.detach = detach
            if tensor.requires_grad:
                path = _union(path, record.path)
                result.repeated |= record.repeated or instruction in record.path
            if not op.is_recurrent and instruction in record.lineage:
                op.loop_inputs.append((tensor, record))
        self._join(op, result)
        if len(lineage) < MAX_LINEAGE:
            lineage, path = _union(lineage, {instruction}), _union(path, {instruction})
        result.lineage, result.path, result.source = lineage, path, source
        return result

    @staticmethod
    def _join(op: Operation, result: TensorRecord) -> None:
        """Record a state that was put together from parts of one state."""
        if op.name not in {"stack", "cat"}:
            return
        parts = [r for r in op.records if r is not None and r.index is not None]
        sources = {id(r.source) if not r.edited else 0 for r in parts}
        if len(parts) == len(op.records) and len(sources) == 1:
            result.edited = parts[0].edited
            result.index = _applied(op, [r.index for r in parts])

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
            self.detached.append((weakref.ref(op.outputs[0]), number, record, instruction))
            result.path, result.repeated, result.depth, result.passes = EMPTY, False, 0, 0
            result.lost = None
        elif instruction not in record.path and len(record.path) < MAX_LINEAGE:
            result.path = record.path | {instruction}
        result.edited = record.edited or is_edit(op)
        result.copies += name in CLONES
        moves = name not in DETACHES | CASTS | EDITS and op.args and source is op.args[0]
        if moves and record.index is not None:
            fits = record.index.shape == source.shape
            result.index = _applied(op, record.index) if fits else None
        if instruction not in record.lineage and len(record.lineage) < MAX_LINEAGE:
            result.lineage = record.lineage | {instruction}
        return result

    def _detached(
        self, instruction: Instruction, record: TensorRecord, source: Tensor
    ) -> DetachRecord:
        """The record of a detach; it counts those of the same line and weights in this chunk."""
        weights = EMPTY if record.repeated else leaf_ids(source.grad_fn)
        last, chunk = record.detach, self.log.chunk
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

    def settle_detaches(self) -> None:
        """At the next operation: a result that is gone before any has used it was not kept."""
        gone = {entry[3] for entry in self.detached if entry[0]() is None}
        for _, number, record, instruction in self.detached:
            if instruction not in gone:
                self.kept_detaches.add(instruction)
                # nor is another detach of the same tensor lost
                self.log.lost_states.discard(self.log.lost_detaches.get(number, instruction))
            elif instruction not in self.kept_detaches:  # the last one of a loop is not kept either
                self.log.lost_detaches[number] = record.lost = instruction
        self.detached.clear()

    def drop_freed(self) -> None:
        """Drop the records of freed tensors."""
        self.records = {i: r for i, r in self.records.items() if r.ref() is not None}


def _union(a: frozenset[Any], b: frozenset[Any] | set[Any]) -> frozenset[Any]:
    """The union; `a` itself if that is all, as in most steps of a loop."""
    return a if b is a or b <= a else a | b


def _applied(op: Operation, other: Any) -> Any:
    """The operation on something else in place of its first argument; `None` where it fails."""
    try:
        return op.func(other, *op.args[1:], **op.kwargs)
    except (IndexError, RuntimeError, TypeError):
        return None


def _is_copy(tensor: Tensor, output: Tensor) -> bool:
    """Whether a tensor without a graph has the values of an output that is not all zeros."""
    return (
        not tensor.requires_grad
        and (output.shape, output.dtype, output.device)
        == (tensor.shape, tensor.dtype, tensor.device)
        and bool((output == tensor).all())
        and bool(output.any())
    )
