"""How two chunks of a recurrent unit lie in time, by what they cover of their data."""

from collections.abc import Callable, Iterator
from itertools import product

from throughtime.doctor._data import Lane, Root

MAX_LEVELS = 4  # computations between data and a recurrence


def follows(before: Lane, after: Lane) -> bool:
    """Whether one lane continues where the other ended, in one dimension of the data."""
    if before.root is not after.root or after.first - before.last not in before.ahead:
        return False
    ends = map(before.root.index, (before.last, after.first))
    return sum(i != j for i, j in zip(*ends, strict=True)) == 1


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
    before, after = same_level(before, after)
    if not before or not after:
        return ""
    if before[0].whole:  # a convolution may read the end of the last chunk again, as context
        before = [
            a._replace(
                ahead=a.ahead | {m - m % (steps * n) for m in a.ahead for n in a.root.strides if n}
            )
            for a in before
        ]
    if rows is None or after[0].whole:
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
    root, step = b.root, b.step or a.step
    if follows(a, b):
        return "next"
    index = root.index(b.first)
    # the dimension of time: the largest stride that a step may go along
    dims = [d for d, n in enumerate(root.strides) if n <= abs(step) and root.shape[d] > 1]
    along = set(sorted(dims, key=lambda d: root.strides[d])[-1:])
    if a.root is not root:
        if not any(index) or any(_begins(root, index, d, step) for d in along):
            return "start"
        shift = a.root.offset - root.offset
        if a.root.shape == root.shape and follows(
            a, b._replace(root=a.root, first=b.first + shift)
        ):
            return ""  # it may be another form of the same data
        last = read(root)
        if any(follows(each, b) for each in last):
            return "other"
        return "elsewhere" if last and not b.whole else ""
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


def levels(lanes: list[Lane]) -> Iterator[list[Lane]]:
    """These lanes, then what their roots were computed from, and so on."""
    for _ in range(MAX_LEVELS):
        yield lanes
        if not any(lane.root.covered for lane in lanes):
            return
        lanes = list(dict.fromkeys(up for lane in lanes for up in lane.root.covered or [lane]))


def same_level(before: list[Lane], after: list[Lane]) -> tuple[list[Lane], list[Lane]]:
    """The nearest levels at which two chunks read one root, or the chunks themselves."""
    pairs = product(enumerate(levels(before)), enumerate(levels(after)))
    for (_, a), (_, b) in sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0]):
        if {lane.root for lane in a} & {lane.root for lane in b}:
            return a, b
    return before, after


def raw_roots(lanes: list[Lane]) -> dict[Root, None]:
    """The roots of raw data behind the lanes of a call."""
    *_, deepest = levels(lanes)
    return dict.fromkeys(lane.root for lane in deepest)


def same_start(a: list[Lane], b: list[Lane]) -> bool:
    """Whether every lane known of two chunks begins at the same element."""
    a, b = same_level(a, b)
    return bool(a and b) and all(
        x.root is y.root and x.first == y.first for x, y in zip(a, b, strict=False)
    )
