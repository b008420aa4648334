"""What is particular to truncation: the chunks and losses it takes.

That its gradient equals plain autograd is tested by test_random_updates.py.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import throughtime as tt
from policy_data import PolicyData, plain, policy_gradients
from strategies import HidesLayer, apart, named, recordings, start, states_apart
from throughtime.chunk import Chunk
from throughtime.errors import DataError

EXACT = 1e-11


def refused(source: Any) -> None:
    list(tt.updates(named("hides-layer").net(), source, nn.MSELoss(), gradient=tt.Truncated(5)))


def some_chunks() -> list[Chunk]:
    return list(tt.Stream(recordings([40, 30]), lanes=2, chunk=5, seed=None))


def moved(chunk: Chunk) -> Chunk:
    """The chunk with one lane a step later."""
    position = chunk.position + torch.tensor([0, 1])
    own = chunk.inputs, chunk.targets
    return Chunk.from_tensors(*own, recording=chunk.recording, position=position)


def test_chunks_that_are_not_adjacent_are_refused() -> None:
    first, second, third, *_ = some_chunks()
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
            refused(source)


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
