"""Where the elements of a tensor come from: raw data, and the outputs of recurrent calls.

A root is what a storage holds until it is changed: raw data, or the result of an operation. An
element of a root is known by its storage offset. A result that only moves elements has a table of
the elements that it was made of; one computed row by row has a view of its source; anything else
covers all that its sources cover. Each root has two such links: to the raw data behind it, and to
the outputs of the recurrent call behind it. No value is read, except to recognise a copy that every
epoch makes anew.
"""

import itertools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from throughtime.doctor._graph import base_of, storage_of, version_of

SPAN = 2**40  # storage offsets of a root; an element's number is root.number * SPAN + offset
MAX_LANES, FEW_LANES = 12, 2  # lanes compared; a wrong order shows in the first ones
MAX_MOVED = 200_000  # elements of a tensor whose moves are followed
MAX_DEPTH = 24  # copies of copies
MAX_ROOTS = 4096  # storages after which freed ones are dropped
SAMPLES = 61  # values by which a copy is recognised
# operations that move elements, those that join tensors, and those that write into their first
MOVES = {"__getitem__", "index_select", "flip", "roll", "gather", "take_along_dim",
         "_pack_padded_sequence"}  # fmt: skip
JOINS = {"stack", "cat", "concat", "concatenate", "pad_sequence"}
WRITES = {"__setitem__", "index_copy", "index_copy_"}
# those that map the last dimension alone, whose results are an order, are no data, are new data
ROWWISE = {"linear", "matmul", "__matmul__", "mm"}
ORDERS = {"randperm", "arange", "argsort", "sort", "topk"}
FILLS = {"zeros", "ones", "eye", "full", "empty", "zeros_like", "ones_like", "new_zeros"}
FROM_ARRAY = {"tensor", "as_tensor", "asarray", "from_numpy"}
# those that mask or reset values
EDITS = {"mul", "__mul__", "__rmul__", "where", "masked_fill", "masked_fill_", "mul_", "__imul__",
         "lerp", "index_fill", "__setitem__"}  # fmt: skip
Kind = Literal["data", "state"]


class View(NamedTuple):
    """A tensor as a view of a root."""

    root: "Root"
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    grad: bool = False  # the tensor requires a gradient

    def at(self, index: dict[Any, int]) -> int:
        """The storage offset at these indices, 0 in the other dimensions."""
        return self.offset + sum(index.get(d, 0) * n for d, n in enumerate(self.strides))


@dataclass(eq=False, slots=True, weakref_slot=True)
class Root:
    """The values of a storage until it is changed."""

    number: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alive: StorageWeakRef
    version: int
    data: View | Tensor | None = None  # what its elements were made of; without it they are raw
    state: View | Tensor | None = None
    sources: list["Root"] = field(default_factory=list)  # kept alive for its tables
    covered: list["Lane"] = field(default_factory=list)  # of other roots, if it mixes elements
    call: Any = None  # the recurrent call whose output it is,
    lane_dim: int | None = None  # and its dimensions
    time_dim: int | None = None
    depth: int = 0
    known: bool = True  # False for constants, and after a change that was not watched
    is_order: bool = False
    learned: bool = False  # it depends on a parameter
    edited: bool = False  # values were masked or reset since the recurrent call
    cloned: bool = False
    cut: bool = False  # the graph ends between that call and it
    behind: Any = None  # the last recurrent call that it depends on

    def become(self, call: Any, lane_dim: int | None) -> None:
        """It holds the result of a recurrent call."""
        self.call = self.behind = call
        self.learned, self.lane_dim, self.state = True, lane_dim, None
        self.edited = self.cloned = self.cut = False

    def index(self, offset: Any) -> list[Any]:
        """The index of an element, or of a tensor of them."""
        rest = offset - self.offset
        index = [rest - rest] * len(self.shape)
        for d in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[d] > 1 and self.strides[d]:
                index[d], rest = rest // self.strides[d], rest % self.strides[d]
        return index


class Lane(NamedTuple):
    """The first and the last step of one lane of a chunk, or all that a chunk covers of a root."""

    root: Root
    first: int  # storage offsets
    last: int
    step: int  # from one step to the next, 0 if unknown
    # from the last step to the first of a chunk that goes on; with x[:-1] the last is a target only
    ahead: frozenset[int]
    whole: bool = False  # all that a chunk covers

    def joined(self, second: "Lane", last: "Lane", count: int) -> "Lane":
        """The lane from this step to the last one, for cells."""
        if last.root is not self.root:
            return self
        step = self.step or (second.first - self.first if second.root is self.root else 0)
        ahead = frozenset([step, 2 * step]) if step else last.ahead
        if last.last - self.first != step * (count - 1):
            ahead = frozenset[int]()  # steps are passed over: it may go on anywhere
        return Lane(self.root, self.first, last.last, step, ahead)


class RootTable:
    """The roots by the storage that holds them."""

    def __init__(self) -> None:
        self.roots: dict[int, Root] = {}
        self.by_number: weakref.WeakValueDictionary[int, Root] = weakref.WeakValueDictionary()
        self.numbers = itertools.count(1)
        self.samples: dict[Any, Root] = {}  # raw data by some of their values
        self.arrays: dict[int, tuple[Any, Root]] = {}  # those that own their memory

    def view(self, tensor: Tensor, *, new: bool = True) -> View | None:
        """A tensor as a view of its root; `new` makes a root of raw data where there is none."""
        if not storage_of(tensor) or not tensor.numel():
            return None
        root = self.roots.get(storage_of(tensor))
        root = None if root and root.alive.expired() else root
        if not root or root.version != version_of(tensor):
            if not (new or root):
                return None
            changed, root = root is not None, self.add(base_of(tensor))
            root.known = not changed
            root = root if changed else self._recognised(base_of(tensor), root)
        return View(root, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(),
                    tensor.requires_grad)  # fmt: skip

    def add(self, tensor: Tensor) -> Root:
        """A new root for what a tensor holds now."""
        root = Root(
            next(self.numbers),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            StorageWeakRef(tensor.untyped_storage()),
            version_of(tensor),
        )
        self.roots[storage_of(tensor)] = self.by_number[root.number] = root
        if len(self.roots) % MAX_ROOTS == 0:
            self.drop_freed()
        return root

    def drop_freed(self) -> None:
        """Forget the roots of freed storages."""
        self.roots = {key: root for key, root in self.roots.items() if not root.alive.expired()}
        self.arrays = {key: pair for key, pair in self.arrays.items() if pair[0]() is not None}
        for key in list(self.samples)[:-256]:
            del self.samples[key]

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

    def _resolve(self, root: Root, at: Any, kind: Kind) -> Any:
        """The number of the element behind one at a storage offset, or behind a tensor of them."""
        while (link := getattr(root, kind)) is not None:
            index = root.index(at)
            if isinstance(link, Tensor):
                return link[tuple(index[: link.dim()])]
            moved = (i * n for i, n in zip(index, link.strides, strict=False))
            root, at = link.root, sum(moved, at - at + link.offset)
        is_origin = root.call if kind == "state" else root.known
        return root.number * SPAN + at if is_origin else at - at

    def element(self, root: Root, at: int, kind: Kind = "data") -> tuple[Root, int] | None:
        """The root and the storage offset behind an element; `None` if there is none."""
        number, offset = divmod(int(self._resolve(root, at, kind)), SPAN)
        origin = self.by_number.get(number)
        return (origin, offset) if origin else None

    def follow(self, op: Any, out: Tensor, target: View | None = None) -> Root | None:
        """The root of a result; `None` for a view. `target` is what was changed in place."""
        key, fills = storage_of(out), op.name in FILLS
        inputs = [t for t in op.inputs if storage_of(t) and not (t.is_leaf and t.requires_grad)]
        others = [t for t in inputs if storage_of(t) != key]
        if not key or not out.numel() or (target is None and len(others) < len(inputs)):
            return None
        sources = [view for t in others if (view := self.view(t))]
        sources = [target, *sources] if target else [] if fills else sources
        root = self.add(out)
        root.learned = any([t.requires_grad for t in op.inputs] + [v.root.learned for v in sources])
        if op.is_choice:
            root.learned = False
            return root
        known = [v for v in sources if v.root.known or v.root.behind]
        root.is_order = op.name in ORDERS or (bool(known) and all(v.root.is_order for v in known))
        if not known:
            root.known = not (op.inputs or fills)
            if op.name in FROM_ARRAY and isinstance(op.args[0], np.ndarray):
                return self.from_array(op.args[0], out)
            return self._recognised(out, root) if root.known and not root.is_order else root
        if not self._moved(root, op, sources):
            self._computed(root, op, known, partial=target is not None and op.name in WRITES)
        depths = [link.root.depth for link in (root.data, root.state) if isinstance(link, View)]
        root.depth = 1 + max(depths, default=0)
        if root.depth > MAX_DEPTH:  # such as its own predictions, fed back
            root.depth, root.data, root.state = 0, None, None
        return root

    def _moved(self, root: Root, op: Any, sources: list[View]) -> bool:
        """Link the result of an operation that moves elements, by moving their numbers."""
        name, index = op.name, sources[-1]
        whole = index.shape == index.root.shape and index.root.data is None
        if name == "__getitem__" and len(sources) > 1 and not index.root.covered and (
            len(index.shape) > 1 or not (whole or index.root.is_order)
        ):  # fmt: skip
            # the indices of a table are the data themselves, such as numbers of words
            root.data = rows_of(index, root.shape, whole=True)
            root.covered = [] if root.data else list(self.covered(index))
            return True
        moved = sources if name in JOINS else sources[:1]
        if name in WRITES and isinstance(op.args[-1], Tensor):
            moved = [sources[0], *(v for v in sources[-1:] if v.shape == op.args[-1].shape)]
        if sum(math.prod(v.shape) for v in moved) > MAX_MOVED:
            return False
        if name == "stack" and all(v.grad for v in moved):  # the outputs of a chunk
            root.known = False
            return True
        if name in JOINS:
            mixed = len({v.root.learned for v in moved}) > 1
            if mixed or len(moved) != len(op.args[0]) or len(set(moved)) < len(moved):
                return False
        elif name not in MOVES and not (name in WRITES and root.shape == moved[0].shape):
            return False
        root.data, root.state = (self._replayed(op, moved, kind) for kind in ("data", "state"))
        numbers = {n for link in (root.data, root.state) for n in (link // SPAN).unique().tolist()}
        root.sources = [self.by_number[n] for n in numbers if n in self.by_number]
        root.behind = max((r.behind for r in root.sources if r.behind), key=_serial, default=None)
        root.edited = any(v.root.edited for v in moved) or name == "__setitem__"
        root.cloned = all(v.root.cloned for v in moved)
        root.cut = any(v.root.cut or (v.root.behind and not v.grad) for v in moved)
        return True

    def _replayed(self, op: Any, moved: list[View], kind: Kind) -> Tensor:
        """The operation on the numbers of the elements that it moves."""
        grids: list[Any] = []
        for view in moved:
            indices = map(torch.from_numpy, np.indices(view.shape, sparse=True))
            offset = torch.tensor(view.offset, device="cpu")
            offsets = sum((n * i for n, i in zip(view.strides, indices, strict=True)), offset)
            numbers = self._resolve(view.root, offsets, kind).expand(view.shape)
            grids.append(numbers.to(op.inputs[0].device))
        args = [grids if op.name in JOINS else grids[0].clone(), *op.args[1:]]
        if op.name in WRITES:
            args[-1] = grids[1] if len(grids) > 1 else 0
        result = op.func(*args, **op.kwargs)
        result = args[0] if result is None else result
        return (result if isinstance(result, Tensor) else result[0]).cpu()

    def _computed(self, root: Root, op: Any, known: list[View], *, partial: bool) -> None:
        """Steps and lanes stay where they are, or everything is mixed."""
        lead = op.name not in ROWWISE
        states = [v for v in known if v.root.behind]
        states.sort(key=lambda v: -_serial(v.root.behind))
        pure = [v for v in known if v not in states] or [v for v in states if v.root.known]
        if states:
            state = states[0]
            root.behind, root.cut = state.root.behind, state.root.cut or not state.grad
            first = View(state.root, state.offset, (), ())
            root.state = rows_of(state, root.shape, whole=lead) or first
            root.cloned = state.root.cloned or op.name in {"clone", "__deepcopy__"}
            root.edited = state.root.edited or op.is_edit(len(states))
        links = (rows_of(v, root.shape, whole=lead) for v in pure if not partial)
        root.data = next(filter(None, links), None)
        if root.data is None:
            lanes = dict.fromkeys(lane for v in pure for lane in self.covered(v))
            root.covered = list(lanes)[-MAX_LANES:]
            root.known = bool(root.covered)

    def from_array(self, array: Any, out: Tensor) -> Root:
        """Record a tensor with the memory or the values of a NumPy array."""
        root, base = self.add(out), array
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.dtype != array.dtype or base.dtype.kind not in "fiub" or not base.flags.writeable:
            return self._recognised(out, root)
        reference, whole = self.arrays.get(id(base), (lambda: None, None))
        if whole is None or reference() is not base:
            memory = torch.from_numpy(base)
            whole = self._recognised(memory, self.add(memory))
            self.arrays[id(base)] = weakref.ref(base), whole
        self.roots[storage_of(out)] = root
        offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
        strides = tuple(n // array.itemsize for n in array.strides)
        root.data = View(whole, offset, array.shape, strides)
        return root

    def change(self, op: Any) -> None:
        """Record a tensor that an operation changed in place."""
        whole = base_of(op.inputs[0])
        root, view = self.roots.get(storage_of(whole)), None
        if root and not (op.name == "copy_" and whole is op.inputs[0]):
            offset = int(whole.storage_offset())
            view = View(root, offset, tuple(whole.shape), whole.stride(), whole.requires_grad)
        if not self.follow(op, whole, view):
            self.add(whole)

    def lanes(
        self, view: View, lengths: list[int], dims: tuple[Any, Any], starts: list[int]
    ) -> list[Lane]:
        """The first lanes of a chunk, whose dimensions are those of lanes and of time.

        For packed data `starts` has the row where each step begins.
        """
        raw = view.root.data is None and not view.root.covered
        lanes = list[Lane]()
        for lane, count in enumerate(lengths[: FEW_LANES if raw else MAX_LANES]):
            ends = (
                {0: starts[t] + lane} if starts else {dims[0]: lane, dims[1]: t}
                for t in (0, min(1, count - 1), count - 1)
            )
            first, second, last = (self.element(view.root, view.at(index)) for index in ends)
            if not (first and second and last and first[0] is second[0] is last[0]):
                return [] if starts else list(self.covered(view))
            root, step = first[0], second[1] - first[1]
            step = step if first[1] + step * (count - 1) == last[1] else 0
            strides = root.strides if count == 1 else {step} - {0}
            ahead = frozenset(k * n for n in strides for k in (1, 2))
            lanes.append(Lane(root, first[1], last[1], step, ahead))
        return lanes

    def covered(self, view: View) -> Iterator[Lane]:
        """What a tensor covers of its roots: apart for each index of a dimension that joins."""
        origin = self.element(view.root, view.offset)
        if not origin:
            return
        root, first = origin
        if root.covered and first == root.offset and math.prod(view.shape) >= math.prod(root.shape):
            yield from root.covered
            return
        moves = dict[int, int]()
        for d, size in enumerate(view.shape):
            if size == 1:
                continue
            near = self.element(view.root, view.at({d: 1}))
            if not near or near[0] is not root:
                shape, strides = (n[:d] + n[d + 1 :] for n in (view.shape, view.strides))
                for i in range(min(size, MAX_LANES)):
                    yield from self.covered(View(view.root, view.at({d: i}), shape, strides))
                return
            moves[near[1] - first] = size
        ahead = {k * n for n, size in moves.items() for k in (size, size + 1)}
        yield Lane(root, first, first, 0, frozenset(ahead), whole=True)


def _serial(call: Any) -> int:
    return int(call.serial)


def rows_of(view: View, shape: tuple[int, ...], *, whole: bool) -> View | None:
    """A source whose rows are those of a result; `whole` if its last dimension stays too."""
    lead = len(view.shape) - (len(view.shape) == len(shape) and not whole)
    if (view.shape and not lead) or len(shape) > lead + 1 or view.shape[:lead] != shape[:lead]:
        return None
    return View(view.root, view.offset, view.shape[:lead], view.strides[:lead])
