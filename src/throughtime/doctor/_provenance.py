"""The provenance of data: which elements of which tensor a chunk of inputs is.

No value is read. The strides of a view give its position in its base. Stacking, indexing and
copying are followed through the watcher's records. A lane of a chunk goes through a tensor by a
constant step, which may be longer than one or negative. Two chunks are adjacent if in every lane
the first step of one is one step after the last of the other.

Shapes: `T` steps, `B` lanes (rows of the batch).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from throughtime.doctor._records import (
    CopyRecord,
    Operation,
    TensorRecord,
    Unit,
    UnitCall,
    lanes_and_step,
)
from throughtime.doctor._torch_private import base_of
from throughtime.doctor.watcher import Watcher

MAX_LANES = 12  # lanes compared; a wrong order shows in the first ones
FEW_LANES = 2  # the same of views of one tensor, and of copies while this is not watched
MAX_ROOTS = 64  # recordings remembered, the lanes of some chunks
MAX_INDEXED = 200_000  # elements of a tensor whose indexing is replayed
MAX_DEPTH = 12  # copies of copies followed
# Steps from the last of a chunk to the first of the next: with x[:-1] the last is a target only.
GAPS = (1, 2)

Lookup = Callable[[Tensor], TensorRecord | None]


@dataclass(frozen=True, eq=False)
class TensorElement:
    """One element of a tensor that is no copy of another."""

    root: Tensor
    index: tuple[int, ...]


@dataclass(frozen=True)
class LaneEnds:
    """The first and the last step of one lane of a chunk."""

    first: TensorElement
    last: TensorElement
    step: tuple[int, ...] = ()  # from one step to the next; empty if unknown or not constant

    @property
    def time_dims(self) -> set[int]:
        """The dimensions of the root along which the lane moves."""
        return nonzero(self.step or difference(self.first, self.last))

    @property
    def begins(self) -> bool:
        """Whether it begins at the first step of its root, in its direction."""
        dims = self.time_dims
        return len(dims) == 1 and self.begins_along(*dims)

    def begins_along(self, dim: int) -> bool:
        """Whether its first step is the first of the root in a dimension, in its direction."""
        backwards = bool(self.step) and self.step[dim] < 0
        return self.first.index[dim] == (self.first.root.shape[dim] - 1 if backwards else 0)


def difference(before: TensorElement, after: TensorElement) -> tuple[int, ...]:
    """From one element of a tensor to another; empty if they are of different tensors."""
    if before.root is not after.root:
        return ()
    return tuple(b - a for a, b in zip(before.index, after.index, strict=True))


def nonzero(offset: tuple[int, ...]) -> set[int]:
    """The dimensions in which an offset is not zero."""
    return {dim for dim, n in enumerate(offset) if n}


def locate(
    tensor: Tensor, index: tuple[int, ...], record_of: Lookup, depth: int = 0
) -> TensorElement | None:
    """The element of the oldest known tensor that `tensor[index]` is a copy of."""
    record = record_of(tensor)
    if depth > MAX_DEPTH:
        return None
    if record is not None and record.origin is not None:
        source = _source_element(record.origin, index)
        return locate(*source, record_of, depth + 1) if source else None
    base = base_of(tensor)
    if base is None:
        return TensorElement(tensor, index)
    offset = sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
    in_base = _unravel(int(tensor.storage_offset()) + offset - int(base.storage_offset()), base)
    return locate(base, in_base, record_of, depth + 1) if in_base is not None else None


def _unravel(offset: int, base: Tensor) -> tuple[int, ...] | None:
    index = [0] * base.dim()
    for dim in sorted(range(base.dim()), key=lambda d: -base.stride(d)):
        if base.size(dim) > 1:
            index[dim], offset = divmod(offset, base.stride(dim))
    inside = offset == 0 and all(i < n for i, n in zip(index, base.shape, strict=True))
    return tuple(index) if inside else None


def _source_element(
    copied: CopyRecord, index: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]] | None:
    """The element that a copy was made from, one operation earlier."""
    args, kwargs = copied.args, copied.kwargs
    if copied.name in {"stack", "cat"}:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(index)
        return _element_of_part(list(args[0]), dim, index, stacked=copied.name == "stack")
    source: Tensor = args[0]
    if copied.name == "pad_sequence":
        batch_first = bool(args[1] if len(args) > 1 else kwargs.get("batch_first"))
        lane, time = index[:2] if batch_first else index[1::-1]
        part = args[0][lane]
        return (part, (time, *index[2:])) if time < len(part) else None
    if copied.name not in {
        "__getitem__",
        "index_select",
        "flip",
        "roll",
        "_pack_padded_sequence",
    }:
        same = source.shape == copied.shape[: source.dim()]
        return (source, index[: source.dim()]) if same else None
    if source.numel() > MAX_INDEXED:
        return None
    if copied.numbers is None:
        numbers = torch.arange(source.numel(), device=source.device).view(source.shape)
        numbers = copied.func(numbers, *args[1:], **kwargs)
        copied.numbers = numbers[0] if isinstance(numbers, tuple) else numbers
    number, in_source = int(copied.numbers[index]), list[int]()
    for size in reversed(source.shape):
        number, i = divmod(number, size)
        in_source.insert(0, i)
    return source, tuple(in_source)


def _element_of_part(
    parts: list[Tensor], dim: int, index: tuple[int, ...], *, stacked: bool
) -> tuple[Tensor, tuple[int, ...]] | None:
    position = index[dim]
    if stacked:
        return parts[position], index[:dim] + index[dim + 1 :]
    for part in parts:
        if position < part.shape[dim]:
            return part, (*index[:dim], position, *index[dim + 1 :])
        position -= part.shape[dim]
    return None


def _lane_lengths(call: UnitCall, data: Tensor) -> tuple[list[int], list[int]]:
    """The steps of each lane, and for packed data the row where each step begins."""
    if (sizes := call.batch_sizes) is not None:
        lanes = range(int(sizes[0]))
        return [int((sizes > lane).sum()) for lane in lanes], (sizes.cumsum(0) - sizes).tolist()
    steps = 1 if call.time_dim is None else data.shape[call.time_dim]
    dim = call.lane_dim
    return [steps] * (1 if dim is None or dim >= data.dim() else data.shape[dim]), []


def lane_ends(call: UnitCall, record_of: Lookup, most: int = MAX_LANES) -> list[LaneEnds] | None:
    """The ends of the first lanes of the data of a call; `None` if any of them is unknown.

    For a single step the step of time is that from the data of the call before.
    """
    data = call.data
    if data is None:
        return None
    ends, dims = list[LaneEnds](), range(data.dim())
    lengths, starts = _lane_lengths(call, data)
    for lane, steps in enumerate(lengths[:most]):

        def element(tensor: Tensor, t: int, lane: int = lane) -> TensorElement | None:
            at = {0: starts[t] + lane} if starts else {call.time_dim: t, call.lane_dim: lane}
            return locate(tensor, tuple(at.get(d, 0) for d in dims), record_of)

        first, last = element(data, 0), element(data, steps - 1)
        if first is None or last is None:
            return None
        step: tuple[int, ...] = ()
        if steps > 1 and (second := element(data, 1)) is not None:
            step = difference(first, second)
            if difference(first, last) != tuple(n * (steps - 1) for n in step):
                step = ()
        elif call.previous is not None and call.previous.shape == data.shape:
            before = element(call.previous, 0)
            step = difference(before, first) if before is not None else ()
        ends.append(LaneEnds(first, last, step))
    return ends


def follows(before: LaneEnds, after: LaneEnds) -> bool:
    """Whether one lane continues where the other ended."""
    gap = difference(before.last, after.first)
    moved = nonzero(gap)
    if step := _common_step(before, after):
        # the step of a single one may be a jump to it
        is_next = before.first.index == before.last.index and sum(gap) == 1
        is_next &= moved == nonzero(step)
        return is_next or any(gap == tuple(n * d for d in step) for n in GAPS)
    dims = before.time_dims | after.time_dims
    return len(moved) == 1 and all(gap[d] in GAPS and (not dims or d in dims) for d in moved)


def _common_step(before: LaneEnds, after: LaneEnds) -> tuple[int, ...]:
    """The step of a chunk and the next; empty if unknown."""
    is_long = after.first.index != after.last.index
    step = before.step or (after.step if is_long else ())
    return step if any(step) else ()


def relation(
    before: list[LaneEnds],
    after: list[LaneEnds],
    rows: list[int],
    read: Callable[[], dict[int, list[LaneEnds]]],
) -> str:
    """How two chunks lie in time, the state of the first in the second.

    `rows[b]` is the lane of `before` whose state lane `b` of `after` has. `read()[id(root)]`
    are the lanes of the last chunk that was read from a tensor, as far as known.

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
    last = read()
    kinds = {_lane_relation(a, b, lane, last) for lane, (a, b) in enumerate(pairs)}
    if kinds <= {"start", "next"}:
        return "start"
    if "elsewhere" in kinds and kinds <= {"elsewhere", "jump", "other", "start", ""}:
        return "jump"
    return kinds.pop() if len(kinds) == 1 else ""


def _lane_relation(
    before: LaneEnds, after: LaneEnds, lane: int, read: dict[int, list[LaneEnds]]
) -> str:
    """How the next chunk of one lane lies in time; "elsewhere" is a jump within other data."""
    if follows(before, after):
        return "next"
    a, b = before.last, after.first
    if a.root is not b.root:
        if [i for i in b.index if i] in ([], [lane]) or after.begins:
            return "start"
        last = read.get(id(b.root), [])
        if len(a.index) == len(b.index) and follows(
            before, replace(after, first=TensorElement(a.root, b.index))
        ):
            return ""  # it may be another form of the same data
        goes_on = any(follows(other, after) for other in last)
        return "other" if goes_on else "elsewhere" if last else ""
    moved = nonzero(difference(a, b))
    along = before.time_dims | after.time_dims or {
        dim for dim in moved if len(moved) == 1 or b.index[dim] == 0
    }
    if len(along) != 1:
        return ""
    if after.begins_along(*along):
        return "start" if moved - along else "again"
    return "jump" if _common_step(before, after) and moved == along else ""


def same_start(before: list[LaneEnds], after: list[LaneEnds]) -> bool:
    """Whether every lane known of both chunks begins at the same element."""
    return all(
        a.first.root is b.first.root and a.first.index == b.first.index
        for a, b in zip(before, after, strict=False)
    )


def stack_along(data: Tensor, dim: int | None, record_of: Lookup) -> CopyRecord | None:
    """The stacking of samples that a dimension of `data` comes from."""
    for _ in range(MAX_DEPTH):
        if dim is None or data.shape[dim] < 2:
            return None
        base = base_of(data)
        if base is not None:
            shape, stride = data.shape[dim], data.stride(dim)
            pairs = enumerate(zip(base.shape, base.stride(), strict=True))
            data, dim = base, next((d for d, pair in pairs if pair == (shape, stride)), None)
            continue
        record = record_of(data)
        if record is None or record.origin is None:
            return None
        if record.origin.name == "stack":
            return record.origin if dim == 0 else None
        source: Any = record.origin.args[0]
        if not isinstance(source, Tensor) or source.shape != data.shape:
            return None
        data = source
    return None


def data_of(op: Operation, excluded: list[Tensor]) -> tuple[Tensor | None, int | None]:
    """The data behind an operation, and its dimension of lanes.

    It is the first input with a row for each row of the result, or a column for each of its
    columns. Token ids are numbers, one for each row. A vector has no lanes; a number may be its
    data, as that of a signal.
    """
    shape, candidates = op.outputs[0].shape, list[Tensor]()
    for tensor, record in op.pairs():
        data = record.data if record is not None and record.learned else tensor
        is_weight = tensor.is_leaf and tensor.requires_grad
        if data is not None and not is_weight and all(tensor is not t for t in excluded):
            candidates.append(data)
    lead = min(1, len(shape) - 1)
    for data in candidates:
        are_ids = data.shape == shape[:-1] and not data.is_floating_point()
        if are_ids or (data.dim() == len(shape) and data.shape[:lead] == shape[:lead]):
            return data, 0 if len(shape) > 1 else None
    if len(shape) == 1:
        return next((d for d in candidates if d.dim() == 0), None), None
    columns = (d for d in candidates if d.dim() == 2 and d.shape[1] == shape[-1] == 1)
    return next(columns, None), 1


def layer_dims(
    inputs: Tensor, layer: bool, batch_first: bool
) -> tuple[int, int | None, int | None]:
    """The number of steps, and the dimensions of lanes and of time in the inputs."""
    if not layer:
        return 1, 0 if inputs.dim() == 2 else None, None
    if inputs.dim() == 2:
        return len(inputs), None, 0
    return inputs.shape[int(batch_first)], int(not batch_first), int(batch_first)


class ChunkOrder:
    """Compares the data of two calls of a recurrent unit; no value is read."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.record_of = watcher, watcher.table.record_of
        self.axes: dict[int, tuple[Tensor, int]] = {}  # dimension of time by tensor
        # the last chunk of a tensor that a unit read, by both
        self.read: dict[tuple[Unit, int], UnitCall] = {}

    def lanes(self, call: UnitCall) -> list[LaneEnds] | None:
        """Where the lanes of the data, or the first of them, begin and end; `None` if unknown."""
        if call.lanes is None and call.data is not None:
            base = base_of(call.data)
            joined = self.watcher.active if base is None else self.record_of(base) is not None
            call.lanes = lane_ends(call, self.record_of, MAX_LANES if joined else FEW_LANES) or ()
        return call.lanes or None

    def relation(self, origin: UnitCall, call: UnitCall, state: TensorRecord | None = None) -> str:
        """How a call lies after the one that its state comes from: see `_provenance.relation`."""
        rows, step = (None, None) if state is None else lanes_and_step(state.index)
        data, time = origin.data, origin.time_dim
        if data is not None and time is not None and step not in {None, origin.steps - 1}:
            # the state is not the last one of the chunk
            origin = replace(origin, data=data.narrow(time, 0, (step or 0) + 1), lanes=None)
        in_order = rows is None or rows == list(range(len(rows)))
        part = origin.data
        if part is not None and in_order and self._is_next_slice(origin, call):
            remember(self.read, (origin.unit, id(base_of(part))), origin)
            return "next"
        before, after = self.lanes(origin), self.lanes(call)
        if not in_order:
            before, after = (lane_ends(each, self.record_of, MAX_LANES) for each in (origin, call))
        if not before or not after or (rows is None and len(before) != len(after)):
            return ""
        for root in {id(lane.last.root) for lane in before}:
            remember(self.read, (origin.unit, root), origin)
        rows = list(range(MAX_LANES)) if rows is None else rows
        return relation(before, after, rows, partial(self._last_read, call, after))

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
        base = base_of(call.data) if call.data is not None else None
        if origin.lanes and call.lanes and base is not None and base is call.lanes[0].first.root:
            (dim, *_) = nonzero(difference(origin.lanes[0].last, call.lanes[0].first))
            remember(self.axes, id(base), (base, dim))

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
        lanes, packed = self.lanes(call), origin.batch_sizes is not call.batch_sizes
        for most in (1, MAX_LANES):
            before, after = (
                lane_ends(
                    replace(each, lane_dim=each.time_dim, time_dim=each.lane_dim, previous=None),
                    self.record_of,
                    most,
                )
                for each in (origin, call)
            )
            if packed or not before or not after or not lanes or len(before) != len(after):
                return False
            if not all(
                len(b.time_dims) == 1 and not b.time_dims & lanes[0].time_dims and follows(a, b)
                for a, b in zip(before, after, strict=True)
            ):
                return False
        return True


def remember(table: dict[Any, Any], key: object, value: Any) -> None:
    """Store a value and drop the oldest: a finished recording need not stay in memory."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_ROOTS:
        del table[next(iter(table))]
