"""The copy of a module under trial, and the laws that compare a convention with its author's calls.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import NO_LANES
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import (
    Convention,
    OutputLayout,
    call_start,
    item_at,
    key_name,
    set_attribute,
    tensor_paths,
)
from throughtime.carry._laws import (
    LAWS,
    Laboratory,
    Law,
    difference,
    gradients,
    relative_difference,
    state_difference,
)
from throughtime.carry._names import (
    SIZE_ATTRIBUTES,
    is_method,
    names_state,
    parameters_of,
    reset_methods,
)
from throughtime.carry._ports import Key, attributes, changed_attributes
from throughtime.carry._trial import (
    STEPS,
    ConstantRandomness,
    Snapshot,
    changed_inputs,
    long_steps,
    modes_of,
    set_modes,
    trial_inputs,
)
from throughtime.errors import ModelError, StateError
from throughtime.state import State

CALL_ERRORS = (Exception,)  # a module that is called in a way it is not made for raises anything


@dataclass(frozen=True)
class Hints:
    """What the user says about a module; None is found by trials. See `tt.carry`."""

    inputs: Callable[[Tensor], Any] | None = None
    output: int | str | tuple[int | str, ...] | list[Any] | None = None
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

    def accepts(self, convention: Convention, x: Tensor) -> bool:
        """Whether a convention obeys every law; if not, the failure is noted."""
        self.reset()
        bound = BoundModule(self.module, convention, x[:1, :1])
        by_step = convention.call in ("step", "last")
        laboratory = Laboratory(bound, self.module, x, by_step=by_step)
        try:
            for law in self._laws(convention, laboratory):
                if law is not None and not law.holds:
                    self.note(convention, law)
                    return False
        except CALL_ERRORS as error:
            in_training = laboratory.training is not None
            self.note(convention, None, error, in_training=in_training)
            return False
        finally:
            bound.release()
        return True

    def _laws(self, convention: Convention, laboratory: Laboratory) -> Iterator[Law | None]:
        for training in self.training_modes:
            yield from laboratory.measure(training)
        laboratory.training = None
        for law in (self._kept, self._author, self._last, self._start, self._long):
            yield law(convention, laboratory)

    def _author(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """Called as its author calls it, a module with its state inside gives the same.

        A state that it keeps in an attribute itself must be the one that hooks carry, with its
        gradient. A step that keeps nothing between its calls has no memory.
        """
        source, x = convention.source, laboratory.x
        is_step = convention.call == "step" and source.arguments is None and bool(source.ports)
        if not (source.scratch or is_step) or convention.context or convention.call == "every":
            return None
        chunks = [3, STEPS - 3] if convention.call == "chunk" else [1] * STEPS
        own = self._run_plainly(convention, x, chunks)
        if own is None:
            return None
        carried, _ = laboratory.run(x, *chunks)
        tolerance, first = laboratory.tolerance, chunks[0]
        whole = Law("whole", difference(own, carried), tolerance)
        if not whole.holds:
            alone = self._run_plainly(convention, x[first:], chunks[1:])
            remembers = alone is not None and difference(alone, own[first:]) > tolerance
            starts_alike = difference(own[:first], carried[:first]) <= tolerance
            # the attribute carries the state, and is not what its layer returns
            return whole if starts_alike and (remembers or not source.scratch) else None
        leaves = [p for p in self.module.parameters() if p.requires_grad]
        if not source.scratch or not leaves or not own.requires_grad:
            return None
        grads = (gradients(y, leaves) for y in (own, carried))
        deviation = max(map(relative_difference, *grads))
        return Law(
            "credit", deviation, tolerance, detached=", ".join(map(key_name, source.scratch))
        )

    def _kept(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """What a module keeps in attributes beside its state must not matter.

        Attributes that two calls leave with other values are replaced by noise. Every tensor that
        the module returns is compared, for outputs may be saturated, as spikes are.
        """
        source = convention.source
        if convention.context or convention.call == "every":
            return None
        if (
            laboratory.leaves_nothing
            and not source.scratch
            and convention.start.kind not in ("method", "function")
        ):
            return None  # what a module does without a state is measured by `start`
        x = laboratory.x[: 1 if convention.call in ("step", "last") else 3]
        self.reset()
        bound = cast(BoundModule, laboratory.adapter)
        state = convention.lanes.to_module(bound.initial_state(x.shape[1], None))

        def invoke(part: Tensor) -> Any:
            return bound.invoke(part, state, None, bound.port_call(part, state, None))[0]

        with torch.no_grad():
            first, second = (
                self._left_by(convention, part, invoke) for part in (x, changed_inputs(x, 0, 0))
            )
            keys = [
                key
                for key in second
                if key not in source.attributes
                and isinstance(first.get(key), Tensor)
                and difference(first[key], second[key]) > 0
            ]
            if not keys:
                return None
            results: list[list[Tensor]] = []
            for noise in (0.0, 0.3):
                self.reset()
                for key in keys:
                    set_attribute(self.module, key, first[key] * (1 - noise) + noise)
                results.append([leaf for _, leaf in tensor_paths(invoke(x))])
            self.reset()
        deviation = max(difference(a, b) for a, b in zip(*results, strict=True))
        return Law("kept", deviation, 10 * laboratory.tolerance)

    def _left_by(
        self, convention: Convention, x: Tensor, invoke: Callable[[Tensor], Any]
    ) -> dict[Key, Any]:
        """The floating attributes that one more call changes, without hooks if it can be made."""
        before = attributes(self.module)
        try:
            self.forward(convention.inputs.arrange(x), {}, x.shape[1])
        except CALL_ERRORS:
            invoke(x)
        after = attributes(self.module)
        values = {key: after[key] for key in changed_attributes(before, after)}
        return {
            key: value
            for key, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        }

    def _run_plainly(self, convention: Convention, x: Tensor, chunks: list[int]) -> Tensor | None:
        """The outputs of the module called chunk after chunk, without hooks; None if it fails.

        A module that holds a state for other lanes is reset first, as its author would.
        """
        for method in (None, *dict.fromkeys(reset_methods(self.module))):
            self.reset()
            try:
                if method is not None:
                    self._reset_by(method, convention, x)
                outputs: list[Tensor] = []
                for part in x.split(chunks):
                    args = convention.inputs.arrange(part)
                    result = self.forward(args, {}, part.shape[1])
                    outputs.append(convention.outputs.read(result, len(part), part.shape[1]))
            except CALL_ERRORS:
                continue
            finally:
                self.reset()
            return torch.cat(outputs)
        return None

    def _reset_by(self, method: str, convention: Convention, x: Tensor) -> None:
        """Reset a state in attributes by a method of the module, or set what the method returns."""
        module, source = self.module, convention.source
        for key in self.sizes:
            set_attribute(module, key, x.shape[1])
        state = call_start(module, method, x.shape[1], convention.inputs.arrange(x[:1])[0])
        if state is not None and len(source.scratch) == 1:
            set_attribute(module, source.scratch[0], state)

    def _start(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """The initial state must give what the module gives that starts by itself.

        States are compared too, for outputs may be saturated, as spikes are.
        """
        start = convention.start
        if start.kind in ("method", "function") or start.template or convention.context:
            return None
        x = laboratory.x if convention.call in ("chunk", "every") else laboratory.x[:1]
        with torch.no_grad():
            evaluated = laboratory.evaluated if x is laboratory.x else None
            y, end = evaluated or laboratory.run(x)
            result, after, _ = self.call(convention, x)
            own = convention.outputs.read(result, x.shape[0], x.shape[1])
            deviation = difference(own, y)
            if convention.call != "every":
                state = convention.lanes.lanes_first(convention.source.next_state(result, after))
                deviation = max(deviation, state_difference(state, end))
            law = Law("start", deviation, laboratory.tolerance)
            if law.holds:
                return law
            result, _, _ = self.call(convention, x)
            again = convention.outputs.read(result, x.shape[0], x.shape[1])
        repeat = Law("repeat", difference(own, again), laboratory.tolerance)
        return law if repeat.holds else repeat

    def _last(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """Steps one by one must give what one call of the whole sequence gives: all, or its last.

        Otherwise a module that was made for whole sequences would be run on each step alone.
        """
        if convention.call not in ("last", "every") or convention.context:
            return None
        whole = replace(convention, call="chunk", every=None)
        x = laboratory.x
        steps = long_steps(x, self.module)
        if steps > STEPS:
            x = self.inputs(x.shape[1], steps)
        for training in self.training_modes:
            laboratory.training = training
            with torch.no_grad(), nullcontext() if training is None else ConstantRandomness():
                y, _ = laboratory.run(x)
                result, _, _ = self.call(whole, x, training)
            deviations = [
                difference(item.reshape(expected.shape), expected)
                for item in _outputs_of(result, convention.outputs, x)
                for expected in (y[-1], y)
                if item.numel() == expected.numel()
            ]
            name = "last" if training is None else "training last"
            law = Law(name, min(deviations, default=float("inf")), 10 * laboratory.tolerance)
            if not law.holds:
                return law
        laboratory.training = None
        return None

    def _long(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """Chunks of the user's length must give what one call gives, if a call takes a chunk."""
        steps = long_steps(self.example, self.module)
        if convention.call not in ("chunk", "every") or steps <= STEPS:
            return None
        return laboratory.measure_long(self.inputs(laboratory.x.shape[1], steps))

    def with_resets(self, convention: Convention, x: Tensor) -> Convention:
        """The convention, with whether the module restarts lanes exactly as resets do."""
        if convention.resets is None or convention.call != "chunk":
            return convention
        self.reset()
        bound = BoundModule(self.module, convention, x[:1, :1])
        step = STEPS // 2
        resets = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        resets[step, 0] = True
        with torch.no_grad():
            state = bound.initial_state(x.shape[1], None)
            y, _ = bound.run(x, state, resets)
            first, middle = bound.run(x[:step], state)
            last, _ = bound.run(x[step:], trees.reset(middle, state, resets[step]))
        split = torch.cat([first, last])
        applied = difference(split, y) <= 1e-5 * (1 + float(y.abs().max()))
        return replace(convention, resets=replace(convention.resets, applied=applied))


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


def _outputs_of(result: Any, layout: OutputLayout, x: Tensor) -> Iterator[Tensor]:
    """The outputs of all steps, or of the last one, as a call with all steps may return them."""
    if layout.several:
        yield layout.read(result, *x.shape[:2])
        return
    path = layout.path
    item = item_at(result, path)
    if not isinstance(item, Tensor):
        return
    steps, lanes = x.shape[:2]
    items = item_at(result, path[:-1]) if path else ()
    if isinstance(items, list) and len(items) == steps:  # an output for each step
        item = torch.stack(items)
    yield item
    if item.dim() > 1 and item.shape[1] == steps:
        yield item.transpose(0, 1)
    if item.dim() and item.shape[0] == steps * lanes:
        yield item.unflatten(0, (lanes, steps)).transpose(0, 1)
