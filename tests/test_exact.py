"""Exact gradients, chunk by chunk, against plain autograd over the whole sequence.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    ORACLES,
    Complex,
    Marked,
    PolicyData,
    UpdateGrads,
    data_for,
    deviation,
    every_stride_resets,
    exact_updates,
    last_loss_only,
    no_resets,
    oracle,
    plain,
    policy_gradients,
    unbroken,
)
from quick import examples
from strategies import (
    Rotation,
    Row,
    Step,
    apart,
    every_net,
    few_short_recordings,
    gradients,
    inputs,
    named,
    recordings,
    seeds,
    some_nets,
    start,
    states_apart,
    weights,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.gradient import Objective, Policy, UpdatePolicy, executor, segment
from throughtime.gradient.segment import Replay, Segment
from throughtime.gradient.window import Credit
from throughtime.state import State

EXACT = 1e-10
chunks = st.sampled_from([1, 2, 3, 7, 13, 29, 50, None])  # None: automatic
kept_lane_steps = st.sampled_from([1, 10, 100, 10_000])  # those before are read again


@examples(12)
@given(
    steps=st.sampled_from([1, 2, 7, 13, 29]),
    chunk=chunks,
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
    kept=kept_lane_steps,
)
@every_net
def test_gradient_loss_and_state_equal_plain_autograd(
    row: Row,
    steps: int,
    chunk: int | None,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
    kept: int,
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    with mock.patch.object(executor, "KEPT_LANE_STEPS", kept):
        results = policy_gradients(net, [data.chunk], tt.Exact(chunk=chunk))
    assert deviation(results, plain(net, data, unbroken(data))) < EXACT
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=chunk))
    ends = [update.state for update in run]
    _, end = net(data.x, start(net, data.x), data.resets)
    assert states_apart(run.state, end) < EXACT
    assert not any(leaf.requires_grad for state in ends for leaf in tt.state.tensors(state))


@examples(15)
@given(
    steps=st.sampled_from([1, 2, 7, 13, 29]),
    chunk=chunks,
    lanes=st.sampled_from([2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.3]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@ORACLES
def test_gradient_equals_the_formulas_written_out(
    row: Row,
    step: Step,
    leaves: int,
    steps: int,
    chunk: int | None,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    """The net itself has no part in this oracle.

    Resets that fall into every lane at once are left out.
    """
    net, data = row.net(), PolicyData.draw(steps, lanes, seed, resets, masked)
    together = data.resets.all(dim=1, keepdim=True)
    together[0] = False
    data = PolicyData(data.x, data.targets, data.resets & ~together, data.mask)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=chunk))
    assert (
        deviation(results, oracle(step, leaves, dict(net.named_parameters()), data, steps, steps))
        < EXACT
    )


def test_gradient_reaches_a_thousand_steps_back() -> None:
    """One input at the start, one loss at the end: a rotating net keeps the gradient's norm."""
    net, x = named("tensor-state").net(), torch.zeros(1001, 1, 3, dtype=torch.float64)
    x[0] = 1.0
    mask = torch.zeros(1001, 1, dtype=torch.bool)
    mask[-1] = True
    data = PolicyData(x, inputs(1001, 1, features=2), torch.zeros(1001, 1, dtype=torch.bool), mask)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=10))
    ((_, _, expected),) = plain(net, data)
    ((_, _, cut),) = policy_gradients(net, [data.chunk], tt.Truncated(1001 - 10, 1001 - 10))
    assert apart(results[0][2], expected) < EXACT
    assert expected["module.into"].abs().max() > 0.01
    assert cut["module.into"].abs().max() == 0


def test_complex_states_hand_back_their_credit() -> None:
    net, data = tt.carry(Complex().double()), PolicyData.draw(29, 2, 0)
    assert (
        deviation(policy_gradients(net, [data.chunk], tt.Exact(chunk=7)), plain(net, data)) < EXACT
    )


class EmptyLeaf(Rotation):
    """One leaf of its state has no entries, as a buffer of zero delays has."""

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        state = (
            {"h": self.zeros(x), "delays": x.new_zeros(x.shape[1], 0)} if state is None else state
        )
        y, h = self.play(x, state["h"])
        return y, {"h": h, "delays": state["delays"]}


def test_leaves_without_entries_are_carried() -> None:
    net, data = tt.carry(EmptyLeaf().double()), PolicyData.draw(29, 2, 0)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=7))
    assert deviation(results, plain(net, data)) < EXACT


Change = Callable[[pytest.MonkeyPatch], None]


def with_credit(change: Callable[[int, Credit], Credit]) -> Change:
    """The credit that enters each segment from the next one is changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        backward = Segment.backward

        def changed(ctx: Any, loss: Tensor | None, *credit: Tensor | None) -> Any:
            return backward(ctx, loss, *change(ctx.index, credit))

        patch.setattr(Segment, "backward", staticmethod(changed))

    return apply


def weights_by_segment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Objective, "weight", lambda _, chunk: float(chunk.valid_steps > 0))


def starts_one_segment_early(patch: pytest.MonkeyPatch) -> None:
    forward, last = Segment.forward, list[Sequence[Tensor]]()

    def changed(ctx: Any, *args: Any) -> Any:
        results = forward(ctx, *args)
        if ctx.index == 3:
            ctx.save_for_backward(*last[-1])
        *_, count = [i for i, arg in enumerate(args) if type(arg) is int]
        last.append(args[count + 1 :][: args[count]])
        return results

    patch.setattr(Segment, "forward", staticmethod(changed))
    patch.setattr(Replay, "compare", lambda *_: None)


BROKEN: dict[str, Change] = {
    "drops the credit at one boundary": with_credit(
        lambda index, credit: [None] * len(credit) if index == 2 else credit
    ),
    "drops one leaf of the credit": with_credit(lambda _, credit: [None, *credit[1:]]),
    "counts one credit twice": with_credit(
        lambda index, credit: [a if a is None or index != 1 else 2 * a for a in credit]
    ),
    "takes the mean of the segments' means": weights_by_segment,
    "runs a segment again from the state before": starts_one_segment_early,
}
OTHER: dict[str, Policy | UpdatePolicy] = {
    "cuts credit at every segment": tt.Exact(chunk=7, cut_every=7),
    "truncates": tt.Truncated(29, 29),
    "ignores resets": Marked(tt.Exact(chunk=7), no_resets),
    "forgets the state": Marked(tt.Exact(chunk=7), every_stride_resets),
    "counts the last loss of each chunk only": Marked(tt.Exact(chunk=7), last_loss_only),
}


def ragged(row: Row) -> tuple[Carried, PolicyData]:
    """Two lanes over 37 steps.

    Every chunk of 7 has another number of valid steps, and one lane resets in the middle.
    """
    net = row.net()
    data = data_for(net, 37, 2, 3, masked=0.4)
    resets = data.resets.clone()
    resets[17, 1] = True
    return net, PolicyData(data.x, data.targets, resets, data.mask)


@pytest.mark.covering
@pytest.mark.parametrize("change", list(BROKEN.values()), ids=list(BROKEN))
@some_nets("lstm", "tensor-state", "namedtuple-state")
def test_broken_executor_is_not_plain_autograd(
    row: Row, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data = ragged(row)
    expected = plain(net, data)
    policy = tt.Exact(chunk=7)
    assert deviation(policy_gradients(net, [data.chunk], policy), expected) < EXACT
    change(monkeypatch)
    assert deviation(policy_gradients(net, [data.chunk], policy), expected) > 1e-6


@pytest.mark.covering
@pytest.mark.parametrize("mutant", list(OTHER.values()), ids=list(OTHER))
@some_nets("lstm", "tensor-state", "namedtuple-state")
def test_other_policy_is_not_plain_autograd(row: Row, mutant: Policy | UpdatePolicy) -> None:
    net, data = ragged(row)
    same = Marked(tt.Exact(chunk=7), lambda chunk: chunk)
    assert deviation(policy_gradients(net, [data.chunk], same), plain(net, data)) < EXACT
    results = policy_gradients(net, [data.chunk], mutant)
    whole = {name: torch.stack([g[name] for *_, g in results]).sum(0) for name in results[0][2]}
    ((_, _, expected),) = plain(net, data)
    if not isinstance(mutant, Marked):
        steps = int(data.mask.sum())
        whole = {
            name: torch.stack([g[name] * n / steps for n, _, g in results]).sum(0) for name in whole
        }
    assert apart(whole, expected) > 1e-6


def test_gradients_add_up_until_they_are_zeroed() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(30, 2, 0)
    each = policy_gradients(net, [data.chunk], tt.Exact(chunk=4, cut_every=9))
    assert len(each) == 4
    for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4, cut_every=9)):
        pass
    assert (
        apart(
            gradients(net),
            {name: torch.stack([g[name] for *_, g in each]).sum(0) for name in gradients(net)},
        )
        < EXACT
    )
    own = {name: p.grad for name, p in net.named_parameters()}
    list(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4)))
    assert all(
        p.grad is own[name] for name, p in net.named_parameters()
    )  # added to in place, as autograd does


def test_update_says_what_was_run() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(23, 2, 0, masked=0.3)
    (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    y, end = net(data.x, start(net, data.x), data.resets)
    assert (update.steps, update.chunk.steps, update.chunk.valid_steps) == (
        int(data.mask.sum()),
        3,
        int(data.mask[20:].sum()),
    )
    assert (update.outputs - y[20:]).abs().max() < EXACT
    assert not update.outputs.requires_grad
    assert not update.loss.requires_grad
    assert update.weight == update.steps
    assert states_apart(update.state, end) < EXACT
    whole = next(iter(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=500))))
    assert whole.outputs.shape == y.shape


def test_chunk_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic one, which depends on the memory of a step, does not."""
    net = named("hides-layer").net()
    data = PolicyData.draw(97, 1, 5, masked=0.2)
    ((_, _, expected),) = plain(net, data)
    calls, lengths = list[int](), set[int]()
    net.module.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    for most in (1, 30_000, 100_000, 10**9):
        monkeypatch.setattr(segment, "MOST_BYTES", most)
        exact_updates(net, data, tt.Exact())
        lengths.add(calls[-1])  # the first segment runs again last
        assert apart(gradients(net), expected) < EXACT
        net.zero_grad()
    assert len(lengths) == 4
    assert {1, 97} < lengths


@examples(15)
@given(
    lengths=few_short_recordings,
    reads=st.lists(st.sampled_from([1, 3, 7, 500]), min_size=2, max_size=2, unique=True),
    chunk=chunks,
    lanes=st.sampled_from([1, 2]),
    kept=kept_lane_steps,
)
@some_nets("hides-layer", "learnt-start")
def test_chunk_of_the_stream_changes_no_bit(
    row: Row, lengths: list[int], reads: list[int], chunk: int | None, lanes: int, kept: int
) -> None:
    lanes, policy, net = min(lanes, sum(lengths)), tt.Exact(chunk=chunk), row.net()
    results = list[UpdateGrads]()
    for read, most in zip(reads, (kept, 10_000), strict=True):
        stream = tt.Stream(recordings(lengths), lanes, read, warm_up=1)
        with mock.patch.object(executor, "KEPT_LANE_STEPS", most):
            results.append(policy_gradients(net, stream, policy))
    first, second = results
    assert deviation(first, second) == 0
    queue = list(tt.Stream(recordings(lengths), lanes, reads[0], warm_up=1))
    assert deviation(policy_gradients(net, queue, policy), first) < EXACT


LENGTHS = [31, 7, 20, 1, 11]


@examples(10)
@given(lengths=few_short_recordings, chunk=chunks, seed=st.sampled_from([None, 0, 1]))
@some_nets("hides-layer", "learnt-start", "gru")
def test_one_lane_has_one_update_for_every_recording(
    row: Row, lengths: list[int], chunk: int | None, seed: int | None
) -> None:
    """Each equals plain autograd on that recording alone."""
    net = row.net()
    width = 2 if row.name != "gru" else 4
    stream = tt.Stream(recordings(lengths, outputs=width), lanes=1, chunk=5, seed=seed)
    data = PolicyData.of(join(list(stream)))
    fresh = tt.Stream(recordings(lengths, outputs=width), lanes=1, chunk=5, seed=seed)
    results = policy_gradients(net, fresh, tt.Exact(chunk=chunk))
    assert sorted(steps for steps, *_ in results) == sorted(lengths)
    assert deviation(results, alone(net, data)) < EXACT


def alone(net: Carried, data: PolicyData) -> UpdateGrads:
    """Plain autograd on every recording by itself, from the initial state."""
    results: UpdateGrads = []
    for begin, end in pairwise(unbroken(data)):
        results += plain(
            net,
            PolicyData(
                data.x[begin:end],
                data.targets[begin:end],
                data.resets[begin:end],
                data.mask[begin:end],
            ),
        )
    return results


def test_several_lanes_have_one_update_for_the_epoch() -> None:
    net = named("hides-layer").net()
    stream, again = (tt.Stream(recordings(LENGTHS), lanes=3, chunk=8, warm_up=2) for _ in range(2))
    data = PolicyData.of(join(list(stream)))
    assert (data.mask.sum(1) < 3).any()
    results = policy_gradients(net, again, tt.Exact(chunk=4))
    assert len(results) == 1
    assert deviation(results, plain(net, data)) < EXACT


def test_lanes_whose_recordings_end_together_have_an_update_each_time() -> None:
    net = named("hides-layer").net()
    stream, again = (
        tt.Stream(recordings([10, 10, 6, 6]), lanes=2, chunk=8, seed=None) for _ in range(2)
    )
    results = policy_gradients(net, again, tt.Exact(chunk=4))
    assert [steps for steps, *_ in results] == [20, 12]
    assert deviation(results, alone(net, PolicyData.of(join(list(stream))))) < EXACT


@examples(15)
@given(
    steps=st.sampled_from([1, 7, 29]),
    segment=st.sampled_from([1, 3, 7, 28, 100]),
    chunk=chunks,
    lanes=st.sampled_from([1, 2]),
    resets=st.sampled_from([0.0, 0.1]),
    masked=st.sampled_from([0.0, 0.9]),
    seed=seeds,
)
@some_nets("hides-layer", "learnt-start", "dataclass-state")
def test_segments_cut_credit_and_carry_the_state(
    row: Row,
    steps: int,
    segment: int,
    chunk: int | None,
    lanes: int,
    resets: float,
    masked: float,
    seed: int,
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=chunk, cut_every=segment))
    assert deviation(results, plain(net, data, [*range(0, steps, segment), steps])) < EXACT


def test_cut_every_is_the_truncation_of_the_same_stride() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(23, 2, 0, resets=0.1)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=2, cut_every=5))
    assert deviation(results, policy_gradients(net, [data.chunk], tt.Truncated(5))) < EXACT
    assert deviation(results, policy_gradients(net, [data.chunk], tt.Truncated(5, 6))) > 1e-6


def test_stretch_without_valid_step_yields_nothing_but_carries_the_state() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(24, 2, 0)
    mask = torch.zeros(24, 2, dtype=torch.bool)
    mask[9, 1] = mask[22] = True
    chunk = Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)
    _, end = net(data.x, start(net, data.x))
    for policy in (tt.Exact(chunk=2, cut_every=3), tt.Exact(cut_every=3)):
        run = tt.updates(net, [chunk], nn.MSELoss(), gradient=policy)
        assert [update.steps for update in run] == [1, 2]
        assert states_apart(run.state, end) < EXACT
    net.zero_grad()
    silent = Chunk.from_tensors(data.x, data.targets, mask=torch.zeros(24, 2, dtype=torch.bool))
    run = tt.updates(net, [silent], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    assert list(run) == []
    assert states_apart(run.state, end) < EXACT
    assert all(p.grad is None for p in net.parameters())


class Training:
    """A net, its optimizer and its updates, saved and restored together."""

    def __init__(self, row: Row, policy: tt.Exact, lanes: int) -> None:
        self.net = row.net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        stream = tt.Stream(recordings(LENGTHS), lanes, chunk=4, warm_up=5)
        self.updates = tt.updates(self.net, stream, nn.MSELoss(), gradient=policy)

    def run(self, most: int = 1000) -> dict[str, Tensor]:
        """Makes so many updates, or what is left of the epoch; the weights then."""
        for _ in range(most):
            if next(self.updates, None) is None:
                break
            self.optimizer.step()
            self.optimizer.zero_grad()
        return weights(self.net)

    def saved(self) -> list[dict[str, Any]]:
        return [self.net.state_dict(), self.optimizer.state_dict(), self.updates.state_dict()]

    def restored(self, saved: Sequence[dict[str, Any]]) -> "Training":
        for part, place in zip((self.net, self.optimizer, self.updates), saved, strict=False):
            part.load_state_dict(place)
        return self


@pytest.mark.covering
@pytest.mark.parametrize(
    ("policy", "lanes"),
    [
        (tt.Exact(chunk=3), 1),
        (tt.Exact(), 1),
        (tt.Exact(chunk=3, cut_every=7), 2),
        (tt.Exact(cut_every=7, clip_adjoint=0.01, chunk=2), 2),
    ],
    ids=["recordings", "auto", "segments", "clipped"],
)
@some_nets("hides-layer", "learnt-start")
def test_resume_after_any_update_gives_the_same_weights_to_the_bit(
    row: Row, policy: tt.Exact, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The automatic length of segments is measured again after a resume, on other steps."""
    monkeypatch.setattr(segment, "MOST_BYTES", 10_000)
    through = Training(row, policy, lanes).run()
    for stop in (1, 2, 4):
        first = Training(row, policy, lanes)
        first.run(stop)
        saved = copy.deepcopy(first.saved())
        assert apart(Training(row, policy, lanes).restored(saved).run(), through) == 0
        assert apart(first.run(), through) == 0
        assert (
            apart(Training(row, policy, lanes).restored(saved[:2]).run(), through) > 1e-9
        )  # the mutant: the place is lost


def test_state_given_is_gone_on_from() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(30, 2, 0)
    data = PolicyData(data.x, data.targets, torch.zeros_like(data.resets), data.mask)
    _, middle = net(data.x[:12], start(net, data.x))
    rest = Chunk.from_tensors(data.x[12:], data.targets[12:])
    results = gradients_from(net, rest, middle)
    ((*_, expected),) = plain(net, data, [0, 12, 30])[1:]
    assert apart(results, expected) < EXACT
    assert apart(gradients_from(net, rest, None), expected) > 1e-6


def gradients_from(net: Carried, chunk: Chunk, state: State) -> dict[str, Tensor]:
    list(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4), state=state))
    results = gradients(net)
    net.zero_grad()
    return results


def test_settings_are_described() -> None:
    assert (
        tt.Exact().describe()
        == "an update for every recording (with several lanes, where all of them start one),"
        " gradients flow back through all of it"
    )
    assert (
        tt.Exact(cut_every=500).describe()
        == "an update every 500 steps, gradients cut there: they flow back at most 500 steps"
    )
