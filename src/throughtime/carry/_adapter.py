"""The interface of an adapter, and where the lanes are in the tensors of a module's state.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class LaneDim:
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
        if self.rows > 1:
            leaf = leaf.unflatten(self.dim, (-1, self.rows))
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
            states: by the number of lanes; only one number for a module of one lane.
            weight: of the module.

        Raises:
            StateError: a tensor has no such dimension, or trees of different structure.
        """
        state = next(iter(states.values()))
        rows = [*map(list, map(trees.leaves, states.values()))]
        if len({*map(len, rows)}) > 1:
            raise StateError(f"the state has {len(rows[0])} and {len(rows[1])} tensors")
        dims = [
            _lane_dim(leaf[0][0], {n: t.shape for n, (_, t) in zip(states, leaf, strict=True)})
            for leaf in zip(*rows, strict=True)
        ]
        return cls.of(tuple(dims), state, weight)

    @classmethod
    def of(cls, dims: tuple[LaneDim, ...], state: State, weight: Tensor | None) -> "LaneLayout":
        """The layout of a state whose dimensions are known."""
        layout = cls(dims, (), None if weight is None else weight.dtype)
        zeros = layout.lanes_first(trees.map_leaves(torch.zeros_like, trees.detach(state)))
        return cls(
            dims, trees.map_leaves(lambda leaf: leaf[:1].clone(), zeros), layout.weight_dtype
        )

    def lanes_first(self, state: State) -> State:
        """The state with its lanes moved to the front."""
        return self._map(state, self._to_front)

    def to_module(self, state: State) -> State:
        """The state with its lanes moved back to the dimensions that the module uses."""
        return self._map(state, self._to_module)

    @cached_property
    def _to_front(self) -> list[Callable[[Tensor], Tensor]]:
        return [dim.to_front for dim in self._moved]

    @cached_property
    def _to_module(self) -> list[Callable[[Tensor], Tensor]]:
        return [dim.to_module for dim in self._moved]

    @property
    def _moved(self) -> tuple[LaneDim, ...]:
        """The dimension of each tensor: none if all have their lanes first, one if all agree."""
        kinds = {*self.dims}
        return () if kinds <= {LaneDim(0)} else self.dims[:1] if len(kinds) == 1 else self.dims

    @staticmethod
    def _map(state: State, moves: list[Callable[[Tensor], Tensor]]) -> State:
        if not moves:
            return state
        if len(moves) == 1:  # every chunk passes here
            return trees.map_leaves(moves[0], state)
        rest = iter(moves)
        return trees.map_leaves(lambda leaf: next(rest)(leaf), state)  # noqa: PLW0108  # one for each leaf

    def with_weight(self, state: State, weight: Tensor | None, lanes: int) -> State:
        """The state on the device of the module, in its dtype if it was when this was inferred.

        A number among the tensors is the value of all lanes.
        """
        if weight is None:
            return state
        pairs = zip(trees.tensors(self.example), self.dims, strict=False)

        def convert(leaf: Tensor) -> Tensor:
            example, dim = next(pairs, (leaf, None))
            if dim is not None and leaf.numel() < 2 and leaf.dim() < example.dim():
                rows = leaf.sum().to(leaf.dtype).expand(lanes, *example.shape[1:])
                leaf = dim.to_module(rows)
            follows = dim is not None and example.dtype == self.weight_dtype
            return leaf.to(weight.device, weight.dtype if follows else leaf.dtype)

        return trees.map_leaves(convert, state)

    def zeros(self, lanes: int, weight: Tensor | None) -> State:
        """A zero state for `lanes` lanes, lanes first, on the device of the module."""
        state = trees.map_leaves(lambda leaf: leaf.new_zeros(lanes, *leaf.shape[1:]), self.example)
        return self.with_weight(state, weight, lanes)


NO_LANES = LaneLayout()  # of a state that stays as it is


def _lane_dim(name: str, shapes: dict[int, torch.Size]) -> LaneDim:
    if len(shapes) == 1:
        return LaneDim(None)
    (first, a), (second, b) = shapes.items()
    changed = [i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q]
    if len(a) == len(b) and len(changed) == 1:
        dim = changed[0]
        rows, rest = divmod(a[dim], first)
        if rest == 0 and b[dim] == rows * second:
            return LaneDim(dim, rows)
    raise StateError(
        f"state leaf '{name}' has shape {tuple(a)} for {first} lanes and {tuple(b)} for {second}:"
        " expected exactly one dimension equal to the number of lanes. A value shared by all"
        " lanes cannot be reset for one lane; give it a lane dimension, or make it a buffer."
    )


def is_state(value: Any) -> bool:
    """Whether a value can be a state: a tree of tensors and None, with at least one tensor."""
    try:
        return next(trees.leaves(value), None) is not None
    except StateError:
        return False
