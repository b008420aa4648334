"""Who plays where: plans of integers, checked without torch."""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import draw_lanes, lengths_of_recordings, seeds
from throughtime.stream.lanes import LaneSchedule, LaneSlice, cut

lane_wishes = st.sampled_from([1, 2, 3, 7, 11, 64])


@given(lengths=lengths_of_recordings, wish=lane_wishes)
def test_recordings_are_cut_only_when_they_are_fewer_than_lanes(
    lengths: list[int], wish: int
) -> None:
    lanes = draw_lanes(lengths, wish)
    spans = cut(lengths, lanes)
    assert len(spans) == max(lanes, len(lengths))
    for i, length in enumerate(lengths):
        mine = [span for span in spans if span.recording == i]
        assert [span.start for span in mine] == [0, *[span.stop for span in mine[:-1]]]
        assert mine[-1].stop == length
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
    if len(lengths) >= lanes:
        assert all(len(span) == lengths[span.recording] for span in spans)


long_lengths = st.lists(
    st.integers(1, 10_000) | st.sampled_from([1, 2, 9_973, 10_000]), min_size=1, max_size=9
)
lane_wishes_on_ranks = st.sampled_from([1, 2, 3, 7, 16])
rank_counts = st.integers(1, 4)


def plans(
    lengths: Sequence[int],
    lanes: int,
    ranks: int,
    seed: int,
    *,
    even: bool = False,
) -> list[LaneSchedule]:
    """What every rank plans by itself."""
    schedules: list[LaneSchedule] = []
    for rank in range(ranks):
        order = random.Random(seed)
        schedules.append(
            LaneSchedule.plan(lengths, lanes, order, rank=rank, ranks=ranks, even=even)
        )
    return schedules


def lanes_for(lengths: Sequence[int], wish: int, ranks: int) -> int:
    return draw_lanes(lengths, wish * ranks) // ranks


def slices_of(tables: Sequence[LaneSchedule], start: int, stop: int) -> list[LaneSlice]:
    """Those of all ranks, lanes numbered over all of them."""
    return [
        part._replace(lane=part.lane + table.own_lanes.start)
        for table in tables
        for part in table.slices(start, stop)
    ]


def check_ranks(
    tables: Sequence[LaneSchedule],
    lengths: Sequence[int],
    chunk: int,
) -> None:
    """Every step once over all ranks, in order within its lane and span.

    As many steps on each rank.
    """
    assert (
        len({table.steps for table in tables})
        == len({table.common_resets for table in tables})
        == 1
    )
    counts = [np.zeros(length, dtype=int) for length in lengths]
    busy, last = dict[int, int](), dict[int, LaneSlice]()
    for begin in range(0, tables[0].steps, chunk):
        for part in slices_of(tables, begin, min(begin + chunk, tables[0].steps)):
            assert begin + part.start == busy.get(part.lane, 0)  # gapless from the start
            busy[part.lane] = begin + part.start + part.steps
            before = last.get(part.lane)
            goes_on = before is not None and (before.recording, before.position + before.steps) == (
                part.recording,
                part.position,
            )
            assert part.age == 0 or (
                goes_on and before is not None and part.age == before.age + before.steps
            )
            counts[part.recording][part.position : part.position + part.steps] += 1
            last[part.lane] = part
    assert all((count == 1).all() for count in counts)
    assert max(busy.values()) == tables[0].steps


@given(
    lengths=long_lengths,
    wish=lane_wishes_on_ranks,
    ranks=rank_counts,
    seed=seeds,
    part_count=st.integers(1, 40),
    even=st.booleans(),
)
def test_ranks_play_every_step_once_in_order(
    lengths: list[int], wish: int, ranks: int, seed: int, part_count: int, even: bool
) -> None:
    lanes = max(1, lanes_for(lengths, wish, ranks))
    ranks = min(ranks, sum(lengths) // lanes)
    tables = plans(lengths, lanes, ranks, seed, even=even)
    check_ranks(tables, lengths, -(-tables[0].steps // part_count))
