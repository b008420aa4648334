"""What an error says about a loop: of a backward, or of a layer.

Codes TT101 to TT105, and TT211 for a layer that fails. An error of a backward comes from
a graph that an earlier backward has freed, or that an optimizer step has changed. Where it enters
shows why:

- a state, if the operation that takes the old tensor in has computed it (TT101, TT102),
- a loss or output that is kept, if the same forward pass has run again (TT104),
- a graph that is sent back twice, if no forward pass has run in between (TT105).
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from throughtime.doctor._frames import Instruction, SourceLine, line_of, user_frame
from throughtime.doctor._graph import (
    CHANGED,
    FREED,
    ChangedTensor,
    StaleEdge,
    changed_tensor,
    is_leaf,
    parameters_of_node,
    reachable_nodes,
    reaches_unusable,
    sequence,
    stale_edges,
)
from throughtime.doctor._log import Backward, Fault, Log, WeightStep
from throughtime.doctor.findings import BACKWARD_FIRST, OWN_LOSS, detach_fix

# torch's errors of a layer and of a cell
LANES_DIFFER = re.compile(
    r"Expected hidden.* size \(\d+, (\d+), .*\), got \[\d+, (\d+),"
    r"|Input batch size (\d+) doesn't match hidden.* batch size (\d+)"
)
MAX_OLD_NODES = 2000  # nodes of an older graph that are compared with those of this one


def explain(log: Log, message: str, root: Any, backward: Backward) -> Fault | None:
    """The fault behind an error of a backward from this node; `None` if unknown."""
    if CHANGED in message:
        changed = changed_tensor(root, message)
        return _changed(log, changed, root, backward) if changed else None
    return _entered(log, root, backward) if FREED in message else None


def _changed(log: Log, changed: ChangedTensor, root: Any, backward: Backward) -> Fault | None:
    """A tensor that was changed in place."""
    user = log.instruction_of(sequence(changed.node))
    detail = f"It is needed by the operation at {line_of(user)}." if user else ""
    at = _line_of_change(log, changed)
    if changed.parameter is None:
        return Fault("TT103", at, detail)
    past = log.backwards[_position(log, changed.node) :]
    if not any(each.retain for each in past) and not reaches_unusable(
        changed.node, MAX_OLD_NODES, FREED
    ):  # no backward has gone through it before
        return Fault("TT103", at, detail, fix=BACKWARD_FIRST)
    change = f"Parameters of the older graph were changed{f' at {at}' if at else ''}."
    return _entered(log, root, backward, change)


def _line_of_change(log: Log, changed: ChangedTensor) -> SourceLine | None:
    """The line of the optimizer step or the operation that changed a tensor in place."""
    number, shape = sequence(changed.node), changed.shape
    steps = (e for e in log.events if isinstance(e, WeightStep) and e.number >= number)
    if step := next((e for e in steps if id(changed.parameter) in e.parameters), None):
        return step.line
    changes = [
        (list(of), instruction)
        for version, of, instruction, last in log.in_place
        if changed.expected < version <= changed.version and last >= number - 64
    ]
    same = [instruction for of, instruction in changes if of == shape]
    larger = [i for of, i in changes if math.prod(of) >= math.prod(shape)]
    return next(map(line_of, same or larger), None)


def _entered(log: Log, root: Any, backward: Backward, change: str = "") -> Fault | None:
    """A backward that enters the graph of an earlier one."""
    if sequence(root) <= log.boundary:
        return _sent_twice(log, root, backward, "", change)
    edges = stale_edges(root, log.boundary)
    if states := [edge for edge in edges if _is_state(log, edge)]:
        return _carried(log, states, backward.line, change)
    if not edges:
        return None
    edge, (entry, name) = edges[0], _entry(log, edges[0])
    past = log.backwards[_position(log, edge.old)]
    chunks = past.chunk, log.chunk
    if entry and entry == log.recurrent and past.site == backward.site:
        fix = f"compute {name or 'the state'} anew before each backward, inside the loop"
        return Fault("TT101", line_of(entry), "It is computed only once.", name, chunks, fix)
    if not _alike(log, reachable_nodes(root, above=log.boundary), _below(edge)):
        return _sent_twice(log, edge.old, backward, name, change)
    return Fault("TT104", backward.line, change, name, chunks, OWN_LOSS if edge.is_number else "")


def _is_state(log: Log, edge: StaleEdge) -> bool:
    """Whether the old tensor enters an operation that has computed it, directly or not."""
    if edge.is_number and not edge.uses_parameters:
        return False
    watched = any(_instructions(log, edge.path))
    return _alike(log, edge.path, _below(edge)) if watched else edge.uses_parameters


def _below(edge: StaleEdge) -> Iterable[Any]:
    """Nodes of the graph that an edge enters."""
    return reachable_nodes(edge.old, MAX_OLD_NODES)


def _alike(log: Log, one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether an operation occurs in both graphs, with the same parameters if it has any."""
    a, b = _instructions(log, one), _instructions(log, other)
    if set().union(*a.values()) & set().union(*b.values()):
        return True
    shared = [key for key in a if key is not None and key in b]
    return bool(shared) and not any(a[key] and b[key] for key in shared)


def _instructions(log: Log, nodes: Iterable[Any]) -> dict[Instruction | None, set[tuple[str, int]]]:
    """The instructions that created nodes, each with the parameters that its nodes use."""
    result: dict[Instruction | None, set[tuple[str, int]]] = {}
    for node in nodes:
        if not is_leaf(node):
            uses = result.setdefault(log.instruction_of(sequence(node)), set())
            uses.update((node.name(), id(p)) for p in parameters_of_node(node))
    return result


def _entry(log: Log, edge: StaleEdge) -> tuple[Instruction | None, str]:
    """The instruction that takes the old tensor in, and the path of the tensor."""

    def matches(value: Any) -> bool:
        return isinstance(value, Tensor) and value.grad_fn is edge.old

    entry = log.instruction_of(sequence(edge.entry)) or log.recurrent
    return entry, log.state_name(entry, matches)


def _position(log: Log, node: Any) -> int:
    """The position among the backwards of the first one after a node."""
    return bisect_left(log.backwards, sequence(node), key=lambda past: past.boundary)


def _carried(log: Log, states: list[StaleEdge], line: SourceLine, change: str) -> Fault:
    """States that were carried with the graph of their chunk."""
    past, (entry, name) = log.backwards[_position(log, states[0].old)], _entry(log, states[0])
    entries = dict.fromkeys(_entry(log, state)[0] for state in states)
    carriers = [each for at in entries if at for each in log.carried.get(at, [])]
    passed = next((at for _, at in carriers if at), line_of(entry) if entry else line)
    retained = past.retain and change != ""
    at = past.line if retained else passed
    details = [change or "A backward has freed that graph."]
    if entry and line_of(entry) != at:
        details.append(f"It enters at {line_of(entry)}.")
    fix = detach_fix([path for path, _ in carriers] or [name], losses=int(retained))
    code, chunks = "TT102" if retained else "TT101", (past.chunk, log.chunk)
    return Fault(code, at, " ".join(details), name, chunks, fix)


def _sent_twice(log: Log, node: Any, backward: Backward, name: str, change: str) -> Fault:
    """A graph that two backwards go through without a forward pass in between."""
    past = log.backwards[_position(log, node)]
    return Fault(
        "TT105", backward.line, change or f"The backward at {past.line} has freed it.", name
    )


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
