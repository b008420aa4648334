"""What a contract is, and what all of them check.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from throughtime.errors import ModelError, StateError
from throughtime.state import State


class Contract(Protocol):
    """One way of running a module with its state made explicit."""

    def initial(self, lanes: int, like: Tensor | None) -> State:
        """The state entering the first step of a recording."""
        ...

    def needs_trial(self) -> bool:
        """Whether `initial` must see inputs first, to learn the state's layout from a trial."""
        ...

    def takes_resets(self, x: Tensor | None) -> bool | None:
        """Whether `run` applies resets itself.

        None where that needs a trial, for which inputs are needed.
        """
        ...

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """`(T, B, ...)` to `(T, B, C)` and the state after it.

        With resets `(T, B)` only where it takes them.
        """
        ...


class NotWholeError(Exception):
    """A module that was given resets plays its layers in pieces after all.

    Splitting the forward call is always right.
    """


class HasInitialState(Protocol):
    """A user module that says what its recordings start from."""

    def initial_state(self, lanes: int) -> State:
        """The state for `lanes` lanes, as the module's forward takes it."""
        ...


def own_start(module: nn.Module) -> HasInitialState | None:
    """The module, if it has a method `initial_state`; a parameter of that name is none."""
    return (
        cast("HasInitialState", module)
        if callable(getattr(module, "initial_state", None))
        else None
    )


def outputs_of(module: nn.Module, y: Any, x: Tensor, batch_first: bool) -> Tensor:
    """The outputs, time first; one row per step and lane, or a clear refusal."""
    if not isinstance(y, Tensor):
        raise ModelError(
            f"{type(module).__name__} returned a {type(y).__name__}, expected one tensor of outputs"
            " (T, B, C). If it returns its state as well, let its forward take it: forward(x,"
            " state) -> (y, state)."
        )
    turned = y.transpose(0, 1) if batch_first and y.dim() > 1 else y
    if turned.shape[:2] != x.shape[:2]:
        raise ModelError(
            f"{type(module).__name__} returned outputs of shape {tuple(y.shape)} for {x.shape[0]}"
            f" steps of {x.shape[1]} lanes, expected {'(B, T, C)' if batch_first else '(T, B, C)'}:"
            " one output per step; the stream's mask says which of them count."
        )
    return turned


def quietly(module: nn.Module, call: Callable[[], tuple[Any, State]]) -> tuple[Any, State]:
    """A trial of a user's module in evaluation mode that leaves no trace."""
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
