"""Rules of the state, over the calls of a unit in order.

Where each call's state comes from, and how its data lie after those of that call: a state that is
not carried (TT201), or backwards too (TT212), carried with an endless graph (TT202), detached at
every step (TT203), or carried where it does not belong (TT204 to TT208, TT210). A lane is a row of
the batch; a recording is one unbroken sequence of data.
"""

from typing import Any

from throughtime.doctor._calls import Unit, UnitCall, begins_again, equal, relation
from throughtime.doctor._data import Root, remember
from throughtime.doctor._log import Fault, Log

# an evaluation in one graph: chunks of a layer or steps of a cell before it is reported
CONNECTED_CHUNKS, CONNECTED_STEPS = 4, 32
FRESH_CHUNKS = 3  # adjacent chunks that start from one state before it is reported
REPEATS = 4  # calls on the same inputs before it is reported
CHUNKS = 2  # that show a fault before it is reported


class StateRule:
    """The rules of the state, with what they remember of the calls so far."""

    def __init__(self, log: Log, report: Any) -> None:
        self.log, self.report = log, report
        self.pending: list[UnitCall] = []  # starts in this chunk
        self.recordings: dict[Root | None, None] = {}  # of which two adjacent chunks were read

    def on_call(self, call: UnitCall) -> None:
        """Compare a call with the one that its state comes from, or that it follows."""
        unit, origin = call.unit, call.origin
        if call.training and (evaluation := unit.last.get(False)):
            self._report_connected(evaluation)
        if origin:
            self._continues(call, origin)
        else:
            unit.first = call
            self._starts_fresh(call)
            if not call.before or call.before.position != call.position or call.steps > 1:
                self._start(call)
        remember(unit.ends, call.recording, call)

    def _continues(self, call: UnitCall, origin: UnitCall) -> None:
        if origin.chunk != call.chunk:
            self.log.crossed.add(call.chunk)
        elif call.has_graph:
            call.graph_steps = origin.graph_steps + call.steps
            call.graph_calls = origin.graph_calls + 1
        if self._repeats(call, origin) or (call.before is not origin and self._start(call)):
            return
        order = relation(origin, call)
        if order == "next":
            self._goes_on(call, origin)
        elif call.edited:
            self._starts_fresh(call)
        else:
            self._goes_elsewhere(call, origin, order)

    # --- a state that is not that of the chunk before

    def _start(self, call: UnitCall) -> bool:
        """Whether the state that started the chunk before starts this one too, which goes on."""
        unit, before = call.unit, call.unit.ends.get(call.recording)
        # it may be older than the last call
        before = before if before and before.chunk < call.chunk else call.before
        if not before or not call.grad or call.training is False or call.bidirectional:
            return False
        if call.states and not equal(call.states, before.states):
            return False
        order = relation(before, call)
        unit.samples |= order == "jump"
        drawn = self.log.random and call.batch != before.batch
        if order != "next" or drawn or unit.samples:
            return False
        call.length = before.steps
        self.pending.append(call)
        return True

    def before_backward(self) -> None:
        """Judge what the whole chunk shows."""
        for call in self.pending:
            unit = call.unit
            # one target for a window, which is a sample of its own
            unit.samples |= 0 < self.log.targets < call.graph_steps * call.width
            if not unit.samples:
                unit.fresh.append(call)
                self._report_starts(unit, FRESH_CHUNKS)
        self.pending.clear()
        self.log.targets = 0
        for unit in self.log.units:
            call, unit.repeated = unit.repeated, None
            if call and call.repeats + 1 >= REPEATS and abs(call.repeats + 1 - call.steps) <= 1:
                self._add("TT210", call)
            for call in unit.last.values():
                unit.trained = max(unit.trained, call.graph_calls)
                if call.stepwise:
                    self.report(Fault("TT203", call.stepwise.line, after=CHUNKS))

    def _report_starts(self, unit: Unit, least: int) -> None:
        """TT201, unless slices of unequal length are independent sequences."""
        starts = unit.fresh[:FRESH_CHUNKS]
        if len(starts) >= least and len({call.length for call in starts}) == 1:
            self._add("TT201", starts[-1], f"{len(starts)} times the inputs continued.")

    def _starts_fresh(self, call: UnitCall) -> None:
        """A new or a masked state: what was repeated before it is a sample of its own."""
        if call.before and call.before.repeats and call.grad:
            call.unit.reread, call.unit.wrap = True, None

    # --- a state that is carried

    def _goes_on(self, call: UnitCall, origin: UnitCall) -> None:
        unit = call.unit
        unit.in_order = True
        unit.fresh.clear()
        if call.bidirectional and equal([call.states[0][-1:]], [origin.outputs[0][-1:]]):
            self._add("TT212", call, after=CHUNKS)
        self._moves_on(origin)
        self._report_wrap(unit)
        remember(self.recordings, origin.recording, None)

    def _moves_on(self, origin: UnitCall) -> None:
        """A state enters other inputs: those that it has read several times were not all."""
        if origin.repeats and origin.grad:
            self._add("TT210", origin, f"{origin.repeats + 1} calls in a row.", CHUNKS)
            origin.unit.wrap, origin.unit.reread = None, True

    def _goes_elsewhere(self, call: UnitCall, origin: UnitCall, order: str) -> None:
        """A state that does not go on in time."""
        if call.training == origin.training and self._begins_again(call, origin, order):
            return
        loader, code = self.log.loader, self._code(call, origin, order)
        if not code:
            self._moves_on(origin)
        elif code == "TT207" and loader and call.batch != origin.batch:
            self.report(Fault(code, loader))
        else:
            self._add(code, call)
        call.unit.jumps |= code == "TT207"

    def _code(self, call: UnitCall, origin: UnitCall, order: str) -> str:
        """The code of a state that does not go on in time; empty if it is no fault."""
        unit, at_once = call.unit, call.chunk == origin.chunk
        if call.training != origin.training:
            return "TT205"
        if self.log.random and call.batch != origin.batch:
            return "TT207"
        if order == "rows":
            return "TT206"
        # what lies between may belong to other states, such as those of other users
        if order == "jump" and call.before is origin and not at_once:
            return "TT207"
        if order == "start" and origin.recording in self.recordings:
            return "TT204"
        unit.mixed |= at_once and order in {"start", "other"}
        return "TT204" if order == "other" and not at_once and not unit.mixed else ""

    # --- the same inputs again

    def _begins_again(self, call: UnitCall, origin: UnitCall, order: str) -> bool:
        """Whether a state enters the inputs, or the beginning of the pass, that it comes from.

        It is reported if the next chunk shows that chunks are in order, or at the end.
        """
        if call.chunk == origin.chunk or not (call.grad and origin.grad):
            return call.repeats > 0
        unit, in_batch = call.unit, call.batch == origin.batch != (0, 0)
        again = order == "again" or (unit.first is not None and begins_again(unit.first, call))
        if call.repeats or (again and unit.in_order):  # or no two chunks were in order so far
            if not call.repeats:
                self._report_wrap(unit)
            ends_pass = again and not (call.repeats and (in_batch or unit.reread))
            unit.wrap = call if ends_pass else None
        return again or call.repeats > 0

    def _report_wrap(self, unit: Unit) -> None:
        wrap, unit.wrap = unit.wrap, None
        if wrap and not unit.jumps:
            self._add("TT208", wrap)

    def _repeats(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether the state of a call enters a call on the same inputs, with no update between.

        A loader's batch is no pass over the data: any number of calls may read it.
        """
        at_once = call.chunk == origin.chunk
        if call.steps != origin.steps // origin.count or not begins_again(origin, call):
            return False
        call.repeats = origin.repeats + 1
        if call.grad and origin.count == 1 and (at_once or call.batch == origin.batch != (0, 0)):
            call.unit.repeated = call
        return at_once

    # --- the graph

    def _report_connected(self, call: UnitCall) -> None:
        """TT202: a graph that grows, in an evaluation, before any backward or beyond all others."""
        limit = CONNECTED_CHUNKS if call.steps > call.count else CONNECTED_STEPS
        endless = call.training is False or call.graph_calls > 2 * call.unit.trained
        if call.chunk == self.log.chunk and call.graph_calls >= limit and endless:
            self._add("TT202", call, f"{call.graph_steps} steps are in one graph.")

    def close(self) -> None:
        """Judge what the end of the loop shows."""
        for unit in self.log.units:
            self._report_starts(unit, FRESH_CHUNKS - 1)
            self._report_wrap(unit)
            for call in unit.last.values():
                self._report_connected(call)

    def _add(self, code: str, call: UnitCall, detail: str = "", after: int = 1) -> None:
        self.report(Fault(code, call.instruction.line, detail, after=after))
