"""Who plays where: recordings on lanes, as plans of integers (no torch, no numpy).

A lane plays spans one after another without a gap. The longest spans are placed first, each on the
lane that is free first (longest processing time first: the longest lane is at most 4/3 as long as
it must be, Graham 1969); each lane then plays its own in a seeded order. Fewer recordings than
lanes are cut into contiguous parts, so that no lane stands idle; part after part, lane after lane,
so that the state in which one lane ends is the one in which the next began.

All ranks make the same plan for all of their lanes together, and each plays its own rows: an epoch
has the same number of steps on every rank, and a rank that has nothing left plays idle lanes.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from throughtime.errors import DataError


@dataclass(frozen=True, slots=True)
class RecordingSpan:
    """The steps `start` to before `stop` of a recording.

    The state entering `start` is the initial one.
    """

    recording: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class LaneSlice(NamedTuple):
    """What a lane plays within a chunk: steps `at` to before `at + steps` of the chunk.

    `since` counts steps from where the state was the initial one: 0 means that the first of them is
    a reset.
    """

    lane: int
    at: int
    steps: int
    recording: int
    position: int
    since: int


def cut(
    lengths: Sequence[int], lanes: int, offsets: Sequence[int] | None = None
) -> list[RecordingSpan]:
    """One span per recording, or, with fewer recordings than lanes, one per lane of nearly equal
    length.

    Args:
        lengths: steps of each recording.
        lanes: those of all ranks together.
        offsets: first steps of each recording that are not played.

    Raises:
        DataError: an empty recording, no recordings, or more lanes than steps.
    """
    if lanes < 1:
        raise DataError(f"lanes={lanes}: expected at least 1")
    if not lengths:
        raise DataError("no recordings: expected at least one")
    empty = [i for i, length in enumerate(lengths) if length < 1]
    if empty:
        raise DataError(f"recording {empty[0]} is empty: every recording needs at least one step")
    begins = [0] * len(lengths) if offsets is None else offsets
    played = [length - begin for length, begin in zip(lengths, begins, strict=True)]
    if lanes > sum(played):
        raise DataError(
            f"lanes={lanes} but the recordings have {sum(played)} steps in all: a lane needs at"
            " least one step"
        )
    parts = _parts(played, lanes)
    return [
        RecordingSpan(i, begin + steps * k // parts[i], begin + steps * (k + 1) // parts[i])
        for i, (begin, steps) in enumerate(zip(begins, played, strict=True))
        for k in range(parts[i])
    ]


def cut_equal_parts(lengths: Sequence[int], lanes: int) -> list[RecordingSpan]:
    """At most one span per lane, of the fewest steps that do; only the last span of a recording may
    be shorter.

    Raises:
        DataError: see `cut`.
    """
    cut(lengths, lanes)  # refuses what cannot be played
    least, most = 1, max(lengths)
    while least < most:
        middle = (least + most) // 2
        fits = sum(-(-length // middle) for length in lengths) <= lanes
        least, most = (least, middle) if fits else (middle + 1, most)
    return [
        RecordingSpan(i, at, min(at + least, length))
        for i, length in enumerate(lengths)
        for at in range(0, length, least)
    ]


def _parts(lengths: Sequence[int], lanes: int) -> list[int]:
    """How many parts each recording is cut into: the longest parts are cut first, until lanes are full."""
    parts = [1] * len(lengths)
    longest: list[tuple[float, int]] = [(-length, i) for i, length in enumerate(lengths)]
    heapq.heapify(longest)
    for _ in range(lanes - len(lengths)):
        _, i = longest[0]
        parts[i] += 1
        heapq.heapreplace(longest, (-lengths[i] / parts[i], i))
    return parts


@dataclass(frozen=True)
class LaneSchedule:
    """The spans of every lane in playing order; lane time counts steps from the start of the epoch.

    Attributes:
        spans: of each lane, those of all ranks.
        starts: the lane time at which each of them begins, and at which the last ends.
        steps: those of the longest lane.
        mine: the lanes that this rank plays.
        handed_off: whether a part goes on from the state of the part before it, and so from where the
            recording began.
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
        offsets: Sequence[int] | None = None,
        rank: int = 0,
        ranks: int = 1,
        handed_off: bool = False,
        even: bool = False,
    ) -> "LaneSchedule":
        """Places every span.

        Args:
            lengths: steps of each recording.
            lanes: those of one rank.
            order: draws which comes when; `None` keeps the order given.
            offsets: see `cut`.
            rank: whose lanes `plays` tells.
            ranks: how many there are.
            handed_off: see `LaneSchedule`.
            even: parts of a recording are equally long but its last one, so that all others end
                with the epoch.
        """
        total = lanes * ranks
        mine = range(lanes * rank, lanes * (rank + 1))
        if len(lengths) >= total:
            placed = _placed(cut(lengths, total, offsets), total, order)
        else:
            placed = [
                [span]
                for span in (
                    cut_equal_parts(lengths, total) if even else cut(lengths, total, offsets)
                )
            ]
            placed += [[] for _ in range(total - len(placed))]
        starts = tuple((0, *accumulate(len(span) for span in row)) for row in placed)
        return cls(
            tuple(map(tuple, placed)), starts, max(row[-1] for row in starts), mine, handed_off
        )

    def slices(self, start: int, stop: int) -> Iterator[LaneSlice]:
        """What every lane of this rank plays in lane time `start` to before `stop`, lane by lane, in order."""
        for lane, at in enumerate(self.own_lanes):
            row, begins = self.spans[at], self.starts[at]
            now = start
            index = bisect_right(begins, now) - 1
            while now < stop and index < len(row):
                span, begin = row[index], begins[index]
                steps = min(stop, begins[index + 1]) - now
                position = span.start + now - begin
                yield LaneSlice(
                    lane,
                    now - start,
                    steps,
                    span.recording,
                    position,
                    position if self.handed_off else now - begin,
                )
                now += steps
                index += 1

    @cached_property
    def common_resets(self) -> tuple[int, ...]:
        """The lane times at which no lane of any rank goes on with a span: each starts one, or has nothing left; the last is the end."""
        longest = max(self.starts, key=lambda row: row[-1])
        others = [(set(row), row[-1]) for row in self.starts]
        return tuple(
            at for at in longest if all(at in starts or at >= end for starts, end in others)
        )

    @property
    def idle_steps(self) -> int:
        """Steps in which a lane of this rank has nothing left to play, over the whole epoch."""
        return sum(self.steps - self.starts[lane][-1] for lane in self.own_lanes)


def _placed(
    spans: list[RecordingSpan], lanes: int, order: random.Random | None
) -> list[list[RecordingSpan]]:
    """The spans of each lane.

    With an order the longest are placed first, and each lane's are drawn anew.
    """
    if order is not None:
        order.shuffle(spans)  # among equal lengths the sort keeps it
        spans = sorted(spans, key=len, reverse=True)
    placed: list[list[RecordingSpan]] = [[] for _ in range(lanes)]
    free = [(0, lane) for lane in range(lanes)]
    for span in spans:
        busy, lane = free[0]
        placed[lane].append(span)
        heapq.heapreplace(free, (busy + len(span), lane))
    if order is not None:
        for row in placed:
            order.shuffle(row)
    return placed
