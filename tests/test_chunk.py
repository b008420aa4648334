"""Chunks cut, joined and counted: the same steps, whatever they were cut from."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import throughtime as tt
from throughtime.chunk import Chunk, ChunkMetadata, join

NAMES = ("inputs", "targets", "resets", "mask", "recording", "position")


def stream_with_gaps(chunk: int) -> tt.Stream:
    """Two lanes: one ends early, some targets are missing, a recording begins in the middle."""
    draw = np.random.default_rng(0)
    lengths = (23, 40, 9)
    made = [
        {
            "inputs": draw.normal(size=(n, 2)),
            "targets": np.where(draw.random(n) < 0.2, np.nan, draw.normal(size=n)),
        }
        for n in lengths
    ]
    return tt.Stream(made, lanes=2, chunk=chunk, seed=None)


def same(a: Chunk, b: Chunk) -> bool:
    """Whether all of it is, the counts without a look at the tensors too."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in NAMES]
    alike = all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs)
    return alike and (a.steps, a.lanes, a.valid, a.any_reset) == (
        b.steps,
        b.lanes,
        b.valid,
        b.any_reset,
    )


@pytest.mark.parametrize("cuts", [(0, 7, 40), (0, 1, 2, 39, 40), (3, 20, 31), (5, 5, 9)])
def test_pieces_of_a_stretch_joined_are_the_steps_between_their_ends(cuts: tuple[int, ...]) -> None:
    whole = stream_with_gaps(64).read(0, 40)
    again = join([whole[start:stop] for start, stop in pairwise(cuts)])
    expected = whole[cuts[0] : cuts[-1]]
    assert same(again, expected)
    assert all(same(again[at : at + 1], expected[at : at + 1]) for at in range(expected.steps))


def test_pieces_that_do_not_follow_one_another_are_joined_as_they_are() -> None:
    whole = stream_with_gaps(64).read(0, 40)
    for parts in ([(20, 30), (0, 20)], [(0, 10), (12, 20)], [(0, 10), (5, 9)]):
        pieces = [whole[start:stop] for start, stop in parts]
        again = join(pieces)
        assert [
            torch.equal(getattr(again, name), torch.cat([getattr(p, name) for p in pieces]))
            for name in NAMES[2:]
        ] == [True] * 4
        assert (again.steps, again.valid) == (sum(p.steps for p in pieces), int(again.mask.sum()))
        assert again.any_reset == bool(again.resets.any())


def test_pieces_of_several_stretches_joined_are_the_whole() -> None:
    stream = stream_with_gaps(64)
    pieces = [stream.read(start, stop) for start, stop in pairwise((0, 11, 12, 30, 40))]
    assert same(join(pieces), stream.read(0, 40))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, 3),
        torch.zeros(5, 3),
        torch.eye(5),
        torch.ones(5, 0),
        torch.ones(0, 3),
        torch.ones(1, 1),
    ],
)
def test_counts_before_each_step_are_those_of_the_mask(mask: Tensor) -> None:
    marks = ChunkMetadata.of(mask < 0, mask > 0, mask.long(), mask.long())
    assert list(marks.counted) == [int((mask[:step] > 0).sum()) for step in range(len(mask) + 1)]


@pytest.mark.parametrize("index", [0, slice(None, None, 2)])
def test_only_slices_of_adjacent_steps_index_a_chunk(index: Any) -> None:
    """Every second step is another recording, and a single chunk is not a list of chunks."""
    chunk = tt.Chunk.from_tensors(torch.zeros(6, 2, 3), torch.zeros(6, 2))
    with pytest.raises(TypeError, match="only slices of adjacent steps"):
        chunk[index]
    net = tt.carry(torch.nn.GRU(3, 1))
    alone: Any = chunk
    with pytest.raises(TypeError, match=r"give a list: \[chunk\]"):
        next(tt.updates(net, alone, torch.nn.MSELoss(), gradient=tt.Truncated(3)))
