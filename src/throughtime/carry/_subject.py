"""The copy of a module on which ways of calling it are tried.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from throughtime.carry._adapter import NO_LANES
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import Convention, set_attribute
from throughtime.carry._laws import LAWS, Law
from throughtime.carry._names import SIZE_ATTRIBUTES, is_method, names_state, parameters_of
from throughtime.carry._trial import STEPS, Snapshot, modes_of, set_modes, trial_inputs
from throughtime.errors import ModelError, StateError
from throughtime.state import State

CALL_ERRORS = (Exception,)  # a module that is called in a way it is not made for raises anything


@dataclass(frozen=True)
class Hints:
    """What the user says about a module; None is found by trials. See `tt.carry`."""

    inputs: Callable[[Tensor], Any] | None = None
    output: int | str | tuple[int | str, ...] | None = None
    state: str | None = None
    start: Callable[[int], State] | None = None
    call: str | Callable[..., Any] | None = None
    context: int = 0
    batch_first: bool | None = None


@dataclass(frozen=True)
class Failure:
    """A way of calling a module that was tried, and why it was not accepted.

    `law` is None where a call raised `error`; `one_lane` says that it was tried on one lane,
    `in_training` that every law holds in evaluation.
    """

    convention: Convention | None
    law: Law | None
    error: Exception | None
    one_lane: bool
    in_training: bool = False

    @property
    def name(self) -> str:
        """Of the law, in any mode; empty for an error."""
        return "" if self.law is None else self.law.plain

    @property
    def rank(self) -> float:
        """How far the trial came; positive if several lanes were accepted by the module."""
        law = self.law
        if self.in_training or (law is not None and law.plain != law.name):
            rank = 20.0
        elif law is not None:
            rank = 1.2 if law.error else 0.5 + [*LAWS].index(law.name)
        elif self.convention is not None and self.convention.source.arguments == ():
            return -3  # few modules take a pair: what they raise says nothing
        else:
            rank = 1.0 if isinstance(self.error, (ModelError, StateError)) else 0.0
        return rank - 2 * self.one_lane


class Subject:
    """A module under trial: its signature, and calls that always start from the same state of it.

    Args:
        module: the copy, or the user's module itself if it cannot be copied.
        original: the user's.
        x: example inputs `(T, B, ...)`.
        hints: what the user says.
        standardize: whether inputs of trials are standard normal.

    Raises:
        ModelError: `hints.call` is no method of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        original: nn.Module,
        x: Tensor,
        hints: Hints,
        *,
        standardize: bool = False,
    ) -> None:
        self.module, self.hints, self.example = module, hints, x
        self.modes, self._standardize = modes_of(original), standardize
        self.one_lane = False
        self.failures: list[Failure] = []
        self._snapshot = Snapshot(module)
        self.method = _method_name(original, hints.call)
        forward = getattr(module, self.method)
        parameters = parameters_of(forward)
        count = _count_inputs(hints, x)
        self.input_name: str | None = None
        if count == 1 and len(parameters) > 1:
            first, second = parameters[0].name, parameters[1].name
            if first == hints.state or (names_state(first) and not names_state(second)):
                self.input_name = second
                parameters = [parameters[1], parameters[0], *parameters[2:]]
        self.parameters = parameters[count:]
        self.sizes = tuple(
            (name, key)
            for name, part in module.named_modules()
            for key in SIZE_ATTRIBUTES
            if type(vars(part).get(key)) is int
        )
        self.weight = next(module.parameters(), None)

    def reset(self) -> None:
        """Put attributes and buffers back; evaluation mode."""
        self._snapshot.restore()
        set_modes(self.module, None)

    @property
    def training_modes(self) -> list[dict[str, bool] | None]:
        """Evaluation, and the modes of a module that trains."""
        return [None, self.modes] if self.modes.get("") else [None]

    def inputs(self, lanes: int, steps: int = STEPS) -> Tensor:
        """Inputs of a trial."""
        return trial_inputs(self.example, self.module, lanes, steps, standardize=self._standardize)

    def note(
        self,
        convention: Convention | None,
        law: Law | None,
        error: Exception | None = None,
        *,
        in_training: bool = False,
    ) -> None:
        """Remember a way of calling that was not accepted."""
        self.failures.append(Failure(convention, law, error, self.one_lane, in_training))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int) -> Any:
        """One call, as the author of the module would make it."""
        for key in self.sizes:
            set_attribute(self.module, key, lanes)
        call = self.module if self.method == "forward" else getattr(self.module, self.method)
        return call(*args, **kwargs)

    def call(
        self, convention: Convention, x: Tensor, training: dict[str, bool] | None = None
    ) -> tuple[Any, State, bool]:
        """`BoundModule.first_call`, in the training modes of all parts; None is evaluation."""
        self.reset()
        set_modes(self.module, training)
        bound = BoundModule(self.module, replace(convention, lanes=NO_LANES), x[:1, :1])
        try:
            with torch.no_grad():
                return bound.first_call(x)
        finally:
            bound.release()


def _method_name(module: nn.Module, call: str | Callable[..., Any] | None) -> str:
    """The method that `tt.carry(module, call=...)` names; forward if it names none."""
    if call is None or (isinstance(call, str) and not is_method(module, call)):
        return "forward"
    if isinstance(call, str):
        return call
    name = getattr(call, "__name__", "")
    if getattr(call, "__self__", None) is not module:
        raise ModelError(
            "call= must be 'chunk', 'step', 'last' or a method of the module that is carried, such"
            f" as module.{name or 'step'}"
        )
    return name


def _count_inputs(hints: Hints, x: Tensor) -> int:
    """How many arguments are inputs."""
    for example in (x, x[0]) if hints.inputs is not None else ():
        try:
            inputs = hints.inputs(example) if hints.inputs is not None else ()
        except CALL_ERRORS:
            continue
        return len(inputs) if isinstance(inputs, tuple) else 1
    return 1
