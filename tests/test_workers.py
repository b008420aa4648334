"""Reading ahead in a thread: the same chunks to the bit, the same errors, and
nobody left behind.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
import throughtime.stream.stream as stream_module
from quick import examples
from strategies import draw_lanes, recordings, seeds
from test_stream import Counting, all_same, rest_of_epoch
from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.stream.recording import StepArrays

LENGTHS = [37, 11, 29, 5]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short recordings are read in many stretches."""
    monkeypatch.setattr(stream_module, "BLOCK_LANE_STEPS", 24)


@pytest.fixture(autouse=True)
def nobody_left_behind() -> Iterator[None]:
    """No process or thread that a stream started outlives it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    gc.collect()
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    deadline = time.monotonic() + 10
    while (threads := readers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads


def readers() -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("throughtime-stream")
    ]


def pair(lanes: int = 2, **options: Any) -> list[tt.Stream]:
    """The same stream, read ahead and read when needed."""
    return [
        tt.Stream(recordings(LENGTHS), lanes, 5, workers=workers, **options)
        for workers in ("thread", 0)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"offset": 9}, {"lanes": 7, "hand_off": True}],
    ids=["plain", "offset", "hand-off"],
)
def test_reading_ahead_gives_the_same_chunks_across_epochs(options: dict[str, Any]) -> None:
    ahead, here = pair(**options)
    for _ in range(3):
        assert all_same(list(ahead), list(here))
    assert ahead.state_dict() == here.state_dict()
    assert ahead.wait_seconds > 0


def test_reading_ahead_gives_the_same_chunks_after_every_kind_of_move() -> None:
    """Other lengths, other readers, a restart, and moves to earlier and other epochs."""

    def results(stream: tt.Stream) -> list[Chunk | None]:
        list(stream)
        stream.take(8)
        saved = stream.state_dict()
        read_chunks = [stream.take(5), stream.take(17), stream.read(0, 9), stream.take(5)]
        stream.load_state_dict(saved)
        read_chunks += [stream.take(3), next(iter(stream)), *rest_of_epoch(stream, 4)]
        stream.load_state_dict(saved | {"epoch": 5, "position": 20})
        return [*read_chunks, *stream]

    got, expected = map(results, pair())
    assert all_same([c for c in got if c], [c for c in expected if c])
    assert [c is None for c in got] == [c is None for c in expected]


@examples(6)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    wish=st.integers(1, 5),
    chunk=st.sampled_from([1, 7, 30]),
    seed=seeds,
    stop=st.integers(0, 60),
)
def test_reading_ahead_resumes_anywhere(
    lengths: list[int], wish: int, chunk: int, seed: int, stop: int
) -> None:
    lanes = draw_lanes(lengths, wish)
    here = tt.Stream(recordings(lengths), lanes, chunk, seed=seed)
    if stop:
        here.take(stop)
    ahead = tt.Stream(recordings(lengths), lanes, chunk, seed=seed, workers="thread")
    ahead.load_state_dict(here.state_dict())
    assert all_same(list(ahead), rest_of_epoch(here, chunk))
    assert all_same(list(ahead), list(here))


def with_nan() -> list[dict[str, Any]]:
    sources = recordings(LENGTHS)
    sources[1]["inputs"][3, 2] = np.nan
    return sources


def error_of(source: Any, workers: Any) -> tuple[str, int]:
    """The message, and at which step.

    The same again when it is tried again; what was read before stays readable.
    """
    stream = tt.Stream(source, 1, 5, seed=None, workers=workers)
    with pytest.raises(DataError) as first:
        list(stream)
    at = stream.position
    with pytest.raises(DataError) as second:
        stream.take(5)
    assert str(first.value) == str(second.value)
    stream._start()
    assert stream.take(5) is not None
    return str(first.value), at


def test_error_ahead_is_the_error_of_reading_here() -> None:
    results = error_of(with_nan(), "thread")
    assert results == error_of(with_nan(), 0)
    assert "recording 'r1' has 1 input that is NaN" in results[0]


@dataclass
class Hiccup(Counting):
    """A disk that fails once in a process, and serves from then on."""

    def read(self, start: int, stop: int) -> StepArrays:
        if start >= 40 and not getattr(self, "failed", False):
            self.failed = True
            raise OSError("the disk was gone")
        return StepArrays(
            np.arange(start, stop, dtype=np.float64).reshape(-1, 1), np.zeros(stop - start)
        )


def test_after_any_error_the_steps_are_those_of_their_position() -> None:
    stream = tt.Stream(Hiccup(90), 1, 5, seed=None, workers="thread")
    with pytest.raises(OSError, match="the disk was gone"):
        list(stream)
    for _ in range(2):
        chunks = list(stream)
        assert torch.cat([c.inputs[:, 0, 0] for c in chunks]).tolist() == list(range(90))


@pytest.mark.parametrize("workers", [-1, 2, "threads", 1.5])
def test_workers_that_make_no_sense_are_refused(workers: Any) -> None:
    with pytest.raises(DataError, match=r"workers=.*: expected 0, or 'thread'"):
        tt.Stream(recordings(LENGTHS), 2, 5, workers=workers)
