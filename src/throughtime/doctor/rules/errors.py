"""What an error says about a loop: of a backward, or of a layer.

Codes TT101 to TT105, and TT211 for a layer that fails. An error of a backward comes from
a graph that an earlier backward has freed, or that an optimizer step has changed. Where it enters
shows why:

- a state, if an operation on the way from the old tensor to the loss has computed it (TT101,
  TT102),
- a loss or output that is kept, if the same forward pass has run again (TT104),
- a graph that is sent back twice, if no forward pass has run in between (TT105).
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from throughtime.doctor._frames import Instruction, SourceLine, line_of, user_frame
from throughtime.doctor._graph import (
    CHANGED,
    FREED,
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
from throughtime.doctor._log import Backward, Fault, Log, WeightStep
from throughtime.doctor.findings import BACKWARD_FIRST, OWN_LOSS, detach_fix

# torch's errors of a layer and of a cell
LANES_DIFFER = re.compile(
    r"Expected hidden.* size \(\d+, (\d+), .*\), got \[\d+, (\d+),"
    r"|Input batch size (\d+) doesn't match hidden.* batch size (\d+)"
)
VERSIONS = re.compile(r"\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)")
MAX_OLD_NODES = 2000  # nodes of an older graph that are compared with those of this one


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
        line_of(instruction)
        for version, of, instruction, last in log.in_place
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
        detail = f"It is needed by the operation at {line_of(user)}." if user else ""
        return Fault("TT103", line, detail, fix=BACKWARD_FIRST * (parameter is not None))
    return _entered(log, root, backward, f"Parameters of the older graph were changed at {line}.")


def _entered(log: Log, root: Any, backward: Backward, change: str) -> Fault | None:
    """A backward that enters the graph of an earlier one."""
    edges = stale_edges(root, log.boundary) if sequence(root) > log.boundary else []
    if states := [edge for edge in edges if _is_state(log, edge)]:
        return _carried(log, states, backward.line, change)
    if not edges and sequence(root) > log.boundary:
        return None
    edge = edges[0] if edges else StaleEdge([], root, root)
    past = log.backwards[_position(log, edge.old)]
    chunks, name = (past.chunk, log.chunk), next(iter(_paths(log, edges[:1])), "")
    new = reachable_nodes(root, above=log.boundary) if edges else ()
    if _instructions(log, new).isdisjoint(_below(log, edge)):
        detail = change or f"The backward at {past.line} has freed it."
        return Fault("TT105", backward.line, detail, name)
    return Fault("TT104", backward.line, change, name, chunks, OWN_LOSS * edge.is_loss)


def _is_state(log: Log, edge: StaleEdge) -> bool:
    """Whether the old tensor enters an operation that has computed it, directly or not."""
    way = _instructions(log, edge.path)
    alike = not way.isdisjoint(_below(log, edge)) if way else edge.uses_parameters
    return alike and not edge.is_loss


def _below(log: Log, edge: StaleEdge) -> set[Instruction]:
    """The instructions behind an old tensor."""
    return _instructions(log, reachable_nodes(edge.old, MAX_OLD_NODES))


def _instructions(log: Log, nodes: Iterable[Any]) -> set[Instruction]:
    """The instructions that created nodes, as far as known."""
    created = (log.instruction_of(sequence(node)) for node in nodes if not is_leaf(node))
    return {each for each in created if each}


def _position(log: Log, node: Any) -> int:
    """The position among the backwards of the first one after a node."""
    return bisect_left(log.backwards, sequence(node), key=lambda past: past.boundary)


def _entry(log: Log, edge: StaleEdge) -> Instruction | None:
    """The instruction that takes the old tensor in."""
    return log.instruction_of(sequence(edge.entry))


def _paths(log: Log, edges: list[StaleEdge]) -> list[str]:
    """The variables that carry old tensors in."""
    entries = dict.fromkeys(_entry(log, edge) for edge in edges)
    return [path for at in entries if at for path, _ in log.carried.get(at, []) if path]


def _carried(log: Log, states: list[StaleEdge], line: SourceLine, change: str) -> Fault:
    """States that were carried with the graph of their chunk."""
    past, entry = log.backwards[_position(log, states[0].old)], _entry(log, states[0])
    carriers = log.carried.get(entry, []) if entry else []
    passed = next((at for _, at in carriers if at), line_of(entry) if entry else line)
    retained = past.retain and change != ""
    at, paths = past.line if retained else passed, _paths(log, states)
    details = [change or "A backward has freed that graph."]
    if entry and line_of(entry) != at:
        details.append(f"It enters at {line_of(entry)}.")
    fix, chunks = detach_fix(paths, retained=retained), (past.chunk, log.chunk)
    code, name = "TT102" if retained else "TT101", "".join(paths[:1])
    return Fault(code, at, " ".join(details), name, chunks, fix)


def lanes_of_error(error: BaseException) -> Fault | None:
    """TT211: an error of a layer or cell whose state has other lanes than its inputs."""
    trace, line, match = error.__traceback__, None, LANES_DIFFER.search(str(error))
    while trace:
        if user_frame(trace.tb_frame) is trace.tb_frame:
            line = SourceLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    chunk, state = filter(None, match.groups()) if match else ("", "")
    detail = f"The state has {state} lanes, the chunk has {chunk}."
    return Fault("TT211", line, detail) if chunk != state else None
