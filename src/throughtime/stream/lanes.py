"""Lane schedules: which lane plays which part of which recording, as integers.

A lane plays spans one after another without a gap. The longest spans are placed first, each on the
lane that is free first (longest processing time first: the longest lane is at most 4/3 as long as
the optimum, Graham 1969); each lane then plays its own in a seeded order. Fewer recordings than
lanes are cut into contiguous parts, so that no lane is idle. Parts go to lanes in order, so the
state in which one lane ends is the one in which the next began.

All ranks make the same schedule for all of their lanes, and each plays its own rows: an epoch has
the same number of steps on every rank, and a rank that has nothing left plays idle lanes.
"""

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from throughtime.errors import DataError


@dataclass(frozen=True, slots=True)
class RecordingSpan:
    """The steps `start` to before `stop` of a recording; the initial state enters `start`."""

    recording: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class LaneSlice(NamedTuple):
    """The steps of one recording that a lane plays within a chunk.

    Attributes:
        lane: the lane, of this rank.
        start: the first step, in the chunk.
        steps: how many.
        recording: index of the recording.
        position: the first step, in the recording.
        age: steps played since the state was the initial one: 0 makes the first step a reset.
    """

    lane: int
    start: int
    steps: int
    recording: int
    position: int
    age: int

    @property
    def stop(self) -> int:
        return self.start + self.steps


def cut(lengths: Sequence[int], lanes: int) -> list[RecordingSpan]:
    """One span per recording, or one per lane where there are fewer recordings than lanes.

    Spans of one recording are nearly equally long.

    Args:
        lengths: steps of each recording.
        lanes: those of all ranks.

    Raises:
        DataError: no recordings, or more lanes than steps.
    """
    if not lengths:
        raise DataError("no recordings: pass at least one, tt.Stream([recording], ...)")
    if lanes > sum(lengths):
        raise DataError(
            f"{lanes} lanes, but the recordings have {sum(lengths)} steps in all; take fewer lanes"
        )
    return [
        RecordingSpan(i, steps * k // parts, steps * (k + 1) // parts)
        for i, (steps, parts) in enumerate(zip(lengths, _parts(lengths, lanes), strict=True))
        for k in range(parts)
    ]


def cut_equal_parts(lengths: Sequence[int], lanes: int) -> list[RecordingSpan]:
    """At most one span per lane, as short as possible.

    Only the last span of a recording may be shorter than the others.

    Raises:
        DataError: see `cut`.
    """
    cut(lengths, lanes)  # refuses what cannot be played
    sizes = range(1, max(lengths))

    def fits(size: int) -> bool:
        return sum(-(-length // size) for length in lengths) <= lanes

    size = 1 + bisect_left(sizes, True, key=fits)
    return [
        RecordingSpan(i, start, min(start + size, length))
        for i, length in enumerate(lengths)
        for start in range(0, length, size)
    ]


def _parts(lengths: Sequence[int], lanes: int) -> list[int]:
    """The number of parts of each recording; the longest parts are cut until all lanes have one."""
    parts = [1] * len(lengths)
    while sum(parts) < lanes:
        parts[max(range(len(parts)), key=lambda i: lengths[i] / parts[i])] += 1
    return parts


@dataclass(frozen=True)
class LaneSchedule:
    """The spans of every lane in playing order; lane time counts steps from the epoch's start.

    Attributes:
        spans: of each lane, those of all ranks.
        starts: the lane time at which each of them begins, and at which the last ends.
        steps: those of the longest lane.
        own_lanes: the lanes that this rank plays.
        handed_off: whether a part continues from the state of the part before it, and so from the
            start of the recording.
    """

    spans: tuple[tuple[RecordingSpan, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    steps: int
    own_lanes: range
    handed_off: bool = False

    @classmethod
    def plan(
        cls,
        lengths: Sequence[int],
        lanes: int,
        order: random.Random | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        handed_off: bool = False,
        even: bool = False,
    ) -> "LaneSchedule":
        """Place every span.

        Args:
            lengths: steps of each recording.
            lanes: those of one rank.
            order: draws the order of recordings; `None` keeps that of `lengths`.
            rank: the rank whose lanes `slices` gives.
            ranks: how many there are.
            handed_off: see `LaneSchedule`.
            even: the parts of a recording are equally long but its last one, so that all others end
                with the epoch.
        """
        total = lanes * ranks
        if len(lengths) >= total:
            rows = _place(cut(lengths, total), total, order)
        else:
            parts = cut_equal_parts(lengths, total) if even else cut(lengths, total)
            rows = [[span] for span in parts] + [[] for _ in range(total - len(parts))]
        starts = tuple((0, *accumulate(len(span) for span in row)) for row in rows)
        own_lanes = range(lanes * rank, lanes * (rank + 1))
        steps = max(row[-1] for row in starts)
        return cls(tuple(map(tuple, rows)), starts, steps, own_lanes, handed_off)

    def slices(self, start: int, stop: int) -> Iterator[LaneSlice]:
        """The slices of this rank's lanes in lane time `start` to before `stop`, lane by lane."""
        for lane, row in enumerate(self.own_lanes):
            spans, starts = self.spans[row], self.starts[row]
            now = start
            index = bisect_right(starts, now) - 1
            while now < stop and index < len(spans):
                span, played = spans[index], now - starts[index]
                steps = min(stop, starts[index + 1]) - now
                position = span.start + played
                age = position if self.handed_off else played
                yield LaneSlice(lane, now - start, steps, span.recording, position, age)
                now += steps
                index += 1

    @cached_property
    def common_resets(self) -> tuple[int, ...]:
        """The lane times at which no lane of any rank continues a span; the last is the end."""
        longest = max(self.starts, key=lambda row: row[-1])
        others = [(set(row), row[-1]) for row in self.starts]
        return tuple(
            time for time in longest if all(time in row or time >= end for row, end in others)
        )


def _place(
    spans: list[RecordingSpan], lanes: int, order: random.Random | None
) -> list[list[RecordingSpan]]:
    """The spans of each lane.

    With an order, the longest are placed first, and those of each lane are shuffled.
    """
    if order is not None:
        order.shuffle(spans)  # the sort keeps the order of equal lengths
        spans = sorted(spans, key=len, reverse=True)
    rows = [list[RecordingSpan]() for _ in range(lanes)]
    free = [(0, lane) for lane in range(lanes)]
    for span in spans:
        busy, lane = free[0]
        rows[lane].append(span)
        heapq.heapreplace(free, (busy + len(span), lane))
    if order is not None:
        for row in rows:
            order.shuffle(row)
    return rows
