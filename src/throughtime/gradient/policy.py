"""What every gradient policy is: a plan of updates over a source of chunks.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.gradient.objective import Objective
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class AdjointStats:
    """What a sweep saw on its way back.

    Attributes:
        chunk: steps per forward call.
        adjoints: `(edges, B)`, norm of the gradient that came to each edge between chunks, from the
            last edge to the first, before it was clipped there.
        clipped: how many of them were longer than `clip_adjoint`, and made shorter.
    """

    chunk: int
    adjoints: Tensor
    clipped: int = 0


@dataclass(frozen=True, eq=False)
class Update:
    """One update's worth of gradient: `.grad` is ready when you have it.

    Attributes:
        loss: mean over the valid steps, a detached scalar tensor.
        steps: number of valid steps behind it.
        state: the carried state after the last step, detached.
        outputs: `(T, B, C)` detached, of the steps in `chunk`.
        chunk: the steps whose losses were counted; where a whole recording was, or several updates
            were accumulated, the last of them, so that memory stays flat.
        adjoint_stats: norms of the credit that crossed the edges of chunks, where the gradient came from a
            sweep.
        weight: what the gradient weighs among those of other ranks; `None`: its steps. With several
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


def nothing(objective: Objective, chunk: Chunk, state: State, outputs: Tensor) -> Update | None:
    """Steps without one that counts: no update, or, where other ranks may have some, one of no weight."""
    return (
        None
        if objective.together is None
        else Update(outputs.new_zeros(()), 0, state, outputs.detach(), chunk, weight=0.0)
    )


class Progress(NamedTuple):
    """Where a policy stands in the stream: values, enough to go on from here.

    Attributes:
        state: the carried state at the present, detached; `None` before the first step of all.
        edge: the state entering the first step of `past`, detached; `None` for the initial state,
            which may be learnt.
        past: the steps before the present that the next window runs again.
        influence: `(B, n, P)`, how the state depends on the weights, where a policy (`RTRL`)
            carries it.
        since: `(B,)`, steps since each lane's last reset, where a policy warms up.
        graphs: those of the strides before the present, where a policy keeps them.
    """

    state: State
    edge: State
    past: tuple[Chunk, ...] = ()
    influence: Tensor | None = None
    since: Tensor | None = None
    graphs: tuple[Any, ...] = ()


class Policy(Protocol):
    """How credit flows back through time."""

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """Takes steps from the source, adds to `.grad` of the parameters once, returns the update
        and where it got to.

        `None` when the source has reached the end of its epoch.
        """
        ...


@runtime_checkable
class Learning(Protocol):
    """A policy that remembers something between updates besides its progress: a saved place holds it."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        ...

    def load_state_dict(self, learnt: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        ...
