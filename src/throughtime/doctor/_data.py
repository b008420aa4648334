"""What each tensor was read from: the roots of data, and the parts of them that a chunk covers.

A root is what a storage held at one time: raw data, or the result of an operation. Views of it are
ranges in its own dimensions. A root that copies another, step by step and lane by lane, translates
its ranges; one that is computed in any other way, such as by a convolution, remembers what its
arguments covered. Two chunks are compared at the nearest level at which both read one root.
No value is read, except to recognise a copy that every epoch makes anew.

Shapes: `T` steps, `B` lanes (rows of the batch).
"""

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from throughtime.doctor._records import RECURRENT
from throughtime.doctor._torch_private import base_of, storage_of, version_of

MAX_LANES = 12  # lanes compared; a wrong order shows in the first ones
MAX_INDEXED = 200_000  # elements of a tensor whose indexing is applied to their numbers
MAX_DEPTH = 24  # copies of copies followed
MAX_LEVELS = 4  # computations between data and a recurrence
MAX_ROOTS = 4096  # storages after which freed ones are dropped
SAMPLES = 61  # values by which a copy is recognised
# operations that move elements, those that join tensors, and those whose result is an order
PACK = "_pack_padded_sequence"
MOVES = {"__getitem__", "index_select", "flip", "roll", "gather", "take_along_dim", PACK}
JOINS = {"stack", "cat", "concat", "concatenate", "pad_sequence"}
ORDERS = {"randperm", "arange", "argsort", "sort", "topk"}
# those that map the last dimension alone, those whose results are no data, those that copy arrays
ROWWISE = RECURRENT | {"linear", "matmul", "__matmul__", "mm", "lazylinear"}
FILLS = {"zeros", "ones", "eye", "full", "empty", "zeros_like", "ones_like", "new_zeros"}
FROM_ARRAY = {"tensor", "as_tensor", "asarray"}


class Element(NamedTuple):
    """One element of a root that copies no other."""

    root: "Root"
    at: tuple[int, ...]


class View(NamedTuple):
    """A tensor as a view of a root."""

    root: "Root"
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def locate(self, index: tuple[int, ...]) -> Element | None:
        """The element of the oldest known root that this one is a copy of."""
        root = self.root
        rest = self.offset + sum(map(int.__mul__, index, self.strides)) - root.offset
        at = [0] * len(root.shape)
        for dim in root.order:
            if root.shape[dim] > 1:
                at[dim], rest = divmod(rest, root.strides[dim])
        if rest or any(i < 0 or i >= n for i, n in zip(at, root.shape, strict=True)):
            return None
        return Element(root, tuple(at)) if root.copied is None else root.copied(tuple(at))

    def locate_lead(self, lead: int, index: tuple[int, ...]) -> Element | None:
        """The element at the first indices of another tensor."""
        return self.locate((index[:lead] + (0,) * len(self.shape))[: len(self.shape)])

    def select(self, dim: int, index: int) -> "View":
        """The part at one index of a dimension."""
        shape, strides = list(self.shape), list(self.strides)
        del shape[dim]
        return View(self.root, self.offset + index * strides.pop(dim), tuple(shape), tuple(strides))


@dataclass(eq=False, slots=True)
class Root:
    """The values of a storage until it is changed; without a source they are raw data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    alive: StorageWeakRef
    version: int
    order: list[int] = field(default_factory=list)  # its dimensions, the largest stride first
    copied: Callable[[tuple[int, ...]], Element | None] | None = None  # an element's original
    covered: "list[Lane]" = field(default_factory=list)  # of other roots, if it is computed
    joined: int | None = None  # the dimension along which it joins tensors
    random: bool = False  # they are samples that a loader draws at random
    depth: int = 0
    known: bool = True  # False after a change that was not watched
    is_order: bool = False
    chunk: int = 0


class Lane(NamedTuple):
    """The first and the last step of one lane of a chunk, or the corners of all that it covers."""

    root: Root
    first: tuple[int, ...]
    last: tuple[int, ...]
    step: tuple[int, ...] = ()  # from one step to the next; empty if unknown or not constant
    is_range: bool = False  # the corners of all that is covered

    @property
    def dims(self) -> set[int]:
        """The dimensions of the root along which it moves."""
        return nonzero(self.step or difference(self.first, self.last))

    def begins_along(self, dim: int) -> bool:
        """Whether its first step is the first of the root in a dimension, in its direction."""
        backwards = bool(self.step) and self.step[dim] < 0
        return self.first[dim] == (self.root.shape[dim] - 1 if backwards else 0)


def difference(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """From one index of a root to another."""
    return tuple(b - a for a, b in zip(before, after, strict=True))


def nonzero(offset: tuple[int, ...]) -> set[int]:
    """The dimensions in which an offset is not zero."""
    return {dim for dim, n in enumerate(offset) if n}


class RootTable:
    """The roots by the storage that holds them."""

    def __init__(self) -> None:
        self.roots: dict[int, Root] = {}
        self.most = MAX_ROOTS
        self.samples: dict[Any, Root] = {}  # raw data by some of their values
        self.cuts: dict[View, View] = {}  # single steps, and what the loop took them from
        self.arrays: dict[int, tuple[Any, Root]] = {}  # those that own their memory

    def view(self, tensor: Tensor, *, new: bool = True) -> View | None:
        """A tensor as a view of its root; `new` makes a root of raw data where there is none."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        key, version = storage_of(tensor), 0 if tensor.is_inference() else version_of(tensor)
        root = self.roots.get(key)
        if root is None or root.version != version:
            if root is None and not new and base_of(tensor) is None:
                return None
            base = base_of(tensor)
            whole, changed = tensor if base is None else base, root is not None
            root = self._add(whole)
            root.known = not changed
            root = root if changed else self._recognised(whole, root)
        return View(root, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _add(self, tensor: Tensor) -> Root:
        storage = tensor.untyped_storage()
        strides = tensor.stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        version = 0 if tensor.is_inference() else version_of(tensor)
        root = Root(
            tuple(tensor.shape),
            strides,
            int(tensor.storage_offset()),
            StorageWeakRef(storage),
            version,
            order,
        )
        self.roots[storage_of(tensor)] = root
        if len(self.roots) > self.most:
            self.drop_freed()
            self.most = 2 * len(self.roots) + MAX_ROOTS
        return root

    def _recognised(self, tensor: Tensor, root: Root) -> Root:
        """The root of equal raw data, such as of the copy that the last epoch made."""
        count = tensor.numel()
        if count < SAMPLES or tensor.device.type != "cpu" or tensor.is_complex():
            return root
        values = tensor.detach().reshape(-1)[:: count // SAMPLES].tolist()
        if len(set(values)) < 4:
            return root
        same = self.samples.setdefault((root.shape, root.strides, tensor.dtype, *values), root)
        self.roots[storage_of(tensor)] = same
        same.alive, same.version = root.alive, root.version
        return same

    def result(self, op: Any, sources: list[Tensor], out: Tensor) -> Root | None:
        """The root of what an operation computed from data; `None` for a view of them."""
        name, args = op.name, op.args
        if out.layout is not torch.strided or not out.numel():
            return None
        key = storage_of(out)
        if any(storage_of(source) == key for source in sources if source.layout is out.layout):
            return None
        views = [view for source in sources if (view := self.view(source)) and view.root.known]
        root = self._add(out)
        root.is_order = name in ORDERS
        root.known = bool(views) or not (op.inputs or name in FILLS)
        if views:
            moves = name in MOVES and views[0] == self.view(args[0])
            self._connect(root, name if moves or name not in MOVES else "", op, views)
        elif name in FROM_ARRAY and isinstance(args[0], np.ndarray):
            self.copy_array(args[0], out)
        elif root.known and not root.is_order:
            root = self._recognised(out, root)
        return root

    def copy_array(self, array: Any, out: Tensor) -> None:
        """Record a tensor that has the memory or the values of a NumPy array."""
        part = self._part_of_array(array)
        root = self._add(out)
        if part is None:
            self._recognised(out, root)
        else:
            root.copied = part.locate

    def _part_of_array(self, array: Any) -> View | None:
        """An array as a view of the one that owns its memory."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.dtype != array.dtype or base.dtype.kind not in "fiub" or not base.flags.writeable:
            return None
        reference, root = self.arrays.get(id(base), (lambda: None, None))
        if root is None or reference() is not base:
            whole = torch.from_numpy(base)
            root = self._recognised(whole, self._add(whole))
            self.arrays[id(base)] = weakref.ref(base), root
        offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
        strides = tuple(n // array.itemsize for n in array.strides)
        return View(root, offset, array.shape, strides)

    def _connect(self, root: Root, name: str, op: Any, views: list[View]) -> None:
        root.depth = 1 + max(view.root.depth for view in views)
        root.is_order |= all(view.root.is_order for view in views)
        if root.depth > MAX_DEPTH or op.is_choice:
            root.depth = 0  # such as its own predictions, fed back
            return
        if name in JOINS:
            origins = {view.locate((0,) * len(view.shape)) for view in views}
            dim = op.args[1] if name in {"stack", "cat"} and len(op.args) > 1 else 0
            root.joined = op.kwargs.get("dim", dim)
            moved = views if len(origins) == len(views) == len(op.args[0]) else []
        else:
            moved = views[:1] if name in MOVES else []
        if name == "__getitem__" and (index := _index_as_data(views)) is not None:
            self._compute(root, "", [index])
        elif moved and sum(map(_count, moved)) <= MAX_INDEXED:
            root.copied = _Numbers(op, moved).locate
        else:
            self._compute(root, name, views, mixed=bool(moved))

    @staticmethod
    def _compute(root: Root, name: str, views: list[View], *, mixed: bool = False) -> None:
        """Steps and lanes stay where they are, or everything is mixed."""
        for view in () if mixed else views:
            lead = len(view.shape)
            if name in ROWWISE and lead == len(root.shape):
                lead -= 1
            if lead and view.shape[:lead] == root.shape[:lead] and len(root.shape) <= lead + 1:
                root.copied = partial(view.locate_lead, lead)
                return
        lanes = [lane for view in views for lane in covered(view)]
        root.covered = list(dict.fromkeys(lanes))[:MAX_LANES]
        root.known = bool(root.covered)

    def change(self, target: Tensor, values: list[Tensor], *, whole: bool) -> None:
        """Record a tensor that was filled in place with other data."""
        old = self.roots.get(storage_of(target))
        views = list(filter(None, map(self.view, values)))
        base = base_of(target)
        root = self._add(target if base is None else base)
        if whole and base is None and len(views) == 1 and views[0].shape == root.shape:
            self._compute(root, "copy_", views)
        else:
            kept = [] if old is None or whole else old.covered
            lanes = kept + [lane for view in views for lane in covered(view)]
            root.covered = list(dict.fromkeys(lanes))[-MAX_LANES:]
            root.known = bool(root.covered)
            root.depth = 1 + max((v.root.depth for v in views), default=0)

    def note_cut(self, source: Tensor, part: Tensor) -> None:
        """Note that the loop takes a single step of a tensor."""
        whole, view = self.view(source), self.view(part)
        if whole is not None and view is not None and len(view.shape) < len(whole.shape):
            self.cuts[view] = whole

    def drop_freed(self) -> None:
        """Forget the roots of freed storages."""
        self.roots = {key: root for key, root in self.roots.items() if not root.alive.expired()}
        self.arrays = {key: pair for key, pair in self.arrays.items() if pair[0]() is not None}
        while len(self.samples) > 256:
            del self.samples[next(iter(self.samples))]


def _index_as_data(views: list[View]) -> View | None:
    """The indices of a table, where they are the data themselves, such as numbers of words."""
    index = views[-1]
    whole = index.shape == index.root.shape and index.root.copied is None
    is_data = len(index.shape) > 1 or not (whole or index.root.is_order)
    return index if len(views) > 1 and is_data and not index.root.covered else None


def _count(view: View) -> int:
    return math.prod(view.shape)


class _Numbers:
    """The elements that an operation moves, by the same operation on their numbers from 1 on."""

    def __init__(self, op: Any, sources: list[View]) -> None:
        self.func, self.args, self.kwargs = op.func, op.args[1:], op.kwargs
        self.sources, self.device = sources, op.inputs[0].device
        self.joins = not isinstance(op.args[0], Tensor)
        self.starts = list(accumulate(map(_count, sources), initial=1))
        self.numbers: Tensor | None = None

    def locate(self, at: tuple[int, ...]) -> Element | None:
        """The original of the element at an index of the result."""
        moved = self.numbers
        if moved is None:
            pairs = zip(self.starts, self.sources, strict=False)
            numbers = [
                torch.arange(start, start + _count(source), device=self.device).view(source.shape)
                for start, source in pairs
            ]
            moved = self.func(numbers if self.joins else numbers[0], *self.args, **self.kwargs)
            moved = self.numbers = (moved if isinstance(moved, Tensor) else moved[0]).cpu()
        number, index = int(moved[at]), list[int]()
        if number == 0:  # padding
            return None
        part = bisect_right(self.starts, number) - 1
        source, rest = self.sources[part], number - self.starts[part]
        for size in reversed(source.shape):
            rest, i = divmod(rest, size)
            index.insert(0, i)
        return source.locate(tuple(index))


def lane_ends(
    view: View, steps: list[int], starts: list[int], lane_dim: int | None, time_dim: int | None
) -> list[Lane] | None:
    """The ends of the first lanes of a chunk; `None` if any of them is unknown.

    `steps` are those of each lane. For packed data `starts` has the row where each step begins.
    """
    lanes, dims = list[Lane](), range(len(view.shape))
    for lane, count in enumerate(steps[:MAX_LANES]):

        def element(t: int, lane: int = lane) -> Element | None:
            at = {0: starts[t] + lane} if starts else {time_dim: t, lane_dim: lane}
            return view.locate(tuple(at.get(dim, 0) for dim in dims))

        first, last = element(0), element(count - 1)
        if first is None or last is None or first.root is not last.root or not first.root.known:
            return None
        step: tuple[int, ...] = ()
        if count > 1 and (second := element(1)) is not None and second.root is first.root:
            step = difference(first.at, second.at)
            if difference(first.at, last.at) != tuple(n * (count - 1) for n in step):
                step = ()
        lanes.append(Lane(first.root, first.at, last.at, step))
    return lanes


def covered(view: View) -> list[Lane]:
    """The corners of what a tensor covers of its roots, apart where they are no single range."""
    origin = view.locate((0,) * len(view.shape))
    if origin is None or not origin.root.known:
        return []
    moves, steps = dict[int, tuple[int, int]](), [0] * len(origin.at)
    for dim, size in enumerate(view.shape):
        if size == 1:
            continue
        at = tuple(int(d == dim) for d in range(len(view.shape)))
        nearby = view.locate(at)
        if nearby is None or nearby.root is not origin.root:
            return _covered_rows(view, dim)
        offset = difference(origin.at, nearby.at)
        for d in nonzero(offset):
            if d in moves:  # two dimensions go along one of the root: the longer move is of lanes
                other, length = moves[d]
                return _covered_rows(view, dim if abs(offset[d]) > length else other)
            moves[d], steps[d] = (dim, abs(offset[d])), offset[d]
    end = view.locate(tuple(size - 1 for size in view.shape))
    if end is None or end.root is not origin.root:
        return []
    if origin.root.covered and (origin.at, end.at) == _whole(origin.root):
        return origin.root.covered
    return [Lane(origin.root, origin.at, end.at, tuple(steps), is_range=True)]


def _covered_rows(view: View, dim: int) -> list[Lane]:
    rows = (view.select(dim, i) for i in range(min(view.shape[dim], MAX_LANES)))
    return [lane for row in rows for lane in covered(row)]


def _whole(root: Root) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(root.shape), tuple(size - 1 for size in root.shape)


def levels(lanes: list[Lane]) -> Iterator[list[Lane]]:
    """These lanes, then what their roots were computed from, and so on."""
    for _ in range(MAX_LEVELS):
        yield lanes
        if not any(lane.root.covered for lane in lanes):
            return
        above = [up for lane in lanes for up in lane.root.covered or [lane]]
        lanes = list(dict.fromkeys(above))


def same_level(before: list[Lane], after: list[Lane]) -> tuple[list[Lane], list[Lane]] | None:
    """The nearest levels at which two chunks read one root."""
    pairs = product(enumerate(levels(before)), enumerate(levels(after)))
    for (_, a), (_, b) in sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0]):
        if {lane.root for lane in a} & {lane.root for lane in b}:
            return a, b
    return None
