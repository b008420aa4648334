"""What is particular to truncation: its horizon, its options, and the chunks and losses it takes.

That its gradient equals plain autograd is tested by test_random_updates.py and test_policies.py.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, plain, policy_gradients
from strategies import (
    HidesLayer,
    Row,
    apart,
    inputs,
    named,
    recordings,
    some_nets,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError

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
@some_nets("lstm", "sequential", "hides-cell", "dict-state", "learnt-start")
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


def refused(source: Any) -> None:
    list(tt.updates(named("hides-layer").net(), source, nn.MSELoss(), gradient=tt.Truncated(5)))


def some_chunks() -> list[Chunk]:
    return list(tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None))


def moved(chunk: Chunk) -> Chunk:
    """The chunk with one lane a step later."""
    position = chunk.position + torch.tensor([0, 1])
    own = chunk.inputs, chunk.targets
    return Chunk.from_tensors(*own, recording=chunk.recording, position=position)


SOURCES: dict[str, tuple[Callable[[], Any], str]] = {
    "a gap": (lambda: some_chunks()[::2], "lane 0 jumps from recording 0, step 4 to"),
    "a lane apart": (
        lambda: [some_chunks()[0], moved(some_chunks()[1])],
        "lane 1 jumps from recording 1, step 4 to recording 1, step 6",
    ),
    "other lanes": (
        lambda: [some_chunks()[0], list(tt.Stream(recordings([40]), 1, 5))[1]],
        "a chunk of 1 lanes follows one of 2",
    ),
    "tuples": (lambda: [(torch.zeros(5, 2, 3), torch.zeros(5, 2))], "expected a Chunk"),
    "nothing": (list, "no chunk at all"),
}


@pytest.mark.parametrize(("source", "reason"), list(SOURCES.values()), ids=list(SOURCES))
def test_chunks_that_are_not_adjacent_are_refused(source: Callable[[], Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        refused(source())


def test_recording_may_end_and_the_next_may_start_between_chunks() -> None:
    chunks = list(tt.Stream(recordings([10, 5, 5, 10, 5, 7]), lanes=2, chunk=5))
    assert sum(int(chunk.resets[0].sum()) for chunk in chunks) > 2
    refused(chunks)


@pytest.mark.parametrize("policy", [tt.Truncated(3), tt.Truncated(3, 10)], ids=str)
def test_stride_without_valid_step_yields_nothing_but_carries_the_state(policy: Any) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(24, 2, 0)
    mask = torch.zeros(24, 2, dtype=torch.bool)
    mask[9, 1] = mask[22] = True
    chunk = Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)
    run = tt.updates(net, [chunk[:23]], nn.MSELoss(), gradient=policy)
    assert [update.steps for update in run] == [1, 2]
    _, end = net(data.x[:23], start(net, data.x))
    assert states_apart(run.state, end) < EXACT


@pytest.mark.parametrize("column", [False, True], ids=["targets (N,)", "targets (N, 1)"])
def test_one_column_matches_with_and_without_its_dimension(column: bool) -> None:
    net, data = tt.carry(HidesLayer(outputs=1).double()), PolicyData.draw(10, 2, 0, masked=0.4)
    targets = data.targets[:, :, :1] if column else data.targets[:, :, 0]
    chunk = Chunk.from_tensors(data.x, targets, mask=data.mask)
    ((_, _, results),) = policy_gradients(net, [chunk], tt.Truncated(10))
    ((_, _, expected),) = plain(net, replace(data, targets=data.targets[:, :, :1]))
    assert apart(results, expected) < EXACT
