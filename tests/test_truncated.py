"""What is particular to truncation: its horizon, its options, and the chunks and losses it takes.

That its gradient equals plain autograd is tested by test_random_updates.py and test_policies.py.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import throughtime as tt
from policy_data import (
    PolicyData,
    UpdateGrads,
    deviation,
    policy_gradients,
)
from strategies import (
    FEATURES,
    HidesLayer,
    Row,
    Weights,
    apart,
    every_net,
    gradients,
    inputs,
    named,
    recordings,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, DataError

EXACT = 1e-11


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


Window = tuple[int, int, int]  # where its graph starts, where its losses start, where it stops


def windowed(net: Carried, data: PolicyData, windows: Sequence[Window]) -> UpdateGrads:
    """Each window alone: earlier steps without a graph, then one forward and one backward pass."""
    results: UpdateGrads = []
    for begin, counted, stop in windows:
        state = start(net, data.x)
        if begin:
            with torch.no_grad():
                _, state = net(data.x[:begin], state, data.resets[:begin])
        net.zero_grad()
        y, _ = net(data.x[begin:stop], state, data.resets[begin:stop])
        valid = data.mask[counted:stop]
        if valid.any():
            loss = nn.functional.mse_loss(
                y[counted - begin :][valid], data.targets[counted:stop][valid]
            )
            loss.backward()
            results.append((int(valid.sum()), loss.item(), gradients(net)))
    net.zero_grad()
    return results


def strides(steps: int, stride: int, first: int | None = None) -> list[tuple[int, int]]:
    """The steps between updates, the first stride of a length of its own."""
    stops = [*range(first or stride, steps, stride), steps]
    return list(itertools.pairwise([0, *stops]))


def looking_back(counts: Sequence[tuple[int, int]], stride: int, horizon: int) -> list[Window]:
    return [
        (counted if horizon == stride else max(0, stop - horizon), counted, stop)
        for counted, stop in counts
    ]


def jittered_first(seed: int, stride: int) -> int:
    """The length of the first stride that torch's generator draws."""
    torch.manual_seed(seed)
    return int(torch.randint(1, stride + 1, ()))


def test_first_stride_takes_every_length_from_one_to_the_stride_alike() -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(30, 1, 0)
    firsts: list[int] = []
    for seed in range(250):
        torch.manual_seed(seed)
        run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(5, jitter=True))
        firsts.append(next(run).chunk.steps)
        assert next(run).chunk.steps == 5
    counts = [firsts.count(length) for length in range(1, 6)]
    assert sum(counts) == 250
    assert (
        sum((count - 50) ** 2 / 50 for count in counts) < 18.5
    )  # chi squared, 4 degrees of freedom: one in a thousand


def test_every_epoch_begins_anew_and_only_its_start_is_jittered() -> None:
    stream = tt.Stream(recordings([40, 33]), lanes=2, chunk=8)
    net, firsts = named("hides-layer").net(), set[int]()
    for epoch in range(12):
        torch.manual_seed(epoch)
        lengths = [
            u.chunk.steps
            for u in tt.updates(
                net, stream, nn.MSELoss(), gradient=tt.Truncated(6, 10, jitter=True)
            )
        ]
        assert lengths[0] == jittered_first(epoch, 6)
        assert set(lengths[1:-1]) == {6}
        assert sum(lengths) == 40
        firsts.add(lengths[0])
    assert len(firsts) > 2


def test_last_stride_looks_back_the_horizon_however_short_it_is() -> None:
    """The mutant looks back as far as a whole stride would from where the last one began."""
    net, data = named("tensor-state").net(), PolicyData.draw(22, 2, 0)
    results = policy_gradients(net, [data.chunk], tt.Truncated(5, 11))
    right = looking_back(strides(22, 5), 5, 11)
    assert right[-1] == (11, 20, 22)
    assert deviation(results, windowed(net, data, right)) < EXACT
    assert deviation(results, windowed(net, data, [*right[:-1], (14, 20, 22)])) > 1e-6


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "burn_in negative": ({"burn_in": -1}, "burn_in=-1: expected a whole number of at least 0"),
    "burn_in a float": ({"burn_in": 1.5}, r"burn_in=1\.5: expected a whole number of at least 0"),
}


@pytest.mark.parametrize(("setting", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_option_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tt.Truncated(5, 10, **setting)


def test_options_are_described() -> None:
    said = tt.Truncated(10, 20, jitter=True, burn_in=7).describe()
    assert "the first stride of an epoch of random length" in said
    assert "the 7 steps before run again under the new weights" in said
