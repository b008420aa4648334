"""The interface of an adapter, and the checks and trials that adapters share.

A trial is a forward call on one step of example inputs, to find the layout of the state.

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
    """Calls one kind of module as `(x, state) -> (y, state)`."""

    @abstractmethod
    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        """The state before the first step of a recording; `like` are example inputs."""

    @abstractmethod
    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """Map `x` `(T, B, ...)` to outputs `(T, B, C)` and the final state.

        `resets` `(T, B)` are true where a lane starts a recording; they are passed only if
        `takes_resets` is true.
        """

    def takes_resets(self, x: Tensor | None) -> bool | None:
        """Whether `run` applies resets itself; None if that is unknown until a trial."""
        del x
        return False

    def needs_trial(self) -> bool:
        """Whether `initial_state` needs example inputs to find the layout of the state."""
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


class ResetsUnsupportedError(Exception):
    """A module cannot apply resets: it calls a layer more than once, or with part of the steps.

    The caller splits the forward call at the resets instead, which is always correct.
    """


@dataclass(frozen=True)
class LaneLayout:
    """The dimension of each state tensor that indexes the lanes."""

    dims: tuple[int, ...]
    example: State  # zeros in the module's own layout, for two lanes

    @classmethod
    def infer(cls, two: State, three: State) -> "LaneLayout":
        """Find the lanes by comparing states for two and for three lanes."""
        pairs = zip(trees.leaves(two), trees.leaves(three), strict=True)
        dims = tuple(_lane_dim(name, a.shape, b.shape) for (name, a), (_, b) in pairs)
        return cls(dims, trees.map_leaves(torch.zeros_like, trees.detach(two)))

    def lanes_first(self, state: State) -> State:
        """The state with its lanes moved to the front."""
        return self._move(state, lambda leaf, dim: leaf.movedim(dim, 0))

    def to_module(self, state: State) -> State:
        """The state with its lanes moved back to the dimensions that the module uses."""
        return self._move(state, lambda leaf, dim: leaf.movedim(0, dim))

    def _move(self, state: State, move: Callable[[Tensor, int], Tensor]) -> State:
        if not any(self.dims):  # all lanes are first already
            return state
        dims = iter(self.dims)
        return trees.map_leaves(lambda leaf: move(leaf, next(dims)), state)

    def zeros(self, lanes: int, device: torch.device | None) -> State:
        """A zero state for `lanes` lanes, lanes first."""

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
        " expected exactly one dimension equal to the number of lanes. A value shared by all"
        " lanes cannot be reset for one lane; give it a lane dimension, or make it a buffer."
    )


def custom_initial_state(module: nn.Module) -> Callable[[int], State] | None:
    """The module's method `initial_state(lanes)`, or None; an attribute is ignored."""
    method = getattr(module, "initial_state", None)
    return method if callable(method) else None


def check_outputs(module: nn.Module, y: Any, x: Tensor, batch_first: bool) -> Tensor:
    """Check that `y` has one output per step and lane, and return it time first.

    Raises:
        ModelError: `y` is not a tensor, or its steps or lanes differ from those of the inputs.
    """
    name = type(module).__name__
    if not isinstance(y, Tensor):
        raise ModelError(
            f"{name} returned a {type(y).__name__}, expected one tensor of outputs (T, B, C). If it"
            " returns its state as well, its forward must take it: forward(x, state) -> (y, state)."
        )
    outputs = y.transpose(0, 1) if batch_first and y.dim() > 1 else y
    if outputs.shape[:2] != x.shape[:2]:
        raise ModelError(
            f"{name} returned outputs of shape {tuple(y.shape)} for {x.shape[0]} steps of"
            f" {x.shape[1]} lanes, expected {'(B, T, C)' if batch_first else '(T, B, C)'}: one"
            " output per step; the stream's mask selects those that count in the loss."
        )
    return outputs


def trial_call(module: nn.Module, call: Callable[[], tuple[Any, State]]) -> tuple[Any, State]:
    """Run `call` in evaluation mode, without gradients or autocast.

    Training modes and random state are restored.

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
            f"{type(module).__name__}.forward failed in a trial of one step ({error}). Let it"
            " accept state=None at the start of a recording, or give it an initial_state(lanes)"
            " method"
        ) from error
    finally:
        for m, mode in modes:
            m.training = mode
