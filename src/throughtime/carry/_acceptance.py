"""Accept a way of calling a module if it obeys every law of carrying a state.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import (
    Convention,
    Path,
    call_start,
    item_at,
    key_name,
    set_attribute,
    tensor_paths,
)
from throughtime.carry._laws import (
    Laboratory,
    Law,
    difference,
    gradients,
    relative_difference,
    state_difference,
)
from throughtime.carry._names import reset_methods
from throughtime.carry._ports import Key, attributes, changed_attributes
from throughtime.carry._subject import CALL_ERRORS, Subject
from throughtime.carry._trial import (
    STEPS,
    ConstantRandomness,
    changed_inputs,
    long_steps,
)


@dataclass
class Acceptance:
    """Measures the laws on conventions of one copy of a module."""

    subject: Subject

    def accepts(self, convention: Convention, x: Tensor) -> bool:
        """Whether a convention obeys every law; if not, the failure is noted."""
        subject = self.subject
        subject.reset()
        bound = BoundModule(subject.module, convention, x[:1, :1])
        by_step = convention.call in ("step", "last")
        laboratory = Laboratory(bound, subject.module, x, by_step=by_step)
        try:
            for law in self._laws(convention, laboratory):
                if law is not None and not law.holds:
                    subject.note(convention, law)
                    return False
        except CALL_ERRORS as error:
            in_training = laboratory.training is not None
            subject.note(convention, None, error, in_training=in_training)
            return False
        finally:
            bound.release()
        return True

    def _laws(self, convention: Convention, laboratory: Laboratory) -> Iterator[Law | None]:
        for training in self.subject.training_modes:
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
        leaves = [p for p in self.subject.module.parameters() if p.requires_grad]
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
        source, subject = convention.source, self.subject
        if convention.context or convention.call == "every":
            return None
        if (
            laboratory.leaves_nothing
            and not source.scratch
            and convention.start.kind not in ("method", "function")
        ):
            return None  # what a module does without a state is measured by `start`
        x = laboratory.x[: 1 if convention.call in ("step", "last") else 3]
        bound = cast(BoundModule, laboratory.adapter)
        state = convention.lanes.to_module(bound.initial_state(x.shape[1], None))

        def invoke(part: Tensor) -> Any:
            return bound.invoke(part, state, None, bound.port_call(part, state, None))[0]

        with torch.no_grad():
            subject.reset()
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
                subject.reset()
                for key in keys:
                    set_attribute(subject.module, key, first[key] * (1 - noise) + noise)
                results.append([leaf for _, leaf in tensor_paths(invoke(x))])
            subject.reset()
        deviation = max(difference(a, b) for a, b in zip(*results, strict=True))
        return Law("kept", deviation, 10 * laboratory.tolerance)

    def _left_by(
        self, convention: Convention, x: Tensor, invoke: Callable[[Tensor], Any]
    ) -> dict[Key, Any]:
        """The floating attributes that one more call changes, without hooks if it can be made."""
        before = attributes(self.subject.module)
        try:
            self.subject.forward(convention.inputs.arrange(x), {}, x.shape[1])
        except CALL_ERRORS:
            invoke(x)
        after = attributes(self.subject.module)
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
        for method in (None, *dict.fromkeys(reset_methods(self.subject.module))):
            self.subject.reset()
            try:
                if method is not None:
                    self._reset_by(method, convention, x)
                outputs: list[Tensor] = []
                for part in x.split(chunks):
                    args = convention.inputs.arrange(part)
                    result = self.subject.forward(args, {}, part.shape[1])
                    outputs.append(convention.outputs.read(result, len(part), part.shape[1]))
            except CALL_ERRORS:
                continue
            finally:
                self.subject.reset()
            return torch.cat(outputs)
        return None

    def _reset_by(self, method: str, convention: Convention, x: Tensor) -> None:
        """Reset a state in attributes by a method of the module, or set what the method returns."""
        module, source = self.subject.module, convention.source
        for key in self.subject.sizes:
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
            result, after, _ = self.subject.call(convention, x)
            own = convention.outputs.read(result, x.shape[0], x.shape[1])
            deviation = difference(own, y)
            if convention.call != "every":
                state = convention.lanes.lanes_first(convention.source.next_state(result, after))
                deviation = max(deviation, state_difference(state, end))
            law = Law("start", deviation, laboratory.tolerance)
            if law.holds:
                return law
            result, _, _ = self.subject.call(convention, x)
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
        subject, x = self.subject, laboratory.x
        steps = long_steps(x, subject.module)
        if steps > STEPS:
            x = subject.inputs(x.shape[1], steps)
        for training in self.subject.training_modes:
            laboratory.training = training
            with torch.no_grad(), nullcontext() if training is None else ConstantRandomness():
                y, _ = laboratory.run(x)
                result, _, _ = self.subject.call(whole, x, training)
            deviations = [
                difference(item.reshape(expected.shape), expected)
                for item in _outputs_of(result, convention.outputs.path, x)
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
        subject = self.subject
        steps = long_steps(subject.example, subject.module)
        if convention.call not in ("chunk", "every") or steps <= STEPS:
            return None
        return laboratory.measure_long(subject.inputs(laboratory.x.shape[1], steps))

    def with_resets(self, convention: Convention, x: Tensor) -> Convention:
        """The convention, with whether the module restarts lanes exactly as resets do."""
        if convention.resets is None or convention.call != "chunk":
            return convention
        self.subject.reset()
        bound = BoundModule(self.subject.module, convention, x[:1, :1])
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


def _outputs_of(result: Any, path: Path, x: Tensor) -> Iterator[Tensor]:
    """The outputs of all steps, or of the last one, as a call with all steps may return them."""
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
