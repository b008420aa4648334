"""How two chunks of a recurrent unit lie in time, by what they cover of their data."""

from collections.abc import Callable
from typing import NamedTuple

from throughtime.doctor._data import Root


class Lane(NamedTuple):
    """The indices of the first and the last step of one lane of a chunk in its root."""

    root: Root
    first: list[int]
    last: list[int]
    step: list[int]  # from one step to the next, zeros if unknown
    size: list[int]  # of what a step covers, if every step covers the whole chunk; else empty
    steps: int

    @property
    def time(self) -> int:
        """The dimension of time, -1 if unknown."""
        moved = [d for d, n in enumerate(self.step) if n]
        return moved[0] if len(moved) == 1 else -1


def lane(root: Root, offsets: list[int], steps: int) -> Lane:
    """A lane of so many steps: the offsets of the first two, of the last, and of its end."""
    first, second, last, end = map(root.index, offsets)
    step = [b - a for a, b in zip(first, second, strict=True)]
    if [a + n * (steps - 1) for a, n in zip(first, step, strict=True)] != last:
        step = [0] * len(step)
    whole = steps > 1 and first == last
    size = [1 + b - a for a, b in zip(last, end, strict=True)] if whole else []
    return Lane(root, first, last, step, size, steps)


def follows(a: Lane, b: Lane) -> bool:
    """Whether one lane continues where the other ended, in one dimension of the data.

    With x[:-1] the last step is a target only. A convolution may read the end of the last chunk
    again, as context.
    """
    moved = [(d, j - i) for d, (i, j) in enumerate(zip(a.last, b.first, strict=False)) if i != j]
    if a.root is not b.root or len(moved) != 1:
        return False
    ((d, distance),) = moved
    if a.size:
        size = a.size[d]
        return size > 1 and distance in {size, size + 1, size - size % a.steps}
    step = a.step[d] if a.steps > 1 else 1
    return step != 0 and distance in {step, 2 * step}


def relation(
    before: list[Lane],
    after: list[Lane],
    rows: list[int] | None,
    read: Callable[[Root], list[Lane]],
) -> str:
    """How two chunks lie in time, the state of the first in the second.

    `rows[b]` is the lane of `before` whose state lane `b` of `after` has. `read` gives the lanes of
    the last chunk that was read from a root, as far as known.

    Returns:
        "next": every lane goes on; "rows": every lane goes on from another lane; "jump": it goes on
        at another position; "again": it goes back to the beginning; "start": it begins in other
        data; "other": it goes on in other data, whose last chunk was read with another state;
        "": uncertain.
    """
    if not before or not after or (rows is None and len(before) != len(after)):
        return ""  # some lanes may have ended
    of = range(len(after)) if rows is None else rows
    pairs = [(before[i], lane) for i, lane in zip(of, after, strict=False) if i < len(before)]
    if all(follows(a, b) for a, b in pairs):
        return "next" if pairs else ""
    if all(any(follows(other, b) for other in before) for _, b in pairs):
        return "rows"
    kinds = {_of_lanes(a, b, read) for a, b in pairs}
    if kinds <= {"start", "next"}:
        return "start"
    if "elsewhere" in kinds and kinds <= {"elsewhere", "jump", "other", "start", ""}:
        return "jump"
    return kinds.pop() if len(kinds) == 1 else ""


def _of_lanes(a: Lane, b: Lane, read: Callable[[Root], list[Lane]]) -> str:
    """How the next chunk of one lane lies in time; "elsewhere" is a jump within other data."""
    if follows(a, b):
        return "next"
    time = b.time if b.time >= 0 else a.time
    size = a.size or b.size
    if a.root is not b.root:
        inside = [i for d, i in enumerate(b.first) if not size or (b.size and b.size[d] > 1)]
        if not any(inside) or (time >= 0 and _begins(b, time)):
            return "start"
        last = read(b.root)
        if any(follows(each, b) for each in last):
            return "other"
        return "elsewhere" if last and not size else ""
    moved = {d for d, (i, j) in enumerate(zip(a.last, b.first, strict=True)) if i != j}
    if time < 0:
        along = {d for d in moved if len(moved) == 1 or not b.first[d]}
        if len(along) != 1:
            return ""
        (time,) = along
    if _begins(b, time):
        return "start" if moved - {time} else "again"
    return "jump" if moved == {time} and (a.size or a.steps == 1 or any(a.step)) else ""


def _begins(lane: Lane, time: int) -> bool:
    """Whether a lane begins at the first element of its root in time, in its direction."""
    return lane.first[time] == (lane.root.shape[time] - 1 if lane.step[time] < 0 else 0)


def same_start(a: list[Lane], b: list[Lane]) -> bool:
    """Whether every lane known of two chunks begins at the same element."""
    return bool(a and b) and all(
        x.root is y.root and x.first == y.first for x, y in zip(a, b, strict=False)
    )
