"""Rules of the graph: kept over several chunks, entered a second time, or changed in place.

Codes TT101 and TT103 (errors of autograd), TT102 and TT104 (growth).
"""

import itertools
import math
import re
import resource
import statistics
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from throughtime.doctor._autograd import (
    is_leaf,
    modified_in_place,
    reachable_nodes,
    reaches_freed,
    stale_edges,
)
from throughtime.doctor._frames import (
    Instruction,
    SourceLine,
    find_append_line,
    find_container,
    line_of,
)
from throughtime.doctor._records import BackwardCall, Operation, TensorRecord
from throughtime.doctor._torch_private import sequence
from throughtime.doctor.findings import Finding, FindingList
from throughtime.doctor.rules.rule import Rule, parameters_of
from throughtime.doctor.watcher import Watcher

MAX_REACH = 6  # chunks behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_KEPT = 5  # chunks whose losses or outputs still exist
MIN_SUMMED = 3  # chunks that a sum goes through
MAX_SEARCHES = 2  # of all objects, for what keeps the results of one line
MAX_NODES = 4000  # nodes visited in a retained graph
MAX_STEPS = 65  # optimizer steps remembered


@dataclass
class RetainedGraph:
    """A retained graph at its backward: its size, and what came before."""

    reach: int  # earlier chunks in it
    nodes: int
    memory: int  # bytes, the peak of the process
    root: int  # the sequence number of the loss
    steps: int  # optimizer steps before
    seconds: float = 0.0


class GrowthRule(Rule):
    """Checks what should have been freed after a backward."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        self.retained: dict[SourceLine, list[RetainedGraph]] = {}
        self.searches: dict[Instruction, int] = {}
        self.start = 0.0
        self.steps = 0  # of any optimizer

    def after_step(self, optimizer: Any, line: SourceLine | None) -> None:
        self.steps += 1

    def before_backward(self, backward: BackwardCall) -> None:
        """Count the earlier chunks that a retained graph still reaches."""
        root, line = backward.root, backward.line
        if root is None:
            return
        self.start = time.perf_counter()
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
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sizes.append(RetainedGraph(reach, nodes, memory, sequence(root), self.steps))

    def after_backward(self, backward: BackwardCall) -> None:
        if sizes := self.retained.get(backward.line):
            sizes[-1].seconds = time.perf_counter() - self.start
            if sizes[-1].reach == MAX_REACH:
                self._report_retained(backward.line)
        self._check_kept()

    def _report_retained(self, line: SourceLine) -> None:
        sizes = list(itertools.takewhile(lambda s: s.reach > 0, reversed(self.retained[line])))
        sizes.reverse()
        pairs = itertools.pairwise(sizes)
        if not all(b.reach == a.reach + 1 and b.nodes > a.nodes for a, b in pairs):
            return
        count, chunk = len(sizes), self.clock.chunk
        crossed = any(c in self.clock.crossed for c in range(chunk - count, chunk + 1))
        if sizes[0].steps == sizes[-1].steps and not crossed:
            return  # several losses of one forward
        nodes, seconds, memory = (
            statistics.linear_regression(range(count), column).slope if count > 1 else 0.0
            for column in zip(*((s.nodes, s.seconds, s.memory) for s in sizes), strict=True)
        )
        growth = f"{nodes:+.0f} nodes, {1e3 * seconds:+.2f} ms, {memory / 1024:+.0f} kB"
        detail = f"It reaches {sizes[-1].reach} chunks back. Per chunk: {growth}."
        self.findings.add("TT102", line, detail)

    def _check_kept(self) -> None:
        """Report tensors of several chunks that still exist, although their graphs were used."""
        by_line: dict[Instruction, list[TensorRecord]] = {}
        for record in self.watcher.records.values():
            if record.learned and record.chunk < self.clock.chunk:
                by_line.setdefault(record.instruction, []).append(record)
        for instruction, records in by_line.items():
            searches = self.searches.get(instruction, 0)
            if len({r.chunk for r in records}) >= MIN_KEPT and searches < MAX_SEARCHES:
                self.searches[instruction] = searches + 1
                self._report_kept([t for r in records if (t := r.ref()) is not None and t.grad_fn])

    def _report_kept(self, tensors: list[Tensor]) -> None:
        if len(tensors) < MIN_KEPT or not reaches_freed(tensors[0].grad_fn, 60):
            return
        container = find_container(tensors)
        filled = find_append_line(container, self.watcher.files) if container is not None else None
        if filled:
            line, name = filled
            self.findings.add("TT104", line, f"{len(tensors)} of them still exist.", name)

    def on_operation(self, op: Operation, result: TensorRecord) -> None:
        """Check for a sum that continues from chunk to chunk with its graph."""
        if op.is_recurrent or op.outputs[0].numel() != 1 or op.outputs[0].grad_fn is None:
            return
        chunk = self.clock.chunk
        earlier = [
            record.depth + 1
            for tensor, record in op.loop_inputs
            if tensor.grad_fn is not None and tensor.numel() == 1 and record.chunk < chunk
        ]
        same = [record.depth for _, record in op.loop_inputs if record.chunk == chunk]
        result.depth = max(earlier + same, default=0)
        if result.depth >= MIN_SUMMED and earlier:
            detail = f"The sum goes through {result.depth} chunks."
            self.findings.add("TT104", line_of(op.instruction), detail)

    def close(self) -> None:
        for line, sizes in self.retained.items():
            if sizes[-1].reach >= MIN_REACH and sizes[-1].reach == len(sizes) - 1:
                self._report_retained(line)


class AutogradErrorRule(Rule):
    """Explains a RuntimeError of a backward from the graph of its loss."""

    def __init__(self, watcher: Watcher, findings: FindingList) -> None:
        super().__init__(watcher, findings)
        # last sequence number at a step, its line, the shapes of the parameters
        self.steps = deque[tuple[int, SourceLine | None, set[tuple[int, ...]]]](maxlen=MAX_STEPS)
        self.boundaries: list[int] = []  # sequence numbers at each backward

    def after_step(self, optimizer: Any, line: SourceLine | None) -> None:
        numbers = self.watcher.node_numbers
        shapes = {tuple(p.shape) for p in parameters_of(optimizer)}
        self.steps.append((numbers[-1] if numbers else -1, line, shapes))

    def after_backward(self, backward: BackwardCall) -> None:
        self.boundaries.append(self.watcher.boundary)

    def explain(self, error: RuntimeError, roots: list[Tensor], line: SourceLine) -> Finding | None:
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        if "second time" in str(error):
            return next(filter(None, (self._second_time(node, line) for node in nodes)), None)
        if "inplace operation" in str(error):
            return next(filter(None, map(self._in_place, nodes)), None)
        return None

    def _second_time(self, root: Any, line: SourceLine) -> Finding | None:
        watcher = self.watcher
        if watcher.active and not watcher.current & watcher.earlier:
            return None
        edges = stale_edges(root, watcher.boundary)
        if not edges:
            if sequence(root) > watcher.boundary:
                return None
            return self.findings.add("TT104", line, "The loss is from an earlier chunk.")
        edge = next((edge for edge in edges if edge.is_state), None)
        old = (edge or edges[0]).old
        number = sequence(old)
        chunks = bisect_left(self.boundaries, number), self.clock.chunk
        instruction = None
        if edge is not None:
            entry = watcher.instruction_of(sequence(edge.entry))
            instruction = entry or self.clock.recurrent
        name = watcher.state_name(
            instruction, lambda value: isinstance(value, Tensor) and value.grad_fn is old
        )
        if edge is None:
            return self.findings.add("TT104", line, "", name, chunks)
        created = watcher.instruction_of(number)
        detail = f"It was created at {line_of(created)}." if created else ""
        at = line_of(instruction) if instruction else line
        return self.findings.add("TT101", at, detail, name, chunks)

    def _in_place(self, root: Any) -> Finding | None:
        modified = modified_in_place(root)
        if modified is None:
            return None
        node, message = modified
        versions = re.search(
            r"\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)", message
        )
        if versions is None:
            return None
        shape = [int(n) for n in versions[1].split(",") if n.strip()]
        now, expected, number = int(versions[2]), int(versions[3]), sequence(node)
        user = self.watcher.instruction_of(number)
        detail = f"It is needed by the operation at {line_of(user)}." if user else ""
        line = self._change_by_user(shape, now, expected, number)
        return self.findings.add("TT103", line or self._change_by_step(shape, number), detail)

    def _change_by_user(
        self, shape: list[int], now: int, expected: int, number: int
    ) -> SourceLine | None:
        """The line of an operation that changed a tensor of this shape or a larger one."""
        later = [
            (list(changed), instruction)
            for version, changed, instruction, last in self.watcher.in_place
            if expected < version <= now and last >= number - 64
        ]
        same = [instruction for changed, instruction in later if changed == shape]
        larger = [i for changed, i in later if math.prod(changed) >= math.prod(shape)]
        candidates = same or larger
        return line_of(candidates[0]) if candidates else None

    def _change_by_step(self, shape: list[int], number: int) -> SourceLine | None:
        """The line of an optimizer step that changed a parameter of this shape."""
        shapes = {tuple(shape), tuple(shape[::-1])}
        return next(
            (line for last, line, changed in self.steps if last >= number and shapes & changed),
            None,
        )
