"""The rules of backwards and steps: where gradients arrive, and which graphs grow.

Codes TT102, TT104, TT302 and TT304 to TT307. Each rule is a function of the log of a loop and of
its last event, and yields the faults that it finds; `AT` lists them by event. A rule that fails
does not stop the loop: the doctor stores the exception as `internal_error`.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from throughtime.doctor._frames import PART, current_frame, line_of, user_frames, variable_path
from throughtime.doctor._graph import LEAF, reachable_nodes, sequence
from throughtime.doctor._log import Backward, Clear, Clip, Close, Fault, Log, WeightStep
from throughtime.doctor.findings import CLEAR_ONCE, OWN_LOSS, detach_fix

REPEATS = 2  # steps that show a fault before it is reported
MAX_STEPS = 8  # that are compared with the last one
MAX_REACH = 6  # passes behind a retained backward before it is reported
MIN_REACH = 3  # the same if the loop ends before
MIN_SUMMED = 3  # chunks that a sum goes through
MAX_SUM = 1000  # nodes between a sum and its last value
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
    for line in {each.line: None for each in (log.backwards if ended else [event])}:
        passes = [each for each in log.backwards if each.line == line and each.reach >= 0]
        reach = passes[-1].reach if passes else 0
        if reach < MAX_REACH and not (ended and MIN_REACH <= reach == len(passes) - 1):
            continue
        first, last = passes[-1 - reach], passes[-1]
        chunks = range(first.chunk + 1, last.chunk + 1)
        if first.steps < last.steps or not log.crossed.isdisjoint(chunks):
            paths = [path for entered in log.carried.values() for path, _ in entered if path]
            fix = detach_fix(paths, losses=1 + log.several)
            name = paths[0] if paths else ""
            yield Fault("TT102", line, f"It reaches {reach} passes back.", name, fix=fix)


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
    """TT104: results of several chunks that still exist, although their graphs were used."""
    frames = user_frames(current_frame())
    for instruction, by_chunk in list(log.results.items()):
        alive = {n: ref for n, ref in by_chunk.items() if ref() is not None}
        log.results[instruction] = alive
        tensors = [t for ref in alive.values() if (t := ref()).grad_fn]
        if len(tensors) != MIN_KEPT:
            continue
        holders = {
            next(filter(None, (variable_path(lambda v, t=t: v is t, f) for f in frames)), "")
            for t in tensors
        }
        if len(holders) == 1 and holders != {""}:
            name = holders.pop().removesuffix(PART)
            yield Fault("TT104", line_of(instruction), f"{MIN_KEPT} still exist.", name)


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
