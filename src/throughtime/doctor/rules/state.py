"""Rules of the state: carried over a boundary, or carried with an endless graph.

Codes TT202 and TT204 to TT207. A lane is a row of the batch; a recording is one unbroken
sequence of data.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from throughtime.doctor._data import Root, View
from throughtime.doctor._frames import Instruction, SourceLine, line_of
from throughtime.doctor._log import Backward
from throughtime.doctor._order import ChunkOrder, deepest_roots, remember, root_of
from throughtime.doctor._records import (
    Operation,
    TensorRecord,
    Unit,
    UnitCall,
    has_mask,
    numbers,
    tensors,
)
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules.passes import PassRule
from throughtime.doctor.watcher import Watcher

# an evaluation in one graph: chunks of a layer or steps of a cell before it is reported
CONNECTED_CHUNKS, CONNECTED_STEPS = 4, 32
STATE_DIMS = {1, 2, 4, 5}  # of a state by hand: units, lanes of them, channels of images or volumes
MAX_UNITS = 8  # units in one step of a cell by hand
LONG = 256  # steps before the only backward


class StateRule:
    """Compares each call of a recurrent unit with the one that its state comes from."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        self.watcher, self.findings, self.log = watcher, findings, watcher.log
        self.units: dict[Any, Unit] = {}  # by their key
        self.order = ChunkOrder()
        self.passes = PassRule(watcher, findings, self.order, self.units)
        self.recordings: dict[Root, None] = {}  # roots of which two adjacent chunks were read
        # roots that a state of another recording entered, each with what reports it
        self.entered: dict[Root, Callable[[], Any]] = {}
        self.longest: UnitCall | None = None
        self.running: dict[int, UnitCall] = {}  # by module, the first call in the chunk

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        if not op.is_recurrent:
            self._hand_written(op, result)
            self.passes.on_operation(op, result)
            return
        call = self._layer_or_cell(op, result)
        outputs = op.outputs[1:] if op.is_layer else op.outputs
        self.watcher.table.latest[call.unit] = outputs, call, int(op.is_layer)

    def before_module(self, module: nn.Module, inputs: Any, frame: FrameType | None) -> None:
        """Handle a layer or cell that is called while the watcher is off.

        The first call in a chunk is compared; of a cell's other steps only the end is remembered.
        """
        log, call = self.log, self.running.pop(id(module), None)
        data = inputs[0] if inputs else None
        if not isinstance(data, Tensor):
            return
        layer, now = isinstance(module, nn.RNNBase), (log.chunk, log.batch, log.training)
        if call is not None and not layer and (call.chunk, call.batch, call.training) == now:
            call.begin = call.begin or replace(call)
            call.previous, call.lanes, call.data = call.data, None, self._view(data)
        elif frame is not None and data.dim() == (3 if layer else 2):
            call = self._module_call(module, inputs, data, frame)
        else:
            return
        self.running[id(module)] = call

    def _module_call(
        self, module: nn.Module, inputs: Any, data: Tensor, frame: FrameType
    ) -> UnitCall:
        layer = isinstance(module, nn.RNNBase)
        call = self._new_call(
            id(module.weight_ih_l0 if layer else module.weight_ih),
            self.watcher.instruction_at(frame),
            self._view(data),
            *_layer_dims(data, layer, layer and module.batch_first),
        )
        # hooks of all modules do not receive a state that is passed by keyword
        call.is_layer, state_known = layer, len(inputs) > 1
        self._compare(call, tensors(inputs[1] if state_known else ()), state_known)
        return call

    def _view(self, inputs: Tensor) -> View | None:
        """What inputs were read from; `None` if that was not watched."""
        made_unwatched = self.watcher.follows_data and not self.watcher.active
        return self.watcher.data.view(inputs, new=not (inputs.requires_grad or made_unwatched))

    def after_module(self, module: nn.Module, result: Any) -> None:
        """Remember the outputs of a layer or cell that was called while the watcher is off."""
        call = self.running.get(id(module))
        if call is not None and result is not None:
            layer = isinstance(module, nn.RNNBase)
            outputs = result[1] if layer else result
            self.watcher.table.latest[call.unit] = outputs, call, int(layer)

    def _new_call(
        self,
        key: Any,
        instruction: Instruction,
        data: View | None,
        steps: int = 1,
        lane_dim: int | None = 0,
        time_dim: int | None = None,
    ) -> UnitCall:
        log = self.log
        unit = self.units.setdefault(key, Unit(key))
        before = unit.last.get(log.training)
        if before is not None and before.chunk < log.chunk:
            unit.trained = max(unit.trained, before.graph_calls)
        return UnitCall(
            unit,
            instruction,
            log.chunk,
            log.call,
            log.batch,
            log.training,
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
        dims = _layer_dims(inputs, layer, layer and args[8])
        if packed:
            dims = len(args[1]), None, None
        # the outputs of all steps, then states, whose lanes are in dimension 1
        of_state = (1 if packed or inputs.dim() > 2 else None, None)
        lanes_and_time = [dims[1:], of_state, of_state] if layer else 2 * [(0, None)]
        result.index = [
            numbers(out, *where, dims[0])
            for out, where in zip(op.outputs, lanes_and_time, strict=False)
        ]
        data = self._view(inputs)
        if layer and data is not None and not data.root.random:
            derived = data.root.copied is not None or bool(data.root.covered)
            self.watcher.follows_data |= derived and data.root.chunk == self.log.chunk
        call = self._new_call(id(weights[0] if layer else weights), op.instruction, data, *dims)
        call.is_layer, call.inputs = layer, inputs.detach() if layer else None
        result.repeated |= call.steps > 1 or call.unit in result.path
        result.path, result.lineage = result.path | {call.unit}, result.lineage | {call.unit}
        call.batch_sizes = args[1] if packed else None
        self._compare(call, [state] if isinstance(state, Tensor) else list(state))
        result.source, result.edited = call, False
        return call

    def _hand_written(self, op: Operation, result: TensorRecord) -> None:
        """Any other operation; it is a recurrent unit if it takes in a result of its own."""
        out, key = op.outputs[0], op.instruction
        is_state = out.dim() in STATE_DIMS and out.numel() > 1
        if not op.loop_inputs and is_state and self._last_of(key):
            self._hand_written_start(op, result)
            return
        if not op.loop_inputs or not is_state:
            result.source = None if out.numel() == 1 else result.source
            return
        states = [tensor for tensor, _ in op.loop_inputs]
        data, lane_dim = self._data_of(op, states)
        if data is None:
            if all(t.requires_grad or r is not None for t, r in op.pairs()):
                self._keep_source(op, result)  # no data, thus no mask
            return
        call = self._new_call(key, key, data, lane_dim=lane_dim)
        call.masks = has_mask(op)
        earlier = self.watcher.data.view(states[0], new=False)
        if call.unit.first is None and earlier is not None and earlier.shape == data.shape:
            call.unit.first = self._new_call(key, key, earlier, lane_dim=lane_dim)  # the first step
        self._compare(call, states)
        result.source, result.edited = call, False
        result.index = numbers(out, lane_dim, None, 1)

    def _data_of(self, op: Operation, states: list[Tensor]) -> tuple[View | None, int | None]:
        """The data behind a step, and its dimension of lanes: an input that is no state."""
        shape = op.outputs[0].shape
        for tensor in op.inputs:
            is_weight = tensor.is_leaf and tensor.requires_grad
            if is_weight or any(tensor is state for state in states):
                continue
            view = self.watcher.data.view(tensor, new=not tensor.requires_grad)
            if view is None or not view.root.known or root_of(view) is None:
                continue
            if tensor.dim() == len(shape) > 1 and tensor.shape[0] == shape[0]:
                return view, 0
            if len(shape) == 1:
                return view, None
        return None, None

    def _keep_source(self, op: Operation, result: TensorRecord) -> None:
        """Record a value within a step as the state of the unit that ran last in it.

        Lanes that were put together from several calls are the state of none of them.
        """
        sources = [r.source for r in op.records if r is not None and r.source is not None]
        units = {source.unit for source in sources}
        if op.name in {"stack", "cat"} and len(units) < len({id(source) for source in sources}):
            return
        for record in op.records:
            source = record.source if record is not None and not record.edited else None
            if source is not None and source.unit.last.get(source.training) is source:
                result.source, result.edited = source, False

    def _hand_written_start(self, op: Operation, result: TensorRecord) -> None:
        """An operation that took in its own result before and now does not."""
        data, lane_dim = self._data_of(op, [])
        if data is None:
            return
        call = self._new_call(op.instruction, op.instruction, data, lane_dim=lane_dim)
        before, call.unit.first = call.unit.last[call.training], call
        if self._at_boundary(call, before):
            self.passes.start(call, before, [])
        call.unit.last[call.training] = call
        result.source, result.edited = call, False
        result.index = numbers(op.outputs[0], lane_dim, None, 1)

    def _compare(self, call: UnitCall, states: list[Tensor], state_known: bool = True) -> None:
        """Compare a call with the one that its state comes from."""
        records = [r for r in map(self.watcher.table.record_of_state, states) if r]
        origins = [(r, _call_behind(r.source, call)) for r in records]
        state, origin = next((pair for pair in origins if pair[1] is not None), (None, None))
        call.parent = next((r.source for r in records if r.source), None)
        # a state that is a leaf with a record was detached, to read its gradient
        record_of = self.watcher.table.record_of
        has_graph = any(t.requires_grad and not (t.is_leaf and record_of(t)) for t in states)
        unit = call.unit
        before = unit.last.get(call.training)
        if state is not None and origin is not None:
            call.copies = state.copies
            if origin.chunk != call.chunk:
                self.log.crossed.add(call.chunk)
            elif origin.call != call.call and call.steps > 1:
                continued = self.log.continued
                continued[unit] = continued.get(unit, 0) + 1
            self._count_graph(call, origin, has_graph)
            origin.parent = None  # no older call is asked for
            if call.steps == origin.steps == 1:
                call.previous = origin.data
            repeats = self.passes.repeats(call, origin)
            if not self._at_boundary(call, origin):
                call.start, call.begin = origin.start, origin.begin or origin
                call.repeats = max(call.repeats, origin.repeats if call.steps == 1 else 0)
            elif not repeats and not self.passes.start(
                call, None if before is origin else before, states
            ):  # nor does the state of an older chunk enter, as it entered the last one
                self._check_carried(call, origin, state)
        elif state_known and not records and not has_graph:
            unit.first = call
            self.passes.starts_fresh(call)
            if before is None or self._at_boundary(call, before):
                self.passes.start(call, before, states)
        else:
            unit.first = unit.first or call
        unit.last[call.training] = call
        self.log.recurrent = self.log.units[unit] = call.instruction

    def _last_of(self, key: Instruction) -> UnitCall | None:
        """The last call of a unit by hand in this mode."""
        return self.units[key].last.get(self.log.training) if key in self.units else None

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

    def _check_carried(self, call: UnitCall, origin: UnitCall, state: TensorRecord) -> None:
        order = self.order.relation(origin, call, state)
        if order == "next":
            self.passes.goes_on(call.unit)
            if origin.lanes:
                self._add_recording(origin)
            return
        if state.edited and order != "rows":
            self.passes.starts_fresh(call)
            return
        name, line = self._name(call, state), line_of(call.instruction)
        if call.training == origin.training and self.passes.begins_again(
            call, origin, order, line, name
        ):
            return
        code, source, detail = self._fault(call, origin, state, order, line)
        if code == "TT207":
            call.unit.jumps, call.unit.in_order, call.unit.wrap = True, False, None
        elif not code and call.training == origin.training:
            self.passes.moves_on(call.unit)
        if code:
            self.findings.add(code, source, detail, name, (origin.chunk, call.chunk))

    def _fault(
        self, call: UnitCall, origin: UnitCall, state: TensorRecord, order: str, line: SourceLine
    ) -> tuple[str, SourceLine | None, str]:
        """The code of a state that does not go on in time, its line and a detail."""
        detail, new_batch = f"The state enters at {line}.", call.batch != origin.batch
        starts = order == "other" or (order == "start" and self._is_recording(origin))
        if call.training is False and state.copies > origin.copies:
            return "", None, ""  # validation starts from a copy, training keeps its state
        if call.training != origin.training or (call.grad != origin.grad and starts):
            new_phase = call.training != origin.training
            trains = call.training if new_phase else call.grad
            direction = "validation to training" if trains else "training to validation"
            return "TT205", line, f"It goes from {direction}."
        if new_batch and call.batch[0] == origin.batch[0] and self.log.random:
            return "TT207", self.log.loader, detail
        if order == "rows" and not state.edited:
            return "TT206", line, ""
        # what lies between may belong to other states, such as those of other users
        only = call.unit.last.get(call.training) is origin
        if order == "jump" and only and call.chunk != origin.chunk:
            source = self.log.loader if new_batch else line
            return "TT207", source or line, detail
        if call.chunk == origin.chunk and order in {"start", "other"}:
            call.unit.mixed = True
        elif order == "other" and not call.unit.mixed:
            return "TT204", line, ""
        if order == "start" and starts:
            self._enter_recording(call, origin, state, line)
        return "", None, ""

    def _name(self, call: UnitCall, state: TensorRecord) -> str:
        tensor = state.ref()
        return self.log.state_name(
            call.instruction, lambda value: tensor is not None and value is tensor
        )

    def _enter_recording(
        self, call: UnitCall, origin: UnitCall, state: TensorRecord, line: SourceLine
    ) -> None:
        """Remember a state that enters other data, which may be another recording."""
        chunks = origin.chunk, call.chunk
        report = partial(self.findings.add, "TT204", line, "", self._name(call, state), chunks)
        for root in deepest_roots(call):
            remember(self.entered, root, report)
        if self._is_recording(call):
            self._add_recording(call)

    def _add_recording(self, call: UnitCall) -> None:
        """Note that two chunks were read from these tensors: recordings, not copies of a chunk.

        A state that entered one of them from another recording is reported then.
        """
        for root in deepest_roots(call):
            remember(self.recordings, root, None)
            if root in self.entered:
                self.entered.pop(root)()

    def _is_recording(self, call: UnitCall) -> bool:
        return any(root in self.recordings for root in deepest_roots(call))

    def _count_graph(self, call: UnitCall, origin: UnitCall, has_graph: bool) -> None:
        """Count the steps connected in one graph that no backward has freed."""
        if not has_graph or origin.chunk != call.chunk:
            old = call.unit.evaluation
            if old is not None and call.training and old.training is False:
                self._report_connected(call.unit)
            return
        call.graph_steps, call.graph_calls = origin.graph_steps + call.steps, origin.graph_calls + 1
        call.model_calls = origin.model_calls + self._is_new_part(call, origin)
        longer = call.graph_calls > 2 * (call.unit.trained or call.graph_calls)
        if call.training is False or self.log.chunk == 0 or longer:
            call.unit.evaluation = call
        if self.longest is None or call.graph_steps > self.longest.graph_steps:
            self.longest = call

    def _is_new_part(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether two calls read parts of the data that the loop treats as chunks of their own."""
        cuts = self.watcher.data.cuts
        wholes = [cuts.get(data) for data in (origin.data, call.data) if data is not None]
        if len(wholes) == 2 and None not in wholes:
            return wholes[0] != wholes[1]
        return (origin.call, origin.batch) != (call.call, call.batch)

    def _report_connected(self, unit: Unit) -> None:
        call, unit.evaluation = unit.evaluation, None
        if call is None:
            return
        limit = CONNECTED_CHUNKS if call.steps > 1 else CONNECTED_STEPS
        if call.chunk == self.log.chunk and call.graph_calls >= limit:
            detail = f"{call.graph_steps} steps are in one graph, and no backward goes through it."
            self.findings.add("TT202", line_of(call.instruction), detail)

    def before_backward(self, backward: Backward) -> None:
        self.passes.before_backward(backward)

    def close(self) -> None:
        self.passes.close()
        for unit in self.units.values():
            self._report_connected(unit)
        longest = self.longest
        if self.log.chunk != 1 or longest is None or longest.chunk != 0:
            return
        # a cell that runs through one sequence is no stream
        several = longest.steps > 1 or 0 < 2 * longest.model_calls <= longest.graph_steps
        if longest.graph_steps >= LONG and several:
            detail = f"{longest.graph_steps} steps were kept for the only backward."
            self.findings.add("TT202", line_of(longest.instruction), detail)


def _call_behind(source: UnitCall | None, call: UnitCall) -> UnitCall | None:
    """The last call of the same unit behind a state, unless data masked the state since.

    A step by hand has several units if several operations take in data or an earlier result.
    """
    for _ in range(MAX_UNITS):
        if source is None or source.unit == call.unit:
            return source
        source = None if source.masks or call.masks else source.parent
    return None


def _layer_dims(
    inputs: Tensor, layer: bool, batch_first: bool
) -> tuple[int, int | None, int | None]:
    """The number of steps, and the dimensions of lanes and of time in the inputs."""
    if not layer:
        return 1, 0 if inputs.dim() == 2 else None, None
    if inputs.dim() == 2:
        return len(inputs), None, 0
    return inputs.shape[int(batch_first)], int(not batch_first), int(batch_first)
