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
ORDERS = {TIME_FIRST: "(T, B, ...)", LANES_FIRST: "(B, T, ...)", FEATURES_FIRST: "(B, ..., T)"}


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
    """

    path: Path = ()
    order: Order = TIME_FIRST
    features: tuple[int, ...] = ()

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
        shape, (steps, lanes, context) = tuple(y.shape), sizes
        has_time = steps > 1 or len(shape) >= max(3, dims)
        for length in (steps + context, steps) if shape and y.is_floating_point() else ():
            fits = [
                cls(path, order, tuple(n for i, n in enumerate(shape) if i not in order))
                for order in orders
                if len(shape) > max(order) and tuple(shape[i] for i in order) == (length, lanes)
            ]
            if shape[0] == length * lanes:
                fits.insert(len(fits) * has_time, cls(path, orders[0], shape[1:]))
            if fits or (length, lanes) == (1, 1):
                return [*fits, cls(path, orders[0], shape)][0]
        return None

    def read(self, result: Any, steps: int, lanes: int, before: int = 0) -> Tensor:
        """The outputs `(T, B, ...)`, of a call with `before` steps of the past.

        Raises:
            MisfitError: the shape of the item does not fit.
        """
        y, (t, b), size = item_at(result, self.path), self.order, lanes * math.prod(self.features)
        if before and y.numel() == steps * size:
            before = 0  # the past has no outputs
        steps += before
        if y.dim() != 2 + len(self.features) or (y.shape[t], y.shape[b]) != (steps, lanes):
            # steps and lanes in one dimension, or squeeze() in a module drops a time or a batch
            if y.numel() != steps * size:
                raise MisfitError(
                    f"it returned outputs of shape {tuple(y.shape)} for {steps} steps of {lanes}"
                    " lanes, expected one output per step"
                )
            t, b = min(t, 1), 1 - min(t, 1)
            y = y.reshape(*((lanes, steps) if t else (steps, lanes)), *self.features)
        if (t, b) != TIME_FIRST:
            y = y.movedim((t, b), (0, 1))
        return y[before:] if before else y


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
        # cuDNN refuses a strided state, and a CPU rounds otherwise with one that a file gave back
        return leaf.contiguous()


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
            StateError: a tensor has no such dimension.
            LookupError: the trees have different structures.
        """
        counts, rows = [*states], [*map(shapes_of, states.values())]
        dims = tuple(
            _lane_dim(name, counts, [row[name] for row in rows]) for name in rows[0] | rows[-1]
        )
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
        dims = iter(self.dims)  # a state of more tensors is the module's to refuse
        return trees.map_tensors(lambda leaf: move(next(dims, LaneDim(0)), leaf), state)

    def fill(self, start: Any, lanes: int, weight: Tensor | None) -> State:
        """The state of all lanes, lanes first, on the device of the module.

        Floating numbers have the dtype of the module's weights.

        Args:
            start: in the layout of the module, of one lane, or without a dimension for lanes. What
                is None starts at zero.
            lanes: B.
            weight: of the module.

        Raises:
            StateError: it has another structure, or other sizes.
        """
        paths = [path for path, _ in tensor_paths(self.example)]
        values = dict(trees._by_path(start))
        known = {path for path, leaf in values.items() if leaf is not None}
        # what is None, or empty as a whole, may stand for more of the state
        if known - {*paths} or 0 < len(values) == len(known) < len(paths):
            raise StateError(f"the start has tensors at {known}, the state at {paths}")
        rows = zip(self.dims, paths, strict=True)

        def row(leaf: Tensor) -> Tensor:
            zero = leaf.expand(lanes, *leaf.shape[1:])
            if weight is not None:
                zero = zero.to(weight if leaf.is_floating_point() else weight.device)
            dim, path = next(rows)
            value = values.get(path)
            value = torch.as_tensor(0 if value is None else value).to(zero)
            value = value if value.numel() else value.new_zeros(())  # not made yet
            sizes, own = ([n for n in shape if n > 1] for shape in (zero.shape[1:], value.shape))
            if own == sizes:  # of one lane
                return value.reshape(1, *zero.shape[1:]).expand(zero.shape).contiguous()
            return dim.to_front(value.expand(dim.to_module(zero).shape)).contiguous()

        try:
            return trees.map_leaves(row, self.example)
        except RuntimeError as error:
            raise StateError(f"the start does not fit {lanes} lanes: {error}") from error


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
        dims.sort(key=lambda dim: (dim.rows, dim.dim != 1))
        del dims[1:]
    if len(dims) != 1 or len({*map(len, shapes)}) > 1:
        raise StateError(
            f"state leaf '{name}' has shape {' and '.join(map(str, shapes))} for"
            f" {' and '.join(map(str, counts))} lanes: expected exactly one dimension equal to the"
            " number of lanes. Give a value that all lanes share such a dimension, or make it a"
            " buffer."
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
