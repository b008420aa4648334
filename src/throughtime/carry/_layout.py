"""Where things lie: the outputs in what a module returns, and the lanes in its state.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.errors import ModelError, StateError
from throughtime.state import State

Path: TypeAlias = tuple[Any, ...]  # of an item in what a module returned
Order: TypeAlias = tuple[int, int]  # the dimensions of time and of lanes
TIME_FIRST, LANES_FIRST, FEATURES_FIRST = (0, 1), (1, 0), (2, 0)
ORDERS = {TIME_FIRST: "(T, B, {})", LANES_FIRST: "(B, T, {})", FEATURES_FIRST: "(B, {}, T)"}


class MisfitError(ModelError):
    """A result does not have the shape or the structure that a convention says."""


def item_at(result: Any, path: Path) -> Any:
    """The item of a result at a path.

    Raises:
        MisfitError: there is none.
    """
    try:
        for key in path:
            is_index = isinstance(key, int) or isinstance(result, Mapping)
            result = result[key] if is_index else getattr(result, str(key))
    except (LookupError, TypeError, AttributeError) as error:
        raise MisfitError(f"the result has no item {error}") from error
    return result


def items_at(result: Any, keys: Path) -> Any:
    """The item at a key of a result, those at several as a tuple, or all of it at none."""
    items = [item_at(result, (key,)) for key in keys]
    return (items[0] if len(items) == 1 else tuple(items)) if items else result


def items_of(result: Any) -> list[tuple[Any, Any]]:
    """The keys and items of a tuple, list, dict or dataclass; none of anything else."""
    names, items, _ = trees._level(result) or ((), (), None)
    return [*zip(names, items, strict=True)]


def tensor_paths(result: Any) -> list[tuple[Path, Tensor]]:
    """Every tensor in a result."""
    return [(path, y) for path, y in trees._by_path(result) if isinstance(y, Tensor)]


def path_name(path: Path) -> str:
    """A path as Python writes it: `[0]`, `['logits']`."""
    return "".join(f"[{key!r}]" for key in path)


@dataclass(frozen=True)
class OutputLayout:
    """Which item of a result the outputs are, and how they lie.

    Attributes:
        path: of the item.
        order: of its dimensions, or of the steps and lanes that are one dimension.
        features: the shape of one output.
        skip: steps before those of the inputs that have outputs as well.
    """

    path: Path = ()
    order: Order = TIME_FIRST
    features: tuple[int, ...] = ()
    skip: int = 0

    @classmethod
    def of(
        cls, path: Path, y: Tensor, orders: Sequence[Order], sizes: tuple[int, int, int], dims: int
    ) -> "OutputLayout | None":
        """The layout of a tensor with one output for each step and lane; None for others.

        Args:
            path: of the tensor.
            y: what a call returned.
            orders: of dimensions that it may have, the usual first.
            sizes: T, B, and the steps of the context, which may have outputs as well.
            dims: of the inputs of a chunk: outputs of a step that have as many have time.
        """
        shape: tuple[int, ...] = tuple(y.shape)
        first, (steps, lanes, context) = orders[0], sizes
        has_time = steps > 1 or len(shape) >= max(3, dims)
        for skip in dict.fromkeys((context, 0)) if shape and y.is_floating_point() else ():
            both = steps + skip, lanes
            fits = [
                cls(path, order, tuple(n for i, n in enumerate(shape) if i not in order), skip)
                for order in orders
                if len(shape) > max(order) and tuple(shape[i] for i in order) == both
            ]
            if shape[0] == math.prod(both):
                fits.insert(len(fits) * has_time, cls(path, first, shape[1:], skip))
            if fits or both == (1, 1):
                return fits[0] if fits else cls(path, first, shape, skip)
        return None

    def read(self, result: Any, steps: int, lanes: int, before: int = 0) -> Tensor:
        """The outputs `(T, B, ...)`, of a call with `before` steps of the past.

        Raises:
            MisfitError: the shape of the item does not fit.
        """
        skip = min(self.skip, before)
        y, (t, b), steps = item_at(result, self.path), self.order, steps + skip
        if y.dim() != 2 + len(self.features) or (y.shape[t], y.shape[b]) != (steps, lanes):
            # steps and lanes in one dimension, or squeeze() in a module drops a time or a batch
            if y.numel() != steps * lanes * math.prod(self.features):
                raise MisfitError(
                    f"it returned outputs of shape {tuple(y.shape)} for {steps} steps of {lanes}"
                    " lanes, expected one output per step; the stream's mask selects those that"
                    " count in the loss"
                )
            t, b = min(t, 1), 1 - min(t, 1)
            y = y.reshape(*((lanes, steps) if t else (steps, lanes)), *self.features)
        if (t, b) != TIME_FIRST:
            y = y.movedim((t, b), (0, 1))
        return y[skip:] if skip else y


class LaneDim(NamedTuple):
    """The dimension of a state tensor that indexes the lanes.

    Attributes:
        dim: the dimension; None for a module of one lane, whose state has none.
        rows: adjacent rows of that dimension for each lane, more than 1 where the module folds
            another dimension into its batch.
    """

    dim: int | None
    rows: int = 1

    def to_front(self, leaf: Tensor) -> Tensor:
        """The tensor with its lanes moved to the front."""
        if self.dim is None:
            return leaf.unsqueeze(0)
        leaf = leaf.unflatten(self.dim, (-1, self.rows)) if self.rows > 1 else leaf
        return leaf.movedim(self.dim, 0)

    def to_module(self, leaf: Tensor) -> Tensor:
        """The inverse of `to_front`."""
        if self.dim is None:
            return leaf.squeeze(0)
        leaf = leaf.movedim(0, self.dim)
        leaf = leaf.flatten(self.dim, self.dim + 1) if self.rows > 1 else leaf
        return leaf if leaf.is_cpu else leaf.contiguous()  # cuDNN refuses a strided state


@dataclass(frozen=True)
class LaneLayout:
    """Where the lanes are in each tensor of a module's state."""

    dims: tuple[LaneDim, ...] = ()
    example: State = ()  # zeros, lanes first, one lane

    @classmethod
    def infer(cls, states: dict[int, State]) -> "LaneLayout":
        """Find the lanes by comparing states for two numbers of lanes.

        Args:
            states: by the number of lanes; one only for a module that takes no other.

        Raises:
            StateError: a tensor has no such dimension, or trees of different structure.
        """
        counts, rows = [*states], [*map(shapes_of, states.values())]
        if rows[0].keys() != rows[-1].keys():
            raise StateError(f"the state has the tensors {[*rows[0]]} and {[*rows[-1]]}")
        dims = tuple(_lane_dim(name, counts, [row[name] for row in rows]) for name in rows[0])
        first = cls(dims).lanes_first(states[counts[0]])
        return cls(dims, trees.map_leaves(lambda leaf: torch.zeros_like(leaf[:1]), first))

    def lanes_first(self, state: State) -> State:
        """The state with its lanes moved to the front."""
        return self._moved(state, LaneDim.to_front)

    def to_module(self, state: State) -> State:
        """The state with its lanes moved back to the dimensions that the module uses."""
        return self._moved(state, LaneDim.to_module)

    def _moved(self, state: State, move: Callable[[LaneDim, Tensor], Tensor]) -> State:
        if {*self.dims} <= {(0, 1)}:
            return state
        dims = iter(self.dims)
        return trees.map_tensors(lambda leaf: move(next(dims), leaf), state)

    def fill(self, start: Any, lanes: int, weight: Tensor | None) -> State:
        """The state of all lanes, lanes first, on the device of the module.

        Floating numbers have the dtype of the module's weights.

        Args:
            start: in the layout of the module, of one lane, or without a dimension for lanes; None
                is zeros, and a number that of all units, in any part of it.
            lanes: B.
            weight: of the module.

        Raises:
            StateError: it has another structure, or other sizes.
        """

        def zero(leaf: Tensor) -> Tensor:
            like = weight if weight is not None and leaf.is_floating_point() else leaf
            device = leaf.device if weight is None else weight.device
            return like.new_zeros(lanes, *leaf.shape[1:], device=device)

        def spread(zero: Tensor, leaf: Tensor) -> Tensor:
            dim, leaf = next(dims), leaf.to(zero)
            sizes, own = ([n for n in shape if n > 1] for shape in (zero.shape[1:], leaf.shape))
            if not zero.numel():
                return zero
            if own == sizes:  # of one lane
                return leaf.reshape(1, *zero.shape[1:]).expand(zero.shape).contiguous()
            return dim.to_front(leaf.expand(dim.to_module(zero).shape)).contiguous()

        zeros, dims = trees.map_leaves(zero, self.example), iter(self.dims)
        try:
            return trees.map_leaves(spread, zeros, _complete(start, zeros))
        except RuntimeError as error:
            raise StateError(f"the start does not fit {lanes} lanes: {error}") from error


def _complete(start: Any, zeros: Any) -> Any:
    """A start with zeros for what is None yet, and numbers as tensors."""
    if not (start.numel() if isinstance(start, Tensor) else start):
        return trees.map_tensors(lambda leaf: leaf.new_zeros(()), zeros)
    if isinstance(start, (int, float)):
        return torch.tensor(start, device="cpu")
    if isinstance(start, dict):
        return {key: _complete(start.get(key), zero) for key, zero in zeros.items()}
    if type(start) in (list, tuple) and len(start) == len(zeros):
        return type(start)([*map(_complete, start, zeros)])
    return start


def _lane_dim(name: str, counts: list[int], shapes: list[tuple[int, ...]]) -> LaneDim:
    """The dimension of a leaf that has the numbers of lanes; of a single number, that usual one."""
    if counts == [1]:
        return LaneDim(None)
    dims = [
        LaneDim(i, rows)
        for i, sizes in enumerate(zip(*shapes, strict=False))
        if (rows := sizes[0] // counts[0]) and sizes == tuple(rows * n for n in counts)
    ]
    if len(counts) == 1:  # it was made for that number of lanes
        dims = sorted(filter(lambda dim: dim.rows == 1, dims), key=lambda dim: dim.dim != 1)[:1]
    if len(dims) != 1 or len({*map(len, shapes)}) > 1:
        raise StateError(
            f"state leaf '{name}' has shape {' and '.join(map(str, shapes))} for"
            f" {' and '.join(map(str, counts))} lanes: expected exactly one dimension equal to the"
            " number of lanes. A value shared by all lanes cannot be reset for one lane; give it a"
            " lane dimension, or make it a buffer."
        )
    return dims[0]


def is_state(value: Any) -> bool:
    """Whether a value can be a state: a tree of tensors and None, with at least one tensor."""
    try:
        return next(trees.leaves(value), None) is not None
    except StateError:
        return False


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a state, by its path."""
    return {name: tuple(leaf.shape) for name, leaf in trees.leaves(state)}
