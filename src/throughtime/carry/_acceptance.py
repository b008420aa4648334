"""Accept a way of calling a module if it obeys every law of carrying a state.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import (
    Convention,
    InternalState,
    Path,
    call_start,
    item_at,
    set_attribute,
    state_of,
    tensor_paths,
)
from throughtime.carry._laws import (
    Laboratory,
    Law,
    difference,
    loss_weights,
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
    trial_inputs,
)


@dataclass
class Acceptance:
    """Measures the laws on conventions of one copy of a module.

    Args:
        subject: the copy.
        example: the user's inputs.
        modes: the training modes to measure in.
        standardize: whether inputs of trials are standard normal.
    """

    subject: Subject
    example: Tensor
    modes: Mapping[str, bool]
    standardize: bool

    def accepts(self, convention: Convention, x: Tensor) -> bool:
        """Whether a convention obeys every law; if not, the failure is noted."""
        subject = self.subject
        subject.reset()
        bound = BoundModule(subject.module, convention, x[:1, :1])
        training = None
        try:
            by_step = convention.call in ("step", "last")
            laboratory = Laboratory(bound, subject.module, x, by_step=by_step)
            for training in self._training_modes():
                for law in laboratory.measure(training):
                    if not law.holds:
                        subject.note(convention, law)
                        return False
            training = laboratory.training = None
            for law in (
                self._kept,
                self._credit_of_attributes,
                self._last,
                self._start,
                self._long,
            ):
                broken = law(convention, laboratory)
                if broken is not None:
                    subject.note(convention, broken)
                    return False
        except CALL_ERRORS as error:
            subject.note(convention, None, error, in_training=training is not None)
            return False
        finally:
            bound.release()
        return True

    def _credit_of_attributes(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """A state that the module keeps in an attribute itself must be the one that hooks carry.

        Nor may the module cut its gradient: hooks carry the state with it, and called as its author
        wrote it, the module gives another gradient.
        """
        source, x = convention.source, laboratory.x
        if not isinstance(source, InternalState) or not source.scratch or convention.context:
            return None
        if convention.call == "every":
            return None
        chunks = [3, STEPS - 3] if convention.call == "chunk" else [1] * STEPS
        leaves = [p for p in self.subject.module.parameters() if p.requires_grad]
        own = self._run_plainly(convention, x, chunks)
        if own is None or not leaves or not own.requires_grad:
            return None
        carried, _ = laboratory.run(x, *chunks)
        deviation, first = difference(own, carried), chunks[0]
        if deviation > laboratory.tolerance:
            alone = self._run_plainly(convention, x[first:], chunks[1:])
            remembers = alone is not None and difference(alone, own[first:]) > laboratory.tolerance
            starts_alike = difference(own[:first], carried[:first]) <= laboratory.tolerance
            # the attribute carries the state, and is not what its layer returns
            is_other = remembers and starts_alike
            return Law("whole", deviation, laboratory.tolerance) if is_other else None
        weights = loss_weights(own)
        expected, got = (
            torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True)
            for y in (own, carried)
        )
        largest = max(
            difference(a, b) / (1 + float(a.abs().max()))
            for a, b in zip(expected, got, strict=True)
            if a.numel()
        )
        names = ", ".join(".".join(filter(None, key)) for key in source.scratch)
        law = Law("credit", largest, laboratory.tolerance, detached=names)
        return None if law.holds else law

    def _kept(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """What a module keeps in attributes beside its state must not matter.

        Attributes that two calls leave with other values are replaced by noise. Every tensor that
        the module returns is compared, for outputs may be saturated, as spikes are.
        """
        module, source = self.subject.module, convention.source
        if convention.context or convention.call == "every":
            return None
        state_keys = source.attributes if isinstance(source, InternalState) else ()
        if (
            laboratory.leaves_nothing
            and not (isinstance(source, InternalState) and source.scratch)
            and convention.start.kind not in ("method", "function")
        ):
            return None  # what a module does without a state is measured by `start`
        x = laboratory.x[:1] if convention.call in ("step", "last") else laboratory.x[:3]
        with torch.no_grad():
            self.subject.reset()
            left = [self._left_by(convention, part) for part in (x, changed_inputs(x, 0, 0))]
            keys = [
                key
                for key in left[1]
                if key not in state_keys
                and isinstance(left[0].get(key), Tensor)
                and difference(left[0][key], left[1][key]) > 0
            ]
            if not keys:
                return None
            bound = cast(BoundModule, laboratory.adapter)
            state = convention.lanes.to_module(bound.initial_state(x.shape[1], None))
            results: list[list[Tensor]] = []
            for noise in (0.0, 0.3):
                self.subject.reset()
                for key in keys:
                    set_attribute(module, key, left[0][key] * (1 - noise) + noise)
                result = bound.invoke(x, state, None, bound.port_call(x, state, None))
                results.append([leaf for _, leaf in tensor_paths(result)])
            self.subject.reset()
        deviation = max(difference(a, b) for a, b in zip(*results, strict=True))
        law = Law("kept", deviation, 10 * laboratory.tolerance)
        return None if law.holds else law

    def _left_by(self, convention: Convention, x: Tensor) -> dict[Key, Any]:
        """The floating attributes that one more call leaves, without hooks."""
        module = self.subject.module
        before = attributes(module)
        try:
            self.subject.forward(convention.inputs.arrange(x), {}, x.shape[1])
        except CALL_ERRORS:
            bound = BoundModule(module, convention, x[:1, :1])
            state = convention.lanes.to_module(bound.initial_state(x.shape[1], None))
            bound.invoke(x, state, None, bound.port_call(x, state, None))
            bound.release()
        after = attributes(module)
        return {
            key: after[key]
            for key in changed_attributes(before, after)
            if isinstance(after[key], Tensor)
            and after[key].is_floating_point()
            and after[key].dim()
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
        keys = source.scratch if isinstance(source, InternalState) else ()
        if state is not None and len(keys) == 1:
            set_attribute(module, keys[0], state)

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
                state = convention.lanes.lanes_first(state_of(convention.source, result, after))
                deviation = max(deviation, state_difference(state, end))
            start_law = Law("start", deviation, laboratory.tolerance)
            if start_law.holds:
                return None
            result, _, _ = self.subject.call(convention, x)
            again = convention.outputs.read(result, x.shape[0], x.shape[1])
        repeat = Law("repeat", difference(own, again), laboratory.tolerance)
        return start_law if repeat.holds else repeat

    def _last(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """Steps one by one must end where one call of the whole sequence ends.

        Otherwise a module that was made for whole sequences would be run on each step alone.
        """
        if convention.call not in ("last", "every") or convention.context:
            return None
        whole = replace(convention, call="chunk", every=None)
        x, module = laboratory.x, self.subject.module
        steps = long_steps(x, module)
        if steps > STEPS:
            x = trial_inputs(self.example, module, x.shape[1], steps, standardize=self.standardize)
        for training in self._training_modes():
            laboratory.training = training
            with torch.no_grad(), nullcontext() if training is None else ConstantRandomness():
                y, _ = laboratory.run(x)
                result, _, _ = self.subject.call(whole, x, training)
            deviations = [
                difference(item.reshape(y[-1].shape), y[-1])
                for item in _last_steps(result, convention.outputs.path, x)
                if item.numel() == y[-1].numel()
            ]
            name = "last" if training is None else "training last"
            law = Law(name, min(deviations, default=float("inf")), 10 * laboratory.tolerance)
            if not law.holds:
                return law
        laboratory.training = None
        return None

    def _long(self, convention: Convention, laboratory: Laboratory) -> Law | None:
        """Chunks of the user's length must give what one call gives, if a call takes a chunk."""
        module = self.subject.module
        steps = long_steps(self.example, module)
        if convention.call not in ("chunk", "every") or steps <= STEPS:
            return None
        x = trial_inputs(
            self.example, module, laboratory.x.shape[1], steps, standardize=self.standardize
        )
        law = laboratory.measure_long(x)
        return None if law.holds else law

    def _training_modes(self) -> list[dict[str, bool] | None]:
        """Evaluation, and the modes of a module that trains."""
        return [None, dict(self.modes)] if self.modes.get("") else [None]

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


def _last_steps(result: Any, path: Path, x: Tensor) -> Iterator[Tensor]:
    """What could be the outputs after the last step, in the result of a call with all steps."""
    last = item_at(result, path)
    if not isinstance(last, Tensor):
        return
    steps, lanes = x.shape[:2]
    yield last
    if last.dim() and last.shape[0] == steps:
        yield last[-1]
    if last.dim() > 1 and last.shape[1] == steps:
        yield last[:, -1]
    if last.dim() and last.shape[0] == steps * lanes:
        yield last.unflatten(0, (steps, lanes))[-1]
        yield last.unflatten(0, (lanes, steps))[:, -1]
    items = item_at(result, path[:-1]) if path else ()
    if isinstance(items, list) and len(items) == steps:  # an output for each step
        yield items[-1]
