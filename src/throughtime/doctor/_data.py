"""Where the elements of a tensor come from: raw data, and the states of recurrent calls.

A root is what a storage holds until it is changed. An element of raw data has a number. Any other
root has marks, three numbers for each of its elements: of the first and the last element of raw
data that it was made of, and of the state behind it; 0 is not known. An operation that moves
elements moves their marks. Any other keeps the dimensions in front that it shares with its result,
and covers all of the rest. No value is read, except to recognise a copy that every epoch makes
anew.
"""

import itertools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from throughtime.doctor._graph import base_of, storage_of, version_of

SPAN = 2**40  # an element's number is that of its root times this, and its storage offset
# a state's number is that of its call times SPAN, its lane times this, and 1 more than its step, or
# 0 for the last one
LANE = 2**20
MOST = 2**63 - 1
MAX_MARKS = 200_000  # elements of a tensor whose marks are moved
MAX_ROOTS = 4096  # roots of raw data, and storages after which freed ones are dropped
SAMPLES = 61  # values by which a copy is recognised
# operations that move elements, those that join tensors, and those that write into their first
MOVES = {"__getitem__", "index_select", "flip", "roll", "gather", "take_along_dim", "reshape",
         "flatten", "repeat", "_pack_padded_sequence"}  # fmt: skip
JOINS = {"stack", "cat", "concat", "concatenate", "pad_sequence"}
WRITES = {"__setitem__", "index_copy", "index_copy_"}
REPLACES = {"copy_", "zero_", "fill_"}  # write all of it
CLONES = {"clone", "__deepcopy__"}
# those whose results are an order, and constants
ORDERS = {"randperm", "arange", "argsort", "sort", "topk"}
FILLS = {"zeros", "ones", "eye", "full", "empty", "zeros_like", "ones_like", "new_zeros"}
FROM_ARRAY = {"tensor", "as_tensor", "asarray", "from_numpy"}
# those that mask or reset values
EDITS = {"mul", "__mul__", "__rmul__", "where", "masked_fill", "masked_fill_", "mul_", "__imul__",
         "lerp", "index_fill", "__setitem__"}  # fmt: skip
Marks = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False, slots=True)
class Root:
    """The values of a storage until it is changed."""

    number: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alive: StorageWeakRef
    version: int
    item: int  # bytes of an element
    marks: Marks | None = None  # without them its elements are raw
    known: bool = True  # False for constants, and after a change that was not watched
    is_order: bool = False
    learned: bool = False  # it depends on a parameter
    behind: Any = None  # the last recurrent call that it depends on,
    edited: bool = False  # what happened to its values since: they were masked or reset,
    cloned: bool = False
    cut: bool = False  # the graph between that call and it ended

    def index(self, offset: Any) -> list[Any]:
        """The index of an element, or of a tensor of them."""
        rest = offset - self.offset
        index = [rest - rest] * len(self.shape)
        for d in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[d] > 1 and self.strides[d]:
                index[d], rest = rest // self.strides[d], rest % self.strides[d]
        return index


class RootTable:
    """The roots by the storage that holds them."""

    def __init__(self) -> None:
        self.complete = True  # all is watched so far: a tensor without a root is raw data
        self.roots: dict[int, Root] = {}
        self.raw: dict[int, Root] = {}  # those of raw data by their number, the last used last
        self.numbers = itertools.count(1)
        self.samples: dict[Any, Root] = {}  # raw data by some of their values
        self.arrays: dict[int, tuple[Any, Tensor]] = {}  # those that own their memory

    def root(self, tensor: Tensor, *, new: bool = True) -> Root | None:
        """The root of a tensor; `new` makes one of raw data where there is none."""
        if not storage_of(tensor) or not tensor.numel():
            return None
        root, base = self.roots.get(storage_of(tensor)), base_of(tensor)
        if root and not root.alive.expired():
            changed = root.version != version_of(tensor)  # unwatched
            return self.add(base, unknown(base.shape)) if changed else root
        return self.add(base) if new and self.complete else None

    def add(self, tensor: Tensor, marks: Marks | None = None) -> Root:
        """A new root for what a tensor holds now; raw data without marks."""
        memory = StorageWeakRef(tensor.untyped_storage())
        root = Root(next(self.numbers), int(tensor.storage_offset()), tuple(tensor.shape),
                    tensor.stride(), memory, version_of(tensor), tensor.element_size(),
                    marks)  # fmt: skip
        if marks:
            root.known = bool(marks[0].any())
        else:
            root = self._recognised(tensor, root)
            self.raw[root.number] = root
        self.roots[storage_of(tensor)] = root
        if len(self.roots) % MAX_ROOTS == 0:
            self.drop_freed()
        return root

    def drop_freed(self) -> None:
        """Forget the roots of freed storages, and raw data that were not read for long."""
        self.roots = {key: root for key, root in self.roots.items() if not root.alive.expired()}
        self.arrays = {key: pair for key, pair in self.arrays.items() if pair[0]() is not None}
        for table, most in ((self.samples, 256), (self.raw, MAX_ROOTS)):
            for key in list(table)[:-most]:
                del table[key]

    def _recognised(self, tensor: Tensor, root: Root) -> Root:
        """The root of equal raw data, such as of the copy that the last epoch made."""
        count = tensor.numel()
        if count < SAMPLES or tensor.device.type != "cpu" or tensor.is_complex():
            return root
        values = tensor.detach().reshape(-1)[:: count // SAMPLES].tolist()
        if len(set(values)) < 4:
            return root
        same = self.samples.setdefault((root.shape, root.strides, tensor.dtype, *values), root)
        same.alive, same.version = root.alive, root.version
        return same

    def marks(self, tensor: Tensor) -> Marks:
        """The marks of the elements of a tensor that has a root."""
        root = self.root(tensor)
        if root is None or root.item != tensor.element_size():  # a view as of other numbers
            return unknown(tensor.shape)
        if root.marks and root.shape == tensor.shape and root.strides == tensor.stride():
            return root.marks
        indices = map(torch.from_numpy, np.indices(tensor.shape, sparse=True))
        offset = torch.tensor(int(tensor.storage_offset()), device="cpu")
        moved = (n * i for n, i in zip(tensor.stride(), indices, strict=True))
        offsets = sum(moved, offset).expand(tensor.shape)
        if root.marks is None:
            self.raw[root.number] = self.raw.pop(root.number, root)
            numbers = root.number * SPAN + offsets
            return numbers, numbers, torch.zeros_like(numbers)
        index = tuple(root.index(offsets))
        first, last, state = (each[index] if index else each for each in root.marks)
        return first, last, state

    def follow(self, op: Any, out: Tensor) -> None:
        """Record the result of an operation, unless it is a view."""
        key = storage_of(out)
        if key and out.numel() and all(storage_of(t) != key for t in op.inputs):
            self._record(op, out, [] if op.name in FILLS else op.inputs)

    def change(self, op: Any) -> None:
        """Record a tensor that an operation changed in place."""
        target, *others = op.inputs
        whole = base_of(target)
        if root := self.roots.get(storage_of(whole)):
            root.version = version_of(whole)
        replaced = whole is target and op.name in REPLACES
        self._record(op, whole, others if replaced else [whole, *others])

    def _record(self, op: Any, out: Tensor, inputs: list[Tensor]) -> None:
        fluid = [t for t in inputs if not isinstance(t, nn.Parameter)]
        roots = [(t, root) for t in fluid if (root := self.root(t, new=not t.requires_grad))]
        known = [(t, root) for t, root in roots if root.known or root.behind]
        if not known and op.name in FROM_ARRAY and isinstance(op.args[0], np.ndarray):
            return self.from_array(op.args[0], out)
        learned = not op.is_choice and (
            any(t.requires_grad for t in inputs) or any(each.learned for _, each in roots)
        )
        # what is computed from most of the raw data together is new data
        mixed = bool(known) and not learned and all(
            shared(t, out.shape) < min(t.dim(), out.dim()) and self._is_most(t) for t, _ in known
        )  # fmt: skip
        marks = self._moved(op, out, roots)
        if (
            not marks
            and not op.is_choice
            and not mixed
            and (known or op.inputs or op.name in FILLS)
        ):
            marks = self._computed(out, known)
        root = self.add(out, marks)
        root.is_order = op.name in ORDERS or (
            bool(known) and all(each.is_order for _, each in known)
        )
        root.learned = learned
        states = [(t, each) for t, each in known if each.behind]
        if states and marks and marks[2].any():
            root.behind = max((each.behind for _, each in states), key=_serial)
            root.edited = op.name == "__setitem__" or op.is_edit(len(states))
            root.edited |= any(each.edited for _, each in states)
            root.cloned = op.name in CLONES or all(each.cloned for _, each in states)
            root.cut = any(each.cut or not t.requires_grad for t, each in states)
        return None

    def _moved(self, op: Any, out: Tensor, roots: list[tuple[Tensor, Root]]) -> Marks | None:
        """The marks of what an operation moves, by moving its marks; `None` for any other."""
        name, args, tensors = op.name, op.args, [t for t, _ in roots]
        if name == "__getitem__" and len(roots) > 1:
            index, root = roots[-1]
            whole = root.marks is None and index.shape == root.shape
            if index.dim() > 1 or not (whole or root.is_order):
                # the indices of a table are the data themselves, such as numbers of words
                return self.rows(index, out.shape)
        if name == "stack" and all(t.requires_grad for t in tensors):  # the outputs of a chunk
            return unknown(out.shape)
        if name in JOINS:
            fits = len({id(t) for t in tensors}) == len(args[0])
            fits = fits and len({root.learned for _, root in roots}) == 1
        elif name in WRITES:
            fits = bool(tensors) and tensors[0] is (out if name == "__setitem__" else op.inputs[0])
        else:
            fits = name in MOVES and bool(roots)
        if not fits or sum(t.numel() for t in tensors) > MAX_MARKS:
            return None
        device = tensors[0].device
        grids = [[m.to(device) for m in self.marks(t)] for t in tensors]
        results: list[Tensor] = []
        for kind in range(3):
            first = [grid[kind] for grid in grids] if name in JOINS else grids[0][kind].clone()
            rest = list(args[1:])
            if name in WRITES:
                has_source = isinstance(args[-1], Tensor) and args[-1] is tensors[-1]
                rest[-1] = grids[-1][kind] if has_source else 0
            result = op.func(first, *rest, **op.kwargs)
            result = first if result is None else result
            results.append((result if isinstance(result, Tensor) else result[0]).cpu())
        return results[0], results[1], results[2]

    def _is_most(self, tensor: Tensor) -> bool:
        """Whether a tensor covers most of the raw data that it was made of."""
        first, last, _ = map(int, self.rows(tensor, ()))
        root = self.raw.get(first // SPAN)
        return root is not None and 2 * (last - first + 1) > math.prod(root.shape)

    def _computed(self, out: Tensor, known: list[tuple[Tensor, Root]]) -> Marks:
        """The marks of the data in front, and of the last state."""
        states = [(t, root) for t, root in known if root.behind]
        states.sort(key=lambda pair: -_serial(pair[1].behind))
        data = [t for t, root in known if not root.behind] or [t for t, r in states if r.known]
        marks = unknown(out.shape)
        if data:
            longest = max(data, key=lambda t: shared(t, out.shape))
            marks = self.rows(longest, out.shape)
        if not states:
            return marks
        return marks[0], marks[1], self.rows(states[0][0], out.shape)[2]

    def rows(self, tensor: Tensor, shape: tuple[int, ...]) -> Marks:
        """The marks of a result of this shape: the leading dimensions that it shares stay."""
        tensor, lead = tensor.detach(), shared(tensor, shape)
        if lead == len(shape) == tensor.dim() and tensor.numel() <= MAX_MARKS:
            return self.marks(tensor)
        while math.prod(shape[:lead]) > MAX_MARKS:
            lead -= 1
        root = self.root(tensor)
        is_raw = root is not None and root.marks is None
        if is_raw or tensor.numel() > MAX_MARKS:  # the first and the last element of each row
            ends = [tensor[(..., *[at] * (tensor.dim() - lead))] for at in (0, -1)]
            pairs = zip(*map(self.marks, ends), strict=True)
            grids = [torch.stack(pair, -1) for pair in pairs]
        else:
            grids = [m.reshape((*shape[:lead], -1)) for m in self.marks(tensor)]
        first = grids[0].masked_fill(grids[0] == 0, MOST).amin(-1)
        first = first.masked_fill(first == MOST, 0)
        after = [1] * (len(shape) - lead)
        first, last, state = (
            m.reshape((*shape[:lead], *after)).expand(shape)
            for m in (first, grids[1].amax(-1), grids[2].amax(-1))
        )
        return first, last, state

    def from_array(self, array: Any, out: Tensor) -> None:
        """Record a tensor with the memory or the values of a NumPy array."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        known, memory = self.arrays.get(id(base), (lambda: None, out))
        if known() is not base:
            if (
                base.dtype != array.dtype
                or base.dtype.kind not in "fiub"
                or not base.flags.writeable
            ):
                self.add(out)
                return
            memory = torch.from_numpy(base)
            self.arrays[id(base)] = weakref.ref(base), memory
        offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
        strides = [n // array.itemsize for n in array.strides]
        part = memory.as_strided(array.shape, strides, offset)
        self.root(memory)
        self.add(out, self.rows(part, tuple(out.shape)))


def shared(tensor: Tensor, shape: Any) -> int:
    """The leading dimensions that a tensor shares with a shape."""
    pairs = zip(tensor.shape, shape, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def unknown(shape: Any) -> Marks:
    """The marks of what is not known."""
    nothing = torch.zeros((), dtype=torch.int64, device="cpu").expand(shape)
    return nothing, nothing, nothing


def _serial(call: Any) -> int:
    return int(call.serial)
