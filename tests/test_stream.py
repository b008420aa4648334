"""The stream: every step once on any number of ranks, resets at every start, resumable anywhere,
nothing read early.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
import throughtime.stream.stream as stream_module
from strategies import (
    chunk_lengths,
    draw_lanes,
    few_short_recordings,
    lengths_of_recordings,
    recordings,
    seeds,
)
from throughtime.chunk import Chunk, join
from throughtime.errors import DataError
from throughtime.stream import windows
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.recording import StepArrays, TableRecording
from throughtime.stream.sources import as_recording

lane_wishes = st.sampled_from([1, 2, 3, 7, 40])


def same(a: Chunk, b: Chunk) -> bool:
    """To the bit; NaN equals NaN."""
    pairs = [
        (a.inputs, b.inputs),
        (a.resets, b.resets),
        (a.mask, b.mask),
        (a.recording, b.recording),
        (a.position, b.position),
    ]
    if a.targets is not None and b.targets is not None:
        pairs.append((a.targets, b.targets))
    alike = (
        (a.targets is None) == (b.targets is None)
        and a.valid_steps == b.valid_steps
        and a.any_reset == b.any_reset
    )
    return alike and all(
        torch.equal(p.nan_to_num(nan=1e300), q.nan_to_num(nan=1e300)) and p.dtype == q.dtype
        for p, q in pairs
    )


def all_same(a: Sequence[Chunk], b: Sequence[Chunk]) -> bool:
    return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))


def whole(stream: tt.Stream) -> Chunk:
    """An epoch as one chunk."""
    return join(list(stream))


def check_epoch(ranks: Sequence[Sequence[Chunk]], lengths: Sequence[int], chunk: int) -> None:
    """Every step once, in order within its lane, with a reset wherever a lane does not continue.

    On all ranks together; lanes are idle, and a chunk ragged, only at the end.
    """
    counts, starts = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    assert len({sum(c.steps for c in chunks) for chunks in ranks}) == 1
    for chunks in ranks:
        assert [c.steps for c in chunks[:-1]] == [chunk] * (len(chunks) - 1)
        epoch = join(chunks)
        assert len(chunks) == math.ceil(epoch.steps / chunk)
        lanes = zip(epoch.recording.T, epoch.position.T, epoch.resets.T, strict=True)
        for row, at, reset in ((r.tolist(), p.tolist(), s.tolist()) for r, p, s in lanes):
            busy = sum(r >= 0 for r in row)
            assert row[busy:] == [-1] * (len(row) - busy) == at[busy:]
            assert not any(reset[busy:])
            for t in range(busy):
                goes_on = t > 0 and (row[t], at[t]) == (row[t - 1], at[t - 1] + 1)
                assert reset[t] is not goes_on
                counts[row[t], at[t]] += 1
                starts[row[t], at[t]] += reset[t]
    assert counts == Counter((i, t) for i, length in enumerate(lengths) for t in range(length))
    assert max(starts.values()) == 1


@given(
    lengths=lengths_of_recordings,
    wish=lane_wishes,
    ranks=st.integers(1, 4),
    chunk=chunk_lengths,
    seed=seeds,
    mode=st.sampled_from([{}, {"hand_off": True}, {"warm_up": 4}]),
)
def test_every_epoch_has_every_step_once_in_order_with_a_reset_at_every_start(
    lengths: list[int], wish: int, ranks: int, chunk: int, seed: int, mode: dict[str, Any]
) -> None:
    lanes = max(1, draw_lanes(lengths, wish * ranks) // ranks)
    ranks = max(1, min(ranks, sum(lengths) // lanes))
    sources: Any = recordings(lengths)
    streams = [
        tt.Stream(sources, lanes, chunk, seed=seed, rank=rank, ranks=ranks, **mode)
        for rank in range(ranks)
    ]
    for epoch in (1, 2):
        check_epoch([list(stream) for stream in streams], lengths, chunk)
        assert {stream.epoch for stream in streams} == {epoch}


def without_resets(chunks: list[Chunk]) -> list[Chunk]:
    return [
        Chunk.from_tensors(c.inputs, c.targets, recording=c.recording, position=c.position)
        for c in chunks
    ]


MUTANT_EPOCHS: dict[str, Callable[[list[Chunk]], list[Chunk]]] = {
    "last chunk dropped": lambda chunks: chunks[:-1],
    "chunks exchanged": lambda chunks: [chunks[1], chunks[0], *chunks[2:]],
    "no resets": without_resets,
}


@pytest.mark.parametrize("mutant", list(MUTANT_EPOCHS.values()), ids=list(MUTANT_EPOCHS))
def test_check_of_an_epoch_fails_on_mutants(
    mutant: Callable[[list[Chunk]], list[Chunk]],
) -> None:
    lengths = [31, 7, 20, 5]
    chunks = list(tt.Stream(recordings(lengths), 2, 7))
    check_epoch([chunks], lengths, 7)
    with pytest.raises(AssertionError):
        check_epoch([mutant(chunks)], lengths, 7)


@given(lengths=lengths_of_recordings, wish=lane_wishes, chunk=chunk_lengths, seed=seeds)
def test_delivered_numbers_are_those_of_the_source(
    lengths: list[int], wish: int, chunk: int, seed: int
) -> None:
    sources = recordings(lengths)
    for c in tt.Stream(sources, draw_lanes(lengths, wish), chunk, seed=seed):
        assert c.targets is not None
        for t, lane in (c.recording >= 0).nonzero().tolist():
            source, position = sources[int(c.recording[t, lane])], int(c.position[t, lane])
            assert (c.inputs[t, lane].numpy() == source["inputs"][position]).all()
            assert (c.targets[t, lane].numpy() == source["targets"][position]).all()
            assert c.mask[t, lane]
        assert not c.mask[c.recording < 0].any()
        assert c.valid_steps == int(c.mask.sum())
        assert c.any_reset == bool(c.resets.any())


def test_order_is_that_of_the_seed_and_new_in_every_epoch() -> None:
    sources = recordings(range(3, 15))

    def orders(seed: int | None) -> list[tuple[int, ...]]:
        stream = tt.Stream(sources, lanes=1, chunk=50, seed=seed)
        return [
            tuple(whole(stream).recording.flatten().unique_consecutive().tolist()) for _ in range(3)
        ]

    assert orders(5) == orders(5)
    assert len({*orders(5), *orders(6)}) == 6
    assert set(orders(None)) == {tuple(range(12))}


def test_iterating_again_starts_the_epoch_again_and_a_whole_one_counts() -> None:
    stream = tt.Stream(recordings([9, 8]), lanes=1, chunk=4)
    first = next(iter(stream))
    assert (stream.position, stream.epoch) == (4, 0)
    assert same(next(iter(stream)), first)
    assert len(list(stream)) == len(stream) == 5
    assert (stream.position, stream.epoch) == (0, 1)


def rest_of_epoch(stream: tt.Stream, chunk: int) -> list[Chunk]:
    collected: list[Chunk] = []
    while (taken := stream.take(chunk)) is not None:
        collected.append(taken)
    return collected


def remaining(stream: tt.Stream, epochs: int = 2) -> list[Chunk]:
    return [chunk for _ in range(epochs) for chunk in stream]


@given(
    lengths=few_short_recordings,
    wish=lane_wishes,
    chunk=st.sampled_from([1, 3, 7, 100]),
    seed=seeds,
    stop=st.integers(0, 40),
)
def test_resume_anywhere_yields_the_same_stream(
    lengths: list[int], wish: int, chunk: int, seed: int, stop: int
) -> None:
    """Also between chunks, through `take` with other lengths, and in the epochs that follow."""
    lanes, sources = draw_lanes(lengths, wish), recordings(lengths)
    stream = tt.Stream(sources, lanes, chunk, seed=seed)
    while stop > 0 and stream.position < stream.steps:
        stream.take(min(stop, 5))
        stop -= 5
    saved = stream.state_dict()
    left = stream.steps - stream.position
    rest = rest_of_epoch(stream, chunk)
    after = remaining(stream)

    twin = tt.Stream(sources, lanes, chunk, seed=seed)
    twin.load_state_dict(saved)
    assert all_same(list(twin), rest)
    assert all_same(remaining(twin), after)
    assert sum(c.steps for c in rest) == left


@dataclass
class Counting:
    """A recording that notes what is read of it."""

    steps: int
    name: str = "counting"
    reads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __len__(self) -> int:
        return self.steps

    def read(self, start: int, stop: int) -> StepArrays:
        self.reads.append((start, stop))
        return StepArrays(
            np.arange(start, stop, dtype=np.float64).reshape(-1, 1), np.zeros(stop - start)
        )


def test_nothing_is_read_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "BLOCK_LANE_STEPS", 40)
    first, second = Counting(100, "a"), Counting(100, "b")
    stream = tt.Stream([first, second], lanes=1, chunk=10, seed=None)
    assert len(stream) == 20
    assert first.reads == second.reads == []
    for _ in range(4):
        stream.take(10)
    assert first.reads == [(0, 40)]  # one stretch ahead, then cut
    stream.take(40)
    assert (first.reads, second.reads) == ([(0, 40), (40, 80)], [])
    stream.take(45)  # what is longer than a stretch is joined from those it touches
    assert (first.reads[2:], second.reads) == ([(80, 100)], [(0, 20), (20, 60)])


@given(
    takes=st.lists(st.sampled_from([1, 3, 10, 17, 50]), min_size=1, max_size=30),
    ahead=st.sampled_from([1, 16, 40, 1000]),
)
def test_reading_ahead_changes_no_number(takes: list[int], ahead: int) -> None:
    sources = recordings([37, 11, 29])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "BLOCK_LANE_STEPS", ahead)
        stream = tt.Stream(sources, lanes=2, chunk=10)
        for steps in takes:
            at = stream.position
            expected = stream.read(at, min(at + steps, stream.steps)) if at < stream.steps else None
            chunk = stream.take(steps)
            assert (chunk is None) == (expected is None)
            assert chunk is None or expected is None or same(chunk, expected)


def test_only_the_rows_read_of_a_memory_mapped_file_are_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", np.arange(300_000.0).reshape(-1, 3))
    mapped = np.load(tmp_path / "long.npy", mmap_mode="r")
    recording = as_recording({"inputs": mapped}, 0)
    assert isinstance(recording, TableRecording)
    assert isinstance(recording.inputs, ArrayRows)
    assert isinstance(recording.inputs.array, np.memmap)
    chunk = tt.Stream(tmp_path / "long.npy", lanes=4, chunk=5).take(5)
    assert chunk is not None
    assert sorted(chunk.inputs[0, :, 0].tolist()) == [0, 75_000, 150_000, 225_000]


def one(inputs: Any, targets: Any = None, **options: Any) -> Chunk:
    source = {"name": "it", "inputs": inputs} | ({} if targets is None else {"targets": targets})
    setting: dict[str, Any] = {"lanes": 1, "chunk": 4} | options
    return whole(tt.Stream(source, **setting))


def test_warm_up_masks_the_first_steps_of_every_recording_and_part() -> None:
    stream = tt.Stream(recordings([9, 2, 6]), lanes=1, chunk=4, warm_up=3, seed=None)
    assert whole(stream).mask.flatten().tolist() == [
        i >= 3 for i in (*range(9), *range(2), *range(6))
    ]
    parts = tt.Stream(recordings([10]), lanes=2, chunk=4, warm_up=3)
    assert whole(parts).mask.sum(0).tolist() == [2, 2]
    assert whole(tt.Stream(recordings([9]), lanes=1, chunk=4)).mask.all()  # the mutant: no warm-up


def test_targets_that_are_missing_are_masked() -> None:
    classes = np.array([0, -100, 2, 1, -100])
    assert one(np.ones((5, 2)), classes).mask.flatten().tolist() == [True, False, True, True, False]
    floats = np.array([[0, 1], [np.nan, 1], [2, 3], [4, np.nan]])
    chunk = one(np.ones((4, 2)), floats)
    assert chunk.mask.flatten().tolist() == [True, False, True, False]
    assert chunk.valid_steps == 2
    assert one(
        np.ones((3, 2)), np.array([1.0, -100.0, 2.0])
    ).mask.all()  # -100 is a number among floating targets


def test_missing_inputs_are_refused_with_step_and_column() -> None:
    values = np.ones((9, 3))
    values[4, 2] = values[6, 0] = np.nan
    values[7, 1] = np.inf
    with pytest.raises(
        DataError,
        match=(
            r"recording 'it' has an input that is NaN or infinite at step 4, column 2.*"
            r"missing='mask'"
        ),
    ):
        one(values, chunk=9)
    first = recordings([9])[0] | {"name": "good"}
    second = {"name": "bad", "inputs": values, "targets": np.zeros((9, 2))}
    with pytest.raises(DataError, match=r"recording 'bad' .* infinite at step 4, column 2"):
        list(tt.Stream([first, second], lanes=2, chunk=5))


@pytest.mark.parametrize("writeable", [True, False])
def test_inputs_that_are_missing_are_zeroed_and_masked_on_request_in_every_epoch(
    writeable: bool,
) -> None:
    values = np.ones((9, 3), dtype=np.float32)
    values[4, 2], values[7, 1] = np.nan, -np.inf
    values.flags.writeable = writeable
    source = {"inputs": values, "targets": np.zeros(9), "static": [0.5]}
    stream = tt.Stream(source, lanes=1, chunk=4, missing="mask")
    chunk = whole(stream)
    assert chunk.mask.flatten().tolist() == [t not in (4, 7) for t in range(9)]
    rows = [chunk.inputs[t, 0].tolist() for t in (3, 4, 7)]
    assert rows == [[1, 1, 1, 0.5], [1, 1, 0, 0.5], [1, 0, 1, 0.5]]
    assert np.isnan(values[4, 2])  # the user's array is not changed
    assert same(whole(stream), chunk)


ONES = np.ones((6, 2))
TYPES: dict[str, tuple[Any, Any, torch.dtype | None, str]] = {  # of inputs and targets
    "float32": (ONES.astype("f4"), ONES[:, 0].astype("f4"), None, "float32 2, float32"),
    "float64": (ONES, ONES[:, :1], None, "float64 2, float64 1"),
    "to float32": (ONES, np.ones((6, 3)), torch.float32, "float32 2, float32 3"),
    "vector": (np.ones(6, "f4"), np.ones(6, np.uint8), None, "float32 1, int64"),
    "tokens": (np.ones(6, np.int16), np.ones(6, np.bool_), None, "int64, int64"),
    "integers as floats": (np.ones(6, "i2"), np.ones(6, "i8"), torch.float32, "float32 1, int64"),
    "integer matrix": (ONES.astype("i4"), None, None, "int64 2"),
    "tensors": (
        torch.ones(6, 2),
        torch.ones(6, requires_grad=True),
        None,
        "float32 2, float32",
    ),
    "big endian and reversed": (ONES.astype(">f8"), np.ones(6)[::-1], None, "float64 2, float64"),
    "images": (np.ones((6, 2, 4)), np.ones(6), None, "float64 2 4, float64"),
}


@pytest.mark.parametrize(
    ("inputs", "targets", "dtype", "expected"), list(TYPES.values()), ids=list(TYPES)
)
def test_types_and_shapes_follow_the_rules(
    inputs: Any, targets: Any, dtype: torch.dtype | None, expected: str
) -> None:
    chunk = one(inputs, targets, dtype=dtype)
    parts = [chunk.inputs] if chunk.targets is None else [chunk.inputs, chunk.targets]
    assert {part.shape[:2] for part in parts} == {(6, 1)}
    kinds = [" ".join(map(str, (part.dtype, *part.shape[2:]))) for part in parts]
    assert ", ".join(kinds).replace("torch.", "") == expected
    assert chunk.mask.all()


@given(lengths=few_short_recordings, length=st.sampled_from([1, 2, 7, 31, 50]))
def test_windows_are_the_recordings_cut_each_with_a_start_of_its_own(
    lengths: list[int], length: int
) -> None:
    sources = recordings(lengths)
    parts = windows(sources, length)
    assert sum(map(len, parts)) == sum(lengths)
    assert max(map(len, parts)) <= length
    assert sum(len(part) < length for part in parts) <= len(lengths)
    chunk = whole(tt.Stream(parts, lanes=1, chunk=9, seed=None))
    assert int(chunk.resets.sum()) == len(parts) == sum(math.ceil(n / length) for n in lengths)
    assert torch.equal(
        chunk.inputs[:, 0],
        torch.from_numpy(np.concatenate([source["inputs"] for source in sources])),
    )
    assert parts[-1].name.startswith(f"r{len(lengths) - 1}[")


def test_chunks_by_hand_are_checked_and_filled_in() -> None:
    chunk = Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2))
    assert (chunk.steps, chunk.lanes, chunk.valid_steps, chunk.any_reset) == (5, 2, 10, False)
    assert Chunk.from_tensors(torch.zeros(5, 2)).valid_steps == 10
    with pytest.raises(DataError, match=r"inputs have shape \(5,\), expected \(T, B, D\)"):
        Chunk.from_tensors(torch.zeros(5))
    with pytest.raises(DataError) as caught:
        Chunk.from_tensors(
            torch.zeros(5, 2, 3),
            torch.zeros(2, 5),
            resets=torch.zeros(4, 2, dtype=torch.bool),
            mask=torch.ones(5, 2),
        )
    message = str(caught.value)
    for part in (
        "targets: shape (2, 5), expected the first two sizes (5, 2)",
        "resets: shape (4, 2)",
        "mask: dtype torch.float32, expected torch.bool",
    ):
        assert part in message
