"""Who plays where: recordings on lanes, as plans of integers (no torch, no numpy).

A lane plays spans one after another without a gap. Recordings are placed in a seeded order, each on
the lane that is free first (list scheduling, Graham 1966), so lanes end within the longest span of
each other. Fewer recordings than lanes are cut into contiguous parts, so that no lane stands idle.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from throughtime.errors import DataError


@dataclass(frozen=True, slots=True)
class Span:
    """The steps `start` to before `stop` of a recording; the state entering `start` is the initial one."""

    recording: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Play:
    """What a lane plays within a chunk: steps `at` to before `at + steps` of the chunk.

    `since` counts steps from the start of the span: 0 means that the first of them is a reset.
    """

    lane: int
    at: int
    steps: int
    recording: int
    position: int
    since: int


def cut(lengths: Sequence[int], lanes: int) -> list[Span]:
    """One span per recording, or, with fewer recordings than lanes, one per lane of nearly equal length.

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
    if lanes > sum(lengths):
        raise DataError(f"lanes={lanes} but the recordings have {sum(lengths)} steps in all: a lane needs at least one step")
    parts = _parts(lengths, lanes)
    return [Span(i, length * k // parts[i], length * (k + 1) // parts[i]) for i, length in enumerate(lengths) for k in range(parts[i])]


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
class Timetable:
    """The spans of every lane in playing order; lane time counts steps from the start of the epoch."""

    spans: tuple[tuple[Span, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    steps: int

    @classmethod
    def plan(cls, lengths: Sequence[int], lanes: int, order: random.Random | None = None) -> "Timetable":
        """Places every span; `order` shuffles them first, `None` keeps the order given."""
        spans = cut(lengths, lanes)
        if order is not None:
            order.shuffle(spans)
        placed: list[list[Span]] = [[] for _ in range(lanes)]
        free = [(0, lane) for lane in range(lanes)]
        for span in spans:
            busy, lane = free[0]
            placed[lane].append(span)
            heapq.heapreplace(free, (busy + len(span), lane))
        starts = tuple((0, *accumulate(len(span) for span in row)) for row in placed)
        return cls(tuple(map(tuple, placed)), starts, max(row[-1] for row in starts))

    def plays(self, start: int, stop: int) -> Iterator[Play]:
        """What every lane plays in lane time `start` to before `stop`, lane by lane, in order."""
        for lane, (row, begins) in enumerate(zip(self.spans, self.starts, strict=True)):
            now = start
            index = bisect_right(begins, now) - 1
            while now < stop and index < len(row):
                span, begin = row[index], begins[index]
                steps = min(stop, begins[index + 1]) - now
                yield Play(lane, now - start, steps, span.recording, span.start + now - begin, now - begin)
                now += steps
                index += 1

    @cached_property
    def fresh(self) -> tuple[int, ...]:
        """The lane times at which no lane goes on with a span: each starts one, or has nothing left; the last is the end."""
        longest = max(self.starts, key=lambda row: row[-1])
        others = [(set(row), row[-1]) for row in self.starts]
        return tuple(at for at in longest if all(at in starts or at >= end for starts, end in others))

    @property
    def idle(self) -> int:
        """Steps in which a lane has nothing left to play, over the whole epoch."""
        return sum(self.steps - row[-1] for row in self.starts)
