"""Find how a module is called: try the usual ways first, accept one that obeys every law.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import LaneDim, LaneLayout, is_state
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import (
    ArgumentState,
    Call,
    Convention,
    InputLayout,
    InternalState,
    MisfitError,
    OutputLayout,
    Path,
    call_start,
    item_at,
    path_name,
    set_attribute,
)
from throughtime.carry._laws import (
    NOT_FINITE,
    Laboratory,
    Law,
    difference,
    loss_weights,
    state_difference,
)
from throughtime.carry._names import RESTARTS, names_state, reset_methods
from throughtime.carry._observe import Key, attributes, changed_attributes
from throughtime.carry._ports import TorchPort
from throughtime.carry._sources import proposals
from throughtime.carry._subject import CALL_ERRORS, Failure, Hints, Subject
from throughtime.carry._trial import (
    LANES,
    STEPS,
    ConstantRandomness,
    changed_inputs,
    copy_of,
    long_steps,
    modes_of,
    perturb,
    quiet,
    restore_modes,
    shrink,
    trial_inputs,
)
from throughtime.errors import ModelError, StateError
from throughtime.state import State

HIDDEN_LAWS = ("inputs", "memory")  # that fail where a layer hides the state


@dataclass
class Search:
    """The search for the convention of one module.

    Args:
        module: the user's; it is copied.
        x: example inputs `(T, B, ...)`.
        hints: what the user says.
    """

    module: nn.Module
    x: Tensor
    hints: Hints
    failures: list[Failure] = field(default_factory=list[Failure])

    def find(self) -> Convention | None:
        """The first convention that obeys every law; None if there is none.

        A layer that starts at zero, or saturated by large inputs, may hide the state: then weights
        of another copy are perturbed and inputs are standard normal. Where large weights saturate,
        or make outputs overflow, those of a third copy are made smaller.
        """
        with quiet(self.x.device):
            convention = self._find_on(copy_of(self.module), hidden=False)
            hidden = any(f.law is not None and f.law.name in HIDDEN_LAWS for f in self.failures)
            overflows = any(NOT_FINITE in str(f) for f in self.failures)
            changes = [perturb] * hidden + [shrink] * (hidden or overflows)
            for change in changes if convention is None else ():
                twin = copy_of(self.module)
                if twin is not None and convention is None:
                    change(twin)
                    convention = self._find_on(twin, hidden=hidden)
        return convention

    def _find_on(self, twin: nn.Module | None, *, hidden: bool) -> Convention | None:
        """The convention, by trials on a copy, or on the module itself if it has none."""
        modes = modes_of(self.module)
        subject = Subject(self.module if twin is None else twin, self.module, self.x, self.hints)
        try:
            return _Trials(subject, self.x, modes, standardize=hidden).find()
        finally:
            self.failures += subject.failures
            if twin is None:
                subject.reset()
                restore_modes(self.module, modes)


@dataclass
class _Trials:
    """The trials on one copy of a module; `modes` are the training modes to measure in."""

    subject: Subject
    example: Tensor
    modes: Mapping[str, bool]
    standardize: bool

    def find(self) -> Convention | None:
        """The first convention that obeys every law."""
        subject = self.subject
        own = self.example.shape[1]  # a module may be made for a number of lanes
        attempts = [(LANES, False), (LANES, True), (own, True), (1, True)]
        for lanes, contiguous in dict.fromkeys(attempts):
            if (lanes, contiguous) == (LANES, True) and not self._needs_contiguous():
                continue
            subject.one_lane = lanes == 1
            x = trial_inputs(self.example, subject.module, lanes, standardize=self.standardize)
            for call, layout in self._layouts(x, contiguous):
                for group in self._candidates(call, layout, x):
                    accepted = [c for c in (self._first(g, x) for g in group) if c is not None]
                    if len(accepted) > 1:
                        raise self._ambiguous(accepted)
                    if accepted:
                        return accepted[0]
                    if self._is_decided():
                        return None
            if any(f.rank > 0 for f in subject.failures) and not self._needs_contiguous():
                return None  # it takes several lanes, and breaks a law
        return None

    def _first(self, conventions: list[Convention], x: Tensor) -> Convention | None:
        """The first of some readings of one tensor that obeys every law."""
        accepted = (c for c in conventions if self._accepts(c, x))
        convention = next(accepted, None)
        return None if convention is None else self._with_resets(convention, x)

    def _is_decided(self) -> bool:
        """Whether the last way that was tried is right but for a cut gradient or a long lag."""
        law = self.subject.failures[-1].law if self.subject.failures else None
        return law is not None and law.name.removeprefix("training ") in ("credit", "long")

    def _needs_contiguous(self) -> bool:
        """Whether a call failed since it got a view of the inputs."""
        return any("view size is not compatible" in str(f.error) for f in self.subject.failures)

    def _ambiguous(self, accepted: list[Convention]) -> ModelError:
        choices = ", ".join(
            f"{path_name(c.outputs.path)} with features {c.outputs.features}" for c in accepted
        )
        path = accepted[0].outputs.path
        shares_key = sum(c.outputs.path[:1] == path[:1] for c in accepted) > 1
        return ModelError(
            f"{type(self.subject.module).__name__} returns several tensors with one output per"
            f" step: {choices}. Choose the one that the loss gets: tt.carry(module,"
            f" output={path if shares_key else path[0]!r})"
        )

    # ------------------------------------------------------------ shapes

    def _layouts(self, x: Tensor, contiguous: bool) -> Iterator[tuple[Call, InputLayout]]:
        """Calls and layouts of inputs, the usual ones first."""
        hints = self.subject.hints
        for call in self._calls():
            if hints.inputs is not None:
                yield call, InputLayout("B" if call == "step" else "TB", transform=hints.inputs)
                continue
            is_univariate = x.dim() == 3 and x.shape[2] == 1
            for order, drop in product(self._orders(call, x), (False, True)):
                if not drop or (is_univariate and order != "BDT"):
                    yield call, InputLayout(order, drop, contiguous)

    def _calls(self) -> tuple[Call, ...]:
        hint = self.subject.hints.call
        if not isinstance(hint, str) or self.subject.method != "forward":
            return get_args(Call)
        for call in get_args(Call):
            if call == hint:
                return (call,)
        raise ModelError(
            f"call={hint!r}: expected 'chunk', 'step', 'last' or a method of the module"
        )

    def _orders(self, call: Call, x: Tensor) -> list[str]:
        subject = self.subject
        batch_first = subject.hints.batch_first
        if call == "step":
            return ["B", ""] if subject.one_lane else ["B"]
        if batch_first is None:
            layers = [m for m in subject.module.modules() if isinstance(m, nn.RNNBase)]
            orders = ["BT", "TB"] if any(m.batch_first for m in layers) else ["TB", "BT"]
            orders += ["BDT"] if x.dim() == 3 and x.is_floating_point() else []
        else:
            orders = ["BT"] if batch_first else ["TB"]
        if call == "chunk" and any(p.name in RESTARTS for p in subject.parameters):
            orders.append("flat")
        return [*orders, "T"] if subject.one_lane else orders

    # ------------------------------------------------------------ candidates

    def _candidates(
        self, call: Call, layout: InputLayout, x: Tensor
    ) -> Iterator[list[list[Convention]]]:
        """Conventions that fit in shape; a group has a list for each tensor of the result."""
        subject = self.subject
        steps = x if call in ("chunk", "every") else x[:1]
        for proposal in proposals(subject, call, layout, x):
            for start in proposal.starts:
                base = Convention(
                    call=call,
                    inputs=layout,
                    source=proposal.source,
                    start=start,
                    outputs=OutputLayout((), "TB"),
                    lanes=LaneLayout((), (), None),
                    flags=proposal.flags,
                    sizes=subject.sizes,
                    resets=proposal.resets,
                    context=subject.hints.context,
                    method=subject.method,
                    input_name=subject.input_name,
                )
                if call != "every":
                    yield from self._complete(base, steps)
                    continue
                for name in reversed(_layers_of(proposal.source)):
                    yield from self._complete(replace(base, every=name), steps)

    def _complete(self, base: Convention, x: Tensor) -> Iterator[list[list[Convention]]]:
        """Conventions with the places of outputs, state and lanes, from calls of the module."""
        try:
            result, after, single = self.subject.call(base, x)
        except CALL_ERRORS as error:
            self.subject.note(base, None, error)
            return
        for source in _located(base.source, result):
            located = replace(base, source=source, single=single)
            state = _state_of(source, result, after)
            outputs = self._outputs(located, result, state, x)
            if not outputs:
                self.subject.note(located, None, MisfitError(_no_outputs(result, x)))
                continue
            for layout in self._lane_layouts(located, x, state):
                placed = replace(located, lanes=layout)
                if base.start.kind == "tensors":
                    names = _start_tensors(self.subject.module, layout)
                    if not names:
                        continue
                    placed = replace(placed, start=replace(base.start, methods=names))
                yield [[replace(placed, outputs=o) for o in group] for group in outputs.values()]

    def _outputs(
        self, convention: Convention, result: Any, state: State, x: Tensor
    ) -> dict[Path, list[OutputLayout]]:
        """The tensors of a result that could be the outputs, with the orders that fit."""
        hint = self.subject.hints.output
        held = {id(leaf) for leaf in trees.tensors(state)}
        if hint is not None:
            path = hint if isinstance(hint, tuple) else (hint,)
            try:
                leaves = list(_tensor_paths(item_at(result, path), path))
            except MisfitError:
                return {}
        else:
            leaves = list(_tensor_paths(result))
            leaves = [(p, leaf) for p, leaf in leaves if id(leaf) not in held] or leaves[:1]
        choices: dict[Path, list[OutputLayout]] = {}
        for path, leaf in leaves:
            if not leaf.is_floating_point():
                continue
            for order in _output_orders(convention.call, x.shape[1]):
                layout = OutputLayout(path, order)
                try:
                    y = layout.read(result, x.shape[0], x.shape[1])
                except MisfitError:
                    continue
                features = tuple(y.shape[2:])
                choices.setdefault(path, []).append(replace(layout, features=features))
        return choices

    def _lane_layouts(self, convention: Convention, x: Tensor, state: State) -> list[LaneLayout]:
        """Where the lanes of the state are: as torch.nn has them, or by a call with fewer lanes."""
        lanes, source, weight = x.shape[1], convention.source, self.subject.weight
        if lanes == 1:
            return [LaneLayout.infer({1: state}, weight)]
        dims = _torch_lanes(source, state, lanes)
        if dims is None:
            try:
                result, after, _ = self.subject.call(convention, x[:, : lanes - 1])
                other = _state_of(source, result, after)
                shapes = [[leaf.shape for leaf in trees.tensors(s)] for s in (state, other)]
                if shapes[0] == shapes[1]:
                    raise MisfitError("has a state without a dimension for lanes")
                dims = LaneLayout.infer({lanes: state, lanes - 1: other}, weight).dims
            except CALL_ERRORS as error:
                if isinstance(source, ArgumentState) and source.result == ():
                    error = MisfitError(f"is no state as a whole: {error}")
                self.subject.note(convention, None, error)
                if isinstance(error, (MisfitError, ModelError, StateError)):
                    return []
                dims = _only_dims(state, lanes)  # it was made for a number of lanes
        layouts = [] if dims is None else [LaneLayout.of(dims, state, weight)]
        if dims is not None and any(dim.rows > 1 for dim in dims):
            minor = tuple(replace(dim, lane_major=False) for dim in dims)
            layouts.append(LaneLayout.of(minor, state, weight))
        return layouts

    # ------------------------------------------------------------ acceptance

    def _accepts(self, convention: Convention, x: Tensor) -> bool:
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
                results.append([leaf for _, leaf in _tensor_paths(result)])
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
        own: list[Tensor] = []
        with torch.no_grad():
            y, end = laboratory.run(x)
            deviation = 0.0
            for _ in range(2):
                result, after, _ = self.subject.call(convention, x)
                own.append(convention.outputs.read(result, x.shape[0], x.shape[1]))
                if convention.call != "every":
                    state = _state_of(convention.source, result, after)
                    deviation = state_difference(convention.lanes.lanes_first(state), end)
        laws = (
            Law("repeat", difference(*own), laboratory.tolerance),
            Law("start", max(difference(own[0], y), deviation), laboratory.tolerance),
        )
        return next((law for law in laws if not law.holds), None)

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

    def _with_resets(self, convention: Convention, x: Tensor) -> Convention:
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


def _located(
    source: ArgumentState | InternalState, result: Any
) -> Iterator[ArgumentState | InternalState]:
    """The source, with each place of the next state in the result that is possible."""
    if isinstance(source, InternalState):
        yield source
        return
    count = len(source.names)
    for path in _state_paths(result, count):
        state = item_at(result, path)
        fits = count <= 1 or (isinstance(state, (tuple, list)) and len(state) == count)
        if fits and is_state(state):
            yield replace(source, result=path)


def _state_of(source: ArgumentState | InternalState, result: Any, after: State) -> State:
    """The next state; `after` is that of a state inside."""
    return item_at(result, source.result) if isinstance(source, ArgumentState) else after


def _start_tensors(module: nn.Module, layout: LaneLayout) -> tuple[str, ...]:
    """Parameters or buffers, one for each tensor of a state, from which it may start."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    names: list[str] = []
    for leaf in trees.tensors(layout.example):
        fits = [
            name
            for name, tensor in tensors.items()
            if name not in names
            and tensor.numel() == leaf.numel()
            and (names_state(name.rpartition(".")[2]) or name.endswith("0") or "init" in name)
        ]
        names += fits[:1]
    return tuple(names) if len(names) == len(layout.dims) else ()


def _torch_lanes(
    source: ArgumentState | InternalState, state: State, lanes: int
) -> tuple[LaneDim, ...] | None:
    """The dimensions of lanes in the states of torch's layers and cells; None for others."""
    if not isinstance(source, InternalState) or source.attributes:
        return None
    dims: list[LaneDim] = []
    for name, port in source.ports.items():
        if not isinstance(port, TorchPort):
            return None
        for leaf in trees.tensors(state[name]):
            dim = int(port.is_layer)
            if leaf.dim() <= dim or leaf.shape[dim] % lanes:
                return None
            dims.append(LaneDim(dim, leaf.shape[dim] // lanes))
    return tuple(dims)


def _only_dims(state: State, lanes: int) -> tuple[LaneDim, ...] | None:
    """In each tensor the only dimension of the size of the lanes; None if one has no such."""
    dims: list[LaneDim] = []
    for leaf in trees.tensors(state):
        fits = [dim for dim, size in enumerate(leaf.shape) if size == lanes]
        if len(fits) != 1:
            return None
        dims.append(LaneDim(fits[0]))
    return tuple(dims)


def _output_orders(call: Call, lanes: int) -> list[str]:
    one_lane = lanes == 1
    match call:
        case "chunk":
            return ["TB", "BT", "flat TB", "flat BT", "BCT", *(["T"] if one_lane else [])]
        case "every":
            return ["flat BT", "flat TB"]
        case _:
            return ["B", "TB", "BT", *([""] if one_lane else [])]


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


def _state_paths(result: Any, count: int) -> Iterator[Path]:
    """Where the next state may be in a result, the usual places first."""
    if isinstance(result, Mapping):
        names = sorted(map(str, result), key=lambda name: not names_state(name))
        yield from ((name,) for name in names)
    elif isinstance(result, (tuple, list)):
        size = len(result)
        if count > 1:
            yield (slice(size - count, None),)
        if size > 1:
            yield (size - 1,)
        if size > 2 and count <= 1:
            yield (slice(1, None),)
        yield from ((i,) for i in range(size - 1))
        yield ()
    elif hasattr(result, "__dataclass_fields__"):
        yield from ((name,) for name in result.__dataclass_fields__)
    else:
        yield ()


def _tensor_paths(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a result, at most three levels deep."""
    items: list[tuple[int | str, Any]] = []
    if isinstance(result, Tensor):
        yield path, result
    elif isinstance(result, Mapping):
        items = list(result.items())
    elif isinstance(result, (tuple, list)):
        items = list(enumerate(result))
    elif hasattr(result, "__dataclass_fields__"):
        items = [(name, getattr(result, name)) for name in result.__dataclass_fields__]
    for key, item in items if len(path) < 3 else ():
        yield from _tensor_paths(item, (*path, key))


def _layers_of(source: ArgumentState | InternalState) -> list[str]:
    if isinstance(source, ArgumentState):
        return []
    return [n for n, p in source.ports.items() if isinstance(p, TorchPort) and p.is_layer]


def _no_outputs(result: Any, x: Tensor) -> str:
    shapes = [tuple(leaf.shape) for _, leaf in _tensor_paths(result)]
    return (
        f"returned tensors of shapes {shapes} for {x.shape[0]} steps of {x.shape[1]} lanes, none of"
        " which has one output per step"
    )
