"""Rules of the state, over the calls of a unit in order.

Where each call's state comes from, and how its data lie after those of that call: a state that is
not carried (TT201, of a bidirectional layer TT212), carried with an endless graph (TT202),
detached at every step (TT203), or carried where it does not belong (TT204 to TT208, TT210); batch
and time exchanged (TT209) or mixed (TT213). A lane is a row of the batch; a recording is one
unbroken sequence of data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from throughtime.doctor._calls import MIN_DETACHES, Calls, Unit, UnitCall, equal
from throughtime.doctor._data import Lane, Root
from throughtime.doctor._frames import Instruction, SourceLine, line_of
from throughtime.doctor._log import Fault, Log
from throughtime.doctor._order import follows, raw_roots, relation, same_start

# an evaluation in one graph: chunks of a layer or steps of a cell before it is reported
CONNECTED_CHUNKS, CONNECTED_STEPS = 4, 32
LONG = 256  # steps before the only backward
FRESH_CHUNKS = 3  # adjacent chunks that start from one state before it is reported
REPEATS = 4  # calls on the same inputs before it is reported
REPLAYS = 3  # chunks that are read twice before it is reported
SMOOTHER = 0.8  # the change along time, at most, of that along lanes
MIN_DRAWN = 3  # steps and lanes whose order shows that they are exchanged
CHUNKS = 2  # chunks that show exchanged dimensions before it is reported
TWICE = "Each chunk is read twice, the second time from the state at its end."
BESIDE = "Each chunk goes on where the last lane ended, not where the steps ended."
DRAWN = "What it takes for steps is drawn at random, and its lanes lie in order."
MAX_RECORDINGS = 64  # recordings remembered, the lanes of some chunks


@dataclass
class SameStarts:
    """Adjacent chunks that started from the same state, such as zeros."""

    call: UnitCall
    zeros: bool
    count: int = 0
    lengths: set[int] = field(default_factory=set)  # of the chunks before them


@dataclass
class Wrap:
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
        if origin.chunk != call.chunk:
            self.log.crossed.add(call.chunk)
        elif call.steps > 1:
            self.log.continued[unit] = self.log.continued.get(unit, 0) + 1
        self._count_graph(call, origin)
        repeats = self._repeats(call, origin)
        if origin.chunk != call.chunk and self._is_beside(origin, call):
            self.exchanged.append(call)
        if repeats or (before is not origin and self._start(call)):
            return
        order = self._relation(origin, call)
        if order == "next":
            self._goes_on(call, origin)
        elif call.edited and order != "rows":
            self._starts_fresh(call)
        else:
            self._goes_elsewhere(call, origin, order)

    def _relation(self, origin: UnitCall, call: UnitCall) -> str:
        before = self.calls.lanes(origin)
        if call.step not in {None, origin.steps - 1}:  # the state is not the last one of the chunk
            before = [
                lane._replace(last=lane.first + lane.step * (call.step or 0)) for lane in before
            ]
        for lane in before:
            remember(call.unit.ends, lane.root, origin)
        order = relation(
            before,
            self.calls.lanes(call),
            origin.steps,
            call.rows,
            lambda root: self._read(call, root),
        )
        # single steps may lie anywhere, such as events of several users in one table
        return "" if order == "jump" and origin.steps == call.steps == 1 else order

    def _read(self, call: UnitCall, root: Root) -> list[Lane]:
        last = call.unit.ends.get(root)
        return [x for x in self.calls.lanes(last) if x.root is root] if last else []

    # --- a state that is not that of the chunk before

    def _start(self, call: UnitCall) -> bool:
        """Whether the state that started the chunk before starts this one too, which goes on."""
        before, unit = self._on_recording(call), call.unit
        if not before or not call.grad or call.training is False:
            return False
        zeros = not any(bool(state.any()) for state in call.states)
        if not (zeros or equal(call.states, before.states)):
            return False
        order = self._relation(before, call)
        first = unit.starts.get(self.calls.recording(call))
        if order == "jump" or (order == "again" and first and not self._same_start(first, call)):
            unit.samples = True
        drawn = self.log.random and call.batch != before.batch
        if order != "next" or drawn or unit.samples:
            return False
        self.pending.append((call, before.steps, zeros))
        return True

    def _on_recording(self, call: UnitCall) -> UnitCall | None:
        """The last call on the same recording, which may be older than the last call."""
        before, unit, recording = call.before, call.unit, self.calls.recording(call)
        unit.starts.setdefault(recording, call)
        if before:
            remember(unit.ends, self.calls.recording(before), before)
        last = unit.ends.get(recording, before)
        return last if last and last.chunk < call.chunk else before

    def _same_start(self, a: UnitCall, b: UnitCall) -> bool:
        return same_start(self.calls.lanes(a), self.calls.lanes(b))

    def before_backward(self) -> None:
        """Judge what the whole chunk shows."""
        self._report_detaches()
        for call in self.exchanged:
            if self.log.targets >= call.steps * _lanes(call):  # no samples with a label each
                self._add("TT209", call, BESIDE, CHUNKS)
        self.exchanged.clear()
        for call, length, zeros in self.pending:
            self._count_start(call, length, zeros)
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
        if call.before and self._is_drawn(call.before, call):
            self._add("TT209", call, DRAWN, CHUNKS)
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
            unit.wrap.ends_pass, unit.reread = False, True
            self._report_wrap(unit)

    def _goes_elsewhere(self, call: UnitCall, origin: UnitCall, order: str) -> None:
        log, unit, line = self.log, call.unit, line_of(call.instruction)
        name = log.state_name(call.instruction, lambda v: any(v is t for t in call.entered))
        if call.training == origin.training and self._begins_again(call, origin, order, line, name):
            return
        code, source, detail = self._fault(call, origin, order, line, name)
        if code == "TT207":
            unit.jumps, unit.in_order, unit.wrap = True, False, None
        elif not code and call.training == origin.training:
            self._moves_on(unit)
        if code:
            self.report(Fault(code, source, detail, name, (origin.chunk, call.chunk)))

    def _fault(
        self, call: UnitCall, origin: UnitCall, order: str, line: SourceLine, name: str
    ) -> tuple[str, SourceLine | None, str]:
        """The code of a state that does not go on in time, its line and a detail."""
        detail, new_batch = f"The state enters at {line}.", call.batch != origin.batch
        starts = order == "other" or (order == "start" and self._is_recording(origin))
        if call.training is False and call.cloned:
            return "", None, ""  # validation starts from a copy, training keeps its state
        if call.training != origin.training or (call.grad != origin.grad and starts):
            trains = call.training if call.training != origin.training else call.grad
            direction = "validation to training" if trains else "training to validation"
            return "TT205", line, f"It goes from {direction}."
        if new_batch and call.batch[0] == origin.batch[0] and self.log.random:
            return "TT207", self.log.loader, detail
        if order == "rows" and not call.edited:
            return "TT206", line, ""
        # what lies between may belong to other states, such as those of other users
        if order == "jump" and call.before is origin and call.chunk != origin.chunk:
            return "TT207", (self.log.loader if new_batch else line) or line, detail
        return self._other_recording(call, origin, order, line, name)

    def _other_recording(
        self, call: UnitCall, origin: UnitCall, order: str, line: SourceLine, name: str
    ) -> tuple[str, SourceLine | None, str]:
        """TT204, at once or when the next chunk shows that the data are a recording."""
        if call.chunk == origin.chunk and order in {"start", "other"}:
            call.unit.mixed = True
        elif order == "other" and not call.unit.mixed:
            return "TT204", line, ""
        if order == "start" and self._is_recording(origin):
            fault = Fault("TT204", line, "", name, (origin.chunk, call.chunk))
            for root in raw_roots(self.calls.lanes(call)):
                remember(self.entered, root, fault)
            if self._is_recording(call):
                self._add_recording(call)
        return "", None, ""

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

    def _begins_again(
        self, call: UnitCall, origin: UnitCall, order: str, line: SourceLine, name: str
    ) -> bool:
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
        if not (call.repeats or unit.in_order):
            return True  # no two chunks were in order so far
        if not call.repeats:
            self._report_wrap(unit)
        ends_pass = again and not (call.repeats and (in_batch or unit.reread))
        fault = Fault(
            "TT208", line, f"The state enters at {line}.", name, (origin.chunk, call.chunk)
        )
        unit.wrap = Wrap(fault, call.repeats, ends_pass)
        return True

    def _report_wrap(self, unit: Unit) -> None:
        wrap, unit.wrap = unit.wrap, None
        if not wrap or unit.jumps:
            return
        detail = f"{wrap.repeats + 1} updates in a row start where the one before ended."
        self.report(
            wrap.fault if wrap.ends_pass else wrap.fault._replace(code="TT210", detail=detail)
        )

    def _same_data(self, a: UnitCall, b: UnitCall) -> bool:
        """Whether two calls begin with the same steps."""
        if not a.data or not b.data or a.data.shape != b.data.shape:
            return False
        return a.data == b.data or self._same_start(a, b)

    def _is_same_step(self, origin: UnitCall, call: UnitCall) -> bool:
        """Whether a cell goes on with the input that it has read last."""
        pairs = zip(self.calls.lanes(origin), self.calls.lanes(call), strict=False)
        same = all(a.root is b.root and a.last == b.first for a, b in pairs)
        return call.steps == 1 and (same or origin.latest == call.data)

    def _repeats(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether the state of a call enters a call on the same inputs, with no update between.

        A loader's batch is no pass over the data: any number of calls may read it.
        """
        unit, at_once = call.unit, call.chunk == origin.chunk
        if not self._same_data(origin, call) or self._is_same_step(origin, call):
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

    def _is_drawn(self, before: UnitCall, call: UnitCall) -> bool:
        """Whether a layer's steps are drawn anew for each chunk, and its lanes lie in order."""
        along_lanes = [lane.step for lane in self.calls.swapped_lanes(call)]
        if not along_lanes or not all(along_lanes) or min(call.steps, _lanes(call)) < MIN_DRAWN:
            return False
        pairs = zip(self.calls.lanes(before), self.calls.lanes(call), strict=False)
        return any(
            not (a.step or b.step) and a.last - a.first != b.last - b.first < 0 for a, b in pairs
        )

    # --- the graph

    def _count_graph(self, call: UnitCall, origin: UnitCall) -> None:
        """Count the steps connected in one graph that no backward has freed."""
        if call.has_graph and origin.chunk == call.chunk:
            call.graph_steps, call.graph_calls = (
                origin.graph_steps + call.steps,
                origin.graph_calls + 1,
            )
            call.parts = origin.parts + 1

    def _report_connected(self, call: UnitCall) -> None:
        """A graph that grows: in an evaluation, before any backward, or longer than all others."""
        limit = CONNECTED_CHUNKS if call.steps > call.count else CONNECTED_STEPS
        endless = (
            call.training is False
            or not self.log.chunk
            or call.graph_calls > 2 * (call.unit.trained or LONG)
        )
        if call.chunk == self.log.chunk and call.graph_calls >= limit and endless:
            detail = f"{call.graph_steps} steps are in one graph, and no backward goes through it."
            self._add("TT202", call, detail)
        # a cell that runs through one sequence is no stream
        if self.log.chunk == 1 and not call.chunk and call.graph_steps >= LONG and (
            call.steps > call.count or 0 < 2 * call.parts <= call.graph_steps
        ):  # fmt: skip
            self._add("TT202", call, f"{call.graph_steps} steps were kept for the only backward.")

    def _report_detaches(self) -> None:
        """Detaches of the last chunk, unless its gradients were passed on by hand."""
        for call in self.stepwise:
            at = call.stepwise
            if at and at not in self.log.used_gradients:
                detail = (
                    f"{MIN_DETACHES} detaches in one chunk or more, a single step between them."
                )
                self.report(Fault("TT203", line_of(at), detail))
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
