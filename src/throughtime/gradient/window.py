"""Windows: which steps an update runs, and which of their losses count. Integers only, no torch.

    lead ... start      run without a graph, from the state that is known at `lead`
    start ... stop      run with a graph: one segment, or several that run again on the way back
    counted ... stop    the losses of these steps count, as a mean over their valid steps
    keep                the state entering this step is kept: the next window leads in there

A gradient policy answers one question: which window comes next? `executor.py` runs any window.

Shapes: `B` lanes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from throughtime.errors import ConfigError, check_whole

if TYPE_CHECKING:
    from torch import Tensor

    from throughtime.carry.carried import Carried
    from throughtime.chunk import Chunk, Source
    from throughtime.gradient.executor import Update
    from throughtime.gradient.objective import Objective

# The gradient with respect to each leaf of the state that enters a step, None where there is none
Credit: TypeAlias = "Sequence[Tensor | None]"
Gate: TypeAlias = Callable[[int, Credit], Credit]
Enter: TypeAlias = Callable[["Chunk", Any, Any], Any]


class Window(NamedTuple):
    """One update, in steps of the epoch.

    Attributes:
        lead: the first step that is run: its entering state is known.
        start: the first step with a graph.
        counted: the first step whose loss counts.
        stop: the end, exclusive.
        keep: the state entering this step is kept, and is that of the next window's `lead`.
        chunk: steps per segment. A segment keeps the state that entered it and runs again in the
            backward pass. `None`: one segment, which keeps its graph; "auto": as in `tt.Exact()`.
        gate: `gate(step, credit)` returns the credit that crosses a step between two segments, on
            its way back: the gradient of the later losses with respect to the state, leaf by leaf.
        per: the sum of the losses is divided by so many steps of all lanes; `None`: by the number
            of valid steps, so that it is their mean.
        enter: `enter(chunk, state, fresh)` returns the state that enters a chunk in whose first
            step some lanes start a recording. It is called again in the backward pass of a
            segment, so one that remembers anything needs a window of one segment that begins where
            the last one ended.
    """

    lead: int
    start: int
    counted: int
    stop: int
    keep: int
    chunk: "int | Literal['auto'] | None" = None
    gate: Gate | None = None
    per: float | None = None
    enter: Enter | None = None


class Progress(NamedTuple):
    """What lies between two updates: all that a checkpoint needs, as a value.

    Attributes:
        step: the first step of the next update, in the epoch.
        carried: the state entering it, without a graph; `None` for the initial state.
        lead: the first step that the next window may run again.
        edge: the state entering that one.
        memory: the policy's own: plain values, tensors and states.
    """

    step: int = 0
    carried: Any = None
    lead: int = 0
    edge: Any = None
    memory: Any = None


# probe(policy, steps): the gradient of the next steps by another policy, a tensor for each weight:
# the mean of its updates by their valid steps, on all ranks. Empty if no step counts. No effects.
Probe: TypeAlias = Callable[["Policy | UpdatePolicy", int], "list[Tensor]"]


class Policy(Protocol):
    """How credit flows back through time. Implement it as a frozen dataclass.

    `tt.updates` relies on these laws, and `docs/how-to/extending.md` shows a policy of 20 lines:

    - The policy has only settings and never changes. What it remembers is `at.memory`, a value:
      `plan` returns a new one and leaves the old one as it was, so that a failed update can be
      repeated.
    - A window leads in at `at.lead`, where a state is known, and ends after `at.step`.
    - It takes at most `source.remaining(n)` new steps. `None` ends the epoch.
    - `chunk` changes memory and speed, and no gradient unless there is a `gate`.
    - With the same memory and the same random numbers, the same window is planned.

    A policy that no window describes is an `UpdatePolicy`.

    Example:
        >>> from dataclasses import dataclass
        >>> from throughtime.gradient import Window
        >>> @dataclass(frozen=True)
        ... class Strides:
        ...     steps: int
        ...     def plan(self, source, at, probe):
        ...         stop = at.step + source.remaining(self.steps)
        ...         if stop == at.step:
        ...             return None, at.memory
        ...         return Window(at.lead, at.step, at.step, stop, keep=stop), at.memory
    """

    def plan(self, source: "Source", at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The next window, which ends after `at.step`, and the policy's memory after it.

        Args:
            source: `source.remaining(n)` says how many of the next n steps exist.
            at: where the last update ended.
            probe: for a policy that measures gradients.

        Returns:
            The window, `None` at the end of the epoch; and the memory: plain values, tensors and
            states, which a checkpoint can hold.
        """
        ...


@runtime_checkable
class UpdatePolicy(Protocol):
    """A policy that no window describes, such as real-time recurrent learning."""

    def update(
        self, net: "Carried", source: "Source", objective: "Objective", at: Progress
    ) -> "tuple[Update | None, Progress]":
        """Take steps from the source, and add their gradient to `.grad` once.

        `.grad` is None at the call, and is added to what the user has there after it. An update
        in which no step counts has the weight 0.

        Returns:
            The update, `None` at the end of the epoch; and the progress after it.
        """
        ...


def check_horizon(stride: int, horizon: int) -> None:
    """Refuse settings without a plan."""
    check_whole("stride", stride, 1)
    check_whole("horizon", horizon, 1)
    if horizon < stride:
        raise ConfigError(
            f"horizon={horizon} is below stride={stride}: the first losses of every stride would"
            f" reach back no step at all. Take horizon >= stride, or stride={max(1, horizon)}."
        )


def set_whole(policy: object, **least: int) -> None:
    """Make settings of a policy an `int`, so that it prints, compares and is saved alike.

    Args:
        policy: a frozen dataclass.
        least: the least that each of them may be, by name; one that is None stays so.
    """
    for name, lowest in least.items():
        if (value := getattr(policy, name)) is not None:
            object.__setattr__(policy, name, check_whole(name, value, lowest))
