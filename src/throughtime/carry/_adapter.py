"""The interface of an adapter, and the checks and trials that adapters share.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.errors import ModelError, StateError
from throughtime.state import State


class Adapter(ABC):
    """Runs one kind of module with its state as an argument and a result."""

    @abstractmethod
    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        """The state that enters the first step of a recording."""

    @abstractmethod
    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """`(T, B, ...)` to `(T, B, C)` and the state after it.

        `resets` `(T, B)` are passed only to an adapter whose `takes_resets` is true.
        """

    def takes_resets(self, x: Tensor | None) -> bool | None:
        """Whether `run` applies resets itself; None if only a trial with inputs can show it."""
        del x
        return False

    def needs_trial(self) -> bool:
        """Whether `initial_state` still needs inputs, to learn the state's layout from a trial."""
        return False

    def leaf_names(self, state: State) -> list[str]:
        """The leaves of a state by name: the module's own names, `h` and `c` in torch's layers."""
        return [name for name, _ in trees.leaves(state)]


class ResetsRefusedError(Exception):
    """A module that was given resets calls its layers more than once, or with part of the steps.

    The caller splits the forward call instead, which is always correct.
    """


@dataclass(frozen=True)
class LaneLayout:
    """The dimension of the lanes in each leaf of a user's state."""

    dims: tuple[int, ...]
    example: State  # as the module returns it, for two lanes

    @classmethod
    def compare(cls, two: State, three: State) -> "LaneLayout":
        """Find the lanes by comparing states for two and for three lanes."""
        pairs = zip(trees.leaves(two), trees.leaves(three), strict=True)
        dims = tuple(_lane_dim(name, a.shape, b.shape) for (name, a), (_, b) in pairs)
        return cls(dims, trees.map_leaves(torch.zeros_like, trees.detach(two)))

    def lanes_first(self, state: State) -> State:
        """The state with its lanes moved to the front."""
        return self._move(state, lambda leaf, dim: leaf.movedim(dim, 0))

    def as_module(self, state: State) -> State:
        """The state with its lanes moved back to the dimensions that the module uses."""
        return self._move(state, lambda leaf, dim: leaf.movedim(0, dim))

    def _move(self, state: State, move: Callable[[Tensor, int], Tensor]) -> State:
        if not any(self.dims):
            return state
        dims = iter(self.dims)
        return trees.map_leaves(lambda leaf: move(leaf, next(dims)), state)

    def zeros(self, lanes: int, device: torch.device | None) -> State:
        """The zero state for `lanes` lanes, lanes first."""

        def zero(leaf: Tensor) -> Tensor:
            shape = (lanes, *leaf.shape[1:])
            return torch.zeros(shape, dtype=leaf.dtype, device=device or leaf.device)

        return trees.map_leaves(zero, self.lanes_first(self.example))


def _lane_dim(name: str, two: torch.Size, three: torch.Size) -> int:
    changed = [i for i, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) == len(three) and len(changed) == 1:
        dim = changed[0]
        if (two[dim], three[dim]) == (2, 3):
            return dim
    raise StateError(
        f"state leaf '{name}' has shape {tuple(two)} for 2 lanes and {tuple(three)} for 3:"
        " expected exactly one dimension that is the number of lanes. A value that all lanes share"
        " cannot be reset for one of them; keep it per lane, or as a buffer that never changes."
    )


def custom_initial_state(module: nn.Module) -> Callable[[int], State] | None:
    """The module's own method `initial_state(lanes)`, if any; a parameter of that name is not."""
    method = getattr(module, "initial_state", None)
    return method if callable(method) else None


def check_outputs(module: nn.Module, y: Any, x: Tensor, batch_first: bool) -> Tensor:
    """The outputs, time first, if there is one for each step and lane.

    Raises:
        ModelError: they are not a tensor, or have other steps or lanes than the inputs.
    """
    name = type(module).__name__
    if not isinstance(y, Tensor):
        raise ModelError(
            f"{name} returned a {type(y).__name__}, expected one tensor of outputs (T, B, C). If it"
            " returns its state as well, let its forward take it: forward(x, state) -> (y, state)."
        )
    outputs = y.transpose(0, 1) if batch_first and y.dim() > 1 else y
    if outputs.shape[:2] != x.shape[:2]:
        raise ModelError(
            f"{name} returned outputs of shape {tuple(y.shape)} for {x.shape[0]} steps of"
            f" {x.shape[1]} lanes, expected {'(B, T, C)' if batch_first else '(T, B, C)'}: one"
            " output per step; the stream's mask says which of them count."
        )
    return outputs


def trial_call(module: nn.Module, call: Callable[[], tuple[Any, State]]) -> tuple[Any, State]:
    """Run `call` in evaluation mode; modes and random state are afterwards as before.

    Raises:
        ModelError: the call failed.
    """
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        device = next((p.device.type for p in module.parameters()), "cpu")
        with torch.no_grad(), torch.random.fork_rng(), torch.autocast(device, enabled=False):
            return call()
    except (ModelError, StateError):
        raise
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__}.forward(x, None) failed in a trial of one step ({error}); let"
            " it take None for the state at the start of a recording, or give it an"
            " initial_state(lanes) method"
        ) from error
    finally:
        for m, mode in modes:
            m.training = mode
