"""The rules of backwards and steps: where gradients arrive, and which graphs grow.

Codes TT102, TT104, TT302 and TT304 to TT307. Each rule is a function of the log of a loop and of
its last event, and yields the faults that it finds; `AT` lists them by event. A rule that fails
does not stop the loop: the doctor stores the exception as `internal_error`.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from throughtime.doctor._frames import INDICES, current_frame, line_of, user_frames, variable_path
from throughtime.doctor._log import Backward, Clear, Clip, Close, Fault, Log, WeightStep
from throughtime.doctor.findings import CLEAR_ONCE, OWN_LOSS, detach_fix

REPEATS = 2  # steps that show a fault before it is reported
MAX_STEPS = 8  # that are compared with the last one
MAX_REACH = 6  # passes behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_SUMMED = 3  # chunks that a sum goes through
MAX_HELD_DEPTH = 4  # attributes and indices between a variable and a result that it keeps
MIN_KEPT = 5  # chunks whose losses or outputs still exist


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
        detail = (
            "Nothing cleared the gradients since the previous step, so this step uses them again."
        )
        yield Fault("TT302", event.line, detail, after=REPEATS)


def step_without_backward(log: Log, event: WeightStep) -> Iterator[Fault]:
    """TT304: steps in a row that follow a forward pass but no backward."""
    steps = log.steps_of(event.optimizer, REPEATS + 1)
    idle = all(
        step.lacks and step.chunk == before.chunk and step.number != before.number
        for step, before in pairwise(steps)
    )
    if idle and (len(steps) > REPEATS or (len(steps) == REPEATS and steps[-1].chunk == 0)):
        detail = "No backward has run since the step before, and no parameter has a gradient."
        yield Fault("TT304", event.line, detail)


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
    """TT102: backwards in one line that each reach further back, over steps in between."""
    ended = isinstance(event, Close)
    for line in dict.fromkeys(each.line for each in (log.backwards if ended else [event])):
        passes = [each for each in log.backwards if each.line == line and each.reach >= 0]
        far = [each for each in passes if each.reach >= MAX_REACH]
        last = next(iter([*far, *passes[-1:]]), None)
        grows = ended and all(a.reach < b.reach for a, b in pairwise(passes))
        if not last or last.reach < (MIN_REACH if grows else MAX_REACH):
            continue
        first = passes[passes.index(last) - last.reach]
        if first.steps < last.steps or not log.crossed.isdisjoint(
            range(first.chunk + 1, last.chunk + 1)
        ):
            paths = [path for entered in log.carried.values() for path, _ in entered if path]
            name, fix = next(iter(paths), ""), detach_fix(paths, losses=1 + log.several)
            detail = f"It reaches {last.reach} passes back."
            yield Fault("TT102", line, detail, name, fix=fix)


def summed(log: Log, _: Backward) -> Iterator[Fault]:
    """TT104: a sum of losses with its graph over chunks."""
    for instruction, each in log.sums.items():
        if each.depth >= MIN_SUMMED:
            fix = OWN_LOSS if instruction in log.roots else ""
            detail = f"The sum goes through {each.depth} chunks."
            yield Fault("TT104", line_of(instruction), detail, fix=fix)


def kept(log: Log, _: Backward) -> Iterator[Fault]:
    """TT104: results of several chunks that still exist, although their graphs were used."""
    for instruction, by_chunk in list(log.results.items()):
        alive = {n: ref for n, ref in by_chunk.items() if ref() is not None}
        log.results[instruction] = alive
        tensors = [t for ref in alive.values() if (t := ref()).grad_fn]
        if len(tensors) != MIN_KEPT:
            continue
        frames = user_frames(current_frame())
        paths = (variable_path(lambda v, t=t: v is t, frames, MAX_HELD_DEPTH) for t in tensors)
        # rows of a container may be objects that hold them
        holders = {re.sub(INDICES, "", path[: path.rfind("]") + 1]) for path in paths} - {""}
        if len(holders) == 1:
            yield Fault("TT104", line_of(instruction), f"{MIN_KEPT} still exist.", holders.pop())


AT: dict[type, tuple[Callable[..., Iterator[Fault]], ...]] = {
    Backward: (retained, summed, kept),
    WeightStep: (
        cleared_before_use,
        never_cleared,
        step_without_backward,
        clipped_early,
        untrained,
    ),
    Close: (retained,),
}
