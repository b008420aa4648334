"""Rules of the state: never carried, carried over a boundary, or carried with an endless graph.

Codes TT201, TT202 and TT204 to TT207. A lane is a row of the batch; a recording is one unbroken
sequence of data.
"""

from types import FrameType
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from throughtime.doctor._frames import Instruction, SourceLine, enclosing_loop, line_of
from throughtime.doctor._provenance import MAX_LANES, lane_ends, relation
from throughtime.doctor._records import Operation, TensorRecord, Unit, UnitCall, tensors
from throughtime.doctor._torch_private import base_of, root_of
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules.rule import Rule
from throughtime.doctor.watcher import Watcher

MAX_ROOTS = 64  # recordings remembered, the lanes of some chunks
FRESH_CHUNKS = 3  # adjacent chunks that start from zeros before it is reported
# an evaluation in one graph: chunks of a layer or steps of a cell before it is reported
CONNECTED_CHUNKS, CONNECTED_STEPS = 4, 32
LONG = 256  # steps before the only backward


class StateRule(Rule):
    """Compares each call of a recurrent unit with the one that its state comes from."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.last: dict[tuple[Unit, bool | None], UnitCall] = {}
        # adjacent chunks from zeros: how many, the last one, the lengths of those before them
        self.fresh: dict[Unit, tuple[int, Instruction, set[int]]] = {}
        self.carried: set[Unit] = set()
        self.recordings: dict[int, Tensor] = {}  # tensors of which two adjacent chunks were read
        self.axes: dict[int, tuple[Tensor, int]] = {}  # dimension of time by tensor
        # tensors that a state of another recording entered, with line, name and chunks
        self.entered: dict[int, tuple[Tensor, SourceLine, str, tuple[int, int]]] = {}
        self.evaluations: dict[Unit, UnitCall] = {}  # the last call of a connected graph
        self.trained: dict[Unit, int] = {}  # the most calls connected before a backward
        self.longest: UnitCall | None = None
        self.running: dict[int, UnitCall] = {}  # by module, the first call in the chunk

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        if not op.is_recurrent:
            self._hand_written(op, result)
            return
        call = self._layer_or_cell(op, result)
        outputs = op.outputs[1:] if op.is_layer else op.outputs
        self.watcher.layers.remember(outputs, call, 1 if op.is_layer else 0)

    def before_module(self, module: nn.Module, inputs: Any, frame: FrameType | None) -> None:
        """Handle a layer or cell that is called while the watcher is off.

        The first call in a chunk is compared; of a cell's other steps only the end is remembered.
        """
        clock, call = self.clock, self.running.pop(id(module), None)
        data = inputs[0] if inputs else None
        if not isinstance(data, Tensor):
            return
        layer, now = isinstance(module, nn.RNNBase), (clock.chunk, clock.batch, clock.training)
        if call is not None and not layer and (call.chunk, call.batch, call.training) == now:
            call.data, call.lanes = data if call.data is not None else None, None
        elif frame is not None and data.dim() == (3 if layer else 2):
            call = self._module_call(module, inputs, data, frame)
        else:
            return
        self.running[id(module)] = call

    def _module_call(
        self, module: nn.Module, inputs: Any, data: Tensor, frame: FrameType
    ) -> UnitCall:
        record = self.watcher.record_or_base(data)
        is_data = not data.requires_grad and (record is None or not record.learned)
        call = self._new_call(
            id(next(module.parameters())),
            self.watcher.instruction_at(frame),
            data if is_data else None,
            *_dims(data, isinstance(module, nn.RNNBase), getattr(module, "batch_first", False)),
        )
        # hooks of all modules do not receive a state that is passed by keyword
        state_known = len(inputs) > 1
        self._compare(call, tensors(inputs[1] if state_known else ()), state_known)
        return call

    def after_module(self, module: nn.Module, result: Any) -> None:
        """Remember the outputs of a layer or cell that was called while the watcher is off."""
        call = self.running.get(id(module))
        if call is not None and result is not None:
            layer = isinstance(module, nn.RNNBase)
            self.watcher.layers.remember(result[1] if layer else result, call, int(layer))

    def _new_call(
        self,
        unit: Unit,
        instruction: Instruction,
        data: Tensor | None,
        steps: int = 1,
        lane_dim: int | None = 0,
        time_dim: int | None = None,
    ) -> UnitCall:
        clock = self.clock
        before = self.last.get((unit, clock.training))
        if before is not None and before.chunk < clock.chunk:
            self.trained[unit] = max(self.trained.get(unit, 0), before.graph_calls)
        return UnitCall(
            unit,
            instruction,
            clock.chunk,
            clock.call,
            clock.batch,
            clock.training,
            is_grad_enabled(),
            data,
            steps,
            lane_dim,
            time_dim,
            graph_steps=steps,
        )

    def _layer_or_cell(self, op: Operation, result: TensorRecord) -> UnitCall:
        """A call of a layer or cell of torch."""
        args, inputs, layer = op.args, op.inputs[0], op.is_layer
        packed = layer and isinstance(args[3] if len(args) > 3 else None, (list, tuple))
        state, weights = args[2:4] if packed else args[1:3]
        unit = id(weights[0] if layer else weights)
        dims = _dims(inputs, layer, layer and args[8])
        if packed:
            dims = len(args[1]), None, None
        result.lane_dim = 0 if not layer else None if inputs.dim() == 2 else [dims[1], 1, 1]
        result.repeated |= dims[0] > 1 or unit in result.path
        result.path, result.lineage = result.path | {unit}, result.lineage | {unit}
        record = op.records[0]
        data = inputs if record is None or not record.learned else record.data
        leading = 2 if layer else 1
        if data is not None and (packed or data.shape[:leading] != inputs.shape[:leading]):
            data = None
        call = self._new_call(unit, op.instruction, data, *dims)
        self._compare(call, [state] if isinstance(state, Tensor) else list(state))
        result.source, result.edited = call, False
        return call

    def _hand_written(self, op: Operation, result: TensorRecord) -> None:
        """Any other operation; it is a recurrent unit if it takes in a result of its own."""
        out, key = op.outputs[0], op.instruction
        is_state = out.dim() in {1, 2} and out.numel() > 1
        if not op.loop_inputs and is_state and (key, self.clock.training) in self.last:
            self._hand_written_start(op, result)
            return
        if not op.loop_inputs or not is_state:
            result.source = None if out.numel() == 1 else result.source
            return
        states = [tensor for tensor, _ in op.loop_inputs]
        data, result.lane_dim = _data_of(op, states)
        if data is None:
            return
        call = self._new_call(key, key, data, lane_dim=result.lane_dim)
        self._compare(call, states)
        result.data, result.source, result.edited = data, call, False

    def _hand_written_start(self, op: Operation, result: TensorRecord) -> None:
        """An operation that took in its own result before and now does not.

        If one of its inputs is all zeros, that is its state.
        """
        zeros = next(
            (t for t in op.inputs if not isinstance(t, nn.Parameter) and not bool(t.any())), None
        )
        if zeros is None:
            return
        data, lane_dim = _data_of(op, [zeros])
        if data is None:
            return
        call = self._new_call(op.instruction, op.instruction, data, lane_dim=lane_dim)
        self._compare_start(call, [])
        self.last[call.unit, call.training] = call
        result.source, result.edited, result.data, result.lane_dim = call, False, data, lane_dim

    def _compare(self, call: UnitCall, states: list[Tensor], state_known: bool = True) -> None:
        """Compare a call with the one that its state comes from."""
        records = [r for r in map(self.watcher.record_of_state, states) if r and r.learned]
        state = next((r for r in records if r.source and r.source.unit == call.unit), None)
        has_graph = any(t.requires_grad for t in states)
        if state is not None and state.source is not None:
            origin = state.source
            if origin.chunk != call.chunk:
                self.clock.crossed.add(call.chunk)
            elif origin.call != call.call and call.steps > 1:
                continued = self.clock.continued
                continued[call.unit] = continued.get(call.unit, 0) + 1
            self._count_graph(call, origin, has_graph)
            if self._at_boundary(call, origin):
                self._check_carried(call, origin, state)
        elif state_known and not records and not has_graph:
            self._compare_start(call, states)
        self.last.pop((call.unit, call.training), None)
        self.last[call.unit, call.training] = call
        self.clock.recurrent = self.clock.units[call.unit] = call.instruction

    def _at_boundary(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether a new chunk begins between two calls."""
        if (call.chunk, call.batch, call.training, call.grad) != (
            origin.chunk,
            origin.batch,
            origin.training,
            origin.grad,
        ):
            return True
        if call.call == origin.call:
            return False
        return (
            call.steps > 1
            or call.data is None
            or origin.data is None
            or root_of(call.data) is not root_of(origin.data)
        )

    def _lanes(self, call: UnitCall) -> Any:
        if call.lanes is None and call.data is not None:
            record_of = self.watcher.record_of
            call.lanes = lane_ends(call.data, call.lane_dim, call.time_dim, record_of) or ()
        return call.lanes or None

    def _relation(self, origin: UnitCall, call: UnitCall, rows: Any = None) -> str:
        if rows is None and self._is_next_slice(origin, call):
            return "next"
        before, after = self._lanes(origin), self._lanes(call)
        if not before or not after or (rows is None and len(before) != len(after)):
            return ""
        return relation(before, after, list(range(MAX_LANES)) if rows is None else rows)

    def _is_next_slice(self, origin: UnitCall, call: UnitCall) -> bool:
        """Whether a chunk is the next slice along the known dimension of time: cheap and usual."""
        a, b = origin.data, call.data
        if a is None or b is None or a.stride() != b.stride() or a.shape != b.shape:
            return False
        root = base_of(a)
        base, dim = self.axes.get(id(root), (None, 0))
        if base is None or base is not root or base_of(b) is not root:
            return False
        stride, steps = base.stride(dim), 1 if origin.time_dim is None else a.shape[origin.time_dim]
        moved = b.storage_offset() - a.storage_offset()
        index = int(b.storage_offset() - base.storage_offset()) // stride % base.shape[dim]
        return moved == steps * stride and index >= steps

    def _learn_axis(self, call: UnitCall, origin: UnitCall) -> None:
        """Remember the dimension of a tensor along which its chunks follow one another."""
        before, after = origin.lanes, call.lanes
        base = base_of(call.data) if call.data is not None else None
        if not before or not after or base is None or base is not after[0].first.root:
            return
        pairs = enumerate(zip(before[0].last.index, after[0].first.index, strict=True))
        _remember(self.axes, id(base), (base, next(dim for dim, (i, k) in pairs if i != k)))

    def _check_carried(self, call: UnitCall, origin: UnitCall, state: TensorRecord) -> None:
        order = self._relation(origin, call, state.rows)
        if order == "next":
            self.carried.add(call.unit)
            if origin.lanes:
                self._add_recording(origin)
                self._learn_axis(call, origin)
            return
        if state.edited and order != "rows":
            return
        line, new_phase = line_of(call.instruction), call.training != origin.training
        new_batch = call.batch != origin.batch
        starts = order == "start" and self._is_recording(origin)
        code, source, detail = "", line, f"The state enters at {line}."
        if new_phase or (call.grad != origin.grad and starts):
            trains = call.training if new_phase else call.grad
            direction = "validation to training" if trains else "training to validation"
            code, detail = "TT205", f"It goes from {direction}."
        elif new_batch and call.batch[0] == origin.batch[0] and self.clock.random:
            code, source = "TT207", self.clock.loader
        elif order == "rows" and not state.edited:
            code, detail = "TT206", ""
        elif order == "jump" and call.chunk != origin.chunk:
            code = "TT207"
            source = (self.clock.loader if new_batch else enclosing_loop(line)) or line
        elif starts:
            self._enter_recording(call, origin, state, line)
        if code:
            chunks = origin.chunk, call.chunk
            self.findings.add(code, source, detail, self._name(call, state), chunks)

    def _name(self, call: UnitCall, state: TensorRecord) -> str:
        tensor = state.ref()
        return self.watcher.state_name(
            call.instruction, lambda value: tensor is not None and value is tensor
        )

    def _enter_recording(
        self, call: UnitCall, origin: UnitCall, state: TensorRecord, line: SourceLine
    ) -> None:
        """Remember a state that enters other data, which may be another recording."""
        name = self._name(call, state)
        for lane in call.lanes:
            root = lane.first.root
            _remember(self.entered, id(root), (root, line, name, (origin.chunk, call.chunk)))
        if self._is_recording(call):
            self._add_recording(call)

    def _add_recording(self, call: UnitCall) -> None:
        """Note that two chunks were read from these tensors: recordings, not copies of a chunk.

        A state that entered one of them from another recording is reported then.
        """
        for lane in call.lanes:
            root = lane.last.root
            _remember(self.recordings, id(root), root)
            if id(root) in self.entered:
                _, line, name, chunks = self.entered.pop(id(root))
                self.findings.add("TT204", line, "", name, chunks)

    def _is_recording(self, call: UnitCall) -> bool:
        return any(id(lane.last.root) in self.recordings for lane in call.lanes)

    def _compare_start(self, call: UnitCall, states: list[Tensor]) -> None:
        """Compare a call that starts from zeros with the last one of its unit."""
        before = self.last.get((call.unit, call.training))
        if before is None or not call.grad or call.training is False:
            return
        if not self._at_boundary(call, before) or any(bool(t.any()) for t in states):
            return
        if self._relation(before, call) != "next":
            return
        count, _, lengths = self.fresh.get(call.unit, (0, None, set[int]()))
        self.fresh[call.unit] = count + 1, call.instruction, lengths | {before.steps}
        if count + 1 == FRESH_CHUNKS:
            self._report_never_carried(call.unit)

    def _report_never_carried(self, unit: Unit) -> None:
        # slices of unequal length are independent sequences
        count, instruction, lengths = self.fresh[unit]
        if unit not in self.carried and len(lengths) == 1:
            detail = f"{count} times the inputs continued and the state started from zeros."
            self.findings.add("TT201", line_of(instruction), detail)

    def _count_graph(self, call: UnitCall, origin: UnitCall, has_graph: bool) -> None:
        """Count the steps connected in one graph that no backward has freed."""
        if not has_graph or origin.chunk != call.chunk:
            old = self.evaluations.get(call.unit)
            if old is not None and call.training and old.training is False:
                self._report_connected(self.evaluations.pop(call.unit))
            return
        call.graph_steps, call.graph_calls = origin.graph_steps + call.steps, origin.graph_calls + 1
        changes = (origin.call, origin.batch) != (call.call, call.batch)
        call.model_calls = origin.model_calls + changes
        longer = call.graph_calls > 2 * self.trained.get(call.unit, call.graph_calls)
        if call.training is False or self.clock.chunk == 0 or longer:
            self.evaluations[call.unit] = call
        if self.longest is None or call.graph_steps > self.longest.graph_steps:
            self.longest = call

    def _report_connected(self, call: UnitCall) -> None:
        limit = CONNECTED_CHUNKS if call.steps > 1 else CONNECTED_STEPS
        if call.chunk == self.clock.chunk and call.graph_calls >= limit:
            detail = f"{call.graph_steps} steps are in one graph, and no backward goes through it."
            self.findings.add("TT202", line_of(call.instruction), detail)

    def close(self) -> None:
        for unit, (count, *_) in self.fresh.items():
            if count >= FRESH_CHUNKS - 1:
                self._report_never_carried(unit)
        for call in self.evaluations.values():
            self._report_connected(call)
        longest = self.longest
        if self.clock.chunk != 1 or longest is None or longest.chunk != 0:
            return
        # a cell that runs through one sequence is no stream
        several = longest.steps > 1 or 0 < 2 * longest.model_calls <= longest.graph_steps
        if longest.graph_steps >= LONG and several:
            detail = f"{longest.graph_steps} steps were kept for the only backward."
            self.findings.add("TT202", line_of(longest.instruction), detail)


def _remember(table: dict[int, Any], key: int, value: Any) -> None:
    """Store a value and drop the oldest: a finished recording need not stay in memory."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_ROOTS:
        del table[next(iter(table))]


def _data_of(op: Operation, excluded: list[Tensor]) -> tuple[Tensor | None, int | None]:
    """The data behind an operation, and its dimension of lanes.

    It is the first input with a row for each row of the result, or a column for each of its
    columns. Token ids are numbers, one for each row. A vector has no lanes.
    """
    shape, candidates = op.outputs[0].shape, list[Tensor]()
    for tensor, record in op.pairs():
        data = record.data if record is not None and record.learned else tensor
        is_weight = tensor.is_leaf and tensor.requires_grad
        if data is not None and not is_weight and all(tensor is not t for t in excluded):
            candidates.append(data)
    for data in candidates:
        are_ids = data.shape == shape[:-1] and not data.is_floating_point()
        if are_ids or (data.dim() == len(shape) and data.shape[:-1] == shape[:-1]):
            return data, 0 if len(shape) > 1 else None
    columns = (d for d in candidates if d.dim() == 2 and d.shape[1] == shape[-1] == 1)
    return next(columns, None), 1


def _dims(inputs: Tensor, layer: bool, batch_first: bool) -> tuple[int, int | None, int | None]:
    """The number of steps, and the dimensions of lanes and of time in the inputs."""
    if not layer:
        return 1, 0 if inputs.dim() == 2 else None, None
    if inputs.dim() == 2:
        return len(inputs), None, 0
    return inputs.shape[int(batch_first)], int(not batch_first), int(batch_first)
