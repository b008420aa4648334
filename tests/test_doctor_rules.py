"""Each rule of the log, on events that are made by hand."""

import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch

from throughtime.doctor._frames import Instruction, SourceLine
from throughtime.doctor._log import Backward, Change, Close, Fault, Log, WeightStep
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules.loop import AT, kept, summed

LOSS, CLEAR, CLIP, STEP = (SourceLine("train.py", n) for n in (1, 2, 3, 4))
HERE = Instruction(compile("x = 1", "train.py", "exec"), LOSS)
WEIGHTS = frozenset([1])


def faults(*events: Any, **position: Any) -> list[Fault]:
    """What the rules find when these events come one after the other."""
    log, result, last = Log(**position), list[Fault](), None
    for event in events:
        log.append(event)
        if isinstance(event, Backward):
            log.chunk += 1
        if isinstance(event, WeightStep):
            event.before, last = last, event
        result += [fault for rule in AT.get(type(event), ()) for fault in rule(log, event)]
    return result


def codes(*events: Any, **position: Any) -> set[str]:
    return {fault.code for fault in faults(*events, **position)}


def backward(chunk: int = 0, **facts: Any) -> Backward:
    return replace(Backward(LOSS, number=10 * chunk, chunk=chunk), **facts)


def step(chunk: int, **facts: Any) -> WeightStep:
    return WeightStep(WEIGHTS, STEP, chunk=chunk, **facts)


def clear(line: SourceLine | None = CLEAR) -> Change:
    return Change("c", WEIGHTS, line)


def test_a_sound_loop_has_no_fault() -> None:
    events = [e for n in range(5) for e in (clear(), backward(n), step(n + 1, number=10 * n + 9))]
    assert not codes(*events, Close(), crossed={1, 2, 3, 4})


def test_tt302_names_the_line_that_clears_gradients_before_a_step_uses_them() -> None:
    events = [e for n in range(3) for e in (backward(n), clear(), step(n + 1, lacks=True))]
    first, *_ = (fault for fault in faults(*events) if fault.code == "TT302")
    assert (first.line, first.after) == (CLEAR, 2)


def test_tt302_names_gradients_of_which_each_step_uses_the_last_only() -> None:
    def loop(used: bool) -> list[Any]:
        both = clear(), backward(used=used), clear(), backward(used=used)
        return [event for n in range(3) for event in (*both, step(n + 1))]

    events = loop(used=False)
    first, *_ = (fault for fault in faults(*events) if fault.code == "TT302")
    assert (first.line, first.after) == (CLEAR, 2)
    assert first.fix.startswith("clear once")
    assert not codes(*loop(used=True))


def test_tt302_names_a_step_that_uses_the_same_gradients_again() -> None:
    events = [step(0), backward(0), step(1, repeated=True)]
    assert codes(*events) == {"TT302"}
    assert not codes(step(0), clear(), backward(0), step(1, repeated=True))
    assert not codes(step(0), clear(line=None), backward(0), step(1, repeated=True))


def test_tt304_needs_steps_after_forward_passes_without_a_backward() -> None:
    idle = [step(0, lacks=True, number=n) for n in range(3)]
    assert codes(*idle) == {"TT304"}
    assert not codes(idle[0])
    assert not codes(idle[0], replace(idle[0]))  # no forward pass
    after_a_chunk = [step(1, lacks=True, number=n) for n in range(2)]
    assert [fault.after for fault in faults(*after_a_chunk)] == [2]


def test_tt306_needs_every_clip_before_the_backward() -> None:
    clip = Change("l", WEIGHTS, CLIP)
    assert codes(step(0), clip, clear(), backward(0), step(1)) == {"TT306"}
    assert not codes(step(0), clip, clear(), backward(0), clip, step(1))


@pytest.mark.parametrize("code", ["TT305", "TT307"])
def test_facts_of_a_step_are_reported_at_its_second_occurrence(code: str) -> None:
    fact = {"TT305": "constructed", "TT307": "evaluating"}[code]
    (fault,) = faults(clear(), backward(0), step(1, **{fact: LOSS}))
    assert (fault.code, fault.line, fault.after) == (code, LOSS, 2)


def test_what_may_be_chance_is_a_finding_the_second_time_and_then_no_more() -> None:
    findings = FindingList((), strict=False)
    counts = list[int]()
    for _ in range(4):
        findings.add(Fault("TT302", CLEAR, after=2))
        counts.append(len(findings.items))
    assert counts == [0, 1, 1, 1]


def test_tt102_needs_graphs_that_reach_one_chunk_further_at_every_backward() -> None:
    growing = [backward(n, retain=True, reach=n, steps=n) for n in range(8)]
    assert codes(*growing, step(8)) == {"TT102"}
    assert not codes(*growing[:4], step(4))
    assert codes(*growing[:4], Close()) == {"TT102"}
    cut = [replace(each, reach=0) for each in growing]
    assert not codes(*cut, Close())
    losses_of_one_chunk = [*(replace(each, steps=0) for each in growing), backward(8, steps=0)]
    assert not codes(*losses_of_one_chunk, Close(), crossed={*range(1, 9)})


def test_tt104_needs_a_sum_over_three_chunks() -> None:
    log, weight, total = Log(), torch.ones((), requires_grad=True), torch.zeros(())
    found = list[str]()
    for n in range(4):
        total = total + weight * weight
        log.results[HERE] = {n: weakref.ref(total)}
        found += [fault.code for fault in summed(log, backward(n))]
    assert found == ["TT104"]


def test_tt104_needs_five_results_that_still_exist_and_nothing_that_forgets_them() -> None:
    weight = torch.ones(3, requires_grad=True)
    results = [(weight * weight).sum() for _ in range(5)]
    log = Log(chunk=5, results={HERE: {n: weakref.ref(each) for n, each in enumerate(results)}})
    (fault,) = kept(log, backward())
    assert fault.code == "TT104"
    window = deque(results, maxlen=8)
    assert not list(kept(log, backward()))
    del window, results[:2]
    assert not list(kept(log, backward()))
