"""The calls of recurrent units, and where their states come from.

A unit is a recurrent layer or cell of torch, or an instruction that takes in its own result beside
data. A call of it covers the steps that it takes in one chunk: the chunk of a layer, or the steps
of a cell one after another.
"""

import itertools
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from throughtime.doctor._data import (
    EDITS,
    JOINS,
    MAX_LANES,
    MOVES,
    WRITES,
    Lane,
    Root,
    RootTable,
    View,
    rows_of,
)
from throughtime.doctor._frames import Instruction
from throughtime.doctor._graph import storage_of
from throughtime.doctor._log import Log

LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
STATE_DIMS = {1, 2, 4, 5}  # of a state by hand: units, lanes of them, channels of images or volumes
MIN_DETACHES = 3  # one after another, a single step between them
MAX_PARENTS = 8  # units in one step of a cell by hand
COPIES_OR_VIEWS = (
    {"detach", "data", "detach_", "to", "float", "double", "half", "clone", "contiguous", "cpu"}
    | {"cuda", "type", "__deepcopy__", "requires_grad_", "index_copy"}
    | MOVES
    | JOINS
)


@dataclass(slots=True, eq=False)
class Operation:
    """One operation on tensors."""

    name: str
    func: Any
    args: Any
    kwargs: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    instruction: Instruction
    is_choice: bool = False  # its result is data, although it depends on parameters

    def is_edit(self, states: int) -> bool:
        """Whether it may mask or reset values of a state: a factor other than 0 and 1 does not."""
        others = sum(1 for t in self.inputs if t.dim() and not (t.is_leaf and t.requires_grad))
        numbers = [a for a in self.args if isinstance(a, (int, float))]
        constant = "mul" in self.name and any(n in {0, 1} for n in numbers)
        return self.name not in COPIES_OR_VIEWS and (others > states or constant)


@dataclass(eq=False)
class Unit:
    """A recurrent layer or cell, or an instruction that takes in its own result, with its past."""

    key: Any  # the id of its first weight, or the instruction and the object that it belongs to
    confirmed: bool = True  # it took in a result of its own
    last: "dict[bool | None, UnitCall]" = field(default_factory=dict)  # its last call by mode
    first: "UnitCall | None" = None  # the first call of its pass over the data
    carried: bool = False  # a state entered the next chunk in time
    in_order: bool = False  # the last one did
    replays: int = 0  # chunks that were read twice, the second time from the state at their end
    jumps: bool = False  # a state jumped in time
    mixed: bool = False  # it reads several tensors within one chunk
    samples: bool = False  # its chunks are samples of their own
    reread: bool = False  # it reads each chunk several times
    repeated: "UnitCall | None" = None  # the last call of several on the same inputs
    passes_gradients: bool = False  # the loop uses the gradients of its states
    trained: int = 0  # the most calls connected before a backward
    fresh: Any = None  # its chunks that started from one state
    wrap: Any = None  # its state that entered what it comes from
    ends: "dict[Root | None, UnitCall]" = field(default_factory=dict)  # the last call by recording,
    starts: "dict[Root | None, UnitCall]" = field(default_factory=dict)  # and the first


@dataclass(slots=True, eq=False, repr=False)
class UnitCall:
    """The steps of a unit in one chunk."""

    unit: Unit
    instruction: Instruction
    serial: int
    chunk: int
    model_call: int
    batch: tuple[int, int]
    training: bool | None
    grad: bool
    data: View | None  # the inputs of its first call, without the state,
    latest: View | None  # of the last one,
    second: View | None = None  # and of the second
    dims: tuple[int | None, int | None] = (0, None)  # their dimensions of lanes and of time
    steps: int = 1
    batch_sizes: Tensor | None = None  # of packed data, the lanes at each step
    count: int = 1  # calls of the layer or cell
    origin: "UnitCall | None" = None  # the call that its state comes from,
    rows: list[int] | None = None  # the lane in it of each lane,
    step: int | None = None  # its step, if it is not the last,
    edited: bool = False  # and what happened to the state since
    cloned: bool = False
    has_graph: bool = False
    parents: "tuple[UnitCall, ...]" = ()  # calls of other units behind its state
    states: list[Tensor] = field(default_factory=list)  # as they entered, without graph
    outputs: list[Tensor] = field(default_factory=list)  # of its last step, without graph
    before: "UnitCall | None" = None  # the last call of the unit
    graph_steps: int = 0  # steps connected in one graph
    graph_calls: int = 1  # calls of the unit connected in one graph
    inputs: Tensor | None = None  # of a layer, without their graph
    repeats: int = 0  # calls or chunks before it, one after the other, that read the same data
    run: int = 0  # steps in a row whose state was detached, the last ones
    stepwise: Instruction | None = None  # what detached every step
    entered: list[Tensor] = field(default_factory=list)  # the states
    known_lanes: list[Lane] | None = None
    last_detach: Instruction | None = None  # of its last state
    bidirectional: bool = False
    carries_backward: bool = False  # the state of its backward direction, too

    @property
    def position(self) -> tuple[Any, ...]:
        """The chunk, the batch and the mode."""
        return self.chunk, self.batch, self.training, self.grad


class Calls:
    """Makes calls of operations, and hands each new one to `on_call`."""

    viewed: Any = None  # the last view that exchanges sizes: a weak reference, the instruction

    def __init__(self, log: Log, table: RootTable, rule: Any) -> None:
        self.log, self.table, self.rule = log, table, rule
        self.units: dict[Any, Unit] = {}  # by their key
        self.serials = itertools.count()
        self.has_layers = False  # a layer or cell of torch is in use
        self.follows_data = False  # the data of a layer are computed in each chunk,
        self.chunk_start = 0  # whose first root has this number

    def layer_or_cell(self, op: Operation) -> None:
        """A layer or cell of torch."""
        self.has_layers = True
        args, inputs, layer = op.args, op.inputs[0], op.name in LAYERS
        packed = layer and isinstance(args[3] if len(args) > 3 else None, (list, tuple))
        state, weights = args[2:4] if packed else args[1:3]
        weight, data = weights[0] if layer else weights, self._data(inputs)
        # weights that are no parameters may be made anew for each call
        key = id(weight) if isinstance(weight, nn.Parameter) else op.instruction
        own = data and data.root.behind
        if own and own.unit.key == key and self._first(own.latest) in {None, self._first(data)}:
            data = None  # its own prediction, which has no place in the data
        call = self._new(key, op, data)
        if packed:
            call.steps, call.dims, call.batch_sizes = len(args[1]), (None, None), args[1]
        elif layer:
            time_dim = int(args[8] and inputs.dim() > 2)
            call.steps = inputs.shape[time_dim]
            call.dims = (None if inputs.dim() == 2 else 1 - time_dim), time_dim
        elif inputs.dim() == 1:
            call.dims = None, None
        call.inputs = inputs.detach() if layer else None
        call.bidirectional = layer and bool(args[8 if packed else 7])
        if self.viewed and self.viewed[0]() is inputs:
            self.rule.on_mixed(self.viewed[1])
        states = [state] if isinstance(state, Tensor) else list(state)
        of_state = (1 if states[0].dim() > 2 else None) if layer else call.dims[0]
        dims = call.dims
        # what a front-end computes is followed in all chunks
        if layer and data and data.root.number >= self.chunk_start:
            self.follows_data |= data.root.data is not None or bool(data.root.covered)
        call = self._add(call, states, of_state)
        for i, out in enumerate(op.outputs):
            root = self.table.add(out)
            root.become(call, of_state)
            if layer and not i:
                root.lane_dim, root.time_dim = dims
            root.data = data and rows_of(data, root.shape, whole=False)
            root.known = root.data is not None
            root.depth = 1 + (data.root.depth if data else 0)
        call.outputs = [t.detach() for t in (op.outputs[1:] if layer else op.outputs)]

    def _data(self, tensor: Tensor) -> View | None:
        """What inputs were read from; `None` if that is not known."""
        view = self.table.view(tensor, new=not tensor.requires_grad)
        return view if view and (view.root.known or view.root.data is not None) else None

    def detached(self, source: Tensor, instruction: Instruction) -> None:
        """A state without its graph, unless the states of other units keep theirs."""
        view = self.table.view(source, new=False)
        if source.is_leaf or not view or not (call := view.root.behind):
            return
        others = [c for c in call.parents if c.unit is not call.unit and c.chunk == call.chunk]
        at = None if any(c.has_graph for c in others) else instruction
        for each in (call, *others):
            each.last_detach = at

    def note_gradients(self, leaves: list[Tensor]) -> None:
        """Note that the loop uses the gradients of tensors that were detached."""
        for view in (self.table.view(tensor, new=False) for tensor in leaves):
            if view and view.root.behind:
                view.root.behind.unit.passes_gradients = True

    def next_chunk(self) -> None:
        """Drop what the next chunk does not need."""
        self.chunk_start = next(self.table.numbers)
        self.table.drop_freed()

    def by_hand(self, op: Operation, frame: FrameType) -> None:
        """Any other operation; it is a step of a unit if it takes in a result of its own."""
        out = op.outputs[0]
        root = self.table.roots.get(storage_of(out))
        if not root or not root.learned or op.name in MOVES | WRITES:
            return
        if out.dim() not in STATE_DIMS or out.numel() < 2:
            return
        # two layers of one class run the same instruction
        is_method = frame.f_code.co_varnames[:1] == ("self",)
        key = op.instruction, id(frame.f_locals.get("self")) if is_method else 0
        fluid = [t for t in op.inputs if t.dim() and not (t.is_leaf and t.requires_grad)]
        views = [self.table.view(t, new=not t.requires_grad) for t in fluid]
        pairs = list(zip(fluid, views, strict=True))
        own = [t for t, v in pairs if self._behind(v, key)]
        lane_dim = None if out.dim() == 1 else 0
        data = None
        for t, v in pairs:
            fits = lane_dim is None or (t.dim() == out.dim() and len(t) == len(out))
            learned = any(each.root.learned for other, each in pairs if each and other is not t)
            is_mask = op.name in EDITS and v and not v.root.learned
            if fits and learned and not is_mask and not any(t is each for each in own):
                data = data or self._data(t)
        if not data:
            return
        call = self._new(key, op, data, confirmed=bool(own))
        call.dims = lane_dim, None
        call = self._add(call, own, lane_dim)
        call.parents = tuple(
            v.root.behind for v in views if v and v.root.behind not in {None, call}
        )
        root.become(call, lane_dim)
        root.depth = 1 + data.root.depth

    def _behind(self, view: View | None, key: Any) -> UnitCall | None:
        """The last call of a unit behind a state."""
        pending, visited = [view and view.root.behind], list[UnitCall]()
        while pending and len(visited) < MAX_PARENTS:
            call = pending.pop(0)
            if not call or call in visited:
                continue
            if call.unit.key == key:
                return call
            visited.append(call)
            pending += call.parents
        return None

    def _new(
        self, key: Any, op: Operation, data: View | None, *, confirmed: bool = True
    ) -> UnitCall:
        log, unit = self.log, self.units.setdefault(key, Unit(key, confirmed))
        unit.confirmed |= confirmed
        before = unit.last.get(log.training)
        if before and before.chunk < log.chunk:
            unit.trained = max(unit.trained, before.graph_calls)
        return UnitCall(unit, op.instruction, next(self.serials), log.chunk, log.call, log.batch,
                    log.training, torch.is_grad_enabled(), data, data, before=before)  # fmt: skip

    def _add(self, call: UnitCall, states: list[Tensor], lane_dim: int | None) -> UnitCall:
        """Add a call, or its steps to the one that its state comes from."""
        unit, log = call.unit, self.log
        views = [self.table.view(t, new=False) for t in states]
        state = next((v for v in views if self._behind(v, unit.key)), None)
        origin = self._behind(state, unit.key)
        last = unit.last.get(call.training)
        is_known = not any(v and v.root.learned for v in views)
        if is_known and last and _is_copy(states, last.outputs):
            origin, call.cloned = last, True
        call.has_graph = any(v and v.grad and not v.root.cut for v in views) and any(
            not t.is_leaf for t in states
        )
        others = (v.root.behind for v in views if v and v.root.behind)
        call.parents = tuple(c for c in others if c.unit is not unit)
        call.graph_steps = call.steps
        if unit.confirmed:
            log.recurrent = log.units[unit] = call.instruction
        if origin and origin is last and not self._is_boundary(call, origin):
            return self._continued(origin, call)
        if state:
            is_known = self._rows(call, state, lane_dim)
        call.origin = origin
        if origin:
            origin.origin = origin.before = None  # no older call is asked for
            call.carries_backward = call.bidirectional and equal(
                [states[0][-1:]], [t[-1:] for t in origin.outputs[:1]]
            )
        call.states, call.entered = [t.detach().clone() for t in states], states
        if call.before:
            call.before.before, call.before.outputs = None, []
        if unit.confirmed and (is_known and (origin or not call.has_graph)):
            self.rule.on_call(call)
        else:
            unit.first = unit.first or call
        call.entered, call.inputs = [], None
        unit.last[call.training] = call
        return call

    def _continued(self, call: UnitCall, step: UnitCall) -> UnitCall:
        """The call with one more step."""
        if step.has_graph:
            call.graph_steps, call.graph_calls = call.graph_steps + step.steps, call.graph_calls + 1
        is_cut = step.steps == 1 and not step.has_graph and call.last_detach
        call.run = call.run + 1 if is_cut else 0
        if call.run + 1 >= MIN_DETACHES:
            call.stepwise = call.last_detach
        call.second = step.data if call.count == 1 else call.second
        call.steps, call.count, call.latest = call.steps + step.steps, call.count + 1, step.data
        call.serial, call.model_call, call.has_graph = step.serial, step.model_call, step.has_graph
        call.known_lanes = call.last_detach = None
        return call

    def _is_boundary(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether a new chunk begins between two calls."""
        if call.position != origin.position:
            return True
        if call.model_call == origin.model_call or not call.data:
            return False
        first, latest, now = map(self._first, (origin.data, origin.latest, call.data))
        again = now == first != latest
        return call.steps > 1 or again or self.recording(call) is not self.recording(origin)

    def _first(self, view: View | None) -> tuple[Root, int] | None:
        return self.table.element(view.root, view.offset) if view else None

    def _rows(self, call: UnitCall, state: View, lane_dim: int | None) -> bool:
        """Note which lane of the call before each lane of a state comes from, and its step.

        Returns:
            Whether all of them come from one call.
        """
        call.edited, call.cloned = state.root.edited, state.root.cloned
        size = 1 if lane_dim is None else state.shape[lane_dim]
        at = [state.at({lane_dim: lane}) for lane in range(min(size, MAX_LANES))]
        elements = [self.table.element(state.root, offset, "state") for offset in at]
        known = [e for e in elements if e is not None]
        if len(known) < len(elements) or len({root.call for root, _ in known}) > 1:
            return call.edited
        root = known[0][0]
        indices = [root.index(offset) for _, offset in known]
        if root.lane_dim is not None:
            rows = [index[root.lane_dim] for index in indices]
            call.rows = rows if len(set(rows)) > 1 or len(rows) == 1 else None
        if root.time_dim is not None:
            call.step = indices[0][root.time_dim]
        return True

    def recording(self, call: UnitCall) -> Root | None:
        """The oldest root known behind the inputs of a call."""
        if not call.data:
            return None
        root, *_ = self._first(call.data) or [call.data.root]
        while root.covered:
            root = root.covered[0].root
        return root

    def lanes(self, call: UnitCall) -> list[Lane]:
        """Where the lanes of a call, or the first of them, begin and end; empty if unknown."""
        if call.known_lanes is None:
            views = [call.data, call.second, call.latest][: 3 if call.count > 1 else 1]
            parts = [] if None in views else [self._lanes(call, v) for v in views if v]
            if len({part[0].root for part in parts if part}) > 1:  # each step was computed alone
                parts = [[up for x in part for up in x.root.covered or [x]] for part in parts]
            call.known_lanes = parts[0] if parts else []
            if len(parts) == 3:
                call.known_lanes = [
                    a.joined(b, c, call.count) for a, b, c in zip(*parts, strict=False)
                ]
        return call.known_lanes

    def swapped_lanes(self, call: UnitCall) -> list[Lane]:
        """The lanes if those that the layer takes for lanes were steps."""
        lane_dim, time_dim = call.dims
        if not call.data or lane_dim is None or call.count > 1:
            return []
        shape = call.data.shape
        lengths = [shape[lane_dim]] * shape[time_dim or 0]
        return self.table.lanes(call.data, lengths, (time_dim, lane_dim), [])

    def _lanes(self, call: UnitCall, view: View) -> list[Lane]:
        lane_dim, time_dim = call.dims
        if (sizes := call.batch_sizes) is not None:
            lengths = [int((sizes > lane).sum()) for lane in range(min(int(sizes[0]), MAX_LANES))]
            return self.table.lanes(view, lengths, call.dims, (sizes.cumsum(0) - sizes).tolist())
        steps = 1 if time_dim is None else view.shape[time_dim]
        return self.table.lanes(view, [steps] * (1 if lane_dim is None else view.shape[lane_dim]),
                                call.dims, [])  # fmt: skip


def _is_copy(states: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether states without a graph have the values of outputs that are not all zeros."""
    is_new = all(not a.requires_grad and a.any() for a in states)
    return is_new and equal(states, outputs)


def equal(states: list[Tensor], others: list[Tensor]) -> bool:
    """Whether states have the same values."""
    return (
        bool(states)
        and len(states) == len(others)
        and all(
            a.device == b.device and torch.equal(a, b) for a, b in zip(states, others, strict=True)
        )
    )
