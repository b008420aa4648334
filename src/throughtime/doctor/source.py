"""Where data comes from: which elements of which tensor a chunk of inputs is, found without reading
a value.

A chunk that is a slice of a longer tensor tells by its strides where in that tensor it lies;
stacking, indexing and copying are followed through what the watcher noted. Two chunks are adjacent
where the first step of one is, in every lane, the step after the last of the other.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from throughtime.doctor.inner import base_of

LANES = 12  # lanes compared; a fault of order shows in the first ones
INDEXED = 200_000  # elements of a tensor whose indexing is replayed

STRIDES = (
    1,
    2,
)  # a chunk whose last step serves as a target only, x[:-1], leaves a gap of one step

Lookup = Callable[[Tensor], Any]


@dataclass(frozen=True, eq=False)
class Spot:
    """One element of a tensor that was not made from another."""

    root: Tensor
    at: tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """What one lane plays in one chunk: its first and its last step."""

    first: Spot
    last: Spot


def locate(tensor: Tensor, index: tuple[int, ...], seen: Lookup, depth: int = 0) -> Spot | None:
    """The element of the oldest known tensor that `tensor[index]` is."""
    note = seen(tensor)
    if depth > 12:
        return None
    if note is not None and note.origin is not None:
        found = _through(note, index)
        return locate(*found, seen, depth + 1) if found else None
    base = base_of(tensor)
    if base is None:
        return Spot(tensor, index)
    offset = int(tensor.storage_offset()) + sum(
        i * s for i, s in zip(index, tensor.stride(), strict=True)
    )
    at = _unravel(offset - int(base.storage_offset()), base)
    return locate(base, at, seen, depth + 1) if at is not None else None


def _unravel(offset: int, base: Tensor) -> tuple[int, ...] | None:
    at = [0] * base.dim()
    for dim in sorted(range(base.dim()), key=lambda d: -base.stride(d)):
        if base.size(dim) > 1:
            at[dim], offset = divmod(offset, base.stride(dim))
    return (
        tuple(at)
        if offset == 0 and all(i < n for i, n in zip(at, base.shape, strict=True))
        else None
    )


def _through(note: Any, index: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]] | None:
    """One step towards the source, by what the operation did."""
    name, func, args, kwargs = note.origin
    if name in {"stack", "cat"}:
        parts, dim = list(args[0]), (args[1] if len(args) > 1 else kwargs.get("dim", 0))
        return _part(parts, dim % len(index), index, stacked=name == "stack")
    source: Tensor = args[0]
    if name not in {"__getitem__", "index_select", "flip", "roll"}:
        return (
            (source, index[: source.dim()]) if source.shape == note.shape[: source.dim()] else None
        )
    if source.numel() > INDEXED:
        return None
    if note.numbers is None:
        note.numbers = func(
            torch.arange(source.numel(), device=source.device).view(source.shape),
            *args[1:],
            **kwargs,
        )
    number, at = int(note.numbers[index]), list[int]()
    for size in reversed(source.shape):
        number, i = divmod(number, size)
        at.insert(0, i)
    return source, tuple(at)


def _part(
    parts: list[Tensor], dim: int, index: tuple[int, ...], *, stacked: bool
) -> tuple[Tensor, tuple[int, ...]] | None:
    at = index[dim]
    if stacked:
        return parts[at], index[:dim] + index[dim + 1 :]
    for part in parts:
        if at < part.shape[dim]:
            return part, (*index[:dim], at, *index[dim + 1 :])
        at -= part.shape[dim]
    return None


def lanes(
    data: Tensor, lane_dim: int | None, time_dim: int | None, seen: Lookup
) -> list[Lane] | None:
    """What each lane of `data` plays; `None` where that cannot be told."""
    count = data.shape[lane_dim] if lane_dim is not None and lane_dim < data.dim() else 1
    found: list[Lane] = []
    for lane in range(min(count, LANES)):
        first, last = [0] * data.dim(), [0] * data.dim()
        if lane_dim is not None and lane_dim < data.dim():
            first[lane_dim] = last[lane_dim] = lane
        if time_dim is not None and time_dim < data.dim():
            last[time_dim] = data.shape[time_dim] - 1
        spots = locate(data, tuple(first), seen), locate(data, tuple(last), seen)
        if spots[0] is None or spots[1] is None:
            return None
        found.append(Lane(spots[0], spots[1]))
    return found


def follows(before: Lane, after: Lane) -> bool:
    """Whether one lane goes on where the other ended."""
    if before.last.root is not after.first.root or len(before.last.at) != len(after.first.at):
        return False
    moved = [
        (b - a, dim)
        for dim, (a, b) in enumerate(zip(before.last.at, after.first.at, strict=True))
        if a != b
    ]
    axes = axis(before) | axis(after)
    return len(moved) == 1 and moved[0][0] in STRIDES and (not axes or moved[0][1] in axes)


def axis(lane: Lane) -> set[int]:
    """The dimension of the root along which a lane moves."""
    if lane.first.root is not lane.last.root:
        return set()
    return {d for d, (a, b) in enumerate(zip(lane.first.at, lane.last.at, strict=True)) if a != b}


def relation(before: list[Lane], after: list[Lane], rows: list[int]) -> str:
    """How two chunks lie: "next", "rows", "jump", "again", "start", or "" where nothing is certain.

    `rows[b]` is the lane of `before` whose state lane `b` of `after` has.
    """
    pairs = [
        (before[rows[b]], lane)
        for b, lane in enumerate(after)
        if b < len(rows) and rows[b] < len(before)
    ]
    if not pairs:
        return ""
    if all(follows(a, b) for a, b in pairs):
        return "next"
    if all(follows(a, b) or any(follows(other, b) for other in before) for a, b in pairs):
        return "rows"
    kinds = {_kind(a, b, lane) for lane, (a, b) in enumerate(pairs)}
    if kinds <= {"start", "next"}:
        return "start"
    return kinds.pop() if len(kinds) == 1 else ""


def _kind(before: Lane, after: Lane, lane: int) -> str:
    """How one lane lies that does not simply go on."""
    if follows(before, after):
        return "next"
    start = [i for i in after.first.at if i] in ([], [lane])
    if before.last.root is not after.first.root:
        return "start" if start or _begins(after) else ""
    moved = {
        d for d, (a, b) in enumerate(zip(before.last.at, after.first.at, strict=True)) if a != b
    }
    along = axis(before) | axis(after) or {
        d for d in moved if len(moved) == 1 or after.first.at[d] == 0
    }
    if len(along) != 1 or not moved:
        return ""
    begins = after.first.at[next(iter(along))] == 0
    if moved - along:
        return "start" if begins else ""
    return "again" if begins else "jump"


def _begins(lane: Lane) -> bool:
    along = axis(lane)
    return len(along) == 1 and lane.first.at[next(iter(along))] == 0
