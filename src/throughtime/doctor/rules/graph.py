"""Rules of the graph: kept over several chunks, entered by a later backward, or changed in place.

Codes TT102 and TT104 (growth), TT101 to TT105 (errors of autograd). An error comes from a graph
that an earlier backward has freed, or that an optimizer step has changed. Where it enters shows
why:

- a state, if the operation that takes the old tensor in has computed it (TT101, TT102),
- a loss or output that is kept, if the same forward pass has run again (TT104),
- a graph that is sent back twice, if no forward pass has run in between (TT105).
"""

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from throughtime.doctor._autograd import (
    CHANGED,
    FREED,
    ChangedTensor,
    StaleEdge,
    changed_tensor,
    is_leaf,
    parameters_of_node,
    reachable_nodes,
    reaches_unusable,
    stale_edges,
)
from throughtime.doctor._frames import (
    Instruction,
    SourceLine,
    find_append_line,
    line_of,
)
from throughtime.doctor._records import BackwardCall, Operation, TensorRecord
from throughtime.doctor._torch_private import next_sequence, sequence
from throughtime.doctor.findings import (
    BACKWARD_FIRST,
    NO_GRAD,
    OWN_LOSS,
    RETAIN_IN_GRAD,
    Finding,
    FindingList,
    detach_fix,
    lost_detach,
    one_backward,
    release_fix,
)
from throughtime.doctor.rules import Rule, parameters_of
from throughtime.doctor.watcher import Watcher

MAX_REACH = 6  # chunks behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_RUNS = 2  # recordings of three chunks or more that each backward goes through
MIN_KEPT = 5  # chunks whose losses or outputs still exist
MIN_SUMMED = 3  # chunks that a sum goes through
MIN_UNSENT = 4  # forward passes in a sum that no backward goes through
MAX_SEARCHES = 2  # of all objects, for what keeps the results of one line
MAX_NODES = 4000  # nodes visited in a retained graph
MAX_OLD_NODES = 2000  # nodes of an older graph that are compared with those of this one
MAX_STEPS = 65  # optimizer steps remembered
MAX_BACKWARDS = 4096  # backwards remembered, at least


@dataclass
class RetainedGraph:
    """A retained graph at its backward: its size, and what came before."""

    reach: int  # earlier chunks in it
    nodes: int
    root: int  # the sequence number of the loss
    steps: int  # optimizer steps before
    chunk: int
    newest: int  # the sequence number of the next node


@dataclass(frozen=True)
class UnsentSum:
    """A sum over several forward passes that no backward has gone through so far."""

    numbers: tuple[int, ...]  # sequence numbers of the sum and of its last term
    passes: int
    chunk: int


class GrowthRule(Rule):
    """Checks what should have been freed after a backward."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.retained: dict[SourceLine, list[RetainedGraph]] = {}
        self.searches: dict[Instruction, int] = {}
        self.unsent: dict[Instruction, UnsentSum] = {}
        self.several = False  # a forward pass has several losses
        self.roots: set[Instruction | None] = set()  # that computed what was sent back
        self.sent: set[Instruction] = set()  # sums that need no graph for long, or are sent back

    def before_backward(self, backward: BackwardCall) -> None:
        """Count the earlier chunks that a retained graph still reaches."""
        root, line = backward.root, backward.line
        if root is None:
            return
        self._find_sent(root)
        self.several |= backward.number <= self.watcher.boundary
        self.roots.add(self.watcher.instruction_of(backward.number))
        if not (backward.retain or line in self.retained):
            return
        sizes = self.retained.setdefault(line, [])
        if len(sizes) > 2 * MAX_REACH:
            return
        oldest, nodes = sequence(root), 0
        for node in reachable_nodes(root, MAX_NODES):
            nodes += 1
            if not is_leaf(node):
                oldest = min(oldest, sequence(node))
        reach = sum(size.root >= oldest for size in sizes)
        clock = self.clock
        newest = next_sequence()
        size = RetainedGraph(reach, nodes, backward.number, clock.steps, clock.chunk, newest)
        if sizes and backward.number < sizes[-1].newest:  # another loss of one forward pass
            size.reach = sizes.pop().reach
        sizes.append(size)

    def after_backward(self, backward: BackwardCall) -> None:
        sizes = self.retained.get(backward.line)
        if sizes and (sizes[-1].reach == MAX_REACH or self._runs_through(sizes) == MIN_RUNS):
            self._report_retained(backward.line)
        self._check_kept()

    def _runs_through(self, sizes: list[RetainedGraph]) -> int:
        """The number of recordings whose third chunk reaches back to the first; 0 if not now."""
        crossed, runs = self.clock.crossed, 0
        for first, second, third in zip(sizes, sizes[1:], sizes[2:], strict=False):
            grows = (first.reach, second.reach, third.reach) == (0, 1, 2)
            runs += grows and first.chunk not in crossed and third.chunk in crossed
        return runs if sizes[-1].reach == 2 else 0

    def _report_retained(self, line: SourceLine) -> None:
        sizes = list(itertools.takewhile(lambda s: s.reach > 0, reversed(self.retained[line])))
        sizes.reverse()
        pairs = itertools.pairwise(sizes)
        if not all(b.reach == a.reach + 1 and b.nodes > a.nodes for a, b in pairs):
            return
        count, chunk = len(sizes), self.clock.chunk
        first, last, chunks = sizes[0], sizes[-1], max(count - 1, 1)
        crossed = any(c in self.clock.crossed for c in range(chunk - count, chunk + 1))
        if first.steps == last.steps and not crossed:
            return  # several losses of one forward
        growth = (last.nodes - first.nodes) // chunks
        detail = f"It reaches {last.reach} chunks back, {growth} nodes more in each chunk."
        paths = [v.path for entered in self.watcher.carried.values() for v in entered if v.path]
        name = paths[0] if paths else ""
        self.findings.add(
            "TT102", line, detail, name, fix=detach_fix(paths, line, losses=1 + self.several)
        )

    def _check_kept(self) -> None:
        """Report tensors of several chunks that still exist, although their graphs were used."""
        by_line: dict[Instruction, list[TensorRecord]] = {}
        for record in self.watcher.table.records.values():
            if record.chunk < self.clock.chunk:
                by_line.setdefault(record.instruction, []).append(record)
        for instruction, records in by_line.items():
            searches = self.searches.get(instruction, 0)
            if len({r.chunk for r in records}) >= MIN_KEPT and searches < MAX_SEARCHES:
                self.searches[instruction] = searches + 1
                self._report_kept([t for r in records if (t := r.ref()) is not None and t.grad_fn])

    def _report_kept(self, tensors: list[Tensor]) -> None:
        if len(tensors) < MIN_KEPT or not reaches_unusable(tensors[0].grad_fn, 60, FREED):
            return
        if filled := find_append_line(tensors, self.watcher.files):
            line, name = filled
            self.findings.add("TT104", line, f"{len(tensors)} of them still exist.", name)

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        """Check for a sum of losses that goes on with its graph over chunks or forward passes."""
        out = op.outputs[0]
        if op.is_recurrent or out.grad_fn is None or (out.numel() > 1 and op.name != "stack"):
            return
        known = ((t, r) for t, r in op.pairs() if r is not None)
        terms = [(t, r) for t, r in known if t.numel() == 1 and t.grad_fn is not None]
        sums = [record for _, record in op.loop_inputs if any(record is r for _, r in terms)]
        self._count_chunks(op, result, sums)
        self._count_passes(op, result, sums, [pair for pair in terms if pair[1] not in sums])

    def _count_chunks(self, op: Operation, result: TensorRecord, sums: list[TensorRecord]) -> None:
        chunk = self.clock.chunk
        earlier = [record.depth + 1 for record in sums if record.chunk < chunk]
        same = [record.depth for record in sums if record.chunk == chunk]
        result.depth = max(earlier + same, default=0)
        if result.depth >= MIN_SUMMED and earlier:
            detail = f"The sum goes through {result.depth} chunks."
            fix = OWN_LOSS if op.instruction in self.roots else ""
            self.findings.add("TT104", line_of(op.instruction), detail, fix=fix)

    def _count_passes(
        self,
        op: Operation,
        result: TensorRecord,
        sums: list[TensorRecord],
        terms: list[tuple[Tensor, TensorRecord]],
    ) -> None:
        """Count the forward passes in a sum within one chunk."""
        calls = {record.call for _, record in terms}
        before = max((max(r.passes, 1) for r in sums), default=0)
        passes = before + len(calls - {r.call for r in sums})
        result.passes, result.call = passes, max(calls, default=result.call)
        if passes < MIN_UNSENT or not terms:
            return
        if before < MIN_UNSENT and op.instruction in self.unsent:
            self._restart(op.instruction)
        if op.instruction not in self.sent:
            numbers = sequence(op.outputs[0].grad_fn), sequence(terms[-1][0].grad_fn)
            self.unsent[op.instruction] = UnsentSum(numbers, passes, self.clock.chunk)

    def _find_sent(self, root: Any) -> None:
        """Remove the sums that the backward of this root goes through."""
        if not self.unsent:
            return
        oldest = min(number for each in self.unsent.values() for number in each.numbers)
        numbers = set(map(sequence, reachable_nodes(root, MAX_NODES, above=oldest - 1)))
        for instruction, each in list(self.unsent.items()):
            if not numbers.isdisjoint(each.numbers):
                self.sent.add(instruction)
                del self.unsent[instruction]

    def _restart(self, instruction: Instruction) -> None:
        """A sum begins anew: report the last one, unless it was one of a single training chunk."""
        last = self.unsent.pop(instruction)
        if self.clock.chunk > last.chunk + 1:
            self._report_unsent(instruction, last)
        else:
            self.sent.add(instruction)

    def _report_unsent(self, instruction: Instruction, last: UnsentSum) -> None:
        if all(finding.code not in {"TT104", "TT202"} for finding in self.findings.items):
            detail = f"No backward goes through this sum over {last.passes} forward passes."
            self.findings.add("TT104", line_of(instruction), detail, fix=NO_GRAD)

    def close(self) -> None:
        for line, sizes in self.retained.items():
            if sizes[-1].reach >= MIN_REACH and sizes[-1].reach == len(sizes) - 1:
                self._report_retained(line)
        for instruction, last in self.unsent.items():
            self._report_unsent(instruction, last)


@dataclass(frozen=True)
class PastStep:
    """An optimizer step."""

    number: int  # the largest sequence number before it
    chunk: int
    line: SourceLine | None
    parameters: frozenset[int]  # their ids


class AutogradErrorRule(Rule):
    """Explains a RuntimeError of a backward from the graph of its loss."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.backwards: list[BackwardCall] = []  # that ended without an error
        self.steps = deque[PastStep](maxlen=MAX_STEPS)

    def after_step(self, optimizer: Any, line: SourceLine | None) -> None:
        parameters = frozenset(map(id, parameters_of(optimizer)))
        step = PastStep(next_sequence() - 1, self.clock.chunk, line, parameters)
        self.steps.append(step)

    def after_backward(self, backward: BackwardCall) -> None:
        backward.boundary = self.watcher.boundary
        self.backwards.append(backward)
        if len(self.backwards) > 2 * MAX_BACKWARDS:
            del self.backwards[:MAX_BACKWARDS]

    def explain(
        self, error: RuntimeError, roots: list[Tensor], backward: BackwardCall
    ) -> Finding | None:
        message = str(error)
        kind = self._changed if CHANGED in message else self._entered
        if CHANGED not in message and FREED not in message:
            return None
        nodes = (root.grad_fn for root in roots if root.grad_fn is not None)
        return next(filter(None, (kind(node, backward, message) for node in nodes)), None)

    def _changed(self, root: Any, call: BackwardCall, message: str) -> Finding | None:
        """Explain a tensor that was changed in place."""
        changed = changed_tensor(root, message)
        if changed is None:
            return None
        user = self.watcher.instruction_of(sequence(changed.node))
        detail = f"It is needed by the operation at {line_of(user)}." if user else ""
        lines = self._lines_of_change(changed)
        at, others = next(iter(lines), None), ", ".join(map(str, lines[1:]))
        if changed.parameter is None:
            detail += f" It is also changed at {others}." if others else ""
            return self.findings.add("TT103", at, detail)
        past = self.backwards[self._position(changed.node) :]
        if not any(each.retain for each in past) and not reaches_unusable(
            changed.node, MAX_OLD_NODES, FREED
        ):  # no backward has gone through it before
            return self.findings.add("TT103", at, detail, fix=BACKWARD_FIRST)
        change = f"Parameters of the older graph were changed{f' at {at}' if at else ''}."
        return self._entered(root, call, message, change)

    def _lines_of_change(self, changed: ChangedTensor) -> list[SourceLine]:
        """The lines of the optimizer step or the operations that changed a tensor in place."""
        number, shape = sequence(changed.node), changed.shape
        for step in self.steps:
            if step.number >= number and id(changed.parameter) in step.parameters:
                return [step.line] if step.line else []
        later = [
            (list(of), instruction)
            for version, of, instruction, last in self.watcher.in_place
            if changed.expected < version <= changed.version and last >= number - 64
        ]
        same = [instruction for of, instruction in later if of == shape]
        larger = [i for of, i in later if math.prod(of) >= math.prod(shape)]
        return list(dict.fromkeys(map(line_of, same or larger)))

    def _entered(
        self, root: Any, call: BackwardCall, message: str, change: str = ""
    ) -> Finding | None:
        """Explain a backward that enters the graph of an earlier one."""
        boundary = self.watcher.boundary
        if sequence(root) <= boundary:
            return self._sent_twice(root, call, "", change)
        edges = stale_edges(root, boundary)
        states = [edge for edge in edges if self._is_state(edge)]
        if states:
            return self._carried(states, call.line, change)
        if not edges:
            return None
        edge = edges[0]
        entry, name = self._entry(edge), self._name(edge)
        again = self.backwards[self._position(edge.old)].site == call.site
        if again and entry and entry == self.clock.recurrent and entry in self.watcher.earlier:
            return self._computed_once(edge, entry, name)
        if not self._alike(reachable_nodes(root, above=boundary), below(edge)):
            return self._sent_twice(edge.old, call, name, change)
        fix = OWN_LOSS if edge.is_number else release_fix(name)
        if not edge.is_number and self.watcher.instruction_of(sequence(edge.old)) not in (
            None,
            *self.watcher.current,
        ):
            fix = f"compute {name or 'it'} anew before each backward, inside the loop"
        return self.findings.add("TT104", call.line, change, name, self._chunks(edge.old), fix)

    def _is_state(self, edge: StaleEdge) -> bool:
        """Whether the old tensor enters an operation that has computed it, directly or not."""
        if edge.is_number and not edge.uses_parameters:
            return False
        watched = any(self._instructions(edge.path))
        return self._alike(edge.path, below(edge)) if watched else edge.uses_parameters

    def _alike(self, one: Iterable[Any], other: Iterable[Any]) -> bool:
        """Whether an operation occurs in both graphs, with the same parameters if it has any."""
        a, b = self._instructions(one), self._instructions(other)
        if set().union(*a.values()) & set().union(*b.values()):
            return True
        shared = [key for key in a if key is not None and key in b]
        return bool(shared) and not any(a[key] and b[key] for key in shared)

    def _instructions(self, nodes: Iterable[Any]) -> dict[Instruction | None, set[tuple[str, int]]]:
        """The instructions that created nodes, each with the parameters that its nodes use."""
        result: dict[Instruction | None, set[tuple[str, int]]] = {}
        for node in nodes:
            if not is_leaf(node):
                uses = result.setdefault(self.watcher.instruction_of(sequence(node)), set())
                uses.update((node.name(), id(p)) for p in parameters_of_node(node))
        return result

    def _entry(self, edge: StaleEdge) -> Instruction | None:
        """The instruction that takes the old tensor in."""
        return self.watcher.instruction_of(sequence(edge.entry)) or self.clock.recurrent

    def _name(self, edge: StaleEdge) -> str:
        return self.watcher.state_name(
            self._entry(edge), lambda value: isinstance(value, Tensor) and value.grad_fn is edge.old
        )

    def _position(self, node: Any) -> int:
        """The position among the backwards of the first one after a node."""
        return bisect_left(self.backwards, sequence(node), key=lambda past: past.boundary)

    def _chunks(self, old: Any) -> tuple[int, int]:
        """The chunks that created and used a tensor."""
        chunk = self.clock.chunk
        return chunk - len(self.backwards) + self._position(old), chunk

    def _carried(self, states: list[StaleEdge], line: SourceLine, change: str) -> Finding | None:
        """Report states that were carried with the graph of their chunk."""
        old, entry = states[0].old, self._entry(states[0])
        entries = dict.fromkeys(filter(None, map(self._entry, states)))
        variables = [v for each in entries for v in self.watcher.carried.get(each, [])]
        name = self._name(states[0])
        paths = [v.path for v in variables] or [name]
        at = next((v.line for v in variables if v.is_argument), None)
        at = at or (line_of(entry) if entry else line)
        past = self.backwards[self._position(old)]
        retained = past.retain and change != ""
        fix = detach_fix(paths, line, losses=int(retained))
        details = [change or "A backward has freed that graph."]
        created = self.watcher.instruction_of(sequence(old))
        if created and not retained and created != entry:
            details.append(f"The state was created at {line_of(created)}.")
        lost_detaches = self.watcher.table.lost_detaches
        lost = [lost_detaches[n] for s in states if (n := sequence(s.old)) in lost_detaches]
        if retained:
            at = past.line
        elif lost:
            at = min(map(line_of, lost), key=lambda each: each.line)
            details[0], advice = lost_detach(at)
            fix = advice or fix
        if entry and line_of(entry) != at:
            details.append(f"It enters at {line_of(entry)}.")
        code = "TT102" if retained else "TT101"
        return self.findings.add(code, at, " ".join(details), name, self._chunks(old), fix)

    def _computed_once(self, edge: StaleEdge, entry: Instruction, name: str) -> Finding | None:
        """Report a first state that is computed before the loop and enters every chunk."""
        created = self.watcher.instruction_of(sequence(edge.old))
        detail = f"It is computed only once, at {line_of(created)}." if created else ""
        fix = f"compute {name or 'the state'} anew before each backward, inside the loop"
        return self.findings.add("TT101", line_of(entry), detail, name, self._chunks(edge.old), fix)

    def _sent_twice(self, node: Any, call: BackwardCall, name: str, change: str) -> Finding | None:
        """Report a graph that two backwards go through without a forward pass in between."""
        position, number = self._position(node), sequence(node)
        past, what = self.backwards[position], name or "the loss"
        chunk = self._chunks(node)[0]
        stepped = any(step.chunk > chunk for step in self.steps)
        if past.is_grad:
            fix = RETAIN_IN_GRAD
        elif any(number == each.number for each in self.backwards[position:]):
            fix = "one backward for each forward pass: compute the loss anew before each backward"
        elif not stepped:
            fix = one_backward(past.line, call.line)
        elif past.site == call.site:
            fix = (
                f"compute {what} anew before each backward, inside the loop; or one backward for"
                " the sum of the losses, before the step"
            )
        else:
            fix = (
                "if both losses train the same parameters, (loss1 + loss2).backward() after every"
                f" zero_grad() and before every step(); otherwise {name or 'y'}.detach() in the"
                f" loss that must not train what computed it, or compute {what} anew after the step"
            )
        detail = change or f"The backward at {past.line} has freed it."
        return self.findings.add("TT105", call.line, detail, name, fix=fix)

    def close(self) -> None:
        """Report a lost detach of a state, where neither an error nor growth has shown it."""
        self.watcher.table.settle_detaches()
        known = any(finding.code in {"TT101", "TT102"} for finding in self.findings.items)
        if not known:
            for instruction in self.watcher.table.lost_states:
                detail, fix = lost_detach(line_of(instruction))
                self.findings.add("TT101", line_of(instruction), detail, fix=fix)


def below(edge: StaleEdge) -> Iterable[Any]:
    """Nodes of the graph that an edge enters."""
    return reachable_nodes(edge.old, MAX_OLD_NODES)
