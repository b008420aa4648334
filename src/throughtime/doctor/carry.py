"""How a state goes from chunk to chunk: never carried, across recordings, phases, rows and gaps, or with its whole graph."""

import ast
from pathlib import Path
from sys import _getframe as frame_at
from typing import Any

import torch
from torch import Tensor, nn

from throughtime.doctor.finding import Findings
from throughtime.doctor.frames import Key, Place, line_of
from throughtime.doctor.inner import base_of
from throughtime.doctor.names import name_of
from throughtime.doctor.notes import Clock, Seen, Step, Unit
from throughtime.doctor.source import LANES, lanes, relation
from throughtime.doctor.watch import LAYERS, Watcher

ROOTS = 64  # recordings remembered, the lanes of some chunks
FRESH = 3  # adjacent chunks that start from zero before it is said
CHUNKS, STEPS, LONG = (
    4,
    32,
    256,
)  # an evaluation's chunks or steps in one graph; steps before the only backward


class Carrying:
    """Follows each recurrent unit from one call to the next."""

    def __init__(self, watcher: Watcher, findings: Findings) -> None:
        self.watcher, self.findings = watcher, findings
        self.clock: Clock = watcher.clock
        self.last: dict[tuple[Unit, bool | None], Step] = {}
        self.fresh: dict[Unit, tuple[int, Key]] = {}
        self.lengths: dict[Unit, set[int]] = {}  # of chunks that another goes on from
        self.carried: set[Unit] = set()
        self.followed: dict[int, Tensor] = {}
        self.axes: dict[int, tuple[Tensor, int]] = {}
        self.entered: dict[
            int, tuple[Tensor, tuple[Place, str, tuple[int, int]]]
        ] = {}  # by a state of another recording
        self.hanging: dict[Unit, Step] = {}  # evaluations in one graph
        self.longest: Step | None = None

    def recurrent(
        self,
        name: str,
        args: Any,
        inputs: list[Tensor],
        notes: list[Any],
        key: Key,
        made: dict[str, Any],
    ) -> Step:
        """A call of a layer or cell of torch."""
        packed = name in LAYERS and isinstance(args[3] if len(args) > 3 else None, (list, tuple))
        state = args[2] if packed else args[1]
        weight = args[3][0] if packed else args[2][0] if name in LAYERS else args[2]
        hx = [state] if isinstance(state, Tensor) else list(state)
        steps, lane, time = _dims(name, args, packed)
        unit = id(weight)
        made["lane"] = [lane, 1, 1] if name in LAYERS else 0
        if name in LAYERS and inputs[0].dim() == 2:
            made["lane"] = None
        made["twice"] = made["twice"] or steps > 1 or unit in made["path"]
        made["path"], made["lineage"] = made["path"] | {unit}, made["lineage"] | {unit}
        note = notes[0]
        data = inputs[0] if note is None or not note.learned else note.data
        leading = 2 if name in LAYERS else 1
        if data is not None and (packed or data.shape[:leading] != inputs[0].shape[:leading]):
            data = None
        return self.step(unit, key, data, hx, steps, (lane, time), made)

    def operation(
        self,
        inputs: list[Tensor],
        notes: list[Any],
        outputs: list[Tensor],
        key: Key,
        made: dict[str, Any],
    ) -> Step | None:
        """Any other operation; it counts where it takes in what it gave earlier."""
        states = [
            (t, n)
            for t, n in zip(inputs, notes, strict=True)
            if n is not None and n.learned and key in n.lineage
        ]
        if not states and outputs[0].dim() == 2 and (key, self.clock.training) in self.last:
            return self._starts_by_hand(inputs, notes, key, made)
        if not states or outputs[0].dim() != 2 or outputs[0].numel() == 1:
            made["step"] = None if outputs[0].numel() == 1 else made["step"]
            return None
        others = [
            n.data if n is not None and n.learned else t
            for t, n in zip(inputs, notes, strict=True)
            if not any(t is s for s, _ in states)
        ]
        data = next(
            (
                d
                for d in others
                if d is not None and d.dim() == 2 and d.shape[0] == outputs[0].shape[0]
            ),
            None,
        )
        made["lane"] = 0
        made["data"] = data if data is not None else made["data"]
        return (
            self.step(key, key, data, [t for t, _ in states], 1, (0, None), made)
            if data is not None
            else None
        )

    def _starts_by_hand(
        self, inputs: list[Tensor], notes: list[Any], key: Key, made: dict[str, Any]
    ) -> Step | None:
        """An operation that took in what it gave, and now does not: where a part of it is all zeros, its state is."""
        zero = next(
            (t for t in inputs if not isinstance(t, nn.Parameter) and not bool(t.any())), None
        )
        pairs = [(t, n) for t, n in zip(inputs, notes, strict=True) if t is not zero]
        found = [
            n.data if n is not None and n.learned else t
            for t, n in pairs
            if not t.is_leaf or not t.requires_grad
        ]
        data = next(
            (
                d
                for d in found
                if d is not None and d.dim() == 2 and d.shape[0] == inputs[0].shape[0]
            ),
            None,
        )
        if zero is None or data is None:
            return None
        clock = self.clock
        where = (clock.chunk, clock.call, clock.batch)
        cur = Step(key, key, where, clock.training, torch.is_grad_enabled(), data, 1, 0, None, 1, 1)
        self._starts(cur, [])
        self.last[key, cur.training] = cur
        made["step"], made["edited"], made["data"], made["lane"] = cur, False, data, 0
        return cur

    def step(
        self,
        unit: Unit,
        key: Key,
        data: Tensor | None,
        hx: list[Tensor],
        steps: int,
        dims: tuple[Any, Any],
        made: dict[str, Any],
    ) -> Step:
        clock = self.clock
        cur = Step(
            unit,
            key,
            (clock.chunk, clock.call, clock.batch),
            clock.training,
            torch.is_grad_enabled(),
            data,
            steps,
            dims[0],
            dims[1],
            steps,
            1,
        )
        notes = [n for n in (self.watcher.state_of(t) for t in hx) if n is not None and n.learned]
        state = next((n for n in notes if n.step is not None and n.step.unit == unit), None)
        if state is not None and state.step is not None:
            if state.step.clock[0] != clock.chunk:
                clock.crossed.add(clock.chunk)
            self._grows(cur, state.step, any(t.requires_grad for t in hx))
            if self._at_an_edge(cur, state.step):
                self._judge(cur, state.step, state, key)
        elif not made.get("unknown") and not notes and not any(t.requires_grad for t in hx):
            self._starts(cur, hx)
        made["step"], made["edited"], made["rows"] = cur, False, None
        self.last.pop((unit, cur.training), None)
        self.last[unit, cur.training] = cur
        return cur

    def _at_an_edge(self, cur: Step, origin: Step) -> bool:
        if (
            cur.clock[0] != origin.clock[0]
            or cur.clock[2] != origin.clock[2]
            or cur.training != origin.training
            or cur.grad != origin.grad
        ):
            return True
        if cur.clock[1] == origin.clock[1]:
            return False
        return (
            cur.steps > 1
            or cur.data is None
            or origin.data is None
            or _root(cur.data) is not _root(origin.data)
        )

    def _lanes(self, step: Step) -> Any:
        if step.lanes is None and step.data is not None:
            step.lanes = lanes(step.data, step.lane_dim, step.time_dim, self.watcher.of) or ()
        return step.lanes or None

    def _relation(self, origin: Step, cur: Step, rows: Any = None) -> str:
        if rows is None and self._plainly_next(origin, cur):
            return "next"
        before, after = self._lanes(origin), self._lanes(cur)
        if not before or not after:
            return ""
        if rows is None and len(before) != len(after):
            return ""
        return relation(before, after, list(range(LANES)) if rows is None else rows)

    def _plainly_next(self, origin: Step, cur: Step) -> bool:
        """The usual case at little cost: the same slice of the same tensor, further along the axis known to be time."""
        a, b = origin.data, cur.data
        if a is None or b is None or a.stride() != b.stride() or a.shape != b.shape:
            return False
        whole = base_of(a)
        base, dim = self.axes.get(id(whole), (None, 0))
        if base is None or base is not whole or base_of(b) is not whole:
            return False
        stride, steps = base.stride(dim), 1 if origin.time_dim is None else a.shape[origin.time_dim]
        moved = b.storage_offset() - a.storage_offset()
        at = int(b.storage_offset() - base.storage_offset()) // stride % base.shape[dim]
        return moved == steps * stride and at >= steps

    def _learn_axis(self, step: Step, origin: Step) -> None:
        """Remembers along which dimension of a tensor its chunks follow one another."""
        before, after = origin.lanes, step.lanes
        base = base_of(step.data) if step.data is not None else None
        if not before or not after or base is None or base is not after[0].first.root:
            return
        moved = [
            d
            for d, (i, k) in enumerate(zip(before[0].last.at, after[0].first.at, strict=True))
            if i != k
        ]
        _keep(self.axes, id(base), (base, moved[0]))

    def _judge(self, cur: Step, origin: Step, state: Seen, key: Key) -> None:
        how = self._relation(origin, cur, state.rows)
        if how == "next":
            self.carried.add(cur.unit)
            if origin.lanes:
                self._followed(origin)
                self._learn_axis(cur, origin)
            return
        if state.edited and how != "rows":
            return
        place, phase = line_of(key), cur.training != origin.training
        batches = cur.clock[2] != origin.clock[2]
        if phase or (cur.grad != origin.grad and how == "start" and self._known_roots(origin)):
            into = (
                "training to validation"
                if not (cur.training if phase else cur.grad)
                else "validation to training"
            )
            self._tell("TT205", place, f"It goes from {into}.", (cur, origin, state))
        elif batches and cur.clock[2][0] == origin.clock[2][0] and self.clock.random:
            self._tell(
                "TT207", self.clock.loader, f"The state enters at {place}.", (cur, origin, state)
            )
        elif how == "rows" and not state.edited:
            self._tell("TT206", place, "", (cur, origin, state))
        elif how == "jump" and cur.clock[0] != origin.clock[0]:
            line = self.clock.loader if batches else for_line(place)
            self._tell(
                "TT207", line or place, f"The state enters at {place}.", (cur, origin, state)
            )
        elif how == "start" and self._known_roots(origin):
            self._enters_another(cur, origin, state, place)

    def _tell(
        self, code: str, place: Place | None, detail: str, met: tuple[Step, Step, Seen]
    ) -> None:
        cur, origin, state = met
        self.findings.add(
            code, place, detail, self._name(cur.key, state), (origin.clock[0], cur.clock[0])
        )

    def _enters_another(self, cur: Step, origin: Step, state: Seen, place: Place) -> None:
        found = place, self._name(cur.key, state), (origin.clock[0], cur.clock[0])
        for lane in cur.lanes:
            _keep(self.entered, id(lane.first.root), (lane.first.root, found))
        if self._known_roots(cur):
            self._followed(cur)

    def _followed(self, step: Step) -> None:
        """What two chunks were read from is a recording, not a copy of one chunk.

        Then a state that entered it from another is told.
        """
        for lane in step.lanes:
            root = lane.last.root
            _keep(self.followed, id(root), root)
            if id(root) in self.entered:
                place, name, chunks = self.entered.pop(id(root))[1]
                self.findings.add("TT204", place, "", name, chunks)

    def _known_roots(self, origin: Step) -> bool:
        return any(id(lane.last.root) in self.followed for lane in origin.lanes)

    def _name(self, key: Key, state: Seen) -> str:
        return self.watcher.names.get(key, "") or self._search(state)

    @staticmethod
    def _search(state: Seen) -> str:
        tensor = state.ref()
        return name_of(lambda value: value is tensor, frame_at()) if tensor is not None else ""

    def _starts(self, cur: Step, hx: list[Tensor]) -> None:
        before = self.last.get((cur.unit, cur.training))
        if (
            before is None
            or not cur.grad
            or cur.training is False
            or not self._at_an_edge(cur, before)
        ):
            return
        if any(bool(t.any()) for t in hx) or self._relation(before, cur) != "next":
            return
        count = self.fresh.get(cur.unit, (0, cur.key))[0] + 1
        self.fresh[cur.unit] = count, cur.key
        lengths = self.lengths.setdefault(cur.unit, set())
        lengths.add(before.steps)
        if count == FRESH:
            self._never_carried(cur.unit)

    def _never_carried(self, unit: Unit) -> None:
        count, key = self.fresh[unit]
        if (
            unit not in self.carried and len(self.lengths[unit]) == 1
        ):  # pieces of unequal length are things of their own
            self.findings.add(
                "TT201",
                line_of(key),
                f"{count} times the inputs went on where those before ended, and the state began"
                " anew.",
            )

    def _grows(self, cur: Step, origin: Step, graph: bool) -> None:
        """Counts what hangs together in one graph that no backward has freed."""
        if not graph or origin.clock[0] != cur.clock[0]:
            self._resumes(cur)
            return
        cur.reached, cur.links = origin.reached + cur.steps, origin.links + 1
        cur.calls = origin.calls + (origin.clock[1:] != cur.clock[1:])
        if cur.training is False or self.clock.chunk == 0:
            self.hanging[cur.unit] = cur
        if self.longest is None or cur.reached > self.longest.reached:
            self.longest = cur

    def _resumes(self, cur: Step) -> None:
        old = self.hanging.get(cur.unit)
        if old is not None and cur.training and old.training is False:
            self._grew(self.hanging.pop(cur.unit))

    def _grew(self, old: Step) -> None:
        if old.clock[0] == self.clock.chunk and (
            old.links >= CHUNKS if old.steps > 1 else old.links >= STEPS
        ):
            what = (
                f"{old.reached} steps hang together in one graph, and no backward goes through"
                " them."
            )
            self.findings.add("TT202", line_of(old.key), what)

    def recent(self) -> Key | None:
        """Where a unit was called last."""
        return next((step.key for step in reversed(self.last.values())), None)

    def close(self) -> None:
        """What can be said only when the loop is over."""
        for unit, (count, _) in self.fresh.items():
            if count >= FRESH - 1:
                self._never_carried(unit)
        for old in self.hanging.values():
            self._grew(old)
        longest = self.longest
        if self.clock.chunk != 1 or longest is None or longest.clock[0] != 0:
            return
        several = (
            longest.steps > 1 or 0 < 2 * longest.calls <= longest.reached
        )  # a cell that runs through one sequence is no stream
        if longest.reached >= LONG and several:
            self.findings.add(
                "TT202",
                line_of(longest.key),
                f"{longest.reached} steps were kept for the only backward.",
            )


def _keep(where: dict[int, Any], key: int, value: Any) -> None:
    """Remembers the last few: a recording that is long over need not stay in memory."""
    where.pop(key, None)
    where[key] = value
    if len(where) > ROOTS:
        del where[next(iter(where))]


def _root(tensor: Tensor) -> Tensor:
    base = base_of(tensor)
    return tensor if base is None else base


def _dims(name: str, args: Any, packed: bool) -> tuple[int, int | None, int | None]:
    """Steps, and where lanes and time are in the input."""
    if name not in LAYERS:
        return 1, 0 if args[0].dim() == 2 else None, None
    if packed:
        return len(args[1]), None, None
    if args[0].dim() == 2:
        return args[0].shape[0], None, 0
    first = bool(args[8])
    return args[0].shape[1 if first else 0], 0 if first else 1, 1 if first else 0


def for_line(place: Place) -> Place:
    """The innermost `for` around a line."""
    try:
        tree = ast.parse(Path(place.file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return place
    around = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.For) and n.lineno < place.line <= (n.end_lineno or n.lineno)
    ]
    return Place(place.file, max(around, key=lambda n: n.lineno).lineno) if around else place
