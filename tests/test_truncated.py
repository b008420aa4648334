"""Truncated backpropagation through time against plain autograd over the whole sequence.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import throughtime as tt
from policy_data import (
    ORACLES,
    Marked,
    PolicyData,
    deviation,
    every_stride_resets,
    last_loss_only,
    no_resets,
    oracle,
    policy_gradients,
)
from quick import examples
from strategies import (
    FEATURES,
    HidesLayer,
    Row,
    Step,
    TensorState,
    Weights,
    apart,
    every_net,
    gradients,
    inputs,
    named,
    recordings,
    seeds,
    some_nets,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk, Source, join
from throughtime.errors import DataError, ModelError
from throughtime.gradient import Probe, Progress, Window

EXACT = 1e-11


@given(
    steps=st.sampled_from([1, 2, 7, 13, 29]),
    stride=st.sampled_from([1, 2, 3, 5, 7, 29, 50]),
    further=st.sampled_from([0, 1, 2, 3, 7, 11, 40]),
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@ORACLES
def test_gradient_equals_plain_autograd(
    row: Row,
    step: Step,
    leaves: int,
    steps: int,
    stride: int,
    further: int,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    net, data = row.net(), PolicyData.draw(steps, lanes, seed, resets, masked)
    results = policy_gradients(net, [data.chunk], tt.Truncated(stride, stride + further))
    assert (
        deviation(
            results,
            oracle(step, leaves, dict(net.named_parameters()), data, stride, stride + further),
        )
        < EXACT
    )


class CountsWindow(tt.Truncated):
    """The mutant that counts every loss of the window."""

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        window, memory = super().plan(source, at, probe)
        return window and window._replace(counted=window.start), memory


MUTANTS: dict[str, Any] = {
    "counts every loss of the window": CountsWindow(5, 11),
    "counts the last loss only": Marked(tt.Truncated(5, 11), last_loss_only),
    "ignores resets": Marked(tt.Truncated(5, 11), no_resets),
    "forgets the state": Marked(tt.Truncated(5, 11), every_stride_resets),
    "one step short": tt.Truncated(5, 10),
    "one step long": tt.Truncated(5, 12),
    "no further than the stride": tt.Truncated(5),
    "another stride": tt.Truncated(4, 11),
}


@pytest.mark.covering
@pytest.mark.parametrize("mutant", list(MUTANTS.values()), ids=list(MUTANTS))
@ORACLES
def test_mutant_is_not_the_gradient_of_plain_autograd(
    row: Row, step: Step, leaves: int, mutant: Any
) -> None:
    net, data = row.net(), PolicyData.draw(29, 2, 3, resets=0.03)
    assert data.resets[1:].any()
    expected = oracle(step, leaves, dict(net.named_parameters()), data, 5, 11)
    assert deviation(policy_gradients(net, [data.chunk], tt.Truncated(5, 11)), expected) < EXACT
    results = policy_gradients(net, [data.chunk], mutant)
    if len(results) == len(expected):  # else it makes updates at other steps
        assert max(apart(g, h) for (*_, g), (*_, h) in zip(results, expected, strict=True)) > 1e-6


def blamed(net: Carried, data: PolicyData, policy: tt.Truncated) -> list[Tensor]:
    """The gradient norm `(T, B)` that every update sends to the inputs."""
    x = data.x.clone().requires_grad_()
    chunk, results = (
        Chunk.from_tensors(x, data.targets, resets=data.resets, mask=data.mask),
        list[Tensor](),
    )
    for _ in tt.updates(net, [chunk], nn.MSELoss(), gradient=policy):
        assert x.grad is not None
        results.append(x.grad.norm(dim=2))
        x.grad = None
    return results


@pytest.mark.covering
@pytest.mark.parametrize(("stride", "horizon"), [(1, 1), (10, 10), (10, 17), (10, 60), (7, 50)])
@every_net
def test_gradient_is_zero_beyond_the_horizon_and_alive_within(
    row: Row, stride: int, horizon: int
) -> None:
    """Only the last step of every stride has a loss: it sees `horizon` steps and not one more."""
    net, data = row.net(), PolicyData.draw(61, 2, 0)
    width = net(data.x, start(net, data.x))[0].shape[2]
    data = PolicyData(
        data.x,
        inputs(61, 2, features=width),
        data.resets,
        torch.arange(61).unsqueeze(1).expand(61, 2) % stride == stride - 1,
    )
    results = blamed(net, data, tt.Truncated(stride, horizon))
    assert len(results) == 61 // stride
    for i, norms in enumerate(results):
        last = (i + 1) * stride
        first = max(0, last - horizon)
        assert norms[:first].abs().sum() == 0
        assert norms[last:].abs().sum() == 0
        assert norms[first:last].min() > 1e-9
        assert norms[first].max() > 1e-3 * norms[last - 1].max()


@every_net
def test_gradient_is_zero_across_a_reset(row: Row) -> None:
    net, data = row.net(), PolicyData.draw(30, 2, 0)
    width = net(data.x, start(net, data.x))[0].shape[2]
    resets = data.resets.clone()
    resets[13, 1] = True
    mask = torch.zeros(30, 2, dtype=torch.bool)
    mask[19] = True
    (norms,) = blamed(
        net, PolicyData(data.x, inputs(30, 2, features=width), resets, mask), tt.Truncated(10, 20)
    )
    assert norms[:13, 1].abs().sum() == 0
    assert norms[13:20, 1].min() > 1e-9
    assert norms[:20, 0].min() > 1e-9


@examples(6)
@given(stride=st.sampled_from([1, 3, 7, 23, 40]), masked=st.sampled_from([0.0, 0.4]), seed=seeds)
@every_net
def test_horizon_as_long_as_the_recording_gives_full_bptt(
    row: Row, stride: int, masked: float, seed: int
) -> None:
    """Weighted by valid steps, updates sum to one backward pass: each loss counts once."""
    net, data = row.net(), PolicyData.draw(23, 2, seed, resets=0.1, masked=masked)
    y, _ = net(data.x, start(net, data.x), data.resets)
    targets = torch.zeros_like(y.detach())
    net.zero_grad()
    y[data.mask].square().sum().backward()
    full = gradients(net)
    net.zero_grad()
    data = PolicyData(data.x, targets, data.resets, data.mask)
    results = policy_gradients(net, [data.chunk], tt.Truncated(stride, stride + 23))
    sums = {
        name: sum(
            (g[name] * steps * y.shape[2] for steps, _, g in results), torch.zeros_like(full[name])
        )
        for name in full
    }
    assert sum(steps for steps, *_ in results) == int(data.mask.sum())
    assert apart(sums, full) < EXACT


def test_loss_is_the_mean_over_the_valid_steps() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(23, 3, 0, resets=0.1, masked=0.5)
    y, _ = net(data.x, start(net, data.x), data.resets)
    errors = (y - data.targets).square().mean(2).detach()
    losses = list[float]()
    for update in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(7, 9)):
        rows = slice(7 * len(losses), 7 * len(losses) + 7)
        assert update.steps == int(data.mask[rows].sum())
        assert update.loss.item() == pytest.approx(
            errors[rows][data.mask[rows]].mean().item(), rel=1e-12
        )
        lanes = [errors[rows, lane][data.mask[rows, lane]].mean().item() for lane in range(3)]
        assert update.loss.item() != pytest.approx(
            np.mean(lanes), rel=1e-3
        )  # the mutant: a mean of means
        assert (
            torch.equal(update.outputs, y[rows].detach())
            or (update.outputs - y[rows]).abs().max() < EXACT
        )
        assert (update.chunk.steps, update.chunk.valid_steps) == (
            min(7, 23 - rows.start),
            update.steps,
        )
        losses.append(update.loss.item())
    assert len(losses) == 4


@examples(10)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunks=st.lists(st.sampled_from([1, 2, 3, 7, 31, 500]), min_size=2, max_size=2, unique=True),
    stride=st.sampled_from([1, 4, 9]),
    further=st.sampled_from([0, 1, 10]),
    lanes=st.sampled_from([1, 2]),
)
@some_nets("hides-layer", "tensor-state")
def test_chunk_length_of_the_stream_changes_no_gradient(
    row: Row, lengths: list[int], chunks: list[int], stride: int, further: int, lanes: int
) -> None:
    lanes, policy, net = min(lanes, sum(lengths)), tt.Truncated(stride, stride + further), row.net()
    streams = [tt.Stream(recordings(lengths), lanes, chunk, warm_up=1) for chunk in chunks]
    first, second = (policy_gradients(net, stream, policy) for stream in streams)
    assert deviation(first, second) == 0
    queue = policy_gradients(
        net, list(tt.Stream(recordings(lengths), lanes, chunks[0], warm_up=1)), policy
    )
    assert deviation(first, queue) == 0


@ORACLES
def test_gradient_on_a_stream_equals_plain_autograd(row: Row, step: Step, leaves: int) -> None:
    """Recordings of any length on several lanes, idle ends and warm-up included."""
    net = row.net()
    stream = tt.Stream(recordings([31, 7, 20, 3, 11]), lanes=3, chunk=8, warm_up=2)
    data = PolicyData.of(join(list(stream)))
    assert (data.mask.sum(1) < 3).any()
    results = policy_gradients(
        net,
        tt.Stream(recordings([31, 7, 20, 3, 11]), lanes=3, chunk=8, warm_up=2),
        tt.Truncated(4, 10),
    )
    assert (
        deviation(results, oracle(step, leaves, dict(net.named_parameters()), data, 4, 10)) < EXACT
    )


def test_stride_without_valid_step_yields_nothing_but_carries_the_state() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(24, 2, 0)
    mask = torch.zeros(24, 2, dtype=torch.bool)
    mask[9, 1] = mask[22] = True
    chunk = Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)
    for policy in (tt.Truncated(3), tt.Truncated(3, 10)):
        run = tt.updates(net, [chunk], nn.MSELoss(), gradient=policy)
        assert [update.steps for update in run] == [1, 2]
        _, end = net(data.x, start(net, data.x))
        assert states_apart(run.state, end) < EXACT
    silent = Chunk.from_tensors(data.x, data.targets, mask=torch.zeros(24, 2, dtype=torch.bool))
    run = tt.updates(net, [silent], nn.MSELoss(), gradient=tt.Truncated(5))
    assert list(run) == []
    assert states_apart(run.state, end) < EXACT


@pytest.mark.covering
@pytest.mark.parametrize("horizon", [5, 12, 40])
@some_nets("lstm", "hides-cell", "namedtuple-state", "learnt-start")
def test_carried_state_is_that_of_one_long_forward(row: Row, horizon: int) -> None:
    net, data = row.net(), PolicyData.draw(23, 2, 0, resets=0.1)
    y, end = net(data.x, start(net, data.x), data.resets)
    chunk = Chunk.from_tensors(data.x, torch.zeros_like(y.detach()), resets=data.resets)
    for update in tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Truncated(5, horizon)):
        last = int(update.chunk.position[-1, 0]) + 1
        _, expected = net(data.x[:last], start(net, data.x), data.resets[:last])
        assert states_apart(update.state, expected) < EXACT
        assert not any(leaf.requires_grad for leaf in tt.state.tensors(update.state))
        assert not update.outputs.requires_grad
        assert not update.loss.requires_grad
        assert states_apart(update.state, end) < EXACT or last < 23


def refused(source: Any, net: Any = None, loss_fn: Any = None) -> None:
    list(
        tt.updates(
            net or named("hides-layer").net(),
            source,
            loss_fn or nn.MSELoss(),
            gradient=tt.Truncated(5),
        )
    )


def some_chunks() -> list[Chunk]:
    return list(tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None))


def loader(**options: Any) -> Any:
    """A DataLoader over chunks; typed for datasets, it takes any sequence."""
    chunks: Any = some_chunks()
    return DataLoader(chunks, **options)


def test_chunks_that_are_not_adjacent_are_refused_naming_the_lane() -> None:
    chunks = some_chunks()
    refused(chunks[:6])
    with pytest.raises(
        DataError,
        match=(
            r"lane 0 jumps from recording 0, step 4 to recording 0, step 10 without a reset.*not"
            r" adjacent"
        ),
    ):
        refused([chunks[0], *chunks[2:]])
    other = Chunk.from_tensors(
        chunks[1].inputs,
        chunks[1].targets,
        recording=chunks[1].recording,
        position=chunks[1].position + torch.tensor([0, 1]),
    )
    with pytest.raises(
        DataError, match="lane 1 jumps from recording 1, step 4 to recording 1, step 6"
    ):
        refused([chunks[0], other])


def test_recording_may_end_and_the_next_may_start_between_chunks() -> None:
    chunks = list(tt.Stream(recordings([10, 5, 5, 10, 5, 7]), lanes=2, chunk=5))
    assert sum(int(chunk.resets[0].sum()) for chunk in chunks) > 2
    refused(chunks)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            lambda: [some_chunks()[0], list(tt.Stream(recordings([40]), 1, 5))[1]],
            "a chunk of 1 lanes follows one of 2",
        ),
        (
            lambda: [(torch.zeros(5, 2, 3), torch.zeros(5, 2))],
            r"the stream gave a tuple, expected a Chunk: .*or Chunk\.from_tensors",
        ),
        (list, "the stream gave no chunk at all"),
        (
            lambda: loader(
                shuffle=True, batch_size=None, generator=torch.Generator().manual_seed(0)
            ),
            "jumps from recording",
        ),
        (lambda: tt.Stream({"inputs": np.zeros((9, 3))}, 1, 5), "have no targets; a loss needs"),
    ],
    ids=["other lanes", "tuples", "nothing", "shuffled", "no targets"],
)
def test_source_that_is_no_stream_of_chunks_is_refused(
    source: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        refused(source())


def test_chunks_in_order_through_a_data_loader_are_as_good_as_a_list() -> None:
    net, policy = named("hides-layer").net(), tt.Truncated(4, 6)
    assert (
        deviation(
            policy_gradients(net, loader(batch_size=None), policy),
            policy_gradients(net, some_chunks(), policy),
        )
        == 0
    )


def test_raw_module_is_refused_with_the_line_to_write() -> None:
    raw: Any = HidesLayer()
    with pytest.raises(ModelError, match=r"the net is a HidesLayer; .*net = tt\.carry\(module\)"):
        refused(some_chunks(), raw)


def test_loss_of_every_row_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match=(
            r"loss_fn returned a tensor of shape \(10, 2\), expected one number.*reduction='none'"
        ),
    ):
        refused(some_chunks(), loss_fn=nn.MSELoss(reduction="none"))


def test_frozen_net_is_refused() -> None:
    net = named("hides-layer").net().requires_grad_(requires_grad=False)
    with pytest.raises(
        ModelError, match="the loss depends on no parameter that requires a gradient"
    ):
        refused(some_chunks(), net)


def by_hand(net: Carried, chunk: Chunk, loss: Callable[[Tensor, Tensor], Tensor]) -> Weights:
    y, _ = net(chunk.inputs, start(net, chunk.inputs), chunk.resets)
    assert chunk.targets is not None
    net.zero_grad()
    loss(y[chunk.mask], chunk.targets[chunk.mask]).backward()
    results = gradients(net)
    net.zero_grad()
    return results


@pytest.mark.parametrize("masked", [0.0, 0.4])
@pytest.mark.parametrize("column", [False, True], ids=["targets (N,)", "targets (N, 1)"])
def test_one_column_matches_with_and_without_its_dimension(column: bool, masked: float) -> None:
    net = tt.carry(HidesLayer(outputs=1).double())
    data = PolicyData.draw(10, 2, 0, masked=masked)
    targets = data.targets[:, :, :1] if column else data.targets[:, :, 0]
    chunk = Chunk.from_tensors(data.x, targets, mask=data.mask)
    ((_, _, results),) = policy_gradients(net, [chunk], tt.Truncated(10))
    expected = by_hand(net, chunk, lambda y, t: (y.flatten() - t.flatten()).square().mean())
    assert apart(results, expected) < EXACT
    broadcast = by_hand(
        net, chunk, lambda y, t: (y - t.flatten()).square().mean()
    )  # the mutant: (N, 1) against (N,)
    assert apart(results, broadcast) > 1e-6


LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor], bool]] = {
    "CrossEntropyLoss": (
        nn.CrossEntropyLoss(),
        lambda y, t: -y.log_softmax(1).gather(1, t.unsqueeze(1)).mean(),
        True,
    ),
    "MSELoss": (nn.MSELoss(), lambda y, t: (y - t).square().mean(), False),
    "function": (nn.functional.l1_loss, lambda y, t: (y - t).abs().mean(), False),
    "lambda": (lambda y, t: ((y - t) ** 4).mean(), lambda y, t: ((y - t) ** 4).mean(), False),
}


@pytest.mark.parametrize(("loss_fn", "formula", "classes"), list(LOSSES.values()), ids=list(LOSSES))
def test_plain_losses_work_unchanged(
    loss_fn: Any, formula: Callable[[Tensor, Tensor], Tensor], classes: bool
) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(10, 3, 0, masked=0.3)
    targets = (data.targets[:, :, 0] > 0).long() if classes else data.targets
    chunk = Chunk.from_tensors(data.x, targets, mask=data.mask)
    ((_, _, results),) = policy_gradients(net, [chunk], tt.Truncated(10), loss_fn)
    assert apart(results, by_hand(net, chunk, formula)) < EXACT


def test_ignored_classes_do_not_count() -> None:
    """The stream masks -100 itself, so that the weight of an update is right."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 20)
    labels[3:9] = -100
    source = {"inputs": draw.normal(size=(20, FEATURES)), "targets": labels}
    net = named("hides-layer").net()
    results = policy_gradients(
        net, tt.Stream(source, lanes=1, chunk=4), tt.Truncated(20), nn.CrossEntropyLoss()
    )
    (chunk,) = tt.Stream(source, lanes=1, chunk=20)
    expected = by_hand(
        net,
        Chunk.from_tensors(chunk.inputs, chunk.targets, resets=chunk.resets),
        nn.CrossEntropyLoss(),
    )
    assert results[0][0] == 14
    assert apart(results[0][2], expected) < EXACT


def test_gradients_add_up_until_they_are_zeroed() -> None:
    net, data = tt.carry(TensorState().double()), PolicyData.draw(20, 2, 0)
    apart_ = policy_gradients(net, [data.chunk], tt.Truncated(5, 8))
    for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(5, 8)):
        pass
    added = {name: torch.stack([g[name] for *_, g in apart_]).sum(0) for name in gradients(net)}
    assert apart(gradients(net), added) < EXACT
