"""The laws of every policy, those that a user writes included; test_random_updates.py has those of
their gradients.

Shapes: `T` steps, `B` lanes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, UpdateGrads, deviation, every_policy, policy_gradients
from strategies import apart, gradients, named, recordings, seeds, start
from test_updates import RESUMED, run_and_save, same_bits, trained
from throughtime.carry import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import (
    Objective,
    Policy,
    Probe,
    Progress,
    Update,
    Window,
    executor,
)

STEPS = 24


def stream(chunk: int) -> tt.Stream:
    return tt.Stream(recordings([14, 5, 1, 11]), 2, chunk, warm_up=1)


@pytest.mark.parametrize(
    "policy", [tt.Truncated(5, 11), tt.Exact(cut_every=11), tt.Adaptive(0.1, 4, 11)], ids=repr
)
def test_chunk_length_of_the_stream_changes_no_gradient(policy: Policy) -> None:
    """A stream of chunks of any length, and a list of such chunks; steps before are read again."""
    results: list[UpdateGrads] = []
    for chunk, kept in ((1, 10), (3, 10), (500, 10_000)):
        for source in (stream(chunk), list(stream(chunk))):
            with mock.patch.object(executor, "KEPT_LANE_STEPS", kept):
                results.append(policy_gradients(named("hides-layer").net(), source, policy))
    assert all(deviation(other, results[0]) < 1e-12 for other in results[1:])


REFUSED: list[tuple[type[Exception], dict[str, Any]]] = [
    (ModelError, {"loss_fn": nn.MSELoss(reduction="none")}),
    (ModelError, {"loss_fn": lambda y, t: (y - t).square().mean().item()}),
    (ModelError, {"loss_fn": lambda y, t: (y.detach() - t).square().mean()}),
    (DataError, {"chunk": Chunk.from_tensors(torch.zeros(STEPS, 2, 3))}),
    (ModelError, {"net": nn.LSTM(3, 2)}),  # a bare module
]


@every_policy
def test_what_cannot_be_trained_is_refused_and_leaves_no_gradient(policy: Policy) -> None:
    for kind, own in REFUSED:
        net, chunk = named("hides-layer").net(), PolicyData.draw(STEPS, 2, 0).chunk
        given: dict[str, Any] = {"net": net, "chunk": chunk, "loss_fn": nn.MSELoss()} | own
        with pytest.raises(kind):
            list(tt.updates(given["net"], [given["chunk"]], given["loss_fn"], gradient=policy))
        assert all(weight.grad is None for weight in given["net"].parameters())


WRONG: list[Callable[[], Policy]] = [
    lambda: tt.Truncated(0),
    lambda: tt.Truncated(100, 50),
    lambda: tt.Truncated(5, burn_in=-1),
    lambda: tt.Exact(cut_every=0),
    lambda: tt.Exact(clip_adjoint=math.nan, chunk=5),
    lambda: tt.Exact(clip_adjoint=1.0),  # without the length of its segments
    lambda: tt.Adaptive(0.1, 5, 4),
    lambda: tt.Adaptive(0.0, 5, 40),
    lambda: tt.Adaptive(0.1, 5, 40, stride=6),
    lambda: tt.Adaptive(0.1, 5, 40, probe=9),
    lambda: tt.Randomized(100, alpha=1.0),
    lambda: tt.Randomized(100, grain=101),
]


def test_settings_that_no_plan_can_serve_are_refused() -> None:
    for make in WRONG:
        with pytest.raises(ConfigError):
            make()


def test_iterator_of_chunks_is_taken_or_refused_with_what_to_give_instead() -> None:
    net = named("hides-layer").net()
    once: Any = iter(list(stream(5)))
    taken = policy_gradients(net, once, tt.Truncated(5, 11))
    assert deviation(taken, policy_gradients(net, stream(5), tt.Truncated(5, 11))) == 0
    for policy in (tt.Exact(chunk=7), tt.Adaptive(0.1, 5, 11, stride=5)):
        once = iter(list(stream(5)))
        with pytest.raises(DataError):
            policy_gradients(net, once, policy)


planned = given(
    steps=st.integers(1, 200),
    stride=st.integers(1, 40),
    further=st.integers(0, 60),
    burn_in=st.integers(0, 30),
    jitter=st.booleans(),
    seed=seeds,
)


def plans(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> list[Window]:
    """The windows of an epoch, planned without data."""
    torch.manual_seed(seed)
    policy = tt.Truncated(stride, stride + further, jitter, burn_in)
    at, results, unused = Progress(), list[Window](), cast("Any", None)
    while True:
        source: Any = SimpleNamespace(remaining=lambda n, at=at: min(n, steps - at.step))
        window, _ = policy.plan(source, at, unused)
        if window is None:
            return results
        results.append(window)
        at = Progress(window.stop, lead=window.keep)


@planned
def test_every_step_is_counted_once_and_every_window_reaches_back_the_horizon(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> None:
    results = plans(steps, stride, further, burn_in, jitter, seed)
    assert [step for w in results for step in range(w.counted, w.stop)] == list(range(steps))
    for w in results:
        assert w.start == (max(0, w.stop - stride - further) if further else w.counted)
        assert w.lead == max(0, w.start - burn_in) <= w.keep <= w.stop
    assert all(now.keep == later.lead for now, later in pairwise(results))


def test_first_stride_takes_every_length_from_one_to_the_stride_alike() -> None:
    firsts = [plans(30, 5, 0, 0, True, seed)[0].stop for seed in range(250)]
    counts = [firsts.count(length) for length in range(1, 6)]
    assert sum(counts) == 250
    # chi squared, 4 degrees of freedom: one in a thousand
    assert sum((count - 50) ** 2 / 50 for count in counts) < 18.5


@dataclass(frozen=True)
class ByHand:
    """Truncation after every stride as a policy that no window describes; counts its updates."""

    stride: int

    def update(
        self, net: Carried, source: Source, objective: Objective, at: Progress
    ) -> tuple[Update | None, Progress]:
        chunk = source.take(self.stride)
        if chunk is None:
            return None, at
        before = at.carried
        if before is None:
            before = net.initial_state(chunk.lanes, like=chunk.inputs)
        outputs, after = net(chunk.inputs, before, chunk.resets)
        loss, weight = objective(outputs, chunk)
        loss.backward()
        after, stop = tt.state.detach(after), at.step + chunk.steps
        update = Update(loss.detach(), chunk.valid_steps, after, outputs.detach(), chunk, weight)
        return update, Progress(stop, after, stop, after, (at.memory or 0) + 1)


class Halving:
    """The epoch in segments of 5 steps; half of the credit crosses from one to the one before."""

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        steps = source.remaining(STEPS)
        gate = lambda _, credit: [leaf / 2 for leaf in credit]  # noqa: E731
        return Window(0, 0, 0, steps, steps, chunk=5, gate=gate) if steps else None, None


def test_a_gate_of_ones_own_gets_the_credit_between_segments() -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(STEPS, 2, 0)
    ((_, _, found),) = policy_gradients(net, [data.chunk], Halving())
    state, outputs = start(net, data.x), list[Tensor]()
    for x in data.x.split(5):
        y, h = net(x, state)
        state = h.clone()  # the outputs' own credit goes to h
        state.register_hook(lambda grad: grad / 2)
        outputs.append(y)
    nn.functional.mse_loss(torch.cat(outputs), data.targets).backward()
    assert apart(found, gradients(net)) < 1e-12


def test_own_policy_equals_the_truncation_that_it_repeats_and_resumes_to_the_bit() -> None:
    net, policy = named("hides-layer").net(), ByHand(5)
    results = policy_gradients(net, stream(8), policy)
    assert deviation(results, policy_gradients(net, stream(8), tt.Truncated(5))) == 0
    checkpoints, whole = run_and_save(RESUMED["rotation"], policy)
    assert same_bits(trained(RESUMED["rotation"](), policy, checkpoints[2]), whole)


def moved(chunk: Chunk) -> Chunk:
    """The chunk with one lane a step later."""
    position = chunk.position + torch.tensor([0, 1])
    own = chunk.inputs, chunk.targets
    return Chunk.from_tensors(*own, recording=chunk.recording, position=position)


def test_chunks_that_are_not_adjacent_are_refused() -> None:
    first, second, third, *_ = tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None)
    other = list(tt.Stream(recordings([40]), 1, 5))[1]
    sources: list[tuple[list[Any], str]] = [
        ([first, third], "lane 0 jumps from recording 0, step 4 to"),
        ([first, moved(second)], "lane 1 jumps from recording 1, step 4 to recording 1, step 6"),
        ([first, other], "a chunk of 1 lanes follows one of 2"),
        ([(torch.zeros(5, 2, 3), torch.zeros(5, 2))], "expected a Chunk"),
        ([], "gave no chunk"),
    ]
    for source, reason in sources:
        with pytest.raises(DataError, match=reason):
            policy_gradients(named("hides-layer").net(), source, tt.Truncated(5))
