"""The provenance of data: which elements of which tensor a chunk of inputs is.

No value is read. The strides of a view give its position in its base. Stacking, indexing and
copying are followed through the watcher's records. Two chunks are adjacent if in every lane the
first step of one is the step after the last of the other.

Shapes: `T` steps, `B` lanes (rows of the batch).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime.doctor._records import CopyRecord, TensorRecord
from throughtime.doctor._torch_private import base_of

MAX_LANES = 12  # lanes compared; a wrong order shows in the first ones
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

    @property
    def time_dims(self) -> set[int]:
        """The dimensions of the root along which the lane moves."""
        return moved_dims(self.first, self.last) if self.first.root is self.last.root else set()

    @property
    def begins(self) -> bool:
        """Whether it begins at the first step of its root."""
        dims = self.time_dims
        return len(dims) == 1 and self.first.index[next(iter(dims))] == 0


def moved_dims(before: TensorElement, after: TensorElement) -> set[int]:
    """The dimensions in which two elements of a tensor differ."""
    pairs = enumerate(zip(before.index, after.index, strict=True))
    return {dim for dim, (a, b) in pairs if a != b}


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
    if copied.name not in {"__getitem__", "index_select", "flip", "roll"}:
        same = source.shape == copied.shape[: source.dim()]
        return (source, index[: source.dim()]) if same else None
    if source.numel() > MAX_INDEXED:
        return None
    if copied.numbers is None:
        numbers = torch.arange(source.numel(), device=source.device).view(source.shape)
        copied.numbers = copied.func(numbers, *args[1:], **kwargs)
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


def lane_ends(
    data: Tensor, lane_dim: int | None, time_dim: int | None, record_of: Lookup
) -> list[LaneEnds] | None:
    """The ends of each lane of `data`; `None` if any of them is unknown."""
    dims, lanes = range(data.dim()), 1
    if lane_dim is not None and lane_dim in dims:
        lanes = data.shape[lane_dim]
    ends: list[LaneEnds] = []
    for lane in range(min(lanes, MAX_LANES)):
        first = [lane if dim == lane_dim else 0 for dim in dims]
        last = [data.shape[dim] - 1 if dim == time_dim else first[dim] for dim in dims]
        start, end = locate(data, tuple(first), record_of), locate(data, tuple(last), record_of)
        if start is None or end is None:
            return None
        ends.append(LaneEnds(start, end))
    return ends


def follows(before: LaneEnds, after: LaneEnds) -> bool:
    """Whether one lane continues where the other ended."""
    a, b = before.last, after.first
    if a.root is not b.root or len(a.index) != len(b.index):
        return False
    moved = moved_dims(a, b)
    dims = before.time_dims | after.time_dims
    return len(moved) == 1 and all(
        b.index[dim] - a.index[dim] in GAPS and (not dims or dim in dims) for dim in moved
    )


def relation(before: list[LaneEnds], after: list[LaneEnds], rows: list[int]) -> str:
    """How two chunks lie in time: "next", "rows", "jump", "start", or "" if uncertain.

    `rows[b]` is the lane of `before` whose state lane `b` of `after` has.
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
    kinds = {_lane_relation(a, b, lane) for lane, (a, b) in enumerate(pairs)}
    if kinds <= {"start", "next"}:
        return "start"
    return kinds.pop() if len(kinds) == 1 else ""


def _lane_relation(before: LaneEnds, after: LaneEnds, lane: int) -> str:
    """How the next chunk of one lane lies in time."""
    if follows(before, after):
        return "next"
    a, b = before.last, after.first
    if a.root is not b.root:
        return "start" if [i for i in b.index if i] in ([], [lane]) or after.begins else ""
    moved = moved_dims(a, b)
    along = before.time_dims | after.time_dims or {
        dim for dim in moved if len(moved) == 1 or b.index[dim] == 0
    }
    if len(along) != 1 or not moved:
        return ""
    begins = b.index[next(iter(along))] == 0
    if begins != bool(moved - along):
        return ""
    return "start" if begins else "jump"
