"""Gradient policies: which steps make an update, and how far their credit flows back.

A policy is a frozen value; whatever it needs between two updates is in a state of its own:

    state = policy.init(carried, previous)
    update, state = policy.update(net, source, objective, state)        until update is None
    values = policy.state_dict(state)                                   for a checkpoint
    state = policy.load_state_dict(values, source)

`tt.updates` runs any object with these four methods.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor
from typing_extensions import TypeVar  # with a default, before Python 3.13

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError
from throughtime.gradient.objective import Objective
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class AdjointStats:
    """Norms of the credit that crossed the boundaries between chunks.

    Attributes:
        chunk: steps per forward call.
        adjoints: `(boundaries, B)`, norm of the gradient that came to each boundary, from the last
            one to the first, before it was clipped there.
        clipped: how many of them were longer than `clip_adjoint`, and were scaled down.
    """

    chunk: int
    adjoints: Tensor
    clipped: int = 0


@dataclass(frozen=True, eq=False)
class Update:
    """One update: its gradient is in `.grad`.

    Attributes:
        loss: mean over the valid steps, a detached scalar tensor. Reading its value is left to you:
            it waits for the device.
        steps: number of valid steps behind it.
        state: the carried state after the last step, detached.
        outputs: `(T, B, C)` detached, of the steps in `chunk`.
        chunk: the steps whose losses count. Of a whole recording, or of several accumulated
            updates, it is the last part, so that memory stays flat.
        adjoint_stats: norms of the credit between chunks, where the gradient was computed chunk by
            chunk.
        weight: of this gradient among those of other ranks; `None`: its steps. On several
            ranks `loss` and `steps` are those of all of them, `outputs` and `chunk` this rank's.
    """

    loss: Tensor
    steps: int
    state: State
    outputs: Tensor
    chunk: Chunk
    adjoint_stats: AdjointStats | None = None
    weight: float | None = None

    def __repr__(self) -> str:
        return (
            f"Update(loss={self.loss.item():.6g}, steps={self.steps}, outputs"
            f" {tuple(self.outputs.shape)})"
        )


def empty_update(
    objective: Objective, chunk: Chunk, state: State, outputs: Tensor
) -> Update | None:
    """No valid targets here: None, or a zero-weight update when other ranks may have some."""
    if objective.reducer is None:
        return None
    return Update(outputs.new_zeros(()), 0, state, outputs.detach(), chunk, weight=0.0)


class PolicyState(Protocol):
    """The state of a policy between two updates: a value of any type with this attribute."""

    @property
    def carried(self) -> State:
        """The net's state after the last step taken, detached; `None` before the first."""
        ...


@dataclass(frozen=True, eq=False)
class CarriedState:
    """The state of a policy that needs nothing between updates but the carried state."""

    carried: State = None


S = TypeVar("S", bound=PolicyState, default=Any)


class Policy(Protocol[S]):
    """How credit flows back through time. Implement it as a frozen dataclass.

    `tt.updates` relies on these laws, and `docs/how-to/extending.md` shows a policy of 20 lines:

    - The policy has only settings and never changes. All that it learns is in its state, which is a
      value: `update` returns a new one and leaves the old one as it was, so that a failed update
      can be repeated.
    - `state.carried` is the net's state after the last step taken, without a graph.
    - Updates take all steps of the epoch in order, each once. `update` returns `None` at its end.
    - `.grad` is added to once in an update, and only if all of the gradient is finite. Otherwise
      a `RunError` leaves `.grad` and the weights as they were.
    - The gradient is that of a mean over the valid steps of the update, whatever the chunks.
    - `load_state_dict(state_dict(state))` continues with the same bits.
    """

    def init(self, carried: State, previous: S | None) -> S:
        """The state before the first update of an epoch.

        Args:
            carried: the state entering the first step; `None` for the net's initial state, which
                may be learned: `net.initial_state(chunk.lanes, like=chunk.inputs)`.
            previous: the state after the last epoch, for a policy that learns from epoch to epoch.
        """
        ...

    def update(
        self, net: Carried, source: Source, objective: Objective, state: S
    ) -> tuple[Update | None, S]:
        """Make one update: take steps, and add their gradient to `.grad` once.

        Args:
            net: made by `tt.carry`.
            source: the steps, `source.take(n)`; `None` at the end of the epoch.
            objective: the loss, `objective.loss(outputs, chunk)`.
            state: after the last update; it must not be changed in place.

        Returns:
            The update, `None` at the end of the epoch; and the state after it.
        """
        ...

    def state_dict(self, state: S) -> dict[str, Any]:
        """The state as plain values, tensors and state trees."""
        ...

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> S:
        """The state that `state_dict` saved, its tensors on the net's device.

        `source.read(start, stop)` reads steps of this epoch again.
        """
        ...


class MemorylessPolicy(ABC):
    """A policy that needs nothing between two updates but the carried state."""

    def init(self, carried: State, previous: CarriedState | None) -> CarriedState:
        """The state before the first update of an epoch."""
        del previous
        return CarriedState(carried)

    def state_dict(self, state: CarriedState) -> dict[str, Any]:
        """The carried state."""
        return {"carried": state.carried}

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> CarriedState:
        """The state that `state_dict` saved."""
        del source
        return CarriedState(values["carried"])

    @abstractmethod
    def update(
        self, net: Carried, source: Source, objective: Objective, state: CarriedState
    ) -> tuple[Update | None, CarriedState]:
        """As that of `Policy`."""


def check_result(policy: Policy[S], result: Any) -> tuple[Update | None, S]:
    """What `policy.update` returned.

    Raises:
        ConfigError: it is something else than an update, or None, and a state.
    """
    if isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2:
        update, state = cast("tuple[Any, Any]", result)
        if (update is None or isinstance(update, Update)) and hasattr(state, "carried"):
            return update, state
    raise ConfigError(
        f"{type(policy).__name__}.update returned {_outline(result)}, expected a tt.Update, or None"
        " at the end of the epoch, and the policy's state, which has an attribute 'carried':"
        " return update, state"
    )


def check_state(policy: Policy[S], state: S) -> S:
    """The state of `policy`, if it has what `tt.updates` needs.

    Raises:
        ConfigError: it has no attribute `carried`.
    """
    if hasattr(state, "carried"):
        return state
    raise ConfigError(
        f"the state of {type(policy).__name__} is {_outline(state)}, expected a value with an"
        " attribute 'carried': the net's state after the last step, None before the first. A frozen"
        " dataclass with a field 'carried' will do (see tt.Policy)"
    )


def _outline(value: object) -> str:
    """The type of a value; of a tuple, those of its items."""
    if type(value) is tuple:
        return f"({', '.join(type(item).__name__ for item in cast('tuple[Any, ...]', value))})"
    return "None" if value is None else f"a {type(value).__name__}"
