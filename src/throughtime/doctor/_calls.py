"""The calls of recurrent units, and where their states come from.

A unit is a recurrent layer or cell of torch, or an instruction that takes in its own result beside
data. A call of it covers the steps that it takes in one chunk: the chunk of a layer, or the steps
of a cell one after another. How two of them lie in time is told by what they cover of their data.
"""

import itertools
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from throughtime.doctor._data import (
    EDITS,
    MOVES,
    SPAN,
    UNKNOWN,
    WRITES,
    Operation,
    Root,
    RootTable,
    latest,
)
from throughtime.doctor._frames import Instruction
from throughtime.doctor._log import Fault, Log

LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
DETACHES = {"detach", ".data", "detach_"}
STATE_DIMS = {1, 2, 4, 5}  # of a state by hand: units, lanes of them, channels of images or volumes
MIN_DETACHES = 3  # one after another, a single step between them
MAX_LANES = 4  # lanes compared; a wrong order shows in the first ones


class Lane(NamedTuple):
    """What one lane of a chunk reads of its root; distances are by dimension, see `distances`."""

    root: Root
    first: list[int]  # the index of the first element that its first step reads,
    last: list[int]  # and its last one
    step: dict[int, int]  # the distance from one step to the next, empty if unknown
    size: dict[int, int]  # that from the first to the last element that the last step reads
    steps: int

    @property
    def is_whole(self) -> bool:
        """Whether every step reads the whole chunk."""
        return self.steps > 1 and self.first == self.last

    def joined(self, step: "Lane") -> "Lane":
        """With one more step."""
        distance = distances(self.last, step.first)
        return Lane(self.root, self.first, step.last,
                    distance if self.steps == 1 or distance == self.step else {}, step.size,
                    self.steps + step.steps)  # fmt: skip

    def begins(self, time: int) -> bool:
        """Whether it begins at the first element of its root in time, in its direction."""
        return self.first[time] == (self.root.shape[time] - 1 if self.step.get(time, 0) < 0 else 0)


def distances(a: list[int], b: list[int]) -> dict[int, int]:
    """How far an index is from another, by the dimensions in which they differ."""
    return {d: b[d] - i for d, i in enumerate(a) if i != b[d]}


def _moved(lanes: list[Lane], offset: int) -> list[Lane]:
    """Lanes of one root at another offset, empty if that is not along its first dimension."""
    root, moved = lanes[0].root, list[Lane]()
    for stride, d in root.dims[:1]:
        for lane in () if offset % stride else lanes:
            first, last = lane.first.copy(), lane.last.copy()
            first[d] += offset // stride
            last[d] += offset // stride
            moved.append(Lane(root, first, last, *lane[3:]))
    return moved


def follows(a: Lane, b: Lane) -> bool:
    """Whether one lane continues where the other ended, in one dimension of the data.

    With x[:-1] the last step is a target only. A convolution may read the end of the last chunk
    again, as context.
    """
    moved = distances(a.last, b.first) if a.root is b.root else {}
    if len(moved) != 1:
        return False
    ((d, distance),) = moved.items()
    if a.is_whole:
        size = 1 + a.size.get(d, 0)
        return size > 1 and distance in {size, size + 1, size - size % a.steps}
    step = a.step.get(d, 0) if a.steps > 1 else 1
    return distance in {step, 2 * step}


def relation(a: "UnitCall", b: "UnitCall") -> str:
    """How the chunks of two calls lie in time, if the state of the first enters the second.

    Returns:
        "next": every lane goes on; "rows": every lane goes on from another lane; "jump": it goes on
        at another position; "again": it goes back to the beginning; "start": it begins in other
        data; "other": it goes on in other data, whose last chunk was read with another state;
        "": uncertain.
    """
    before, after = a.lanes, b.lanes
    if not before or not after or (b.rows is None and len(before) != len(after)):
        return ""  # some lanes may have ended
    of = range(len(after)) if b.rows is None else b.rows
    pairs = [(before[i], lane) for i, lane in zip(of, after, strict=False) if i < len(before)]
    if all(follows(*pair) for pair in pairs):
        return "next" if pairs else ""
    if all(any(follows(other, lane) for other in before) for _, lane in pairs):
        return "rows"
    kinds = {_of_lanes(*pair, b.unit.ends) for pair in pairs}
    if kinds <= {"start", "next"}:
        return "start"
    elsewhere = "elsewhere" in kinds and kinds <= {"elsewhere", "jump", "other", "start", ""}
    if elsewhere or kinds == {"jump"}:
        # single steps may lie anywhere, such as events of several users in one table
        return "jump" if a.steps + b.steps > 2 else ""
    return kinds.pop() if len(kinds) == 1 else ""


def _of_lanes(a: Lane, b: Lane, ends: "dict[Root | None, UnitCall]") -> str:
    """How the next chunk of one lane lies in time; "elsewhere" is a jump within other data."""
    if follows(a, b):
        return "next"
    time = next(iter(b.step or a.step), -1)  # its dimension, -1 if unknown
    whole = a.is_whole or b.is_whole
    if a.root is not b.root:
        inside = (i for d, i in enumerate(b.first) if not whole or (b.is_whole and d in b.size))
        if not any(inside) or (time >= 0 and b.begins(time)):
            return "start"
        last = (b.root in ends and ends[b.root].lanes) or []
        if any(follows(each, b) for each in last):
            return "other"
        return "elsewhere" if last and not whole else ""
    moved = distances(a.last, b.first).keys()
    if time < 0:
        along = {d for d in moved if len(moved) == 1 or not b.first[d]}
        if len(along) != 1:
            return ""
        (time,) = along
    if b.begins(time):
        return "start" if moved - {time} else "again"
    return "jump" if moved == {time} and (a.is_whole or a.steps == 1 or a.step) else ""


def begins_again(a: "UnitCall", b: "UnitCall") -> bool:
    """Whether every lane known of a call begins where an earlier one began.

    Not if it is a step on the same input, such as the encoding that a decoder gets at each step.
    """
    pairs = list(zip(a.lanes or [], b.lanes or [], strict=False))
    is_same_step = b.steps == 1 and all(x.last == y.first for x, y in pairs)
    same = all(x.root is y.root and x.first == y.first for x, y in pairs)
    return bool(pairs) and same and not is_same_step


@dataclass(eq=False)
class Unit:
    """A recurrent layer or cell, or an instruction that takes in its own result, with its past."""

    key: Any  # the id of its first weight, or the instruction and the object that it belongs to
    confirmed: bool = False  # it took in a result of its own
    last: "dict[bool | None, UnitCall]" = field(default_factory=dict)  # its last call by mode
    ends: "dict[Root | None, UnitCall]" = field(default_factory=dict)  # and by recording
    first: "UnitCall | None" = None  # the first call of its pass over the data
    in_order: bool = False  # a state entered the next chunk in time
    jumps: bool = False  # a state jumped in time
    repeated: "UnitCall | None" = None  # the last call of several on the same inputs
    trained: int = 0  # the most calls in one graph before a backward
    mixed: bool = False  # it reads several tensors within one chunk
    samples: bool = False  # its chunks are samples of their own
    reread: bool = False  # it reads each chunk several times
    # chunks in a row that started from one state
    fresh: "list[UnitCall]" = field(default_factory=list)
    wrap: "UnitCall | None" = None  # the call whose state entered what it comes from


@dataclass(eq=False)
class UnitCall:
    """The steps of a unit in one chunk."""

    unit: Unit
    instruction: Instruction
    serial: int  # of its last step
    chunk: int
    model_call: int
    batch: Any
    training: bool | None
    grad: bool
    lanes: list[Lane] | None  # what its first lanes read, `None` if that is no raw data
    steps: int = 1
    count: int = 1  # calls of the layer or cell
    width: int = 1  # lanes
    origin: "UnitCall | None" = None  # the call that its state comes from,
    rows: list[int] | None = None  # the lane in it of each lane,
    edited: bool = False  # and what happened to the state since
    has_graph: bool = False
    states: list[Tensor] = field(default_factory=list)  # as they entered, without graph
    outputs: list[Tensor] = field(default_factory=list)  # of its last step, without graph
    before: "UnitCall | None" = None  # the last call of the unit
    length: int = 0  # steps of the chunk that it goes on from, although its state does not
    graph_steps: int = 0  # steps connected in one graph
    graph_calls: int = 1  # calls of the unit connected in one graph
    repeats: int = 0  # calls or chunks before it, one after the other, that read the same data
    run: int = 0  # steps in a row whose state was detached, the last ones
    stepwise: Instruction | None = None  # what detached every step
    last_detach: Instruction | None = None  # of its last state
    bidirectional: bool = False

    @property
    def position(self) -> Any:
        """The chunk, the batch and the mode."""
        return self.chunk, self.batch, self.training, self.grad

    @property
    def recording(self) -> Root | None:
        """The raw data that it reads first."""
        return self.lanes[0].root if self.lanes else None


class Calls:
    """Makes calls of operations, and hands each new one to the rule."""

    # the last view: a weak reference, the shape before, the instruction
    viewed: Any = (lambda: None), (), None
    # the last part of raw data that was read: what it is, its offset, its lanes
    read: Any = None, 0, []

    def __init__(self, log: Log, table: RootTable, rule: Any) -> None:
        self.log, self.table, self.rule = log, table, rule
        self.units: dict[Any, Unit] = {}  # by their key
        self.serials = itertools.count(1)

    def layer_or_cell(self, op: Operation) -> None:
        """A layer or cell of torch."""
        args, inputs, layer = op.args, op.inputs[0], op.name in LAYERS
        packed = layer and isinstance(args[3], (list, tuple))
        state, weights = args[1 + packed : 3 + packed]
        states = [state] if isinstance(state, Tensor) else list(state)
        weight = weights[0] if layer else weights
        # weights that are no parameters may be made anew for each call
        key = id(weight) if isinstance(weight, nn.Parameter) else op.instruction
        time_dim = int(args[8] and inputs.dim() > 2) if layer and not packed else None
        lanes = None if packed else self._lanes(inputs, inputs.dim() - 1, time_dim)
        # TT213: the inputs are a view that exchanges sizes, and so mixes the rows
        view, before, instruction = self.viewed
        sizes = [[n for n in shape if n > 1] for shape in (before, inputs.shape)]
        if view() is inputs and sizes[0] != sizes[1] and sorted(sizes[0]) == sorted(sizes[1]):
            self.rule.report(Fault("TT213", instruction.line, after=2))
        marks = [UNKNOWN] * len(op.outputs)
        if lanes and self.table.complete:  # later no operation behind it is followed
            marks[0] = self.table.rows(inputs, op.outputs[0].shape)
        self._add(
            key,
            op,
            lanes,
            states,
            list(map(self.table.add, op.outputs, marks)),
            steps=(len(args[1]) if packed else inputs.shape[time_dim or 0]) if layer else 1,
            width=states[0].shape[-2] if states[0].dim() > 1 + layer else 1,
            outputs=values(op.outputs[layer:]),
            bidirectional=layer and bool(args[7 + packed]),
        )

    def _lanes(self, tensor: Tensor, lead: int, time_dim: int | None) -> list[Lane] | None:
        """What each lane of a tensor reads; it has so many dimensions in front.

        `None` if it is not raw data, empty if a lane reads several of them.
        """
        root = self.table.root(tensor, new=not tensor.requires_grad)
        offset = tensor.storage_offset()
        if not root.known:
            return None
        key = root, tensor.shape, tensor.stride(), time_dim
        lanes = _moved(self.read[2], offset - self.read[1]) if key == self.read[0] else []
        if not lanes:
            grid = self.table.rows(tensor, tensor.shape[:lead])
            grid = grid[:, None] if time_dim is None else grid.swapaxes(1, 1 + time_dim)
            first, last = grid.reshape(2, grid.shape[1], -1)[..., :MAX_LANES]
            reads = np.array([first[0], first[:2][-1], first[-1], last[-1]]).T.tolist()
            for numbers in reads:
                source = self.table.raw.get(numbers[0] // SPAN)
                if not source or {n // SPAN for n in numbers} != {source.number}:
                    return [] if reads[0][0] else None
                at = {n: source.index(n % SPAN) for n in {*numbers}}
                start, second, last, end = (at[n] for n in numbers)
                step, size, steps = distances(start, second), distances(last, end), len(first)
                is_even = distances(start, last) == {d: n * (steps - 1) for d, n in step.items()}
                lanes.append(Lane(source, start, last, step if is_even else {}, size, steps))
        if root.marks is None:
            self.read = key, offset, lanes
        return lanes

    def detached(self, op: Operation) -> None:
        """A state without its graph, unless the states of other units keep theirs, or have none."""
        if op.name not in DETACHES or op.inputs[0].is_leaf:
            return
        calls = list(self.table.root(op.inputs[0], new=False).behind.values())  # the last one last
        kept = any(
            not call.grad or (call.has_graph and call.chunk == calls[-1].chunk)
            for call in calls[:-1]
        )
        for call in calls:
            call.last_detach = None if kept else op.instruction

    def by_hand(self, op: Operation, frame: FrameType) -> None:
        """Any other operation; it is a step of a unit if it takes in a result of its own."""
        out, table = op.outputs[0], self.table
        root = table.root(out, new=False)
        if not root.learned or op.name in MOVES | WRITES:
            return
        if out.dim() not in STATE_DIMS or out.numel() < 2:
            return
        # two layers of one class run the same instruction
        key = op.instruction, id(frame.f_locals.get("self"))
        pairs = [(t, table.root(t, new=not t.requires_grad)) for t in op.fluid]
        own = [t for t, r in pairs if key in r.behind]
        lanes = source = None
        for t, r in pairs:
            fits = out.dim() == 1 or (t.dim() == out.dim() and len(t) == len(out))
            # a known unit may start from a constant
            learned = key in self.units or any(e.learned for other, e in pairs if other is not t)
            is_mask = op.name in EDITS and not r.learned
            if lanes is None and key not in r.behind and fits and learned and not is_mask:
                lanes, source = self._lanes(t, int(out.dim() > 1), None), t
        if lanes is None:
            return
        states = own or [t for t, r in pairs if t is not source and not r.learned]
        width = 1 if out.dim() == 1 else len(out)
        self._add(key, op, lanes, states, [root], confirmed=bool(own), width=width)

    def _add(
        self,
        key: Any,
        op: Operation,
        lanes: list[Lane] | None,
        states: list[Tensor],
        results: list[Root],
        *,
        confirmed: bool = True,
        **facts: Any,
    ) -> None:
        """Add a call, or its steps to the one that its state comes from."""
        log, unit = self.log, self.units.setdefault(key, Unit(key))
        unit.confirmed |= confirmed
        last = unit.last.get(log.training)
        call = UnitCall(
            unit, op.instruction, next(self.serials), log.chunk, log.call, log.batch, log.training,
            torch.is_grad_enabled(), lanes, before=last, **facts,
        )  # fmt: skip
        pairs = [(t, self.table.root(t, new=False)) for t in states]
        behind = latest(root.behind for _, root in pairs)
        origin, is_known = behind.get(unit.key), not any(root.learned for _, root in pairs)
        if is_known and last and _is_copy(states, last.outputs):
            origin = last
        call.has_graph = any(t.grad_fn and not root.cut for t, root in pairs)
        call.graph_steps = call.steps
        if unit.confirmed:
            log.recurrent = log.units[unit] = op.instruction
        if origin and origin is last and not self._is_boundary(call, origin):
            is_cut = not any(t.is_leaf and t.requires_grad for t in states)  # used by the loop
            call = self._continued(origin, call, is_cut)
        else:
            self._begin(call, origin, pairs)
            if unit.confirmed and (origin or (is_known and not call.has_graph)):
                self.rule.on_call(call)
            else:
                unit.first = unit.first or call
            unit.last[call.training] = call
        for root in results:
            root.behind = latest([root.behind, behind, {unit.key: call}])
            root.learned, root.edited, root.cut = True, False, False

    def _begin(self, call: UnitCall, origin: UnitCall | None, states: list[Any]) -> None:
        """A new chunk, whose state comes from this call."""
        call.states, call.origin = values([t for t, _ in states]), origin
        if call.before:
            call.before.before = None
        if origin:
            origin.origin = origin.before = None  # no older call is asked for
            if origin.outputs:
                self._compare(call, origin)
            else:  # by hand
                call.edited = any(root.edited for _, root in states)

    def _continued(self, call: UnitCall, step: UnitCall, is_cut: bool) -> UnitCall:
        """The call with one more step."""
        if step.has_graph:
            call.graph_steps += step.steps
        # 0 where a graph has ended
        call.graph_calls = step.has_graph and call.graph_calls and call.graph_calls + 1
        is_cut = is_cut and step.steps == 1 and not step.has_graph and bool(call.last_detach)
        call.run = call.run + 1 if is_cut else 0
        if call.run + 1 >= MIN_DETACHES:
            call.stepwise = call.last_detach
        pairs = list(zip(call.lanes or [], step.lanes or [], strict=False))
        is_one = pairs and all(a.root is b.root for a, b in pairs)
        call.lanes = [a.joined(b) for a, b in pairs] if is_one else None
        call.steps, call.count = call.steps + step.steps, call.count + 1
        call.serial, call.model_call, call.has_graph = step.serial, step.model_call, step.has_graph
        call.outputs = step.outputs
        call.last_detach = None
        return call

    def _is_boundary(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether a new chunk begins between two calls."""
        if call.position != origin.position:
            return True
        if call.model_call == origin.model_call or call.lanes is None:
            return False
        is_other = call.recording is not origin.recording or begins_again(origin, call)
        return call.steps > 1 or is_other

    def _compare(self, call: UnitCall, origin: UnitCall) -> None:
        """Note the lane of an earlier call whose result each lane has, by its values."""
        if equal(call.states[:1], origin.outputs[:1]):
            return
        state, result = (
            torch.atleast_2d(each[0]).movedim(-2, 0).flatten(1)
            for each in (call.states, origin.outputs)
        )
        if state.shape[1:] != result.shape[1:]:
            call.edited = True
            return
        same = (state[:MAX_LANES, None] == result).all(-1)
        call.edited = not bool(same.any(1).all())
        rows = same.int().argmax(1).tolist()
        if not call.edited and (len(set(rows)) > 1 or len(rows) == 1):
            call.rows = rows


def values(tensors: list[Tensor]) -> list[Tensor]:
    """What tensors hold now."""
    return [each.detach().cpu().clone() for each in tensors]


def _is_copy(states: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether states without a graph have the values of outputs that are not all zeros."""
    is_new = all(not a.requires_grad and a.any() for a in states)
    return is_new and equal(values(states), outputs)


def equal(states: list[Tensor], others: list[Tensor]) -> bool:
    """Whether states have the same values."""
    return bool(states) and len(states) == len(others) and all(map(torch.equal, states, others))
