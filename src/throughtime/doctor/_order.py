"""How the chunks that a recurrent unit reads one after the other lie in time."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from throughtime.doctor._provenance import MAX_LANES, LaneEnds, follows, lane_ends, relation
from throughtime.doctor._records import TensorRecord, Unit, UnitCall
from throughtime.doctor._torch_private import base_of
from throughtime.doctor.watcher import Watcher

FEW_LANES = 2  # lanes compared of copies, chunk by chunk
MAX_ROOTS = 64  # recordings remembered, the lanes of some chunks


class ChunkOrder:
    """Compares the data of two calls of a recurrent unit; no value is read."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.axes: dict[int, tuple[Tensor, int]] = {}  # dimension of time by tensor
        # the last chunk of a tensor that a unit read, by both
        self.read: dict[tuple[Unit, int], UnitCall] = {}

    def lanes(self, call: UnitCall) -> list[LaneEnds] | None:
        """Where each lane of the data begins and ends; `None` if unknown."""
        data = call.data
        if call.lanes is None and data is not None:
            all_lanes = self.watcher.active or base_of(data) is not None
            most = MAX_LANES if all_lanes else FEW_LANES
            call.lanes = lane_ends(call, self.watcher.table.record_of, most) or ()
        return call.lanes or None

    def first_lanes(self, call: UnitCall) -> list[LaneEnds] | None:
        """The same for the first lanes, which takes less time."""
        return call.lanes or lane_ends(call, self.watcher.table.record_of, FEW_LANES)

    def relation(self, origin: UnitCall, call: UnitCall, state: TensorRecord | None = None) -> str:
        """How a call lies after the one that its state comes from: see `_provenance.relation`."""
        rows = None if state is None else state.rows
        position, time = None if state is None else state.position, origin.time_dim
        if position is not None and time is not None and origin.data is not None:
            # the state is not the last one of the chunk
            origin = replace(origin, data=origin.data.narrow(time, 0, position + 1), lanes=None)
        if rows is None and origin.data is not None and self._is_next_slice(origin, call):
            self._remember_read(origin, [base_of(origin.data)])
            return "next"
        before, after = self.lanes(origin), self.lanes(call)
        if not before or not after or (rows is None and len(before) != len(after)):
            return ""
        self._remember_read(origin, [lane.last.root for lane in before])
        rows = list(range(MAX_LANES)) if rows is None else rows
        return relation(before, after, rows, {} if state is None else self._last_read(call, after))

    def _remember_read(self, call: UnitCall, roots: list[Any]) -> None:
        for root in roots:
            remember(self.read, (call.unit, id(root)), call)

    def _last_read(self, call: UnitCall, after: list[LaneEnds]) -> dict[int, list[LaneEnds]]:
        """The lanes of the last chunk that the unit read from each tensor of a chunk."""
        read: dict[int, list[LaneEnds]] = {}
        for root in [lane.first.root for lane in after]:
            last = self.read.get((call.unit, id(root)))
            lanes = None if last is None else self.lanes(last)
            read[id(root)] = [lane for lane in lanes or () if lane.last.root is root]
        return read

    def goes_on_along_lanes(self, origin: UnitCall, call: UnitCall) -> bool:
        """Whether two chunks are adjacent along what the layer takes for lanes, at every step."""
        if origin.batch_sizes is not None or call.batch_sizes is not None:
            return False
        return all(self._are_adjacent(origin, call, most) for most in (1, MAX_LANES))

    def _are_adjacent(self, origin: UnitCall, call: UnitCall, most: int) -> bool:
        """The same for so many steps."""
        lanes = self.first_lanes(call)
        before, after = (
            lane_ends(
                replace(each, lane_dim=each.time_dim, time_dim=each.lane_dim, previous=None),
                self.watcher.table.record_of,
                most,
            )
            for each in (origin, call)
        )
        if not before or not after or not lanes or len(before) != len(after):
            return False
        return all(
            len(b.time_dims) == 1 and not b.time_dims & lanes[0].time_dims and follows(a, b)
            for a, b in zip(before, after, strict=True)
        )

    def _is_next_slice(self, origin: UnitCall, call: UnitCall) -> bool:
        """Whether a chunk is the next slice along the known dimension of time: cheap and usual."""
        a, b = origin.data, call.data
        if a is None or b is None or a.stride() != b.stride() or a.shape != b.shape:
            return False
        root = base_of(a)
        base, dim = self.axes.get(id(root), (None, 0))
        if base is None or base is not root or base_of(b) is not root:
            return False
        stride, steps = base.stride(dim), 1 if origin.time_dim is None else a.shape[origin.time_dim]
        moved = b.storage_offset() - a.storage_offset()
        index = int(b.storage_offset() - base.storage_offset()) // stride % base.shape[dim]
        return moved == steps * stride and index >= steps

    def learn_axis(self, call: UnitCall, origin: UnitCall) -> None:
        """Remember the dimension of a tensor along which its chunks follow one another."""
        before, after = origin.lanes, call.lanes
        base = base_of(call.data) if call.data is not None else None
        if not before or not after or base is None or base is not after[0].first.root:
            return
        pairs = enumerate(zip(before[0].last.index, after[0].first.index, strict=True))
        remember(self.axes, id(base), (base, next(dim for dim, (i, k) in pairs if i != k)))


def remember(table: dict[Any, Any], key: object, value: Any) -> None:
    """Store a value and drop the oldest: a finished recording need not stay in memory."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_ROOTS:
        del table[next(iter(table))]
