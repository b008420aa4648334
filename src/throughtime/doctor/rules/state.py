"""Rules of the state, over the calls of a unit in order.

Where each call's state comes from, and how its data lie after those of that call: a state that is
not carried (TT201, of a bidirectional layer TT212), carried with an endless graph (TT202),
detached at every step (TT203), or carried where it does not belong (TT204 to TT208, TT210); batch
and time exchanged (TT209) or mixed (TT213). A lane is a row of the batch; a recording is one
unbroken sequence of data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from throughtime.doctor._calls import MIN_DETACHES, Calls, Unit, UnitCall, equal
from throughtime.doctor._data import Lane, Root
from throughtime.doctor._frames import Instruction, line_of
from throughtime.doctor._log import Fault, Log
from throughtime.doctor._order import follows, raw_roots, relation, same_start

# an evaluation in one graph: chunks of a layer or steps of a cell before it is reported
CONNECTED_CHUNKS, CONNECTED_STEPS = 4, 32
LONG = 256  # steps before the only backward
FRESH_CHUNKS = 3  # adjacent chunks that start from one state before it is reported
REPEATS = 4  # calls on the same inputs before it is reported
REPLAYS = 3  # chunks that are read twice before it is reported
SMOOTHER = 0.8  # the change along time, at most, of that along lanes
CHUNKS = 2  # chunks that show exchanged dimensions before it is reported
TWICE = "Each chunk is read twice, the second time from the state at its end."
BESIDE = "Each chunk goes on where the last lane ended, not where the steps ended."
MAX_RECORDINGS = 64  # recordings remembered, the lanes of some chunks


@dataclass
class SameStarts:
    """Adjacent chunks that started from the same state, such as zeros."""

    call: UnitCall
    zeros: bool
    count: int = 0
    lengths: set[int] = field(default_factory=set)  # of the chunks before them


class Wrap(NamedTuple):
    """A state that enters the beginning of the pass that it comes from, or the same inputs."""

    fault: Fault
    repeats: int  # updates before it on the same inputs, one after the other
    ends_pass: bool  # the inputs may be all of the data


class StateRule:
    """The rules of the state, with what they remember of the calls so far."""

    def __init__(self, log: Log, report: Callable[[Fault], object]) -> None:
        self.log, self.report = log, report
        self.calls: Calls
        self.pending: list[tuple[UnitCall, int, bool]] = []  # starts in this chunk
        self.recordings: dict[Root, None] = {}  # roots of which two adjacent chunks were read
        self.entered: dict[Root, Fault] = {}  # roots that a state of another recording entered
        self.exchanged: list[UnitCall] = []  # in this chunk, by what shows that batch and time are
        self.stepwise: list[UnitCall] = []  # of the last chunk, detached at every step

    def on_mixed(self, view: Instruction) -> None:
        """TT213: the inputs of a layer are a view that mixes their rows."""
        self.report(Fault("TT213", line_of(view), after=CHUNKS))

    def on_call(self, call: UnitCall) -> None:
        """Compare a call with the one that its state comes from, or that it follows."""
        origin, before, unit = call.origin, call.before, call.unit
        if call.training and (evaluation := unit.last.get(False)):
            self._report_connected(evaluation)
        if not origin:
            unit.first = call
            self._starts_fresh(call)
            if not before or before.position != call.position or call.steps > 1:
                self._start(call)
            return
        if origin.chunk == call.chunk:
            self._count_graph(call, origin)
        else:
            self.log.crossed.add(call.chunk)
            if self._is_beside(origin, call):
                self.exchanged.append(call)
        if self._repeats(call, origin) or (before is not origin and self._start(call)):
            return
        order = self._relation(origin, call)
        if order == "next":
            self._goes_on(call, origin)
        elif call.edited and order != "rows":
            self._starts_fresh(call)
        else:
            self._goes_elsewhere(call, origin, order)

    def _relation(self, origin: UnitCall, call: UnitCall) -> str:
        before, ends = self.calls.lanes(origin), call.unit.ends
        if call.step not in {None, origin.steps - 1}:  # the state is not the last one of the chunk
            before = [x._replace(last=x.first + x.step * (call.step or 0)) for x in before]
        for lane in before:
            remember(ends, lane.root, origin)

        def read(root: Root) -> list[Lane]:
            lanes = self.calls.lanes(ends[root]) if root in ends else []
            return [lane for lane in lanes if lane.root is root]

        order = relation(before, self.calls.lanes(call), origin.steps, call.rows, read)
        # single steps may lie anywhere, such as events of several users in one table
        return "" if order == "jump" and origin.steps == call.steps == 1 else order

    # --- a state that is not that of the chunk before

    def _start(self, call: UnitCall) -> bool:
        """Whether the state that started the chunk before starts this one too, which goes on."""
        unit, recording = call.unit, self.calls.recording(call)
        unit.starts.setdefault(recording, call)
        if call.before:
            remember(unit.ends, self.calls.recording(call.before), call.before)
        before = unit.ends.get(recording)  # it may be older than the last call
        before = before if before and before.chunk < call.chunk else call.before
        if not before or not call.grad or call.training is False:
            return False
        zeros = not any(bool(state.any()) for state in call.states)
        if not (zeros or equal(call.states, before.states)):
            return False
        order, first = self._relation(before, call), unit.starts.get(recording)
        if order == "jump" or (order == "again" and first and not self._same_start(first, call)):
            unit.samples = True
        drawn = self.log.random and call.batch != before.batch
        if order != "next" or drawn or unit.samples:
            return False
        self.pending.append((call, before.steps, zeros))
        return True

    def _same_start(self, a: UnitCall, b: UnitCall) -> bool:
        return same_start(self.calls.lanes(a), self.calls.lanes(b))

    def before_backward(self) -> None:
        """Judge what the whole chunk shows."""
        self._report_detaches()
        for call in self.exchanged:
            if self.log.targets >= call.steps * _lanes(call):  # no samples with a label each
                self._add("TT209", call, BESIDE, CHUNKS)
        for call, length, zeros in self.pending:
            self._count_start(call, length, zeros)
        self.exchanged.clear()
        self.pending.clear()
        self.log.targets = 0
        for unit in self.calls.units.values():
            call, unit.repeated = unit.repeated, None
            if call and call.repeats + 1 >= REPEATS and abs(call.repeats + 1 - call.steps) <= 1:
                detail = f"{call.repeats + 1} calls in a row read the same {call.steps} steps."
                self._add("TT210", call, detail)

    def _count_start(self, call: UnitCall, length: int, zeros: bool) -> None:
        unit = call.unit
        if 0 < self.log.targets < call.graph_steps * _lanes(call):
            unit.samples = True  # one target for a window, which is a sample of its own
        if unit.samples:
            return
        starts = unit.fresh = unit.fresh or SameStarts(call, zeros)
        starts.call, starts.count = call, starts.count + 1
        starts.lengths.add(length)
        if starts.count == FRESH_CHUNKS:
            self._report_starts(starts)

    def _report_starts(self, starts: SameStarts) -> None:
        # slices of unequal length are independent sequences
        if (starts.zeros and starts.call.unit.carried) or len(starts.lengths) > 1:
            return
        origin = "from zeros" if starts.zeros else "from the same state as before"
        detail = f"{starts.count} times the inputs continued and the state started {origin}."
        self._add("TT201", starts.call, detail)

    def _starts_fresh(self, call: UnitCall) -> None:
        """A new or a masked state: what was repeated before it is a sample of its own."""
        unit = call.unit
        if unit.wrap and unit.wrap.repeats and call.grad and call.training is not False:
            unit.reread, unit.wrap = True, None

    # --- a state that is carried

    def _goes_on(self, call: UnitCall, origin: UnitCall) -> None:
        unit = call.unit
        unit.carried = unit.in_order = True
        if call.carries_backward:
            self._add("TT212", call, "", CHUNKS)
        if unit.fresh and not unit.fresh.zeros:
            unit.fresh = None
        self._moves_on(unit)
        self._report_wrap(unit)
        self._add_recording(origin)

    def _moves_on(self, unit: Unit) -> None:
        """A state enters other inputs: those before were not all of the data."""
        if unit.wrap and unit.wrap.repeats:
            unit.wrap, unit.reread = unit.wrap._replace(ends_pass=False), True
            self._report_wrap(unit)

    def _goes_elsewhere(self, call: UnitCall, origin: UnitCall, order: str) -> None:
        """A state that does not go on in time."""
        log, unit, line = self.log, call.unit, line_of(call.instruction)
        name = log.state_name(call.instruction, lambda v: any(v is t for t in call.entered))
        detail = f"The state enters at {line}."
        fault = Fault("", line, detail, name, (origin.chunk, call.chunk))
        same_mode = call.training == origin.training
        if same_mode and self._begins_again(call, origin, order, fault):
            return
        fault = self._fault(call, origin, order, fault)
        if fault.code == "TT207":
            unit.jumps, unit.in_order, unit.wrap = True, False, None
        elif not fault.code and same_mode:
            self._moves_on(unit)
        if fault.code:
            self.report(fault)

    def _fault(self, call: UnitCall, origin: UnitCall, order: str, fault: Fault) -> Fault:
        """The fault of a state that does not go on in time; without a code there is none."""
        log, unit, new_batch = self.log, call.unit, call.batch != origin.batch
        from_recording = order == "start" and self._is_recording(origin)
        if call.training is False and call.cloned:
            return fault  # validation starts from a copy, training keeps its state
        new_data = order == "other" or from_recording
        if call.training != origin.training or (call.grad != origin.grad and new_data):
            trains = call.training if call.training != origin.training else call.grad
            direction = "validation to training" if trains else "training to validation"
            return fault._replace(code="TT205", detail=f"It goes from {direction}.")
        if new_batch and call.batch[0] == origin.batch[0] and log.random:
            return fault._replace(code="TT207", line=log.loader)
        if order == "rows" and not call.edited:
            return fault._replace(code="TT206", detail="")
        # what lies between may belong to other states, such as those of other users
        if order == "jump" and call.before is origin and call.chunk != origin.chunk:
            return fault._replace(code="TT207", line=(new_batch and log.loader) or fault.line)
        if call.chunk == origin.chunk and order in {"start", "other"}:
            unit.mixed = True
        elif order == "other" and not unit.mixed:
            return fault._replace(code="TT204", detail="")
        if from_recording:
            self._enter_recording(call, fault._replace(code="TT204", detail=""))
        return fault

    def _enter_recording(self, call: UnitCall, fault: Fault) -> None:
        """Report the fault at once, or when the next chunk shows that the data are a recording."""
        for root in raw_roots(self.calls.lanes(call)):
            remember(self.entered, root, fault)
        if self._is_recording(call):
            self._add_recording(call)

    def _add_recording(self, call: UnitCall) -> None:
        """Note that two chunks were read from these tensors: recordings, not copies of a chunk.

        A state that entered one of them from another recording is reported then.
        """
        for root in raw_roots(self.calls.lanes(call)):
            remember(self.recordings, root, None)
            if root in self.entered:
                self.report(self.entered.pop(root))

    def _is_recording(self, call: UnitCall) -> bool:
        return not self.recordings.keys().isdisjoint(raw_roots(self.calls.lanes(call)))

    # --- the same inputs again

    def _begins_again(self, call: UnitCall, origin: UnitCall, order: str, fault: Fault) -> bool:
        """Whether a state enters the inputs, or the beginning of the pass, that it comes from.

        It is reported if the next chunk shows that chunks are in order, or at the end.
        """
        unit, in_batch = call.unit, call.batch == origin.batch != (0, 0)
        if call.chunk == origin.chunk or not (call.grad and origin.grad):
            return in_batch and call.repeats > 0
        again = order == "again" or (unit.first is not None and self._same_start(unit.first, call))
        again = again and not self._is_same_step(origin, call)  # the same input at every step
        if not (again or call.repeats):
            return False
        if call.repeats or unit.in_order:  # or no two chunks were in order so far
            if not call.repeats:
                self._report_wrap(unit)
            ends_pass = again and not (call.repeats and (in_batch or unit.reread))
            unit.wrap = Wrap(fault._replace(code="TT208"), call.repeats, ends_pass)
        return True

    def _report_wrap(self, unit: Unit) -> None:
        wrap, unit.wrap = unit.wrap, None
        if wrap and not unit.jumps:
            detail = f"{wrap.repeats + 1} updates in a row start where the one before ended."
            again = wrap.fault._replace(code="TT210", detail=detail)
            self.report(wrap.fault if wrap.ends_pass else again)

    def _is_same_step(self, origin: UnitCall, call: UnitCall) -> bool:
        """Whether a cell goes on with the input that it has read last."""
        pairs = zip(self.calls.lanes(origin), self.calls.lanes(call), strict=False)
        same = all(a.root is b.root and a.last == b.first for a, b in pairs)
        return call.steps == 1 and (same or origin.latest == call.data)

    def _repeats(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether the state of a call enters a call on the same inputs, with no update between.

        A loader's batch is no pass over the data: any number of calls may read it.
        """
        unit, at_once, a, b = call.unit, call.chunk == origin.chunk, origin.data, call.data
        same = a and b and a.shape == b.shape and (a == b or self._same_start(origin, call))
        if not same or self._is_same_step(origin, call):
            return False
        call.repeats = origin.repeats + 1
        if call.grad and origin.count == 1 and (at_once or call.batch == origin.batch != (0, 0)):
            unit.repeated = call
        if at_once and unit.carried and call.grad and call.chunk in self.log.crossed:
            unit.replays += 1
            if unit.replays == REPLAYS:
                self._add("TT210", call, TWICE)
        return at_once

    # --- batch and time

    def _is_beside(self, origin: UnitCall, call: UnitCall) -> bool:
        """Whether a layer's inputs go on along its lanes, and change less along them, as time does.

        Samples that are read in order also go on where the last lane ended. A layer with
        batch_first=True says that lanes come first, so the inputs must show the contrary.
        """
        inputs, (lane_dim, time_dim) = call.inputs, call.dims
        if inputs is None or lane_dim is None or time_dim is None or call.edited:
            return False
        if inputs.is_complex() or min(_lanes(call), call.steps, _lanes(origin)) < 2:
            return False
        before, after = (self.calls.swapped_lanes(each) for each in (origin, call))
        if not before or before[0].whole or len(before) != len(after):
            return False
        if not all(map(follows, before, after)):
            return False
        lanes, steps = (
            float(inputs.double().diff(dim=dim).abs().mean()) for dim in (lane_dim, time_dim)
        )
        return lanes < steps * (SMOOTHER if time_dim == 1 else 1 / SMOOTHER)

    # --- the graph

    def _count_graph(self, call: UnitCall, origin: UnitCall) -> None:
        """Count the calls of this chunk that are connected, and their steps in one graph."""
        if call.steps > 1:
            self.log.continued[call.unit] = self.log.continued.get(call.unit, 0) + 1
        if call.has_graph:
            call.graph_steps = origin.graph_steps + call.steps
            call.graph_calls = origin.graph_calls + 1

    def _report_connected(self, call: UnitCall) -> None:
        """A graph that grows: in an evaluation, before any backward, or longer than all others."""
        limit = CONNECTED_CHUNKS if call.steps > call.count else CONNECTED_STEPS
        longest = 2 * (call.unit.trained or LONG)
        endless = call.training is False or not self.log.chunk or call.graph_calls > longest
        if call.chunk == self.log.chunk and call.graph_calls >= limit and endless:
            detail = f"{call.graph_steps} steps are in one graph, and no backward goes through it."
            self._add("TT202", call, detail)
        # a cell that runs through one sequence is no stream
        only = self.log.chunk == 1 and not call.chunk and call.steps > call.count
        if only and call.graph_steps >= LONG:
            self._add("TT202", call, f"{call.graph_steps} steps were kept for the only backward.")

    def _report_detaches(self) -> None:
        """Detaches of the last chunk."""
        for call in self.stepwise:
            if call.unit.passes_gradients:
                continue
            detail = f"{MIN_DETACHES} detaches in one chunk or more, a single step between them."
            self.report(Fault("TT203", call.stepwise and line_of(call.stepwise), detail))
        calls = (call for unit in self.calls.units.values() for call in unit.last.values())
        self.stepwise = [call for call in calls if call.stepwise and call.chunk == self.log.chunk]

    def close(self) -> None:
        """Judge what the end of the loop shows."""
        self._report_detaches()
        for unit in self.calls.units.values():
            if unit.fresh and unit.fresh.count >= FRESH_CHUNKS - 1:
                self._report_starts(unit.fresh)
            if unit.wrap and unit.wrap.ends_pass:
                self._report_wrap(unit)
            for call in unit.last.values():
                self._report_connected(call)

    def _add(self, code: str, call: UnitCall, detail: str, after: int = 1) -> None:
        self.report(Fault(code, line_of(call.instruction), detail, after=after))


def _lanes(call: UnitCall) -> int:
    lane_dim = call.dims[0]
    return 1 if lane_dim is None or not call.data else call.data.shape[lane_dim]


def remember(table: dict[Any, Any], key: Root | None, value: object) -> None:
    """Store a value and drop the oldest: a finished recording need not stay in memory."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_RECORDINGS:
        del table[next(iter(table))]
