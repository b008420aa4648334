"""What is particular to truncation: the chunks and losses it takes.

That its gradient equals plain autograd is tested by test_random_updates.py.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from typing import Any

import pytest
import torch
from torch import nn

import throughtime as tt
from strategies import named, recordings
from throughtime.chunk import Chunk
from throughtime.errors import DataError


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
