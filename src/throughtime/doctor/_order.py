"""How two chunks of a recurrent unit lie in time, by what they cover of their data."""

from collections.abc import Callable
from typing import NamedTuple

from throughtime.doctor._data import Root


class Lane(NamedTuple):
    """The first and the last step of one lane of a chunk, or all that a chunk covers of a root."""

    root: Root
    first: int  # storage offsets
    last: int
    step: int  # from one step to the next, 0 if unknown
    # from the last step to the first of a chunk that goes on; with x[:-1] the last is a target only
    ahead: frozenset[int]
    # the dimensions in which it covers more than one element, if every step covers the whole chunk
    whole: tuple[int, ...] = ()


def lane(root: Root, offsets: list[int], count: int) -> Lane:
    """A lane of so many steps: the offsets of the first two, of the last, and of its end."""
    first, second, last, end = offsets
    if count > 1 and first == last:  # every step covers the whole chunk
        sizes = [1 + b - a for a, b in zip(root.index(first), root.index(end), strict=True)]
        whole = tuple(d for d, size in enumerate(sizes) if size > 1)
        ahead = {k * root.strides[d] for d in whole for k in (sizes[d], sizes[d] + 1)}
        return Lane(root, first, first, 0, frozenset(ahead), whole)
    step = second - first
    step = step if first + step * (count - 1) == last else 0
    strides = root.strides if count == 1 else {step} - {0}
    return Lane(root, first, last, step, frozenset(k * n for n in strides for k in (1, 2)))


def follows(before: Lane, after: Lane) -> bool:
    """Whether one lane continues where the other ended, in one dimension of the data."""
    if before.root is not after.root or after.first - before.last not in before.ahead:
        return False
    ends = map(before.root.index, (before.last, after.first))
    moved = {d for d, (i, j) in enumerate(zip(*ends, strict=True)) if i != j}
    return len(moved) == 1 and moved <= {*(before.whole or moved)}


def relation(
    before: list[Lane],
    after: list[Lane],
    steps: int,
    rows: list[int] | None,
    read: Callable[[Root], list[Lane]],
) -> str:
    """How two chunks lie in time, the state of the first in the second.

    The first has that number of steps. `rows[b]` is the lane of `before` whose state lane `b` of
    `after` has. `read` gives the lanes of the last chunk that was read from a root, as far as
    known.

    Returns:
        "next": every lane goes on; "rows": every lane goes on from another lane; "jump": it goes on
        at another position; "again": it goes back to the beginning; "start": it begins in other
        data; "other": it goes on in other data, whose last chunk was read with another state;
        "": uncertain.
    """
    if not before or not after:
        return ""
    if before[0].whole:  # a convolution may read the end of the last chunk again, as context
        before = [
            a._replace(
                ahead=a.ahead | {m - m % (steps * n) for m in a.ahead for n in a.root.strides if n}
            )
            for a in before
        ]
    if rows is None:
        if len(before) != len(after):  # some lanes may have ended
            return ""
        rows = list(range(len(after)))
    pairs = [(before[i], lane) for i, lane in zip(rows, after, strict=False) if i < len(before)]
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
    root, step, whole = b.root, b.step or a.step, a.whole or b.whole
    if follows(a, b):
        return "next"
    index = root.index(b.first)
    # the dimension of time: the largest stride that a step may go along
    dims = [d for d, n in enumerate(root.strides) if n <= abs(step) and root.shape[d] > 1]
    along = set(sorted(dims, key=lambda d: root.strides[d])[-1:])
    if a.root is not root:
        at_start = not any(i for d, i in enumerate(index) if d in whole or not whole)
        if at_start or any(_begins(root, index, d, step) for d in along):
            return "start"
        last = read(root)
        if any(follows(each, b) for each in last):
            return "other"
        return "elsewhere" if last and not whole else ""
    moved = {d for d, (i, j) in enumerate(zip(root.index(a.last), index, strict=True)) if i != j}
    if not along:
        along = {d for d in moved if len(moved) == 1 or not index[d]}
    if len(along) != 1:
        return ""
    if _begins(root, index, min(along), step):
        return "start" if moved - along else "again"
    return "jump" if moved == along and a.ahead else ""


def _begins(root: Root, index: list[int], dim: int, step: int) -> bool:
    """Whether an index is the first of a root in a dimension, in its direction."""
    return index[dim] == (root.shape[dim] - 1 if step < 0 else 0)


def same_start(a: list[Lane], b: list[Lane]) -> bool:
    """Whether every lane known of two chunks begins at the same element."""
    return bool(a and b) and all(
        x.root is y.root and x.first == y.first for x, y in zip(a, b, strict=False)
    )
