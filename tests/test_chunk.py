"""Chunks cut, joined and counted: the same steps, whatever they were cut from."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import throughtime as tt
from throughtime._metadata import ChunkMetadata
from throughtime.chunk import Chunk, join

NAMES = ("inputs", "targets", "resets", "mask", "recording", "position")


def stream_with_gaps(chunk: int) -> tt.Stream:
    """Two lanes: one ends early, some targets are missing, a recording begins in the middle."""
    draw = np.random.default_rng(0)
    lengths = (23, 40, 9)
    recordings = [
        {
            "inputs": draw.normal(size=(n, 2)),
            "targets": np.where(draw.random(n) < 0.2, np.nan, draw.normal(size=n)),
        }
        for n in lengths
    ]
    return tt.Stream(recordings, lanes=2, chunk=chunk, seed=None)


def same(a: Chunk, b: Chunk) -> bool:
    """Whether all of it is, the counts without a look at the tensors too."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in NAMES]
    alike = all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs)
    return alike and (a.steps, a.lanes, a.valid_steps, a.any_reset) == (
        b.steps,
        b.lanes,
        b.valid_steps,
        b.any_reset,
    )


@pytest.mark.parametrize("cuts", [(0, 7, 40), (0, 1, 2, 39, 40), (3, 20, 31), (5, 5, 9)])
def test_joined_slices_of_a_block_are_the_steps_between_their_ends(cuts: tuple[int, ...]) -> None:
    whole = stream_with_gaps(64).read(0, 40)
    again = join([whole[start:stop] for start, stop in pairwise(cuts)])
    expected = whole[cuts[0] : cuts[-1]]
    assert same(again, expected)
    assert all(same(again[at : at + 1], expected[at : at + 1]) for at in range(expected.steps))


def test_slices_that_are_not_adjacent_are_joined_as_they_are() -> None:
    whole = stream_with_gaps(64).read(0, 40)
    for parts in ([(20, 30), (0, 20)], [(0, 10), (12, 20)], [(0, 10), (5, 9)]):
        slices = [whole[start:stop] for start, stop in parts]
        again = join(slices)
        assert [
            torch.equal(getattr(again, name), torch.cat([getattr(part, name) for part in slices]))
            for name in NAMES[2:]
        ] == [True] * 4
        assert (again.steps, again.valid_steps) == (
            sum(part.steps for part in slices),
            int(again.mask.sum()),
        )
        assert again.any_reset == bool(again.resets.any())


def test_joined_slices_of_several_blocks_are_the_whole() -> None:
    stream = stream_with_gaps(64)
    slices = [stream.read(start, stop) for start, stop in pairwise((0, 11, 12, 30, 40))]
    assert same(join(slices), stream.read(0, 40))


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
    metadata = ChunkMetadata.of(mask < 0, mask > 0, mask.long(), mask.long(), mask < 0)
    assert list(metadata.valid_before) == [
        int((mask[:step] > 0).sum()) for step in range(len(mask) + 1)
    ]


@pytest.mark.parametrize(
    ("start", "stop"), [(5, 3), (-1, -4), (9, 7), (3, 3), (-99, 2), (4, 99), (None, -38)]
)
def test_a_slice_of_a_chunk_has_the_steps_of_the_same_slice_of_a_list(
    start: int | None, stop: int | None
) -> None:
    """None where the end comes before the start."""
    whole = stream_with_gaps(64).read(0, 40)
    part, span = whole[start:stop], slice(start, stop)
    assert part.steps == len(range(40)[span]) == len(part.mask) == len(part.resets)
    assert part.valid_steps == int(whole.mask[span].sum())
    assert part.any_reset == bool(whole.resets[span].any())
    assert torch.equal(part.position, whole.position[span])
    assert torch.equal(part.inputs, whole.inputs[span])


@pytest.mark.parametrize("index", [0, slice(None, None, 2)])
def test_only_slices_of_adjacent_steps_index_a_chunk(index: Any) -> None:
    """Every second step is another recording, and a single chunk is not a list of chunks."""
    chunk = Chunk.from_tensors(torch.zeros(6, 2, 3), torch.zeros(6, 2))
    with pytest.raises(TypeError, match="only slices of adjacent steps"):
        chunk[index]
    net = tt.carry(torch.nn.GRU(3, 1))
    alone: Any = chunk
    with pytest.raises(TypeError, match=r"give a list: \[chunk\]"):
        next(tt.updates(net, alone, torch.nn.MSELoss(), gradient=tt.Truncated(3)))


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (7, 30), (23, 24), (39, 40), (5, 5)])
def test_the_plan_of_a_slice_is_that_of_its_tensors(start: int, stop: int) -> None:
    """Reset steps and valid steps are read from counts of the block, not from the slice."""
    whole = stream_with_gaps(64).read(0, 40)
    for part in (whole[start:stop], join([whole[start:start], whole[start:stop]])):
        assert part.reset_steps == part.resets.any(dim=1).nonzero().flatten().tolist()
        assert torch.equal(part.valid, part.mask.flatten().nonzero().flatten())
        outputs = torch.arange(part.steps * 4.0).view(part.steps, 2, 2)
        rows, targets = part.valid_pairs(outputs)
        assert torch.equal(rows, outputs[part.mask])
        assert part.targets is not None
        assert torch.equal(targets.flatten(), part.targets[part.mask].flatten())
