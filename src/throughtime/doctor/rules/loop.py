"""The rules of backwards and steps: where gradients arrive, and which graphs grow.

Codes TT102, TT104, TT203, TT301, TT302 and TT304 to TT307. Each rule is a function of the log of a
loop and of its last event, and yields the faults that it finds; `AT` lists them by event. A rule
that fails does not stop the loop: the doctor stores the exception as `internal_error`.
"""

import itertools
from collections.abc import Callable, Iterator

from throughtime.doctor._autograd import FREED, MeanTerm, reaches_unusable
from throughtime.doctor._frames import SourceLine, container_of, line_of
from throughtime.doctor._log import (
    Backward,
    Clear,
    Clip,
    Close,
    Event,
    Fault,
    Log,
    Sum,
    WeightStep,
)
from throughtime.doctor.findings import (
    CLEAR_AFTER_STEP,
    LOST_DETACH,
    NO_GRAD,
    OWN_LOSS,
    detach_fix,
)

REPEATS = 2  # steps that show a fault before it is reported
MAX_STEPS = 8  # steps before one that are compared with it
MAX_REACH = 6  # chunks behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_RUNS = 2  # recordings of three chunks or more that each backward goes through
MIN_SUMMED = 3  # chunks that a sum goes through
MIN_KEPT = 5  # chunks whose losses or outputs still exist
MAX_SEARCHES = 2  # of all objects, for what keeps the results of one line


def unequal_chunks_in_one_loss(_: Log, event: Backward) -> Iterator[Fault]:
    """TT301: a loss that sums a mean for each chunk of a recording."""
    if event.by_chunk:
        yield from _unequal(event.line, event.means)


def unequal_means(log: Log, _: WeightStep) -> Iterator[Fault]:
    """TT301: losses of unequal chunks that one step sums, by their line and order in a pass."""
    by_line: dict[tuple[SourceLine, int], list[MeanTerm]] = {}
    order, chunk = 0, 0
    for each in _since_any_step(log):
        if isinstance(each, WeightStep):
            chunk = each.chunk
        elif isinstance(each, Backward) and len(each.means) == 1:
            order = order + 1 if each.again else 0
            by_line.setdefault((each.line, order), []).append(each.means[0])
    if log.crossed_since(chunk):
        for (line, _order), terms in by_line.items():
            yield from _unequal(line, terms)


def _since_any_step(log: Log) -> list[Event]:
    """The events from the last step but one, before the last event."""
    numbers = (
        i for i in range(len(log.events) - 2, -1, -1) if isinstance(log.events[i], WeightStep)
    )
    return log.events[next(numbers, 0) : -1]


def _unequal(line: SourceLine, terms: list[MeanTerm]) -> Iterator[Fault]:
    """Means of one kind with the same weight over unequal numbers of elements."""
    counts = sorted({int(term.count) for term in terms})
    if len({(term.kind, round(term.weight, 9)) for term in terms}) == 1 and len(counts) > 1:
        detail = f"Means over {counts} elements have the same weight in one step."
        yield Fault("TT301", line, detail)


def cleared_before_use(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT302: gradients that were cleared before a step used them."""
    lost, kept, clear, used = _cleared(log, event)
    if not clear or not event.line:
        return
    steps = log.steps_of(event.optimizer, MAX_STEPS)
    unused = (clear.watched and not used) or log.crossed_since(steps[1].chunk if steps[1:] else 0)
    always = unused and all(len(_cleared(log, step)[0]) == len(lost) for step in steps[1:])
    wiped, arrives = ({backward.line for backward in each} for each in (lost, kept))
    if event.lacks or (arrives and arrives <= wiped and always):
        effect = "has no gradient" if event.lacks else "uses those of the last chunk only"
        detail = f"It clears the gradients before a step has used them: the step {effect}."
        fix = "" if event.lacks else CLEAR_AFTER_STEP
        yield Fault("TT302", clear.line, detail, fix=fix, after=REPEATS)


def _cleared(
    log: Log, step: WeightStep
) -> tuple[list[Backward], list[Backward], Clear | None, bool]:
    """Before a step: backwards that were cleared, those that were not, and what cleared them.

    The last is whether the gradients were used by other means than a step.
    """
    lost, kept, clear, used = list[Backward](), list[Backward](), None, False
    for event in log.before(step):
        if isinstance(event, Backward) and event.number >= 0:
            kept.append(event)
        elif isinstance(event, WeightStep):
            kept = []
        elif isinstance(event, Clear) and event.parameters & step.parameters:
            if kept and event.line and step.optimizer in event.useful:
                clear, lost = event, lost + kept
                versions = (each.versions.get(step.optimizer) for each in (kept[-1], event))
                used |= any(b.retain for b in kept) or kept[-1].reads != event.reads
                used |= len(set(versions)) > 1
            kept = []
    return lost, kept, clear, used


def never_cleared(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT302: a step that uses the gradients of the last step again."""
    steps = log.steps_of(event.optimizer, 2)
    if not event.repeated or len(steps) < 2 or event.chunk <= steps[1].chunk:
        return
    cleared = any(
        (isinstance(each, Clear) and each.parameters & event.parameters)
        or (isinstance(each, Backward) and event.optimizer in each.fresh)
        for each in log.before(event)
    )
    if not cleared:
        detail = (
            "Nothing cleared the gradients since the previous step, so this step uses them again."
        )
        yield Fault("TT302", event.line, detail, after=REPEATS)


def step_without_backward(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT304: steps in a row that follow a forward pass but no backward."""
    steps = log.steps_of(event.optimizer, REPEATS + 1)
    idle = all(
        step.lacks
        and not step.by_trainer
        and step.chunk == before.chunk
        and (step.call, step.number) != (before.call, before.number)
        for step, before in itertools.pairwise(steps)
    )
    if idle and (len(steps) > REPEATS or (len(steps) == REPEATS and steps[-1].chunk == 0)):
        detail = "No backward has run since the step before, and no parameter has a gradient."
        yield Fault("TT304", event.line, detail)


def strange_parameters(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT305: the parameters that get gradients are in no optimizer."""
    leaves = [e.leaves for e in log.before(event) if isinstance(e, Backward)]
    if event.strangers or any(leaves):
        yield Fault("TT305", event.constructed, after=REPEATS)


def clipped_early(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT306: every clip since the last step comes before any backward."""
    past = log.before(event)
    number = next((i for i, e in enumerate(past) if isinstance(e, Backward)), 0)
    clips = [
        (i, e.line)
        for i, e in enumerate(past)
        if isinstance(e, Clip) and e.parameters & event.parameters
    ]
    if clips and clips[-1][0] < number:
        yield Fault("TT306", clips[-1][1], after=REPEATS)


def never_trained_again(_: Log, event: WeightStep) -> Iterator[Fault]:
    """TT307: a step in the mode of the validation before it."""
    if event.evaluating:
        yield Fault("TT307", event.evaluating, after=REPEATS)


def retained(log: Log, event: Event) -> Iterator[Fault]:
    """TT102: backwards in one line that each reach one chunk further back."""
    if isinstance(event, Close):
        lines = dict.fromkeys(each.line for each in log.backwards if each.nodes)
        passes = [_passes(log, next(b for b in log.backwards if b.line == at)) for at in lines]
    else:
        passes = [_passes(log, event)] if isinstance(event, Backward) and event.nodes else []
    for each in passes:
        reach = [_reach(each, i) for i in range(len(each))]
        at_end = isinstance(event, Close) and reach[-1] == len(each) - 1 >= MIN_REACH
        if at_end or reach[-1] == MAX_REACH or _runs(log, each, reach) == MIN_RUNS:
            yield from _growth(log, each, reach)


def _passes(log: Log, event: Backward) -> list[Backward]:
    """The retained backwards in the line of one, the last of each forward pass."""
    result: list[Backward] = []
    for each in log.backwards:
        if each.line == event.line and each.nodes:
            if result and each.number < result[-1].newest:
                result.pop()
            result.append(each)
    return result


def _reach(passes: list[Backward], i: int) -> int:
    """The number of earlier passes that a backward goes through."""
    return sum(earlier.number >= passes[i].oldest for earlier in passes[:i])


def _runs(log: Log, passes: list[Backward], reach: list[int]) -> int:
    """The number of recordings whose third chunk reaches back to the first; 0 if not now."""
    runs = 0
    for i in range(len(passes) - 2):
        grows = reach[i : i + 3] == [0, 1, 2]
        runs += grows and passes[i].chunk not in log.crossed and passes[i + 2].chunk in log.crossed
    return runs if reach[-1] == 2 else 0


def _growth(log: Log, passes: list[Backward], reach: list[int]) -> Iterator[Fault]:
    count = len(list(itertools.takewhile(bool, reversed(reach))))
    grown, reached = passes[-count:], reach[-count:]
    pairs = itertools.pairwise(zip(grown, reached, strict=True))
    if not all(m == n + 1 and b.nodes > a.nodes for (a, n), (b, m) in pairs):
        return
    first, last = grown[0], grown[-1]
    if first.steps == last.steps and not log.crossed_since(log.chunk - count - 1):
        return  # several losses of one forward
    growth = (last.nodes - first.nodes) // max(count - 1, 1)
    detail = f"It reaches {reached[-1]} chunks back, {growth} nodes more in each chunk."
    paths = [v.path for entered in log.carried.values() for v in entered if v.path]
    fix = detach_fix(paths, losses=1 + log.several)
    yield Fault("TT102", last.line, detail, paths[0] if paths else "", fix=fix)


def summed(log: Log, event: Sum) -> Iterator[Fault]:
    """TT104: a sum of losses that goes on with its graph over chunks."""
    if event.depth >= MIN_SUMMED:
        fix = OWN_LOSS if event.instruction in log.roots else ""
        detail = f"The sum goes through {event.depth} chunks."
        yield Fault("TT104", line_of(event.instruction), detail, fix=fix)


def never_sent(log: Log, _: Close) -> Iterator[Fault]:
    """TT104: a sum over forward passes that no backward goes through."""
    for each in log.sums.values() if not log.codes & {"TT104", "TT202"} else ():
        detail = f"No backward goes through this sum over {each.passes} forward passes."
        yield Fault("TT104", line_of(each.instruction), detail, fix=NO_GRAD)


def lost_detach(log: Log, _: Close) -> Iterator[Fault]:
    """TT101: a lost detach of a state, where neither an error nor growth has shown it."""
    for instruction in log.lost_states if not log.codes & {"TT101", "TT102"} else ():
        yield Fault("TT101", line_of(instruction), LOST_DETACH)


def kept(log: Log) -> Iterator[Fault]:
    """TT104: results of several chunks that still exist, although their graphs were used."""
    for instruction, by_chunk in list(log.results.items()):
        alive = {n: ref for n, ref in by_chunk.items() if ref() is not None}
        log.results[instruction] = alive
        searches = log.searches.get(instruction, 0)
        tensors = [t for n, ref in alive.items() if n < log.chunk and (t := ref()).grad_fn]
        if len(tensors) < MIN_KEPT or searches == MAX_SEARCHES:
            continue
        log.searches[instruction] = searches + 1
        if reaches_unusable(tensors[0].grad_fn, 60, FREED) and (name := container_of(tensors)):
            yield Fault("TT104", line_of(instruction), f"{len(tensors)} still exist.", name)


AT: dict[type, tuple[Callable[..., Iterator[Fault]], ...]] = {
    Backward: (
        unequal_chunks_in_one_loss,
        retained,
    ),
    WeightStep: (
        unequal_means,
        cleared_before_use,
        never_cleared,
        step_without_backward,
        strange_parameters,
        clipped_early,
        never_trained_again,
    ),
    Sum: (summed,),
    Close: (
        retained,
        never_sent,
        lost_detach,
    ),
}
