"""The rules of backwards and steps: where gradients arrive, which graphs grow, and what errors say.

Codes TT101 to TT105, TT211, TT302 and TT304 to TT307. Each rule is a function of the log of a loop
and of its last event, and yields the faults that it finds; `AT` lists them by event. An error of a
backward comes from a graph that an earlier backward has freed, or that an optimizer step has
changed. Where it enters shows why:

- a state, if an operation on the way from the old tensor to the loss has computed it (TT101,
  TT102),
- a loss or output that is kept, if the same forward pass has run again (TT104),
- a graph that is sent back twice, if no forward pass has run in between (TT105).
"""

import gc
import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from throughtime.doctor._frames import Instruction, SourceLine, user_frame
from throughtime.doctor._graph import (
    CHANGED,
    FREED,
    LEAF,
    StaleEdge,
    changed_node,
    is_leaf,
    parameters_of_node,
    reachable_nodes,
    reaches_unusable,
    sequence,
    stale_edges,
    version_of,
)
from throughtime.doctor._log import Backward, Close, Fault, Log, WeightStep
from throughtime.doctor.findings import BACKWARD_FIRST, CLEAR_ONCE, OWN_LOSS, detach_fix

MAX_REACH = 6  # passes behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_SUMMED = 3  # chunks that a sum goes through
MAX_SUM = 1000  # nodes between a sum and its last value
MIN_KEPT = 5  # chunks whose losses or outputs still exist
# torch's errors of a layer, if it is the lanes that differ, and of a cell
LANES_DIFFER = re.compile(
    r"Expected hidden.* size \(\d+, (\d+), .*\), got \[\d+, (?!\1,)"
    r"|Input batch size \d+ doesn't match hidden.* batch size"
)
VERSIONS = re.compile(r"\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)")
MAX_OLD_NODES = 2000  # nodes of an older graph that are compared with those of this one


def steps(log: Log, step: WeightStep) -> Iterator[Fault]:
    """The faults that the events since the last step show, as letters: see `Log.before`.

    TT302: gradients that were not cleared since the last step, or before a step used them: it has
    none, or those of the last chunk only, as the step before it. TT304: a step that follows a
    forward pass but no backward. TT306: every clip comes before any backward.
    """
    past, before = log.before(step), step.before
    letters = "".join(each.letter for each in past)
    lines = {each.letter: each.line for each in past}  # the last ones
    order, clears = letters.replace("l", ""), "It clears the gradients before a step has used them."
    if step.repeated and {*order} == {"b"}:
        yield Fault(
            "TT302", step.line, "Nothing cleared the gradients since the last step.", after=2
        )
    sent = {(each.line, each.used) for each in past if each.letter == "b"}
    if order.endswith("b") and sent == {(lines["b"], False)} and not step.has_hooks:
        step.lost = order.count("bc")
        if before and before.lost == step.lost > 0:
            yield Fault("TT302", lines["c"], clears, fix=CLEAR_ONCE, after=2)
    if step.lacks and re.fullmatch(".*b+c+", order):
        yield Fault("TT302", lines["c"], clears, after=2)
    if step.lacks and "b" not in order and before and step.number != before.number:
        detail = "No backward has run since the step before, and no parameter has a gradient."
        yield Fault("TT304", step.line, detail, after=2 if step.chunk else 1)
    if re.fullmatch("c*l+[^l]*b[^l]*", letters):
        yield Fault("TT306", lines["l"], after=2)
    for code, line in (("TT305", step.constructed), ("TT307", step.evaluating)):
        if line:
            yield Fault(code, line, after=2)


def retained(log: Log, event: WeightStep | Close) -> Iterator[Fault]:
    """TT102: backwards in one line that each reach further back; a step or the end follows."""
    if not log.retained:
        return
    least = MAX_REACH if isinstance(event, WeightStep) else MIN_REACH
    for last in {each.line: each for each in log.backwards if each.reach >= least}.values():
        at_line = [each for each in log.backwards if each.line == last.line]
        passes = [each for each in at_line if each.reach >= 0]
        first = passes[passes.index(last) - last.reach]
        crossed = not log.crossed.isdisjoint(range(first.chunk + 1, last.chunk + 1))
        # others are several losses of one forward pass, or of the steps of one chunk
        if first.steps < last.steps or (crossed and all(each.retain for each in at_line)):
            paths = [path for entered in log.carried.values() for path, _ in entered if path]
            fix, detail = detach_fix(paths, retained=True), f"It reaches {last.reach} passes back."
            yield Fault("TT102", last.line, detail, "".join(paths[:1]), fix)


def summed(log: Log, event: Backward) -> Iterator[Fault]:
    """TT104: a sum of losses with its graph over chunks."""
    for instruction, by_chunk in log.results.items():
        total = by_chunk.get(event.chunk, lambda: None)()
        if total is None or total.numel() > 1 or not total.grad_fn:
            continue
        before, depth = log.sums.get(instruction, (LEAF, 0))
        nodes = reachable_nodes(total.grad_fn, MAX_SUM, before - 1)
        depth = depth + 1 if before in map(sequence, nodes) else 0
        log.sums[instruction] = sequence(total.grad_fn), depth
        if depth >= MIN_SUMMED:
            fix = OWN_LOSS if instruction in log.roots else ""
            yield Fault("TT104", instruction.line, f"The sum goes through {depth} chunks.", fix=fix)


def kept(log: Log, _: Backward) -> Iterator[Fault]:
    """TT104: results of several chunks that still exist, and not in a deque, which has an end."""
    for instruction, by_chunk in list(log.results.items()):
        alive = {n: ref for n, ref in by_chunk.items() if ref() is not None}
        log.results[instruction] = alive
        if not alive:
            del log.results[instruction]
        refs = [ref for ref in alive.values() if ref().grad_fn]
        # not by a retained graph alone; the last one may be kept later
        if len(refs) == MIN_KEPT and all(map(_is_kept, refs[:-1])):
            yield Fault("TT104", instruction.line, f"{MIN_KEPT} still exist.")


def _is_kept(ref: Any) -> bool:
    """Whether a container without an end holds what a weak reference refers to."""
    kinds = {type(holder) for holder in gc.get_referrers(ref())}
    return bool(kinds & {list, tuple, dict}) and deque not in kinds


AT: dict[Any, Any] = {
    Backward: (summed, kept),
    WeightStep: (steps, retained),
    Close: (retained,),
}


def explain(log: Log, message: str, root: Any, backward: Backward) -> Fault | None:
    """The fault behind an error of a backward from this node; `None` if unknown."""
    if CHANGED in message:
        return _changed(log, message, root, backward)
    return _entered(log, root, backward, "") if FREED in message else None


def _changed(log: Log, message: str, root: Any, backward: Backward) -> Fault | None:
    """A tensor that was changed in place."""
    parts, node = VERSIONS.search(message), changed_node(root, message)
    if not parts or not node:
        return None
    number, now, expected = sequence(node), int(parts[2]), int(parts[3])
    shape = sorted(map(int, re.findall(r"\d+", parts[1])))
    same = (
        p for p in parameters_of_node(node) if version_of(p) == now and sorted(p.shape) == shape
    )
    parameter = next(same, None)
    at = [
        instruction.line
        # of a tensor of that shape first: others may be what it is a view of
        for version, of, instruction, last in sorted(
            log.in_place, key=lambda c: sorted(c[1]) != shape
        )
        if expected < version <= now and last >= number - 64 and math.prod(of) >= math.prod(shape)
    ]
    if parameter is not None:
        steps = (e for e in log.events if isinstance(e, WeightStep) and e.number >= number)
        at = [step.line for step in steps if id(parameter) in step.parameters] or at
    line, user = next(iter(at), None), log.instruction_of(number)
    past = log.backwards[_position(log, node) :]
    if parameter is None or not (
        any(each.retain for each in past) or reaches_unusable(node, MAX_OLD_NODES, FREED)
    ):  # no backward has gone through it
        detail = f"It is needed by the operation at {user.line}." if user else ""
        return Fault("TT103", line, detail, fix=BACKWARD_FIRST * (parameter is not None))
    return _entered(log, root, backward, f"Parameters of the older graph were changed at {line}.")


def _entered(log: Log, root: Any, backward: Backward, change: str) -> Fault | None:
    """A backward that enters the graph of an earlier one."""
    is_new = sequence(root) > log.boundary
    edges = stale_edges(root, log.boundary) if is_new else [StaleEdge([], root, root)]
    if states := [edge for edge in edges if _is_state(log, edge)]:
        return _carried(log, states, backward.line, change)
    if not edges:
        return None
    edge, name = edges[0], "".join(_paths(log, edges[:1])[:1])
    if is_new and _alike(log, reachable_nodes(root, above=log.boundary), edge):
        return Fault("TT104", backward.line, change, name, OWN_LOSS * edge.is_loss)
    past = log.backwards[_position(log, edge.old)]
    return Fault(
        "TT105", backward.line, change or f"The backward at {past.line} has freed it.", name
    )


def _is_state(log: Log, edge: StaleEdge) -> bool:
    """Whether the old tensor enters an operation that has computed it, directly or not."""
    return not edge.is_loss and _alike(log, edge.path, edge)


def _alike(log: Log, nodes: Iterable[Any], edge: StaleEdge) -> bool:
    """Whether an operation of these nodes also occurs in the graph that an edge enters.

    With the same parameters; or without any, unless another one has others there, as of a module of
    the same class.
    """
    a, b = _instructions(log, nodes), _instructions(log, reachable_nodes(edge.old, MAX_OLD_NODES))
    shared = a.keys() & b.keys() - {None}
    return bool(set().union(*a.values()) & set().union(*b.values())) or (
        bool(shared) and not any(a[at] and b[at] for at in shared)
    )


def _instructions(log: Log, nodes: Iterable[Any]) -> dict[Any, Any]:
    """The instructions that created nodes, each with the parameters that its nodes use."""
    uses: dict[Any, Any] = {}
    for node in nodes:
        if not is_leaf(node):
            own = uses.setdefault(log.instruction_of(sequence(node)), set())
            own.update((node.name(), id(p)) for p in parameters_of_node(node))
    return uses


def _position(log: Log, node: Any) -> int:
    """The position among the backwards of the first one after a node."""
    return bisect_left(log.backwards, sequence(node), key=lambda past: past.boundary)


def _entry(log: Log, edge: StaleEdge) -> Instruction | None:
    """The instruction that takes the old tensor in."""
    return log.instruction_of(sequence(edge.entry)) or log.recurrent


def _paths(log: Log, edges: list[StaleEdge]) -> list[str]:
    """The variables that carry old tensors in."""
    return [path for edge in edges for path, _ in log.carried.get(_entry(log, edge), []) if path]


def _carried(log: Log, states: list[StaleEdge], line: SourceLine, change: str) -> Fault:
    """States that were carried with the graph of their chunk."""
    past, entry = log.backwards[_position(log, states[0].old)], _entry(log, states[0])
    enters = entry.line if entry else line
    passed = [at for _, at in log.carried.get(entry, []) if at]
    retained = past.retain and change != ""
    at, paths = past.line if retained else [*passed, enters][0], _paths(log, states)
    detail = change or f"It comes from chunk {past.chunk + 1}, and this is chunk {log.chunk + 1}."
    if enters != at:
        detail += f" It enters at {enters}."
    code, name = "TT102" if retained else "TT101", "".join(paths[:1])
    return Fault(code, at, detail, name, detach_fix(paths, retained=retained))


def lanes_of_error(error: BaseException) -> Fault | None:
    """TT211: an error of a layer or cell whose state has other lanes than its inputs."""
    trace, line = error.__traceback__, None
    while trace:
        if user_frame(trace.tb_frame) is trace.tb_frame:
            line = SourceLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return Fault("TT211", line) if LANES_DIFFER.search(str(error)) else None
