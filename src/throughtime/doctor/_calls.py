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
    LANE,
    MOVES,
    SPAN,
    WRITES,
    Root,
    RootTable,
    unknown,
)
from throughtime.doctor._frames import Instruction
from throughtime.doctor._log import Log
from throughtime.doctor._order import Lane, lane

LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
STATE_DIMS = {1, 2, 4, 5}  # of a state by hand: units, lanes of them, channels of images or volumes
MIN_DETACHES = 3  # one after another, a single step between them
MAX_LANES = 12  # lanes compared; a wrong order shows in the first ones
MAX_PARENTS = 8  # units in one step of a cell by hand
COPIES_OR_VIEWS = (
    {"detach", "data", "detach_", "to", "float", "double", "half", "clone", "contiguous", "cpu"}
    | {"cuda", "type", "__deepcopy__", "requires_grad_", "index_copy"}
    | MOVES
    | JOINS
)


# of the first, the second and the last step `(2, B)`: the numbers of the first and the last element
# that it reads in each lane
Ends = tuple[Tensor, Tensor, Tensor]


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
    jumps: bool = False  # a state jumped in time
    mixed: bool = False  # it reads several tensors within one chunk
    samples: bool = False  # its chunks are samples of their own
    reread: bool = False  # it reads each chunk several times
    repeated: "UnitCall | None" = None  # the last call of several on the same inputs
    passes_gradients: bool = False  # the loop uses the gradients of its states
    trained: int = 0  # the most calls connected before a backward
    fresh: Any = None  # its chunks that started from one state
    wrap: Any = None  # the fault of a state that entered what it comes from
    ends: "dict[Root | None, UnitCall]" = field(default_factory=dict)  # the last call by recording


@dataclass(slots=True, eq=False, repr=False)
class UnitCall:
    """The steps of a unit in one chunk."""

    unit: Unit
    instruction: Instruction
    serial: int  # of its last step
    number: int  # of its states
    chunk: int
    model_call: int
    batch: tuple[int, int]
    training: bool | None
    grad: bool
    ends: Ends | None  # `None` if it is not known what it reads
    steps: int = 1
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
    repeats: int = 0  # calls or chunks before it, one after the other, that read the same data
    run: int = 0  # steps in a row whose state was detached, the last ones
    stepwise: Instruction | None = None  # what detached every step
    entered: list[Tensor] = field(default_factory=list)  # the states
    known_lanes: list[Lane] | None = None
    last_detach: Instruction | None = None  # of its last state
    bidirectional: bool = False
    carries_backward: bool = False  # the state of its backward direction, too

    @property
    def width(self) -> int:
        """The number of lanes, as far as known."""
        return self.ends[0].shape[1] if self.ends else 1

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
        self.serials = itertools.count(1)

    def layer_or_cell(self, op: Operation) -> None:
        """A layer or cell of torch."""
        args, inputs, layer = op.args, op.inputs[0], op.name in LAYERS
        packed = layer and isinstance(args[3] if len(args) > 3 else None, (list, tuple))
        state, weights = args[2:4] if packed else args[1:3]
        weight = weights[0] if layer else weights
        # weights that are no parameters may be made anew for each call
        key = id(weight) if isinstance(weight, nn.Parameter) else op.instruction
        time_dim = int(args[8] and inputs.dim() > 2) if layer and not packed else None
        reads = None if packed else self._reads(inputs, inputs.shape[:-1])
        ends = None
        if reads is not None:
            reads = reads.unsqueeze(1) if time_dim is None else reads.movedim(1 + time_dim, 1)
            reads = reads.reshape(*reads.shape[:2], -1)
            ends = reads[:, 0], reads[:, min(1, reads.shape[1] - 1)], reads[:, -1]
        root = self.table.root(inputs, new=False)
        own = root and root.behind
        if ends and own and own.unit.key == key and (
            not own.ends or int(ends[0][0, 0]) in {int(own.ends[at][0, 0]) for at in (0, 2)}
        ):  # fmt: skip
            ends = None  # its own prediction, which has no place in the data
        call = self._new(key, op, ends)
        if layer:
            call.steps = len(args[1]) if packed else inputs.shape[time_dim or 0]
        call.bidirectional = layer and bool(args[8 if packed else 7])
        if self.viewed and self.viewed[0]() is inputs:
            self.rule.on_mixed(self.viewed[1])
        states = [state] if isinstance(state, Tensor) else list(state)
        of_state = (
            (1 if states[0].dim() > 2 else None) if layer else 0 if inputs.dim() > 1 else None
        )
        call = self._add(call, states, of_state)
        for i, out in enumerate(op.outputs):
            is_followed = ends and op.func  # not by its hook alone
            marks = self.table.rows(inputs, out.shape) if is_followed else unknown(out.shape)
            if layer and not i:
                in_lanes = None if packed or inputs.dim() < 3 else 1 - (time_dim or 0)
                self._become(self.table.add(out, marks), call, in_lanes, time_dim)
            else:
                self._become(self.table.add(out, marks), call, of_state)
        call.outputs = [t.detach() for t in (op.outputs[1:] if layer else op.outputs)]

    def _become(
        self, root: Root, call: UnitCall, lane_dim: int | None, time_dim: int | None = None
    ) -> None:
        """A root holds the result of a call."""
        numbers = torch.tensor(call.number * SPAN, device="cpu")
        for dim, unit in ((lane_dim, LANE), (time_dim, 1)):
            if dim is not None:
                after = [1] * (len(root.shape) - dim - 1)
                at = torch.arange(1, root.shape[dim] + 1, device="cpu").view(-1, *after)
                numbers = numbers + unit * at
        first, last, _ = root.marks or unknown(root.shape)
        root.marks = first, last, numbers.expand(root.shape)
        root.behind, root.learned = call, True
        root.edited = root.cloned = root.cut = False

    def _reads(self, tensor: Tensor, shape: Any) -> Tensor | None:
        """The first and the last element that these rows read; `None` if that is not known."""
        root = self.table.root(tensor, new=not tensor.requires_grad)
        if not root or not root.known:
            return None
        reads = torch.stack(self.table.rows(tensor, tuple(shape))[:2])
        return reads if reads.flatten()[0] else None

    def detached(self, source: Tensor, instruction: Instruction) -> None:
        """A state without its graph, unless the states of other units keep theirs."""
        root = self.table.root(source, new=False)
        if source.is_leaf or not root or not (call := root.behind):
            return
        others = [c for c in call.parents if c.unit is not call.unit and c.chunk == call.chunk]
        at = None if any(c.has_graph for c in others) else instruction
        for each in (call, *others):
            each.last_detach = at

    def note_gradients(self, leaves: list[Tensor]) -> None:
        """Note that the loop uses the gradients of tensors that were detached."""
        for tensor in leaves:
            root = self.table.root(tensor, new=False)
            if root and root.behind:
                root.behind.unit.passes_gradients = True

    def by_hand(self, op: Operation, frame: FrameType) -> None:
        """Any other operation; it is a step of a unit if it takes in a result of its own."""
        out = op.outputs[0]
        root = self.table.root(out, new=False)
        if not root or not root.learned or op.name in MOVES | WRITES:
            return
        if out.dim() not in STATE_DIMS or out.numel() < 2:
            return
        # two layers of one class run the same instruction
        is_method = frame.f_code.co_varnames[:1] == ("self",)
        key = op.instruction, id(frame.f_locals.get("self")) if is_method else 0
        fluid = [t for t in op.inputs if t.dim() and not (t.is_leaf and t.requires_grad)]
        pairs = [(t, self.table.root(t, new=not t.requires_grad)) for t in fluid]
        own = [t for t, r in pairs if r and _behind(r.behind, key)]
        reads = source = None
        for t, r in pairs:
            fits = out.dim() == 1 or (t.dim() == out.dim() and len(t) == len(out))
            # a known unit may start from a constant
            learned = key in self.units or any(
                each.learned for other, each in pairs if each and other is not t
            )
            is_mask = op.name in EDITS and r and not r.learned
            is_new = reads is None and not any(t is each for each in own)
            if is_new and fits and learned and not is_mask:
                reads, source = self._reads(t, t.shape[: out.dim() > 1]), t
        if reads is None:
            return
        reads, lane_dim = reads.view(2, -1), None if out.dim() == 1 else 0
        call = self._new(key, op, (reads, reads, reads), confirmed=bool(own))
        states = own or [t for t, r in pairs if t is not source and not (r and r.learned)]
        call = self._add(call, states, lane_dim)
        call.parents = tuple(r.behind for _, r in pairs if r and r.behind not in {None, call})
        self._become(root, call, lane_dim)

    def _new(
        self, key: Any, op: Operation, ends: Ends | None, *, confirmed: bool = True
    ) -> UnitCall:
        log, unit = self.log, self.units.setdefault(key, Unit(key, confirmed))
        unit.confirmed |= confirmed
        before, serial = unit.last.get(log.training), next(self.serials)
        if before and before.chunk < log.chunk:
            unit.trained = max(unit.trained, before.graph_calls)
        return UnitCall(unit, op.instruction, serial, serial, log.chunk, log.call, log.batch,
                        log.training, torch.is_grad_enabled(), ends, before=before)  # fmt: skip

    def _add(self, call: UnitCall, states: list[Tensor], lane_dim: int | None) -> UnitCall:
        """Add a call, or its steps to the one that its state comes from."""
        unit, log = call.unit, self.log
        pairs = [(t, root) for t in states if (root := self.table.root(t, new=False))]
        origins = ((t, r, c) for t, r in pairs if (c := _behind(r.behind, unit.key)))
        state, root, origin = next(origins, (None, None, None))
        last = unit.last.get(call.training)
        is_known = not any(each.learned for _, each in pairs)
        if is_known and last and _is_copy(states, last.outputs):
            origin, call.cloned = last, True
        call.has_graph = any(t.requires_grad and not each.cut for t, each in pairs) and any(
            not t.is_leaf for t in states
        )
        behind = (each.behind for _, each in pairs)
        call.parents = tuple(c for c in behind if c and c.unit is not unit)
        call.graph_steps = call.steps
        if unit.confirmed:
            log.recurrent = log.units[unit] = call.instruction
        if origin and origin is last and not self._is_boundary(call, origin):
            return self._continued(origin, call)
        if state is not None and root:
            is_known = self._rows(call, state, root, lane_dim)
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
        call.entered = []
        unit.last[call.training] = call
        return call

    def _continued(self, call: UnitCall, step: UnitCall) -> UnitCall:
        """The call with one more step."""
        if step.has_graph:
            call.graph_steps += step.steps
        # 0 where a graph has ended
        call.graph_calls = step.has_graph and call.graph_calls and call.graph_calls + 1
        is_cut = step.steps == 1 and not step.has_graph and call.last_detach
        call.run = call.run + 1 if is_cut else 0
        if call.run + 1 >= MIN_DETACHES:
            call.stepwise = call.last_detach
        if call.ends and step.ends:
            second = step.ends[0] if call.steps == 1 else call.ends[1]
            call.ends = call.ends[0], second, step.ends[2]
        else:
            call.ends = None
        call.steps, call.count = call.steps + step.steps, call.count + 1
        call.serial, call.model_call, call.has_graph = step.serial, step.model_call, step.has_graph
        call.known_lanes = call.last_detach = None
        return call

    def _is_boundary(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether a new chunk begins between two calls."""
        if call.position != origin.position:
            return True
        if call.model_call == origin.model_call or not call.ends:
            return False
        first, latest, now = (
            int(ends[at][0, 0]) if ends else 0
            for ends, at in ((origin.ends, 0), (origin.ends, 2), (call.ends, 0))
        )
        again = now == first != latest
        return call.steps > 1 or again or self.recording(call) is not self.recording(origin)

    def _rows(self, call: UnitCall, state: Tensor, root: Root, lane_dim: int | None) -> bool:
        """Note which lane of the call before each lane of a state comes from, and its step.

        Returns:
            Whether all of them come from one call.
        """
        call.edited, call.cloned = root.edited, root.cloned
        size = 1 if lane_dim is None else state.shape[lane_dim]
        numbers = self.table.marks(state.detach())[2].movedim(lane_dim or 0, 0)
        known = numbers.reshape(size, -1)[:MAX_LANES, 0].tolist()
        if not all(known) or len({n // SPAN for n in known}) > 1:
            return call.edited
        rows = [n % SPAN // LANE - 1 for n in known]
        if min(rows) >= 0 and (len(set(rows)) > 1 or len(rows) == 1):
            call.rows = rows
        if step := known[0] % LANE:
            call.step = step - 1
        return True

    def recording(self, call: UnitCall) -> Root | None:
        """The raw data that a call reads first."""
        return self.table.raw.get(int(call.ends[0][0, 0]) // SPAN) if call.ends else None

    def lanes(self, call: UnitCall) -> list[Lane]:
        """Where the lanes of a call, or the first of them, begin and end; empty if unknown."""
        if call.known_lanes is None:
            call.known_lanes = []
            if call.ends:
                (first, _), (second, _), (last, end) = (ends.tolist() for ends in call.ends)
                parts = list(zip(first, second, last, end, strict=True))[:MAX_LANES]
                lanes = [self._lane(part, call.steps) for part in parts]
                call.known_lanes = [each for each in lanes if each] if all(lanes) else []
        return call.known_lanes

    def _lane(self, numbers: tuple[int, ...], count: int) -> Lane | None:
        root = self.table.raw.get(numbers[0] // SPAN)
        same = {n // SPAN for n in numbers} == {numbers[0] // SPAN}
        return lane(root, [n % SPAN for n in numbers], count) if root and same else None


def _behind(call: UnitCall | None, key: Any) -> UnitCall | None:
    """The last call of a unit behind a call, itself included."""
    pending, visited = [call], list[UnitCall]()
    while pending and len(visited) < MAX_PARENTS:
        call = pending.pop(0)
        if not call or call in visited:
            continue
        if call.unit.key == key:
            return call
        visited.append(call)
        pending += call.parents
    return None


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
