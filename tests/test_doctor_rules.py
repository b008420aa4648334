"""Each rule of the log, on events that are made by hand."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from throughtime.doctor._frames import Instruction, SourceLine
from throughtime.doctor._graph import MeanTerm
from throughtime.doctor._log import Backward, Clear, Close, Event, Fault, Log, Sum, WeightStep
from throughtime.doctor.rules.loop import AT, kept

LOSS, CLEAR, STEP = (SourceLine("train.py", n) for n in (1, 2, 3))
HERE = Instruction(compile("x = 1", "train.py", "exec"), 0)
WEIGHTS = frozenset([1])


def faults(*events: Event, **position: Any) -> list[Fault]:
    """What the rules find when these events come one after the other."""
    log, result = Log(**position), list[Fault]()
    for event in events:
        log.append(event)
        if isinstance(event, Backward):
            log.chunk += 1
        result += [fault for rule in AT.get(type(event), ()) for fault in rule(log, event)]
    return result


def codes(*events: Event, **position: Any) -> set[str]:
    return {fault.code for fault in faults(*events, **position)}


def backward(chunk: int = 0, **facts: Any) -> Backward:
    return replace(Backward(LOSS, number=10 * chunk, chunk=chunk), **facts)


def step(chunk: int, **facts: Any) -> WeightStep:
    return WeightStep(7, WEIGHTS, STEP, chunk=chunk, **facts)


def clear(line: SourceLine | None = CLEAR) -> Clear:
    return Clear(WEIGHTS, line)


def test_a_sound_loop_has_no_fault() -> None:
    events = [e for n in range(5) for e in (clear(), backward(n), step(n + 1, number=10 * n + 9))]
    assert not codes(*events, Close(), crossed={1, 2, 3, 4})


def mean(count: int) -> MeanTerm:
    return MeanTerm("MseLossBackward0", 1.0, count)


@pytest.mark.parametrize(("lengths", "found"), [((30, 20), True), ((30, 30), False)])
def test_tt301_needs_means_over_unequal_numbers_of_elements(
    lengths: tuple[int, int], found: bool
) -> None:
    terms = [mean(length) for length in lengths]
    separate = [backward(n, mean=term) for n, term in enumerate(terms)]
    expected = {"TT301"} if found else set()
    assert codes(*separate, step(2), crossed={1}) == expected
    assert codes(*separate, step(2)) == set()


def test_tt301_does_not_compare_two_losses_of_one_pass() -> None:
    losses = [backward(0, mean=mean(30)), backward(1, mean=mean(20), again=True)]
    assert not codes(*losses, step(2), crossed={1})


def test_tt302_names_the_line_that_clears_gradients_before_a_step_uses_them() -> None:
    events = [e for n in range(3) for e in (backward(n), clear(), step(n + 1, lacks=True))]
    first, *_ = (fault for fault in faults(*events) if fault.code == "TT302")
    assert (first.line, first.after) == (CLEAR, 2)
    in_order = [e for n in range(3) for e in (clear(), backward(n), step(n + 1))]
    assert "TT302" not in codes(*in_order)


def test_tt302_names_a_step_that_uses_the_same_gradients_again() -> None:
    events = [step(0), backward(0), step(1, repeated=True)]
    assert codes(*events) == {"TT302"}
    assert not codes(step(0), clear(), backward(0), step(1, repeated=True))
    assert not codes(step(0), clear(line=None), backward(0), step(1, repeated=True))


def test_tt304_needs_two_steps_after_forward_passes_without_a_backward() -> None:
    idle = [step(0, lacks=True, number=n) for n in range(3)]
    assert codes(*idle) == {"TT304"}
    assert not codes(idle[0])


def test_tt102_needs_graphs_that_reach_one_chunk_further_at_every_backward() -> None:
    growing = [backward(n, retain=True, reach=n, steps=n) for n in range(7)]
    assert [fault.after for fault in faults(*growing, steps=7)] == [2, 1]
    assert [fault.after for fault in faults(*growing)] == [2]  # no step has ended the last graph
    assert [fault.after for fault in faults(*growing[:4])] == [2]
    assert codes(*growing[:4], Close()) == {"TT102"}
    cut = [replace(each, reach=0) for each in growing]
    assert not codes(*cut, Close())


def test_tt104_needs_a_sum_over_three_chunks() -> None:
    assert codes(backward(3), sums={HERE: Sum(1, 3, depth=3)}) == {"TT104"}
    assert not codes(backward(3), sums={HERE: Sum(1, 3, depth=2)})


def test_tt104_needs_results_whose_graphs_were_used_and_what_holds_them() -> None:
    weight = torch.ones(3, requires_grad=True)
    results = [(weight * weight).sum() for _ in range(5)]
    log = Log(chunk=5, results={HERE: {n: weakref.ref(each) for n, each in enumerate(results)}})
    assert not list(kept(log, backward()))
    for each in results:
        each.backward()
    (fault,) = kept(log, backward())
    assert (fault.code, fault.tensor) == ("TT104", "results")
    del results[:2]
    assert not list(kept(log, backward()))
