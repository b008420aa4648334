"""How two chunks of a recurrent unit lie in time, by what they cover of their data.

A lane of a chunk goes through a root by a constant step, which may be longer than one or negative.
Two chunks are adjacent if in every lane the first step of one is one step after the last of the
other.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from throughtime.doctor._data import (
    MAX_LANES,
    Lane,
    Root,
    View,
    covered,
    difference,
    lane_ends,
    levels,
    nonzero,
    same_level,
)
from throughtime.doctor._records import TensorRecord, Unit, UnitCall, lanes_and_step

FEW_LANES = 2  # lanes compared of views of one tensor
MAX_ROOTS = 64  # recordings remembered, the lanes of some chunks
# Steps from the last of a chunk to the first of the next: with x[:-1] the last is a target only.
GAPS = (1, 2)


def lanes_of(call: UnitCall) -> list[Lane]:
    """Where the lanes of a call, or the first of them, begin and end; empty if unknown."""
    if call.lanes is None:
        call.lanes = [] if call.data is None else _lanes(call, call.data)
    return call.lanes


def _lanes(call: UnitCall, data: View) -> list[Lane]:
    starts = list[int]()
    if (sizes := call.batch_sizes) is not None:
        lengths = [int((sizes > lane).sum()) for lane in range(int(sizes[0]))]
        starts = (sizes.cumsum(0) - sizes).tolist()
    else:
        steps = 1 if call.time_dim is None else data.shape[call.time_dim]
        dim = call.lane_dim
        lengths = [steps] * (1 if dim is None or dim >= len(data.shape) else data.shape[dim])
    raw = data.root.copied is None and not data.root.covered
    most = FEW_LANES if raw else MAX_LANES
    lanes = lane_ends(data, lengths[:most], starts, call.lane_dim, call.time_dim)
    if lanes and call.steps == 1 and call.previous is not None and call.previous != data:
        previous = lane_ends(call.previous, lengths[:most], [], call.lane_dim, None) or []
        pairs = zip(lanes, previous, strict=False)
        lanes = [
            lane._replace(step=difference(before.first, lane.first))
            if before.root is lane.root
            else lane
            for lane, before in pairs
        ] or lanes
    return covered(data) if lanes is None and not starts else lanes or []


def deepest_roots(call: UnitCall) -> dict[Root, None]:
    """The roots of raw data behind the lanes of a call."""
    *_, deepest = levels(lanes_of(call))
    return dict.fromkeys(lane.root for lane in deepest)


def root_of(view: View | None) -> Root | None:
    """The oldest root known behind a tensor."""
    if view is None:
        return None
    element = view.locate((0,) * len(view.shape))
    root = view.root if element is None else element.root
    while root.covered:
        root = root.covered[0].root
    return root


def same_data(a: UnitCall, b: UnitCall) -> bool:
    """Whether two calls read the same steps."""
    if a.data is None or b.data is None or a.data.shape != b.data.shape:
        return False
    if a.data == b.data or a.data.root is b.data.root:
        return a.data == b.data
    one, other = (data.locate((0,) * len(data.shape)) for data in (a.data, b.data))
    if one is None or other is None or not (one == other or one.root.covered):
        return False
    level = same_level(lanes_of(a), lanes_of(b))
    return level is not None and [e[:3] for e in level[0]] == [e[:3] for e in level[1]]


def same_start(a: UnitCall, b: UnitCall) -> bool:
    """Whether every lane known of two chunks begins at the same element."""
    level = same_level(lanes_of(a), lanes_of(b))
    return level is not None and all(
        one.root is other.root and one.first == other.first
        for one, other in zip(*level, strict=False)
    )


def follows(before: Lane, after: Lane) -> bool:
    """Whether one lane continues where the other ended."""
    if before.root is not after.root:
        return False
    gap = between(before, after)
    moved = nonzero(gap)
    step = common_step(before, after)
    if before.is_range:
        return len(moved) == 1 and any(
            gap[d] == n * ((step and step[d]) or 1) for d in moved for n in GAPS
        )
    if step:
        # the step of a single one may be a jump to it
        is_next = before.first == before.last and sum(gap) == 1 and moved == nonzero(step)
        return is_next or any(gap == tuple(n * d for d in step) for n in GAPS)
    dims = before.dims | after.dims
    return len(moved) == 1 and all(gap[d] in GAPS and (not dims or d in dims) for d in moved)


def between(before: Lane, after: Lane) -> tuple[int, ...]:
    """From the last step of a lane to the first of another; of ranges 0 where they are equal."""
    return tuple(
        0 if before.is_range and (a, b) == (c, d) else c - b
        for a, b, c, d in zip(before.first, before.last, after.first, after.last, strict=True)
    )


def common_step(before: Lane, after: Lane) -> tuple[int, ...]:
    """The step of a chunk and the next; empty if unknown."""
    is_long = after.first != after.last
    step = before.step or (after.step if is_long else ())
    return step if any(step) else ()


def relation(
    before: list[Lane], after: list[Lane], rows: list[int], read: Callable[[Root], list[Lane]]
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
    pairs = [
        (before[row], lane) for row, lane in zip(rows, after, strict=False) if row < len(before)
    ]
    if not pairs:
        return ""
    if all(follows(a, b) for a, b in pairs):
        return "next"
    if all(follows(a, b) or any(follows(other, b) for other in before) for a, b in pairs):
        return "rows"
    kinds = {_lane_relation(a, b, lane, read) for lane, (a, b) in enumerate(pairs)}
    if kinds <= {"start", "next"}:
        return "start"
    if "elsewhere" in kinds and kinds <= {"elsewhere", "jump", "other", "start", ""}:
        return "jump"
    return kinds.pop() if len(kinds) == 1 else ""


def _lane_relation(before: Lane, after: Lane, lane: int, read: Callable[[Root], list[Lane]]) -> str:
    """How the next chunk of one lane lies in time; "elsewhere" is a jump within other data."""
    if follows(before, after):
        return "next"
    if before.root is not after.root:
        dims = after.dims
        begins = len(dims) == 1 and after.begins_along(*dims)
        if [i for i in after.first if i] in ([], [lane]) or begins:
            return "start"
        if len(before.first) == len(after.first) and follows(
            before, after._replace(root=before.root)
        ):
            return ""  # it may be another form of the same data
        last = read(after.root)
        goes_on = any(follows(other, after) for other in last)
        return "other" if goes_on else "elsewhere" if last else ""
    moved = nonzero(between(before, after))
    along = before.dims | after.dims
    if len(along) != 1 or before.is_range:
        along = {dim for dim in moved if len(moved) == 1 or after.first[dim] == 0} or along
    if len(along) != 1:
        return ""
    if after.begins_along(*along):
        return "start" if moved - along else "again"
    known = before.is_range or common_step(before, after)
    return "jump" if known and moved == along else ""


class ChunkOrder:
    """Compares the data of two calls of a recurrent unit."""

    def __init__(self) -> None:
        # the last chunk of a root that a unit read, by both
        self.read: dict[tuple[Unit, Root], UnitCall] = {}

    def relation(self, origin: UnitCall, call: UnitCall, state: TensorRecord | None = None) -> str:
        """How a call lies after the one that its state comes from: see `_order.relation`."""
        rows, step = (None, None) if state is None else lanes_and_step(state.index)
        data, time = origin.data, origin.time_dim
        if data is not None and time is not None and step not in {None, origin.steps - 1}:
            # the state is not the last one of the chunk
            shape = tuple((step or 0) + 1 if d == time else n for d, n in enumerate(data.shape))
            origin = replace(origin, data=data._replace(shape=shape), lanes=None)
        before, after = lanes_of(origin), lanes_of(call)
        known = {lane.root for lane in before}
        for root in known:
            remember(self.read, (origin.unit, root), origin)
        if not {lane.root for lane in after} <= known and (level := same_level(before, after)):
            before, after = level
        if not before or not after or (rows is None and len(before) != len(after)):
            return ""
        rows = list(range(MAX_LANES)) if rows is None or after[0].is_range else rows
        return relation(before, after, rows, lambda root: self._last_read(call, root))

    def _last_read(self, call: UnitCall, root: Root) -> list[Lane]:
        """The lanes of the last chunk that the unit read from a root."""
        last = self.read.get((call.unit, root))
        return [] if last is None else [lane for lane in lanes_of(last) if lane.root is root]


def goes_on_along_lanes(origin: UnitCall, call: UnitCall) -> bool:
    """Whether two chunks are adjacent along what the layer takes for lanes, at every step."""
    if origin.batch_sizes is not None or call.batch_sizes is not None:
        return False
    lanes = lanes_of(call)
    before, after = (
        lanes_of(
            replace(each, lane_dim=each.time_dim, time_dim=each.lane_dim, previous=None, lanes=None)
        )
        for each in (origin, call)
    )
    if not lanes or not before or len(before) != len(after):
        return False
    return all(
        len(b.dims) == 1 and not b.dims & lanes[0].dims and follows(a, b)
        for a, b in zip(before, after, strict=True)
    )


def remember(table: dict[Any, Any], key: object, value: Any) -> None:
    """Store a value and drop the oldest: a finished recording need not stay in memory."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_ROOTS:
        del table[next(iter(table))]
