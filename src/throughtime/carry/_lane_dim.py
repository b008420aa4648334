"""Where the lanes are in a user's state: turned to the front on the way in, back on the way out.

Shapes: `B` lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.errors import StateError
from throughtime.state import State


@dataclass(frozen=True)
class Layout:
    """Where the lanes are in each leaf of a user's state."""

    dims: tuple[int, ...]
    example: State  # as the module returns it, for two lanes

    @classmethod
    def compare(cls, two: State, three: State) -> "Layout":
        pairs = zip(trees.leaves(two), trees.leaves(three), strict=True)
        dims = tuple(_lane_dim(name, a.shape, b.shape) for (name, a), (_, b) in pairs)
        return cls(dims, trees.map_leaves(torch.zeros_like, trees.detach(two)))

    def inward(self, state: State) -> State:
        """Lanes to the front."""
        return self._moved(state, lambda leaf, dim: leaf.movedim(dim, 0))

    def outward(self, state: State) -> State:
        """Lanes back to where the module wants them."""
        return self._moved(state, lambda leaf, dim: leaf.movedim(0, dim))

    def _moved(self, state: State, move: Callable[[Tensor, int], Tensor]) -> State:
        if not any(self.dims):
            return state
        dims = iter(self.dims)
        return trees.map_leaves(lambda leaf: move(leaf, next(dims)), state)

    def zeros(self, lanes: int, device: torch.device | None) -> State:
        """The zero state for `lanes` lanes, lanes first."""
        return trees.map_leaves(
            lambda leaf: torch.zeros(
                lanes, *leaf.shape[1:], dtype=leaf.dtype, device=device or leaf.device
            ),
            self.inward(self.example),
        )


def _lane_dim(name: str, two: torch.Size, three: torch.Size) -> int:
    changed = [i for i, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if (
        len(two) != len(three)
        or len(changed) != 1
        or (two[changed[0]], three[changed[0]]) != (2, 3)
    ):
        raise StateError(
            f"state leaf '{name}' has shape {tuple(two)} for 2 lanes and {tuple(three)} for 3:"
            " expected exactly one dimension that is the number of lanes. What all lanes share"
            " cannot be reset for one of them; keep it per lane, or as a buffer that never"
            " changes."
        )
    return changed[0]
