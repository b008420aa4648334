"""The rules of backwards and steps: where gradients arrive, and which graphs grow.

Codes TT102, TT104, TT302 and TT304 to TT307. Each rule is a function of the log of a loop and of
its last event, and yields the faults that it finds; `AT` lists them by event. A rule that fails
does not stop the loop: the doctor stores the exception as `internal_error`.
"""

import gc
import re
from collections import deque
from collections.abc import Callable, Iterator

from throughtime.doctor._frames import line_of
from throughtime.doctor._graph import LEAF, reachable_nodes, sequence
from throughtime.doctor._log import Backward, Close, Fault, Log, WeightStep
from throughtime.doctor.findings import CLEAR_ONCE, OWN_LOSS, detach_fix

MIN_LOST = 3  # steps in a row that lose the gradients of as many backwards
MAX_REACH = 6  # passes behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_SUMMED = 3  # chunks that a sum goes through
MAX_SUM = 1000  # nodes between a sum and its last value
MIN_KEPT = 5  # chunks whose losses or outputs still exist


def steps(log: Log, step: WeightStep) -> Iterator[Fault]:
    """The faults that the events since the last step show, as letters: see `Log.before`.

    TT302: gradients that were not cleared since the last step, or before a step used them: it has
    none, or those of the last chunk only, as the steps before it. TT304: steps in a row that follow
    a forward pass but no backward. TT306: every clip comes before any backward.
    """
    past, before = log.before(step), step.before
    letters = "".join(each.letter for each in past)
    lines = {each.letter: each.line for each in past}  # the last ones
    order = letters.replace("l", "")
    if step.repeated and {*order} == {"b"}:
        yield Fault(
            "TT302", step.line, "Nothing cleared the gradients since the last step.", after=2
        )
    sent = {(each.line, each.used) for each in past if isinstance(each, Backward)}
    if sent == {(lines.get("b"), False)} and not step.has_hooks:
        step.lost = order.count("bc")
    again = before is not None and step.lost == before.lost > 0
    step.run = before.run + 1 if again and before else 1
    if (step.lost and step.run >= MIN_LOST) or (step.lacks and re.fullmatch(".*b+c+", order)):
        detail, fix = "It clears the gradients before a step has used them.", CLEAR_ONCE * again
        yield Fault("TT302", lines["c"], detail, fix=fix, after=1 if again else 2)
    is_idle = step.lacks and "b" not in order and before and step.number != before.number
    step.idle = before.idle + 1 if is_idle and before else 0
    if step.idle > 1 or (step.idle and step.chunk == 0):
        detail = "No backward has run since the step before, and no parameter has a gradient."
        yield Fault("TT304", step.line, detail)
    if re.fullmatch("c*l+[^l]*b[^l]*", letters):
        yield Fault("TT306", lines["l"], after=2)
    for code, line in (("TT305", step.constructed), ("TT307", step.evaluating)):
        if line:
            yield Fault(code, line, after=2)


def retained(log: Log, event: Backward | Close) -> Iterator[Fault]:
    """TT102: backwards in one line that each reach further back, over steps in between."""
    ended = isinstance(event, Close)
    for line in {each.line: None for each in (log.backwards if ended else [event])}:
        passes = [each for each in log.backwards if each.line == line and each.reach >= 0]
        reach = passes[-1].reach if passes else 0
        if reach < MAX_REACH and not (ended and MIN_REACH <= reach == len(passes) - 1):
            continue
        first, last = passes[-1 - reach], passes[-1]
        chunks = range(first.chunk + 1, last.chunk + 1)
        if first.steps < last.steps or not log.crossed.isdisjoint(chunks):
            paths = [path for entered in log.carried.values() for path, _ in entered if path]
            fix, detail = detach_fix(paths, retained=True), f"It reaches {reach} passes back."
            yield Fault("TT102", line, detail, "".join(paths[:1]), fix=fix)


def summed(log: Log, event: Backward) -> Iterator[Fault]:
    """TT104: a sum of losses with its graph over chunks."""
    for instruction, by_chunk in log.results.items():
        total = by_chunk[event.chunk]() if event.chunk in by_chunk else None
        if total is None or total.numel() > 1 or not total.grad_fn:
            continue
        before, depth = log.sums.get(instruction, (LEAF, 0))
        nodes = reachable_nodes(total.grad_fn, MAX_SUM, before - 1)
        depth = depth + 1 if before in map(sequence, nodes) else 0
        log.sums[instruction] = sequence(total.grad_fn), depth
        if depth >= MIN_SUMMED:
            fix = OWN_LOSS if instruction in log.roots else ""
            yield Fault(
                "TT104", line_of(instruction), f"The sum goes through {depth} chunks.", fix=fix
            )


def kept(log: Log, _: Backward) -> Iterator[Fault]:
    """TT104: results of several chunks that still exist, and not in a deque, which has an end."""
    for instruction, by_chunk in list(log.results.items()):
        alive = {n: ref for n, ref in by_chunk.items() if ref() is not None}
        log.results[instruction] = alive
        tensors = [t for ref in alive.values() if (t := ref()).grad_fn]
        if len(tensors) == MIN_KEPT and not any(
            isinstance(holder, deque) for t in tensors for holder in gc.get_referrers(t)
        ):
            yield Fault("TT104", line_of(instruction), f"{MIN_KEPT} still exist.")


AT: dict[type, tuple[Callable[..., Iterator[Fault]], ...]] = {
    Backward: (retained, summed, kept),
    WeightStep: (steps,),
    Close: (retained,),
}
