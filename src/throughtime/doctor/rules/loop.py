"""The rules of backwards and steps: where gradients arrive, and which graphs grow.

Codes TT102, TT104, TT301, TT302 and TT304 to TT307. Each rule is a function of the log of a loop
and of its last event, and yields the faults that it finds; `AT` lists them by event. A rule that
fails does not stop the loop: the doctor stores the exception as `internal_error`.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from throughtime.doctor._frames import (
    INDICES,
    SourceLine,
    current_frame,
    line_of,
    variable_path,
)
from throughtime.doctor._graph import FREED, MeanTerm, reaches_unusable
from throughtime.doctor._log import (
    Backward,
    Clear,
    Clip,
    Close,
    Fault,
    Log,
    WeightStep,
)
from throughtime.doctor.findings import CLEAR_ONCE, OWN_LOSS, detach_fix

REPEATS = 2  # steps that show a fault before it is reported
MAX_STEPS = 8  # that are compared with the last one
MAX_REACH = 6  # passes behind a retained backward before it is reported
RESTARTS = 2  # the same at each recording
MIN_REACH = 3  # the same if the loop ends before
MIN_SUMMED = 3  # chunks that a sum goes through
MAX_HELD_DEPTH = 4  # attributes and indices between a variable and a result that it keeps
MIN_KEPT = 5  # chunks whose losses or outputs still exist


def unequal_means(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT301: losses of unequal chunks that one step sums, by their line and order in a pass."""
    by_line: dict[tuple[SourceLine, int], list[MeanTerm]] = {}
    order, backwards = 0, log.before(event, Backward)
    for each in backwards:
        order = order + 1 if each.again else 0
        if each.mean:
            by_line.setdefault((each.line, order), []).append(each.mean)
    if log.crossed.isdisjoint(each.chunk for each in backwards[1:]):
        return
    for (line, _), terms in by_line.items():
        counts = sorted({term.count for term in terms})
        if len({(term.kind, round(term.weight, 9)) for term in terms}) == 1 < len(counts):
            yield Fault("TT301", line, f"Means over {counts} elements have the same weight.")


def cleared_before_use(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT302: gradients that were cleared before a step used them.

    The step has none, or those of the last chunk only, as the steps before it.
    """
    past = log.before(event, Backward, Clear)
    lost = [c for b, c in pairwise(past) if isinstance(b, Backward) and isinstance(c, Clear)]
    backwards = {(each.line, each.used) for each in past if isinstance(each, Backward)}
    if lost and not event.lost and backwards == {(past[-1].line, False)}:
        event.lost = len(lost)
    always = {each.lost for each in log.steps_of(event.optimizer, MAX_STEPS)} == {len(lost)}
    if lost and (always or (event.lacks and isinstance(past[-1], Clear))):
        yield Fault(
            "TT302",
            lost[-1].line,
            "It clears the gradients before a step has used them.",
            fix=CLEAR_ONCE * always,
            after=REPEATS + always,
        )


def never_cleared(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT302: a step that uses the gradients of the last step again."""
    past = log.before(event, Backward, Clear)
    if event.repeated and {*map(type, past)} == {Backward}:
        yield Fault(
            "TT302",
            event.line,
            "Nothing cleared the gradients since the previous step, so this step uses them again.",
            after=REPEATS,
        )


def step_without_backward(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT304: steps in a row that follow a forward pass but no backward."""
    steps = log.steps_of(event.optimizer, REPEATS + 1)
    idle = all(
        step.lacks and step.chunk == before.chunk and step.number != before.number
        for step, before in pairwise(steps)
    )
    if idle and (len(steps) > REPEATS or (len(steps) == REPEATS and steps[-1].chunk == 0)):
        yield Fault(
            "TT304",
            event.line,
            "No backward has run since the step before, and no parameter has a gradient.",
        )


def clipped_early(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT306: every clip since the last step comes before any backward."""
    past = log.before(event, Backward, Clip)
    clips = [each for each in past if isinstance(each, Clip)]
    if clips and clips != past and clips == past[: len(clips)]:
        yield Fault("TT306", clips[-1].line, after=REPEATS)


def untrained(_: Log, event: WeightStep) -> Iterator[Fault]:
    """TT305: parameters that no optimizer has. TT307: a step in the mode of the validation."""
    for code, line in (("TT305", event.constructed), ("TT307", event.evaluating)):
        if line:
            yield Fault(code, line, after=REPEATS)


def retained(log: Log, event: Backward | Close) -> Iterator[Fault]:
    """TT102: backwards in one line that each reach further back."""
    ended = isinstance(event, Close)
    events = log.backwards if ended else [event]
    for line in dict.fromkeys(each.line for each in events if each.reach >= 0):
        all_passes = [each for each in log.backwards if each.line == line]
        passes = [each for each in all_passes if each.reach >= 0]
        # a step shows that the last graph has ended, and whether a backward has freed it
        far = [each for each in passes if each.reach >= MAX_REACH and each.steps < log.steps]
        last = [*far, passes[-1]][0]
        first = passes[passes.index(last) - last.reach]
        # recordings whose third chunk reaches back to the first
        restarts = last.reach == RESTARTS and first.chunk not in log.crossed
        if first.steps == last.steps and (
            log.crossed.isdisjoint(range(first.chunk + 1, last.chunk + 1))
            or not all(each.retain for each in all_passes)
        ):
            continue  # several losses of one forward pass, or of the steps of one chunk
        grows = last.reach >= MIN_REACH and all(a.reach < b.reach for a, b in pairwise(passes))
        if far or (grows if ended else restarts):
            paths = [path for entered in log.carried.values() for path, _ in entered if path]
            yield Fault(
                "TT102",
                line,
                f"It reaches {last.reach} passes back.",
                next(iter(paths), ""),
                fix=detach_fix(paths, losses=1 + log.several),
                after=1 + restarts,
            )


def summed(log: Log, _: Backward) -> Iterator[Fault]:
    """TT104: a sum of losses with its graph over chunks."""
    for instruction, each in log.sums.items():
        line = line_of(instruction)
        if each.depth >= MIN_SUMMED:
            fix = OWN_LOSS if instruction in log.roots else ""
            yield Fault("TT104", line, f"The sum goes through {each.depth} chunks.", fix=fix)


def kept(log: Log, _: Backward) -> Iterator[Fault]:
    """TT104: results of several chunks that still exist, although their graphs were used."""
    for instruction, by_chunk in list(log.results.items()):
        alive = {n: ref for n, ref in by_chunk.items() if ref() is not None}
        log.results[instruction] = alive
        tensors = [t for ref in alive.values() if (t := ref()).grad_fn]
        if len(tensors) != MIN_KEPT or not reaches_unusable(tensors[0].grad_fn, 60, FREED):
            continue
        paths = (
            variable_path(lambda v, t=t: v is t, current_frame(), MAX_HELD_DEPTH) for t in tensors
        )
        # rows of a container may be objects that hold them
        holders = {re.sub(INDICES, "", path[: path.rfind("]") + 1]) for path in paths} - {""}
        if len(holders) == 1:
            yield Fault("TT104", line_of(instruction), f"{MIN_KEPT} still exist.", holders.pop())


AT: dict[type, tuple[Callable[..., Iterator[Fault]], ...]] = {
    Backward: (retained, summed, kept),
    WeightStep: (
        unequal_means,
        cleared_before_use,
        never_cleared,
        step_without_backward,
        clipped_early,
        untrained,
    ),
    Close: (retained,),
}
