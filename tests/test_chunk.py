"""Chunks cut, joined and counted, with their series and the ends of recordings: the same steps,
whatever they were cut from."""

import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from quick import examples
from strategies import chunk_lengths, draw_lanes, few_short_recordings, seeds
from throughtime.chunk import Chunk, Placement, join
from throughtime.stream._queue import ChunkQueue

LONGEST = 1000
SERIES = ("weight", "vector", "image", "done", "count")
AT = tuple[int, int]  # recording and step


def values_at(at: AT) -> dict[str, Any]:
    """The series of a step; none of them is zero at every step, as padding is."""
    recording, step = at
    number = 1.0 + recording * LONGEST + step
    return {
        "weight": number / 7,
        "vector": np.array([number, -number, number**2]),
        "image": np.full((2, 2), -number),
        "done": step % 3 == 1,
        "count": -1 - step,
    }


def numbered(lengths: Sequence[int], *, targets: bool = True) -> list[dict[str, Any]]:
    """Recordings whose inputs are 1 + LONGEST * recording + step."""
    recordings: list[dict[str, Any]] = []
    for i, length in enumerate(lengths):
        steps = [values_at((i, step)) for step in range(length)]
        recordings.append(
            {
                "name": f"r{i}",
                "inputs": 1.0 + i * LONGEST + np.arange(length)[:, None],
                "targets": np.arange(length, dtype=np.float64) if targets else None,
                **{name: np.array([step[name] for step in steps]) for name in SERIES},
            }
        )
    return recordings


def tape(chunk: Chunk) -> list[list[AT | None]]:
    """What each lane plays at each step, decoded from the inputs alone; None after its end."""
    numbers = chunk.inputs[..., 0].T.tolist()
    return [[divmod(int(n) - 1, LONGEST) if n else None for n in lane] for lane in numbers]


def series_faults(chunk: Chunk) -> list[str]:
    """Where a series has another value than that of the step, or than zero after the end."""
    faults: list[str] = []
    for lane, played in enumerate(tape(chunk)):
        for step, at in enumerate(played):
            expected = values_at(at or (0, 0))
            for name in SERIES:
                value = np.asarray(expected[name]) * (at is not None)
                got = chunk[name][step, lane].numpy()
                if got.shape != value.shape or not np.array_equal(got, value):
                    faults.append(f"{name} at {step}, {lane}: {got}, expected {value}")
    return faults


def end_faults(chunk: Chunk, lengths: Sequence[int]) -> list[str]:
    """Where a recording starts or ends at other steps than by its length."""
    faults: list[str] = []
    for lane, played in enumerate(tape(chunk)):
        for step, at in enumerate(played):
            start = at is not None and at[1] == 0
            end = at is not None and at[1] == lengths[at[0]] - 1
            if (bool(chunk.starts[step, lane]), bool(chunk.ends[step, lane])) != (start, end):
                faults.append(f"starts or ends at step {step} of lane {lane}")
    for run, part in chunk.runs():
        played = tape(part)[0]
        first, last = played[0], played[-1]
        if first is None or last != (first[0], first[1] + part.steps - 1):
            faults.append(f"{run}: {first} to {last}")
    whole = sum(at is not None for lane in tape(chunk) for at in lane)
    if sum(part.steps for _, part in chunk.runs()) != whole:
        faults.append("steps are in no run")
    return faults


def all_faults(chunks: Sequence[Chunk], lengths: Sequence[int]) -> list[str]:
    return [f for chunk in chunks for f in [*series_faults(chunk), *end_faults(chunk, lengths)]]


@given(
    lengths=few_short_recordings,
    wish=st.integers(1, 5),
    chunk=chunk_lengths,
    seed=st.none() | seeds,
    warm_up=st.integers(0, 5),
    targets=st.booleans(),
)
@examples(40)
def test_series_starts_ends_and_runs_are_those_of_the_steps(
    lengths: list[int],
    wish: int,
    chunk: int,
    seed: int | None,
    warm_up: int,
    targets: bool,
) -> None:
    lanes = draw_lanes(lengths, wish)
    stream = tt.Stream(
        numbered(lengths, targets=targets),
        lanes,
        chunk,
        seed=seed,
        warm_up=warm_up,
    )
    for _ in range(2):
        chunks = list(stream)
        assert all_faults(chunks, lengths) == []
        check_mask(chunks, warm_up)


def check_mask(chunks: Sequence[Chunk], warm_up: int) -> None:
    """With or without targets: every step counts that a lane plays, but for the warm-up."""
    age = [-1] * chunks[0].lanes
    for chunk in chunks:
        for lane, played in enumerate(tape(chunk)):
            for step, at in enumerate(played):
                age[lane] = 0 if chunk.resets[step, lane] else age[lane] + 1
                counts = at is not None and age[lane] >= warm_up
                assert bool(chunk.mask[step, lane]) == counts


@given(cuts=st.lists(st.integers(0, 31), max_size=4), lanes=st.integers(1, 3))
@examples(30)
def test_slices_and_joined_slices_keep_series_and_ends(cuts: list[int], lanes: int) -> None:
    lengths = [12, 9, 10, 5]
    (chunk,) = tt.Stream(numbered(lengths), lanes, 50)
    edges = sorted({0, chunk.steps, *(min(cut, chunk.steps) for cut in cuts)})
    parts = [chunk[start:stop] for start, stop in pairwise(edges)]
    assert all_faults(parts, lengths) == []
    whole = join(parts)
    assert all_faults([whole], lengths) == []
    for part in (*parts, whole):  # what is read from counts of the block
        assert part.reset_steps == part.resets.any(dim=1).nonzero().flatten().tolist()
        assert (part.any_reset, part.valid_steps) == (part.resets.any(), part.mask.sum())
        outputs = torch.arange(part.steps * lanes * 2.0).view(part.steps, lanes, 2)
        assert torch.equal(part.valid_pairs(outputs)[0], outputs[part.mask])
    apart = [pickle.loads(pickle.dumps(part)) for part in parts]  # with metadata of their own
    assert all_faults([join(apart)], lengths) == []


def test_chunks_from_an_iterator_are_cut_with_their_series() -> None:
    lengths = [12, 9, 10, 5]
    for again in (list, iter):
        queue = ChunkQueue(again(tt.Stream(numbered(lengths), 2, 4)))
        chunks: list[Chunk] = []
        while (chunk := queue.take(7)) is not None:
            chunks.append(chunk)
        assert len(chunks) > 1
        assert all_faults(chunks, lengths) == []


def test_runs_of_a_chunk_by_hand_break_at_resets_and_where_recordings_change() -> None:
    recording = torch.tensor([0, 0, 1, 1, 1, 2, -1])[:, None]
    resets = torch.tensor([1, 0, 0, 0, 1, 1, 0])[:, None].bool()
    chunk = Chunk.from_tensors(torch.zeros(7, 1, 1), resets=resets, recording=recording)
    assert [run.steps for _, run in chunk.runs()] == [2, 2, 1, 1]


def test_a_net_casts_floating_series_alone_and_a_device_gets_all() -> None:
    (chunk,) = tt.Stream(numbered([6]), 1, 6)
    cast = chunk.convert(Placement(torch.device("cpu"), torch.float32))
    floats = ("weight", "vector", "image")
    assert {cast[name].dtype for name in floats} == {torch.float32}
    assert (cast["done"].dtype, cast["count"].dtype) == (torch.bool, torch.int64)
    assert torch.equal(cast["weight"], chunk["weight"].float())
    assert cast.ends.tolist() == chunk.ends.tolist()
    moved = chunk[1:4].to(torch.device("meta"))
    assert {moved[name].device.type for name in SERIES} == {"meta"}


def test_steps_of_a_missing_class_do_not_count() -> None:
    targets = torch.tensor([[-100], [1], [0]])
    assert Chunk.from_tensors(torch.zeros(3, 1, 2), targets).valid_steps == 2
