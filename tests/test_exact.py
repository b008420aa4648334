"""Exact gradients, chunk by chunk, against plain autograd over the whole sequence.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

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
from throughtime.chunk import join
from throughtime.gradient import Objective, Policy, _backward, _memory
from throughtime.gradient._backward import VJP
from throughtime.gradient._segments import Cotangents, Segment
from throughtime.state import State

EXACT = 1e-10
Chunk = int | Literal["auto"]
chunks = st.sampled_from([1, 2, 3, 7, 13, 29, 50, "auto"])


@examples(12)
@given(
    steps=st.sampled_from([1, 2, 7, 13, 29]),
    chunk=chunks,
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
    verify=st.sampled_from(["first", "all", "off"]),
)
@every_net
def test_gradient_loss_and_state_equal_plain_autograd(
    row: Row,
    steps: int,
    chunk: Chunk,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
    verify: Literal["first", "all", "off"],
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=chunk, verify=verify))
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
    chunk: Chunk,
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
    for verify in ("all", "first", "off"):
        assert (
            deviation(
                policy_gradients(net, [data.chunk], tt.Exact(chunk=7, verify=verify)),
                plain(net, data),
            )
            < EXACT
        )


Change = Callable[[pytest.MonkeyPatch], None]


def drops_an_adjoint(patch: pytest.MonkeyPatch) -> None:
    whole = _backward.vjp

    def product(
        segment: Segment,
        weights: Sequence[Tensor],
        roots: Any,
        cotangents: Cotangents | None,
        **options: Any,
    ) -> VJP:
        return whole(segment, weights, roots, None if segment.index == 2 else cotangents, **options)

    patch.setattr(_backward, "vjp", product)


def drops_an_adjoint_leaf(patch: pytest.MonkeyPatch) -> None:
    whole = _backward.vjp

    def product(
        segment: Segment,
        weights: Sequence[Tensor],
        roots: Any,
        cotangents: Cotangents | None,
        **options: Any,
    ) -> VJP:
        return whole(
            segment,
            weights,
            roots,
            None if cotangents is None else [None, *cotangents[1:]],
            **options,
        )

    patch.setattr(_backward, "vjp", product)


def counts_an_adjoint_twice(patch: pytest.MonkeyPatch) -> None:
    whole = _backward.vjp

    def product(
        segment: Segment,
        weights: Sequence[Tensor],
        roots: Any,
        cotangents: Cotangents | None,
        **options: Any,
    ) -> VJP:
        double = (
            cotangents
            if cotangents is None or segment.index != 1
            else [None if a is None else 2 * a for a in cotangents]
        )
        return whole(segment, weights, roots, double, **options)

    patch.setattr(_backward, "vjp", product)


def means_of_means(patch: pytest.MonkeyPatch) -> None:
    def loss_weight(_: Objective, chunk: tt.Chunk) -> float:
        return float(chunk.valid_steps > 0)

    patch.setattr(Objective, "loss_weight", loss_weight)


def starts_one_piece_early(patch: pytest.MonkeyPatch) -> None:
    right = _memory.BoundaryStates.get

    def get(kept: _memory.BoundaryStates, index: int) -> State:
        return right(kept, index - 1 if index == 3 else index)

    patch.setattr(_memory.BoundaryStates, "get", get)


BROKEN: dict[str, Change] = {
    "drops the cotangents at one edge": drops_an_adjoint,
    "drops one leaf of the cotangents": drops_an_adjoint_leaf,
    "counts one cotangents twice": counts_an_adjoint_twice,
    "takes the mean of the chunks' means": means_of_means,
    "runs a piece from the edge before": starts_one_piece_early,
}
OTHER: dict[str, Policy] = {
    "cuts credit at every chunk": tt.Exact(chunk=7, cut_every=7),
    "truncates": tt.Truncated(29, 29),
    "ignores resets": Marked(tt.Exact(chunk=7), no_resets),
    "forgets the state": Marked(tt.Exact(chunk=7), every_stride_resets),
    "counts the last loss of each chunk only": Marked(tt.Exact(chunk=7), last_loss_only),
}


def ragged(row: Row) -> tuple[tt.Carried, PolicyData]:
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
    policy = tt.Exact(chunk=7, verify="off")
    assert deviation(policy_gradients(net, [data.chunk], policy), expected) < EXACT
    change(monkeypatch)
    assert deviation(policy_gradients(net, [data.chunk], policy), expected) > 1e-6


@pytest.mark.covering
@pytest.mark.parametrize("mutant", list(OTHER.values()), ids=list(OTHER))
@some_nets("lstm", "tensor-state", "namedtuple-state")
def test_other_policy_is_not_plain_autograd(row: Row, mutant: Policy) -> None:
    net, data = ragged(row)
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
    y, _ = net(data.x, start(net, data.x), data.resets)
    assert (update.steps, update.chunk.steps, update.chunk.valid_steps) == (
        int(data.mask.sum()),
        3,
        int(data.mask[20:].sum()),
    )
    assert (update.outputs - y[20:]).abs().max() < EXACT
    assert not update.outputs.requires_grad
    assert not update.loss.requires_grad
    assert update.adjoint_stats is not None
    assert update.adjoint_stats.chunk == 5
    whole = next(iter(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=500))))
    assert whole.outputs.shape == y.shape


MEMORIES = ["136kB", "140kB", "160kB", 250_000.0, "300KiB", "512MB"]


def test_chunk_changes_no_gradient() -> None:
    """Neither given, nor found for a memory, nor that of the stream.

    Lengths found for a memory do differ.
    """
    net = named("hides-layer").net()
    data = PolicyData.draw(97, 1, 5, masked=0.2)
    expected, lengths = plain(net, data), set[int]()
    for memory in MEMORIES:
        (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(memory=memory))
        assert update.adjoint_stats is not None
        lengths.add(update.adjoint_stats.chunk)
        assert apart(gradients(net), expected[0][2]) < EXACT
        net.zero_grad()
    assert len(lengths) > 3
    assert 97 in lengths


@examples(15)
@given(
    lengths=few_short_recordings,
    reads=st.lists(st.sampled_from([1, 3, 7, 500]), min_size=2, max_size=2, unique=True),
    chunk=chunks,
    lanes=st.sampled_from([1, 2]),
)
@some_nets("hides-layer", "learnt-start")
def test_chunk_of_the_stream_changes_no_bit(
    row: Row, lengths: list[int], reads: list[int], chunk: Chunk, lanes: int
) -> None:
    lanes, policy, net = min(lanes, sum(lengths)), tt.Exact(chunk=chunk), row.net()
    first, second = (
        policy_gradients(net, tt.Stream(recordings(lengths), lanes, read, warm_up=1), policy)
        for read in reads
    )
    assert deviation(first, second) == 0
    queue = list(tt.Stream(recordings(lengths), lanes, reads[0], warm_up=1))
    assert deviation(policy_gradients(net, queue, policy), first) < EXACT


@some_nets("hides-layer", "namedtuple-state", "dict-state")
def test_offload_changes_no_bit_and_leaves_no_file(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = list[Path]()
    room = _memory._map_file

    def watched(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        folders.append(folder)
        return room(folder, shape, dtype)

    monkeypatch.setattr(_memory, "_map_file", watched)
    net = row.net()
    data = data_for(net, 40, 2, 1, resets=0.05)
    kept = policy_gradients(net, [data.chunk], tt.Exact(chunk=3))
    for offload in ("cpu", tmp_path, str(tmp_path)):
        for update in tt.updates(
            net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=3, offload=offload)
        ):
            assert list(tmp_path.iterdir()) == []
            assert update.steps == 80
        net.zero_grad()
        assert (
            deviation(policy_gradients(net, [data.chunk], tt.Exact(chunk=3, offload=offload)), kept)
            == 0
        )
    assert set(folders) == {tmp_path}
    assert len(folders) == 4 * len(tt.state.tensors(start(net, data.x)))


def test_offload_leaves_no_file_behind_an_error(tmp_path: Path) -> None:
    seen = list[list[Path]]()

    def fails(*_: Tensor) -> Tensor:
        seen.append(list(tmp_path.iterdir()))
        raise ArithmeticError("the user's loss")

    data = PolicyData.draw(40, 2, 1)
    with pytest.raises(ArithmeticError, match="the user's loss"):
        next(
            tt.updates(
                named("lstm").net(),
                [data.chunk],
                fails,
                gradient=tt.Exact(chunk=3, offload=tmp_path),
            )
        )
    assert seen == [[]]  # even while it is in use the file has no name
    assert list(tmp_path.iterdir()) == []


LENGTHS = [31, 7, 20, 1, 11]


@examples(10)
@given(lengths=few_short_recordings, chunk=chunks, seed=st.sampled_from([None, 0, 1]))
@some_nets("hides-layer", "learnt-start", "gru")
def test_one_lane_has_one_update_for_every_recording(
    row: Row, lengths: list[int], chunk: Chunk, seed: int | None
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


def alone(net: tt.Carried, data: PolicyData) -> UpdateGrads:
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
    chunk: Chunk,
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
    chunk = tt.Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)
    _, end = net(data.x, start(net, data.x))
    for policy in (tt.Exact(chunk=2, cut_every=3), tt.Exact(cut_every=3)):
        run = tt.updates(net, [chunk], nn.MSELoss(), gradient=policy)
        assert [update.steps for update in run] == [1, 2]
        assert states_apart(run.state, end) < EXACT
    net.zero_grad()
    silent = tt.Chunk.from_tensors(data.x, data.targets, mask=torch.zeros(24, 2, dtype=torch.bool))
    run = tt.updates(net, [silent], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    assert list(run) == []
    assert states_apart(run.state, end) < EXACT
    assert all(p.grad is None for p in net.parameters())


class Training:
    """A net, its optimizer and its updates, saved and restored together."""

    def __init__(self, row: Row, policy: tt.Exact, lanes: int) -> None:
        self.net = row.net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        self.updates = tt.updates(
            self.net, tt.Stream(recordings(LENGTHS), lanes, chunk=4), nn.MSELoss(), gradient=policy
        )

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
    row: Row, policy: tt.Exact, lanes: int
) -> None:
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
    rest = tt.Chunk.from_tensors(data.x[12:], data.targets[12:])
    results = gradients_from(net, rest, middle)
    ((*_, expected),) = plain(net, data, [0, 12, 30])[1:]
    assert apart(results, expected) < EXACT
    assert apart(gradients_from(net, rest, None), expected) > 1e-6


def gradients_from(net: tt.Carried, chunk: tt.Chunk, state: State) -> dict[str, Tensor]:
    list(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact(chunk=4), state=state))
    results = gradients(net)
    net.zero_grad()
    return results


def test_settings_are_described() -> None:
    assert (
        tt.Exact().describe()
        == "an update for every recording (with several lanes, where all of them start one), credit"
        " back through all of it"
    )
    assert (
        tt.Exact(cut_every=500).describe()
        == "an update every 500 steps, credit cut there: back through at most 500 steps"
    )
