"""Who plays where: plans of integers, checked without torch."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import chunk_lengths, draw_lanes, lengths_of_recordings, seeds
from throughtime.errors import DataError
from throughtime.stream.lanes import LaneSchedule, cut

lane_wishes = st.sampled_from([1, 2, 3, 7, 11, 64])


def check_epoch(table: LaneSchedule, lengths: list[int], chunk: int) -> None:
    """Every step of every recording once, in order, without gaps; lanes idle only at their end."""
    counts = Counter[tuple[int, int]]()
    for begin in range(0, table.steps, chunk):
        stop = min(begin + chunk, table.steps)
        busy = dict.fromkeys(range(len(table.spans)), 0)
        for part in table.slices(begin, stop):
            assert part.start == busy[part.lane]  # gapless, and in order
            busy[part.lane] += part.steps
            assert busy[part.lane] <= stop - begin
            counts.update((part.recording, part.position + i) for i in range(part.steps))
        for lane, steps in busy.items():  # nothing to part is nothing to part until the end
            assert steps == stop - begin or not [
                p for p in table.slices(stop, table.steps) if p.lane == lane
            ]
    assert counts == Counter((i, t) for i, length in enumerate(lengths) for t in range(length))
    assert table.idle_steps == table.steps * len(table.spans) - sum(lengths)


@given(lengths=lengths_of_recordings, wish=lane_wishes, seed=seeds, chunk=chunk_lengths)
def test_every_step_occurs_once_in_order_and_lanes_idle_only_at_their_end(
    lengths: list[int], wish: int, seed: int, chunk: int
) -> None:
    check_epoch(
        LaneSchedule.plan(lengths, draw_lanes(lengths, wish), random.Random(seed)), lengths, chunk
    )


@given(lengths=lengths_of_recordings, wish=lane_wishes, seed=seeds, chunk=chunk_lengths)
def test_plays_do_not_depend_on_where_a_chunk_is_cut(
    lengths: list[int], wish: int, seed: int, chunk: int
) -> None:
    table = LaneSchedule.plan(lengths, draw_lanes(lengths, wish), random.Random(seed))

    def flat(begin: int, stop: int) -> set[tuple[int, int, int, int, int]]:
        return {
            (p.lane, begin + p.start + i, p.recording, p.position + i, p.age + i)
            for p in table.slices(begin, stop)
            for i in range(p.steps)
        }

    cuts = set[tuple[int, int, int, int, int]]()
    for begin in range(0, table.steps, chunk):
        cuts |= flat(begin, min(begin + chunk, table.steps))
    assert cuts == flat(0, table.steps)


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


@given(seed=seeds)
def test_order_comes_from_the_seed_and_none_keeps_that_of_the_sequence(seed: int) -> None:
    lengths = list(range(1, 12))
    same = [LaneSchedule.plan(lengths, 3, random.Random(seed)) for _ in range(2)]
    assert same[0] == same[1]
    assert [span.recording for span in LaneSchedule.plan(lengths, 1).spans[0]] == list(range(11))


@pytest.mark.parametrize(
    ("lengths", "lanes", "reason"),
    [
        ([], 1, "no recordings: expected at least one"),
        ([3, 2], 6, "6 lanes, but the recordings have 5 steps in all"),
    ],
    ids=["no recordings", "too many lanes"],
)
def test_what_no_plan_can_serve_is_refused(lengths: list[int], lanes: int, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        LaneSchedule.plan(lengths, lanes)


def test_as_many_lanes_as_steps_leave_none_idle() -> None:
    table = LaneSchedule.plan([3, 1, 7], 11, random.Random(0))
    assert (table.steps, table.idle_steps) == (1, 0)
