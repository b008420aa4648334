"""Rules of the passes over the data: always from one state, into the next pass, on the same inputs.

Codes TT201, TT208 and TT210.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from throughtime.doctor._data import Root
from throughtime.doctor._frames import Instruction, SourceLine, line_of
from throughtime.doctor._log import Backward
from throughtime.doctor._order import (
    ChunkOrder,
    remember,
    root_of,
    same_data,
    same_start,
)
from throughtime.doctor._records import Operation, TensorRecord, Unit, UnitCall
from throughtime.doctor.findings import FindingList
from throughtime.doctor.watcher import Watcher

FRESH_CHUNKS = 3  # adjacent chunks that start from one state before it is reported
REPEATS = 4  # calls on the same inputs before it is reported
REPLAYS = 3  # chunks that are read twice before it is reported


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

    line: SourceLine
    name: str
    chunks: tuple[int, int]
    repeats: int  # updates before it on the same inputs, one after the other
    ends_pass: bool  # the inputs may be all of the data


class PassRule:
    """Follows the passes of the units over their data. `StateRule` passes on their calls."""

    def __init__(
        self,
        watcher: Watcher,
        findings: FindingList,
        order: ChunkOrder,
        units: dict[Any, Unit],
    ) -> None:
        self.watcher, self.findings, self.log = watcher, findings, watcher.log
        self.order, self.units = order, units
        # the first and the last call by unit, mode and recording
        self.starts: dict[Any, UnitCall] = {}
        self.ends: dict[Any, UnitCall] = {}
        self.pending: list[tuple[UnitCall, int, bool]] = []  # in this chunk
        self.targets: dict[Instruction, int] = {}  # elements compared with results, by operation

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        """Count the elements that results are compared with, once a start is to be judged."""
        if not self.pending or all(r is None or not t.dim() for t, r in op.pairs()):
            return
        for tensor, record in op.pairs():
            if record is None and not tensor.requires_grad:
                key = op.instruction
                self.targets[key] = self.targets.pop(key, 0) + tensor.numel()
                return

    def start(self, call: UnitCall, before: UnitCall | None, states: list[Tensor]) -> bool:
        """Handle a state that is not that of the chunk before.

        Returns:
            Whether the same state started that chunk too, and this one goes on from it in time.
        """
        call.start = [state.detach().clone() for state in states]
        if before is not None:
            before = self._on_recording(call, before)
        if before is None or not call.grad or call.training is False:
            return False
        zeros = not any(bool(state.any()) for state in call.start)
        if not (zeros or _equal(call.start, before.start)):
            return False
        order = self.order.relation(before, call)
        first = self.starts.get(self._key(call))
        if order == "jump" or (
            order == "again" and first is not None and not same_start(first, call)
        ):
            call.unit.samples = True
        drawn = self.log.random and call.batch != before.batch
        if order != "next" or drawn or call.unit.samples:
            return False
        self.pending.append((call, before.steps, zeros))
        return True

    def _key(self, call: UnitCall) -> tuple[Unit, bool | None, Root | None]:
        return call.unit, call.training, root_of(call.data)

    def _on_recording(self, call: UnitCall, before: UnitCall) -> UnitCall:
        """The last call on the same recording, which may be older than the last call."""
        remember(self.ends, self._key(before), before)
        if self._key(call) not in self.starts:
            remember(self.starts, self._key(call), call)
        last = self.ends.get(self._key(call), before)
        return last if last.data is not None and last.chunk < call.chunk else before

    def before_backward(self, backward: Backward) -> None:
        for call, length, zeros in self.pending:
            self._count_start(call, length, zeros)
        for unit in self.units.values():
            call, unit.repeated = unit.repeated, None
            if call and call.repeats + 1 >= REPEATS and abs(call.repeats + 1 - call.steps) <= 1:
                self._report_repeats(call)
        self.pending.clear()
        self.targets.clear()

    def _count_start(self, call: UnitCall, length: int, zeros: bool) -> None:
        unit = call.unit
        last = unit.last.get(call.training, call)
        steps = last.graph_steps if last.chunk == call.chunk else call.steps
        lanes = 1 if call.lane_dim is None or call.data is None else call.data.shape[call.lane_dim]
        compared = next(reversed(self.targets.values()), 0)
        if 0 < compared < steps * lanes:  # one target for a window, which is a sample of its own
            unit.samples = True
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
        self.findings.add("TT201", line_of(starts.call.instruction), detail)

    def starts_fresh(self, call: UnitCall) -> None:
        """Handle a new or a masked state: what was repeated before it is a sample of its own."""
        unit = call.unit
        if unit.wrap and unit.wrap.repeats and call.grad and call.training is not False:
            unit.reread, unit.wrap = True, None

    def goes_on(self, unit: Unit) -> None:
        """Handle a state that enters the next chunk in time."""
        unit.carried = unit.in_order = True
        if unit.fresh and not unit.fresh.zeros:
            unit.fresh = None
        self.moves_on(unit)
        self._report_wrap(unit)

    def moves_on(self, unit: Unit) -> None:
        """Handle a state that enters other inputs: those before were not all of the data."""
        if unit.wrap and unit.wrap.repeats:
            unit.wrap.ends_pass, unit.reread = False, True
            self._report_wrap(unit)

    def begins_again(
        self, call: UnitCall, origin: UnitCall, order: str, line: SourceLine, name: str
    ) -> bool:
        """Whether a state enters the inputs, or the beginning of the pass, that it comes from.

        It is reported if the next chunk shows that chunks are in order, or at the end.
        """
        in_batch = self._in_batch(call, origin)
        if call.chunk == origin.chunk or not (call.grad and origin.grad):
            return in_batch and call.repeats > 0
        unit = call.unit
        again = order == "again" or (unit.first is not None and same_start(unit.first, call))
        if call.steps == 1 and same_data(origin, call):
            again = False  # the same input at every step
        if not (again or call.repeats):
            return False
        if not (call.repeats or unit.in_order):
            return True  # no two chunks were in order so far
        if not call.repeats:
            self._report_wrap(unit)
        ends_pass = again and not (call.repeats and (in_batch or unit.reread))
        chunks = origin.chunk, call.chunk
        unit.wrap = Wrap(line, name, chunks, call.repeats, ends_pass)
        return True

    def _report_wrap(self, unit: Unit) -> None:
        wrap, unit.wrap = unit.wrap, None
        if wrap is None or unit.jumps:
            return
        code, detail = "TT208", f"The state enters at {wrap.line}."
        if not wrap.ends_pass:
            code = "TT210"
            detail = f"{wrap.repeats + 1} updates in a row start where the one before ended."
        self.findings.add(code, wrap.line, detail, wrap.name, wrap.chunks)

    def repeats(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether the state of a call enters a call on the same inputs, with no update between.

        A loader's batch is no pass over the data: any number of calls may read it.
        """
        at_once, begin = call.chunk == origin.chunk, origin.begin or origin
        each_step = call.steps == 1 and same_data(origin, call)
        if call.data is None or each_step or not same_data(begin, call):
            return False
        call.repeats = origin.repeats + 1
        if call.grad and begin is origin and (at_once or self._in_batch(call, origin)):
            call.unit.repeated = call
        unit = call.unit
        if at_once and unit.carried and call.grad and call.chunk in self.log.crossed:
            unit.replays += unit.replayed != call.chunk
            unit.replayed = call.chunk
            if unit.replays == REPLAYS:
                detail = "Each chunk is read twice, the second time from the state at its end."
                self.findings.add("TT210", line_of(call.instruction), detail)
        return at_once

    def _in_batch(self, call: UnitCall, origin: UnitCall) -> bool:
        """Whether two calls read the batch that a loader returned last."""
        return call.batch == origin.batch and call.batch != (0, 0)

    def _report_repeats(self, call: UnitCall) -> None:
        detail = f"{call.repeats + 1} calls in a row read the same {call.steps} steps."
        self.findings.add("TT210", line_of(call.instruction), detail)

    def close(self) -> None:
        for unit in self.units.values():
            if unit.fresh and unit.fresh.count >= FRESH_CHUNKS - 1:
                self._report_starts(unit.fresh)
            if unit.wrap and unit.wrap.ends_pass:
                self._report_wrap(unit)


def _equal(states: list[Tensor], others: list[Tensor] | None) -> bool:
    """Whether two chunks started from the same values."""
    return (
        bool(states and others)
        and len(states) == len(others or ())
        and all(
            a.shape == b.shape and bool((a == b).all())
            for a, b in zip(states, others or (), strict=True)
        )
    )
