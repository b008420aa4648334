"""Where the elements of a tensor come from: raw data, and the states of recurrent calls.

A root is what a storage holds until it is changed. An element of raw data has a number. Any other
root has marks, two numbers for each of its elements: of the first and the last element of raw data
that it was made of; 0 is not known. An operation that moves elements moves their marks. Any other
keeps the dimensions in front that it shares with its result, and covers all of the rest. No value
is read, except to recognise a copy that every epoch makes anew.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from throughtime.doctor._frames import Instruction
from throughtime.doctor._graph import base_of, storage_of, version_of

# of a tensor of some shape: the first and the last, (2, *shape)
Marks = np.ndarray[Any, Any]

UNKNOWN: Marks = np.zeros(2, np.int64)  # for any shape
SPAN = 2**40  # an element's number is that of its root times this, and its storage offset
MAX_MARKS = 200_000  # elements of a tensor whose marks are moved
MAX_ROOTS = 4096  # roots of raw data
SAMPLES, MIN_DIFFERENT = 61, 4  # values by which a copy is recognised
# operations that move elements, those that join tensors, and those that write into their first
MOVES = {"__getitem__", "index_select", "flip", "roll", "gather", "take_along_dim", "reshape",
         "flatten", "repeat"}  # fmt: skip
JOINS = {"stack", "cat", "concat", "concatenate", "pad_sequence"}
WRITES = {"__setitem__", "index_copy", "index_copy_"}
REPLACES = {"copy_", "zero_", "fill_"}  # write all of it
# those whose results are an order, and constants
ORDERS = {"randperm", "arange", "argsort", "sort", "topk"}
FILLS = {"zeros", "ones", "eye", "full", "empty", "zeros_like", "ones_like", "new_zeros"}
# those that may mask, reset or exchange values
EDITS = MOVES | WRITES | {"mul", "__mul__", "__rmul__", "where", "masked_fill", "masked_fill_",
                          "mul_", "__imul__", "lerp", "index_fill"}  # fmt: skip


@dataclass(eq=False)
class Operation:
    """One operation on tensors."""

    name: str
    func: Any
    args: Any
    kwargs: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    instruction: Instruction

    @property
    def fluid(self) -> list[Tensor]:
        """Its inputs, without parameters and numbers."""
        return [t for t in self.inputs if t.dim() and not (t.is_leaf and t.requires_grad)]

    def is_edit(self, states: int) -> bool:
        """Whether it may mask or exchange values of a state; a factor like 0.9 does not."""
        numbers = {each for each in self.args if isinstance(each, (int, float))}
        return self.name in EDITS and (len(self.fluid) > states or bool(numbers & {0, 1}))


@dataclass(eq=False)
class Root:
    """The values of a storage until it is changed."""

    number: int
    offset: Any
    shape: Any
    strides: Any
    alive: Any  # a weak reference to the storage
    version: int
    item: int  # bytes of an element
    marks: Marks | None = None  # two numbers for each; without them its elements are raw
    known: bool = True  # False for constants, and after a change that was not watched
    is_order: bool = False
    learned: bool = False  # it depends on a parameter
    # the last recurrent calls that it depends on, by the keys of their units,
    behind: dict[Any, Any] = field(default_factory=dict)
    edited: bool = False  # its values were masked or exchanged since
    cut: bool = False  # the graph between that call and it ended

    @functools.cached_property
    def dims(self) -> list[Any]:
        """The strides of dimensions that move, and the dimensions, the largest stride first."""
        pairs = ((n, d) for d, n in enumerate(self.strides) if n and self.shape[d] > 1)
        return sorted(pairs, reverse=True)

    def index(self, offset: Any) -> list[Any]:
        """The index of an element, or of a tensor of them."""
        rest = offset - self.offset
        index = [rest - rest] * len(self.shape)
        for stride, d in self.dims:
            index[d], rest = divmod(rest, stride)
        return index


NOTHING = Root(0, 0, (), (), None, 0, 0, known=False, cut=True)  # of what was not watched


class RootTable:
    """The roots by the storage that holds them."""

    def __init__(self) -> None:
        self.complete = True  # all is watched so far: a tensor without a root is raw data
        self.roots: dict[int, Root] = {}
        self.count = 0  # of them after freed ones were dropped
        self.raw: dict[int, Root] = {}  # those of raw data by their number, the last used last
        self.numbers = itertools.count(1)
        self.samples: dict[Any, Root] = {}  # raw data by some of their values

    def root(self, tensor: Tensor, *, new: bool = True) -> Root:
        """The root of a tensor, `NOTHING` if unknown; `new` makes one of raw data."""
        key = storage_of(tensor)
        if not key or not tensor.numel():
            return NOTHING
        root = self.roots.get(key)
        if root and root.alive.cdata == key:  # no other storage has the address of one referred to
            changed = root.version != version_of(tensor)  # unwatched
            return self.add(base_of(tensor), UNKNOWN) if changed else root
        return self.add(base_of(tensor)) if new and self.complete else NOTHING

    def add(self, tensor: Tensor, marks: Marks | None = None) -> Root:
        """A new root for what a tensor holds now; raw data without marks."""
        memory = StorageWeakRef(tensor.untyped_storage())
        root = Root(next(self.numbers), tensor.storage_offset(), tensor.shape, tensor.stride(),
                    memory, version_of(tensor), tensor.element_size(), marks)  # fmt: skip
        if marks is None:
            root = self._recognised(tensor, root)
            remember(self.raw, root.number, root, MAX_ROOTS)
        else:
            root.known = bool(marks.item(0) or marks.any())
        self.roots[storage_of(tensor)] = root
        return root

    def drop_freed(self) -> None:
        """Forget the roots of freed storages, once there are twice as many as the last time."""
        if len(self.roots) > 2 * self.count:
            self.roots = {key: root for key, root in self.roots.items() if not root.alive.expired()}
            self.count = len(self.roots)

    def _recognised(self, tensor: Tensor, root: Root) -> Root:
        """The root of equal raw data, such as of the copy that the last epoch made."""
        count = tensor.numel()
        if count < SAMPLES or tensor.device.type != "cpu":
            return root
        values = tensor.detach().flatten()[:: count // SAMPLES].tolist()
        if len(set(values)) < MIN_DIFFERENT:
            return root
        same = self.samples.get(key := (root.shape, root.strides, *values), root)
        same.alive, same.version = root.alive, root.version
        return remember(self.samples, key, same, MAX_ROOTS // 16)

    def follow(self, op: Operation, out: Tensor) -> None:
        """Record the result of an operation, unless it is a view."""
        key = storage_of(out)
        if op.args and isinstance(op.args[0], np.ndarray):
            self.from_array(op.args[0], out)
        elif key and out.numel() and all(storage_of(t) != key for t in op.inputs):
            self._record(op, out, [] if op.name in FILLS else op.inputs)

    def from_array(self, array: Any, out: Tensor) -> None:
        """Record a tensor with the memory or the values of a NumPy array."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.dtype == array.dtype and base.flags.writeable:
            start = (array.ctypes.data - base.ctypes.data) // array.itemsize
            strides = [n // array.itemsize for n in array.strides]
            whole = torch.from_numpy(base)
            self.root(whole)  # a part alone would be a root of its own
            part = whole.as_strided(array.shape, strides, start)
            self.add(out, self.rows(part, out.shape))

    def change(self, op: Operation) -> None:
        """Record a tensor that an operation changed in place."""
        target, *others = op.inputs
        whole = base_of(target)
        if root := self.roots.get(storage_of(whole)):
            root.version = version_of(whole)
        replaced = whole is target and op.name in REPLACES
        self._record(op, whole, others if replaced else [whole, *others])

    def _record(self, op: Operation, out: Tensor, inputs: list[Tensor]) -> None:
        roots = [
            (t, self.root(t, new=not t.requires_grad))
            for t in inputs
            if not (t.is_leaf and isinstance(t, nn.Parameter))
        ]
        known = [(t, root) for t, root in roots if root.known or root.behind]
        trains = any(t.requires_grad for t in inputs)
        # a gradient, token or action is data, although it depends on parameters; a spike is not
        is_chosen = trains and out.dtype == torch.int64
        is_choice = not out.requires_grad and (is_chosen or op.func is torch.autograd.grad)
        learned = not is_choice and (trains or any(each.learned for _, each in roots))
        marks = self._moved(op, out, roots)
        if marks is None and not is_choice and (op.inputs or op.name in FILLS):
            marks = self._computed(out, known)
        root = self.add(out, marks)
        root.is_order = op.name in ORDERS or (
            bool(known) and all(each.is_order for _, each in known)
        )
        root.learned = learned
        states = [(t, each) for t, each in known if each.behind]
        if states and marks is not None:
            root.behind = latest(each.behind for _, each in states)
            root.edited = any(each.edited for _, each in states) or op.is_edit(len(states))
            root.cut = all(each.cut or not t.requires_grad for t, each in states)

    def _moved(self, op: Operation, out: Tensor, roots: list[Any]) -> Marks | None:
        """The marks of what an operation moves, by moving its marks; `None` for any other."""
        name, tensors = op.name, [t for t, _ in roots]
        if name == "__getitem__" and len(roots) > 1:
            index, root = roots[-1]
            whole = root.marks is None and index.shape == root.shape
            if index.dim() > 1 or not (whole or root.is_order):
                # the indices of a table are the data themselves, such as numbers of words
                return self.rows(index, out.shape)
        if name in WRITES:
            return UNKNOWN  # the outputs of a chunk
        joins = name in JOINS
        if joins:
            fits = len(roots) == len(op.args[0]) and len({root.learned for _, root in roots}) == 1
        else:
            fits = name in MOVES and bool(roots)
        if not fits or sum(t.numel() for t in tensors) > MAX_MARKS:
            return None
        grids = [torch.tensor(self.rows(t, t.shape), device=t.device) for t in tensors]
        moved = [
            op.func(numbers if joins else numbers[0], *op.args[1:], **op.kwargs)
            for numbers in zip(*grids, strict=True)
        ]
        return torch.stack(moved).cpu().numpy()

    def _computed(self, out: Tensor, known: list[Any]) -> Marks:
        """The marks of the data in front: of those that share most dimensions with the result."""
        data = [t for t, root in known if not root.behind] or [t for t, r in known if r.known]
        if not data:
            return UNKNOWN
        return self.rows(max(data, key=lambda t: shared(t, out.shape)), out.shape)

    def rows(self, tensor: Tensor, shape: Any) -> Marks:
        """The marks of a result of this shape: the leading dimensions that it shares stay.

        Of the rest the first and the last element count.
        """
        root, lead = self.root(tensor), shared(tensor, shape)
        if not root.known or root.item != tensor.element_size():  # a view as of other numbers
            return np.zeros((2, *shape), np.int64)
        while math.prod(shape[:lead]) > MAX_MARKS:
            lead -= 1
        marks, sizes, strides = root.marks, tensor.shape, tensor.stride()
        is_whole, rest = root.shape == sizes and root.strides == strides, len(sizes) - lead
        if marks is None or not is_whole:
            axes = (strides[d] * np.arange(sizes[d]) for d in range(lead))
            begin = functools.reduce(np.add.outer, axes, np.array(tensor.storage_offset()))
            size = sum(strides[d] * (sizes[d] - 1) for d in range(lead, len(sizes)))
            offsets = np.array([begin, begin + size])
            if marks is None:
                remember(self.raw, root.number, root, MAX_ROOTS)
                marks, rest = offsets + root.number * SPAN, 0
            else:
                marks, rest = np.stack([marks[:, *root.index(at)] for at in offsets], -1), 1
        if rest:
            (first, other), (end, last) = (marks[..., *[at] * rest] for at in (0, -1))
            marks = np.array([np.minimum(first, end), np.maximum(last, other)])
        if zeros := (0,) * (len(shape) - lead):
            marks = np.ascontiguousarray(marks)
            marks = np.ndarray((2, *shape), np.int64, marks, 0, marks.strides + zeros)
        return marks


def shared(tensor: Tensor, shape: Any) -> int:
    """The leading dimensions that a tensor shares with a shape."""
    most = min(tensor.dim(), len(shape))
    return next((d for d in range(most) if tensor.shape[d] != shape[d]), most)


def latest(histories: Iterable[Any]) -> dict[Any, Any]:
    """The last call of each unit in several histories."""
    calls = [call for each in histories for call in each.values()]
    return {call.unit.key: call for call in sorted(calls, key=lambda call: call.serial)}


def remember(table: dict[Any, Any], key: Any, value: Any, most: int = 64) -> Any:
    """Store a value as the newest, and drop the oldest."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]
    return value
