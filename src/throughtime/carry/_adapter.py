"""The interface of an adapter, and where the lanes are in the tensors of a module's state.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.errors import StateError
from throughtime.state import State


class Adapter(ABC):
    """Calls one kind of module as `(x, state) -> (y, state)`.

    Attributes:
        unpack: returns the items of several outputs from what `run` returns, in which they lie
            side by side; None for a single one.
    """

    unpack: Callable[[Tensor], Any] | None = None

    @abstractmethod
    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        """The state before the first step of a recording; `like` are example inputs."""

    @abstractmethod
    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """Map `x` `(T, B, ...)` to outputs `(T, B, C)` and the final state.

        `resets` `(T, B)` are true where a lane starts a recording; they are passed only if
        `takes_resets` is true.
        """

    def prepare(self, x: Tensor) -> None:
        """Find out by trials how the module is called, unless that is known.

        Args:
            x: example inputs `(T, B, ...)`.

        Raises:
            ModelError: no way of calling the module obeys the laws of carrying a state.
        """
        del x

    def takes_resets(self) -> bool:
        """Whether `run` applies resets itself."""
        return False

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        """What the module's forward gets if one call of it runs a whole chunk, else None.

        Args:
            x: inputs `(T, B, ...)`.
            state: passed on, unless hooks set the states of the module's layers.
        """
        del x, state
        return None

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        """The outputs `(T, B, C)` in the layout of the module, which is that of its forward.

        Args:
            result: the tensor of outputs that the forward computed.
            x: its inputs `(T, B, ...)`.
        """
        del x
        return result

    def starts_from_zeros(self) -> bool:
        """Whether recordings start from a state of zeros."""
        return True

    def leaf_names(self, state: State) -> list[str]:
        """The names of the state's tensors: the module's own, or `h` and `c` of torch's layers."""
        return [name for name, _ in trees.leaves(state)]

    def explain(self) -> str:
        """How the module is called and what its state is, a sentence a line."""
        return ""


def input_kind(module: nn.Module, x: Tensor) -> tuple[bool, Any, bool]:
    """For which inputs trials are made once: their type and features, and the module's mode."""
    shape = x.shape  # a slice of it takes half of a microsecond in every call
    return x.is_floating_point(), shape[2] if len(shape) == 3 else shape[2:], module.training


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
        return leaf.flatten(self.dim, self.dim + 1) if self.rows > 1 else leaf


@dataclass(frozen=True)
class LaneLayout:
    """Where the lanes are in each tensor of a module's state."""

    dims: tuple[LaneDim, ...] = ()
    example: State = ()  # zeros, lanes first, one lane
    weight_dtype: torch.dtype | None = None  # of the module when this was inferred

    @classmethod
    def infer(cls, states: dict[int, State], weight: Tensor | None) -> "LaneLayout":
        """Find the lanes by comparing states for two numbers of lanes.

        Args:
            states: by the number of lanes; one only for a module that takes no other.
            weight: of the module.

        Raises:
            StateError: a tensor has no such dimension, or trees of different structure.
        """
        counts, rows = [*states], [*map(list, map(trees.leaves, states.values()))]
        if len({*map(len, rows)}) > 1:
            raise StateError(f"the state has {len(rows[0])} and {len(rows[1])} tensors")
        dims = tuple(
            _lane_dim(leaf[0][0], counts, [t.shape for _, t in leaf])
            for leaf in zip(*rows, strict=True)
        )
        layout = cls(dims, (), None if weight is None else weight.dtype)
        first = layout.lanes_first(states[counts[0]])
        zeros = trees.map_leaves(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), first)
        return replace(layout, example=zeros)

    def lanes_first(self, state: State) -> State:
        """The state with its lanes moved to the front."""
        return self._moved(state, LaneDim.to_front)

    def to_module(self, state: State) -> State:
        """The state with its lanes moved back to the dimensions that the module uses."""
        return self._moved(state, LaneDim.to_module)

    @cached_property
    def _is_first(self) -> bool:
        return {*self.dims} <= {LaneDim(0)}

    def _moved(self, state: State, move: Callable[[LaneDim, Tensor], Tensor]) -> State:
        if self._is_first:
            return state
        dims = cycle(self.dims)
        return trees.map_leaves(lambda leaf: move(next(dims), leaf), state)

    def zeros(self, lanes: int, weight: Tensor | None) -> State:
        """A zero state, lanes first, on the device of the module.

        In its dtype, if it was when this was inferred.
        """

        def rows(leaf: Tensor) -> Tensor:
            like = leaf if weight is None or leaf.dtype != self.weight_dtype else weight
            device = leaf.device if weight is None else weight.device
            return like.new_zeros(lanes, *leaf.shape[1:], device=device)

        return trees.map_leaves(rows, self.example)

    def fill(self, start: Any, lanes: int, weight: Tensor | None) -> State:
        """The state of all lanes, lanes first, that a module means by its start.

        Args:
            start: in the layout of the module, of one lane, or without a dimension for lanes; None
                is zeros, and a number that of all units, in any part of it.
            lanes: B.
            weight: of the module.

        Raises:
            StateError: it has another structure, or other sizes.
        """
        zeros, dims = self.to_module(self.zeros(lanes, weight)), iter(self.dims)

        def spread(zero: Tensor, leaf: Tensor) -> Tensor:
            dim = next(dims).dim
            if leaf.numel() > 1 and dim is not None and leaf.shape != zero.shape:
                leaf = widen(leaf, lanes, dim)
            return leaf.to(zero).expand(zero.shape).contiguous()

        try:
            return self.lanes_first(trees.map_leaves(spread, zeros, _complete(start, zeros)))
        except RuntimeError as error:
            raise StateError(f"the start does not fit {lanes} lanes: {error}") from error


def _complete(start: Any, zeros: Any) -> Any:
    """A start with zeros for what is None yet, and numbers as tensors."""
    if not (start.numel() if isinstance(start, Tensor) else start):
        return zeros
    if isinstance(start, (int, float)):
        return zeros + start
    if isinstance(start, dict):
        return {key: _complete(start.get(key), zero) for key, zero in zeros.items()}
    if type(start) in (list, tuple) and len(start) == len(zeros):
        return type(start)([*map(_complete, start, zeros)])
    return start


def widen(leaf: Tensor, lanes: int, dim: int) -> Tensor:
    """A tensor of one lane, or without a dimension for lanes, repeated for all lanes.

    Args:
        leaf: of a state, in the layout of a module.
        lanes: B.
        dim: where the lanes are to be.
    """
    while leaf.dim() <= dim:
        leaf = leaf.unsqueeze(0)
    leaf = leaf if leaf.shape[dim] == 1 else leaf.unsqueeze(dim)
    return leaf.expand(*leaf.shape[:dim], lanes, *leaf.shape[dim + 1 :])


def _lane_dim(name: str, counts: list[int], shapes: list[torch.Size]) -> LaneDim:
    """The dimension of a leaf that has the numbers of lanes; of a single number, that usual one."""
    if counts == [1]:
        return LaneDim(None)
    dims = [
        LaneDim(i, sizes[0] // counts[0])
        for i, sizes in enumerate(zip(*shapes, strict=False))
        if sizes[0]
        and len({n / lanes for n, lanes in zip(sizes, counts, strict=True)}) == 1
        and sizes[0] % counts[0] == 0
        and (len(counts) > 1 or sizes[0] == counts[0])
    ]
    if len(counts) == 1:  # it was made for that number of lanes
        dims = sorted(dims, key=lambda dim: dim.dim != 1)[:1]
    if len(dims) != 1 or len({*map(len, shapes)}) > 1:
        raise StateError(
            f"state leaf '{name}' has shape {' and '.join(str(tuple(s)) for s in shapes)} for"
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
