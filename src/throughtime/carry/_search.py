"""Find how a module is called: try the usual ways first, accept one that obeys every law.

A way is tried on twins: copies of the module, the first with its own weights, the others with
noise on weights and buffers, so that a head that starts at zero or a neuron that is silent hides
nothing. All of a result that may be the outputs is listed before a law is measured.

Shapes: `T` steps, `B` lanes.
"""

import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._calls import (
    CALLS,
    OWN,
    STATE,
    Convention,
    Hints,
    ModuleAdapter,
    layer_zeros,
)
from throughtime.carry._inside import (
    Key,
    attributes,
    is_turned,
    names_state,
    parameters_of,
    ports_of,
    set_attributes,
)
from throughtime.carry._laws import (
    LAWS,
    Laboratory,
    Law,
    NotFiniteError,
    difference,
    gradient_difference,
)
from throughtime.carry._layout import (
    FEATURES_FIRST,
    LANES_FIRST,
    ORDERS,
    TIME_FIRST,
    LaneLayout,
    MisfitError,
    OutputLayout,
    Path,
    is_state,
    item_at,
    items_of,
    shapes_of,
    tensor_paths,
)
from throughtime.carry._trial import (
    LANES,
    LONG_STEPS,
    STEPS,
    Snapshot,
    copy_of,
    long_steps,
    modes_of,
    perturb,
    quiet,
    sample_inputs,
    set_modes,
    weight_of,
)
from throughtime.errors import StateError
from throughtime.state import State

CALL_ERRORS = (Exception,)  # a module that is called in a way it is not made for raises anything
LIVE = ("inputs", "memory")  # laws that one twin may break: its weights may hide the state
PATIENCE, REPORT = 10.0, 2.0  # seconds after which a search ends, and between reports
ZEROS = (layer_zeros,)  # a start
STARTS = re.compile(r"_*(init|begin|zero|start|reset)")  # methods that say the start
RANK = {name: i for i, name in enumerate(["last", *LAWS])} | {"last": 0}
Outputs: TypeAlias = tuple[OutputLayout, ...]
_log = logging.getLogger("throughtime")


class Failure(NamedTuple):
    """A way of calling a module that was tried, and why it was not accepted.

    Attributes:
        stage: how far the trial came: 0 where a call raised an error, 1 where its result had no
            outputs, 2 where the lanes of its state were not seen, then the laws in their order.
        law: the one that is broken; None where `error` was raised.
    """

    stage: float
    convention: Convention | None
    law: Law | None = None
    error: Exception | None = None


class OutOfTimeError(BaseException):
    """A search has taken `PATIENCE` seconds; no error of a module, and not handled as one."""


class Twin:
    """A copy of a module under trial, called always from the same attributes and buffers.

    Args:
        module: the copy, or the user's module itself if it cannot be copied.
        example: inputs `(T, B, ...)`.
        scale: deviation of inputs that are normal; 0 for those like the examples.
    """

    def __init__(self, module: nn.Module, example: Tensor, scale: float = 0.0) -> None:
        self.module, self._example = module, example
        self._snapshot = Snapshot(module)
        # inputs of a trial for lanes and steps
        self.inputs = partial(sample_inputs, example, scale=scale, weight=weight_of(module))
        self.restore()

    def restore(self) -> None:
        """Put attributes and buffers back; evaluation mode."""
        self._snapshot.restore()
        set_modes(self.module, None)

    def bound(self, c: Convention) -> closing[ModuleAdapter]:
        """The copy, called by a convention, as a context."""
        return closing(ModuleAdapter(self.module, c, self._example))

    def first_call(self, c: Convention, x: Tensor) -> tuple[Any, State]:
        """The result of a call from the start of a recording, and the state after it."""
        with self.bound(c) as bound:
            return bound.first_call(x)


def twins_of(module: nn.Module, x: Tensor) -> list[Twin]:
    """Copies of a module with its weights and with others; itself if it refuses to be copied."""
    own, other = copy_of(module), copy_of(module)
    if own is None or other is None:
        return [Twin(module, x)]
    perturb(other)
    return [Twin(own, x), Twin(other, x, 1.0), Twin(other, x, 5.0)]


def remembered(
    twins: list[Twin], c: Convention, parts: Sequence[Tensor]
) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The attributes that a call changes; and those of them that can be a state, if calls read any.

    Numbers do not count: a counter goes on counting, as in use.

    Args:
        twins: of which the first and the last are called.
        c: how they are called.
        parts: inputs of three calls, of which the last is longer.
    """
    changed: dict[Key, bool] = {}
    is_read = False
    for twin in dict.fromkeys((twins[0], twins[-1])):

        def call(part: Tensor, values: dict[Key, Any], twin: Twin = twin) -> list[Any]:
            twin.restore()
            set_attributes(twin.module, values)
            return [twin.first_call(c, part)[0], attributes(twin.module)]

        twin.restore()
        before = attributes(twin.module)
        first, longer = call(parts[0], {})[1], call(parts[2], {})[1]
        values = {k: v for k, v in first.items() if difference(before.get(k, parts), v)}
        for key, value in values.items():
            last = longer.get(key)
            is_fixed = is_state(value) and is_state(last) and shapes_of(value) == shapes_of(last)
            changed[key] = is_fixed and changed.get(key, True)
        if not values:
            continue
        rows = [call(parts[1], start) for start in ({}, values)]
        for row in rows:  # of attributes, those that hold a state
            row[1] = [row[1].get(key) for key, is_fixed in changed.items() if is_fixed]
        is_read |= difference(*rows) > 0
        twin.restore()
    return (*changed,), tuple(key for key, is_fixed in changed.items() if is_fixed and is_read)


class Search:
    """The search for the convention of one module.

    Args:
        module: the user's; it is copied.
        x: example inputs `(T, B, ...)`.
        hints: what the user says.
        steps: of the chunks of the stream.
        is_link: whether the module is in a chain, and may compute each step alone, without a state.
    """

    def __init__(
        self, module: nn.Module, x: Tensor, hints: Hints, steps: int, *, is_link: bool = False
    ) -> None:
        self.module, self.x, self.hints = module, x, hints
        self._steps, self._is_link = steps, is_link
        self.failures: list[Failure] = []
        self.modes = modes_of(module)
        self.choices: list[Outputs] = []  # more than one where the user must choose
        self.began = self._reported = time.monotonic()
        self.own_methods = _own_methods(module)
        self.is_late = self.is_callable = self.has_state = self._beside = False

    def find(self) -> Convention | None:
        """The first convention that obeys every law on every twin; None if there is none."""
        with quiet(self.x.device):
            snapshot = Snapshot(self.module)
            self.twins = twins_of(self.module, self.x)
            try:
                # a module may be made for a number of lanes, or for one
                for lanes in dict.fromkeys((LANES, self.x.shape[1], 1)):
                    for convention in self._conventions(self.twins[0].inputs(lanes)):
                        if self._accepts(convention, lanes):
                            return convention
                        law = self.failures[-1].law
                        if law is not None and law.name in ("value", "credit", "long", "random"):
                            return None  # right but for a cut gradient or a long lag
                    if any(failure.stage >= 2 for failure in self.failures):
                        return None  # it takes so many lanes, and breaks a law
            except OutOfTimeError:
                self.is_late = True
            finally:
                snapshot.restore()
        return None

    def _note(
        self,
        c: Convention,
        stage: float = 0.0,
        error: Exception | None = None,
        law: Law | None = None,
    ) -> bool:
        """Remember a way that was not accepted; report that a search goes on, or end it.

        Raises:
            OutOfTimeError: it has taken too long.
        """
        if law is not None:
            stage = 2.9 + RANK[law.name] + 15 * law.training
        self.failures.append(Failure(stage - 30 * c.is_one_lane, c, law, error))
        return self._check_time()

    def _check_time(self) -> bool:
        now = time.monotonic()
        if now - self._reported > REPORT:
            self._reported = now
            _log.warning(
                "tt.carry has tried %d ways of calling %s in %.0f s, and gives up after %.0f s",
                *(len(self.failures), type(self.module).__name__, now - self.began, PATIENCE),
            )
        if now - self.began > PATIENCE:
            raise OutOfTimeError
        return False

    # ------------------------------------------------------------ ways

    def _conventions(self, x: Tensor) -> Iterator[Convention]:
        """Conventions to measure, the usual ones first."""
        for base in self._layouts(x):
            for placed in self._places(base, x):
                yield from self._complete(placed, x)

    def _layouts(self, x: Tensor) -> Iterator[Convention]:
        """Calls and layouts of inputs."""
        hints = self.hints
        orders = [TIME_FIRST, LANES_FIRST]
        if any(isinstance(m, nn.RNNBase) and m.batch_first for m in self.module.modules()):
            orders.reverse()
        orders += [FEATURES_FIRST] if x.dim() == 3 and x.is_floating_point() else []
        if hints.batch_first is not None:
            orders = [
                LANES_FIRST if hints.batch_first else TIME_FIRST,
                *[TIME_FIRST] * self._is_link,
            ]
        calls: list[Any] = [hints.call] if hints.call in CALLS else [*CALLS]
        for call in calls:
            own = [TIME_FIRST] if call == "step" or hints.inputs else orders
            for order, drop in product(own, (False, True) if x.shape[2:] == (1,) else (False,)):
                yield Convention(hints, call, order, drop)

    def _places(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with a place of the state."""
        if base.written is not None:
            yield base
            return
        try:
            parameters = parameters_of(self.module.forward)
            if base.hints.inputs is None and is_turned(parameters):
                raise MisfitError("takes its state before its inputs")
            options = parameters[len(base.arrange(x)) :]
        except CALL_ERRORS as error:
            self._note(base, error=error)
            return
        required = [p.name for p in options if p.default is p.empty]
        if required:
            if len({*map(names_state, required)}) == 1:
                yield replace(base, arguments=(*required,))
            return
        yield base  # attributes: an argument is an option then
        named = [p.name for p in options if names_state(p.name)]
        others = [p.name for p in options if p.default is None and p.name not in named]
        for names in _together(named):
            yield replace(base, arguments=names)
        twin, steps = self.twins[0], len(x) + base.hints.context
        with suppress(*CALL_ERRORS):
            whole = replace(base, call="chunk")
            for ports in ports_of(twin.module, lambda: twin.first_call(whole, x), steps):
                if ports and base.call != "step":
                    yield replace(base, ports=ports)
        for names in _together(others):
            yield replace(base, arguments=names)

    def _starts(self, c: Convention) -> list[Any]:
        """The starts to try, or that of the user."""
        if self.hints.start is not None:
            return [(self.hints.start,)]
        if c.ports:
            return [None, OWN]
        has_layer = c.arguments and layer_zeros(self.module, 1) is not None
        return [*self.own_methods, None, *[ZEROS] * bool(has_layer)]

    def _complete(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with the places of outputs, state and lanes, from calls of the module."""
        starts, parts = self._starts(base), x.split((2, 2, 3))
        if base.call != "chunk":
            x, parts = x[:1], x.split((1, 1, 5))
        self.has_state |= not base.is_inside
        is_given, held, located, kept = self.hints.start is not None, base, None, ()
        # other starts show the layout of the state if that of the user is not in it
        for start in (*starts, None, ZEROS) if is_given else starts:
            first = replace(base, start=start)
            try:
                if located is None:
                    # a method may put back what the first call has left
                    plain = replace(base, start=None) if base.is_inside else first
                    changed, kept = remembered(self.twins, plain, parts)
                    held = replace(base, attributes=kept * base.is_inside, scratch=changed)
                first = replace(held, start=start)
                self.twins[0].restore()
                result, after = self.twins[0].first_call(first, x)
            except CALL_ERRORS as error:
                self._note(first, error=error)
                continue
            if located is None:
                self.is_callable, self.has_state = True, self.has_state or bool(kept)
                self._beside = bool(kept) and not base.is_inside
                located = [*self._located(first, result, after, x)]
            for c, self.choices in located:
                for outputs in self.choices:
                    yield replace(c, start=starts[0] if is_given else start, outputs=outputs)
            if is_given:
                return

    def _located(
        self, first: Convention, result: Any, after: State, x: Tensor
    ) -> Iterator[tuple[Convention, list[Outputs]]]:
        """Conventions with the places of state and lanes, and what could be the outputs."""
        is_link = self._is_link and (first.call, first.order, first.drop) == (
            "chunk",
            (0, 1),
            False,
        )
        for path in _state_paths(first, result):
            c = replace(first, result=path)
            try:
                state = item_at(result, path) if c.arguments else after
                choices = self._outputs(c, result, state, x)
                if self.hints.output is not None and path and _is_under(choices[0][0].path, path):
                    continue  # the user names it as an output
                if is_state(state):
                    c = replace(c, lanes=self._lanes(c, x, state))
                elif c.is_inside and not c.hints.context:
                    if not is_link or not isinstance(result, Tensor):
                        return
                    c = replace(c, scratch=())  # nobody will restore it
                yield c, choices
            except CALL_ERRORS as error:
                self._note(c, 1 + isinstance(error, StateError), error)

    def _outputs(self, c: Convention, result: Any, state: State, x: Tensor) -> list[Outputs]:
        """What of a result could be the outputs: one tensor each, or several where all are asked.

        Raises:
            MisfitError: there is nothing.
        """
        hint, leaves = self.hints.output, tensor_paths(result)
        if hint is None or hint == "all":
            held = [*map(id, trees.tensors(state))] if is_state(state) else []
            leaves = [
                (path, y)
                for path, y in leaves
                if not (_is_under(path, c.result) if c.arguments else id(y) in held)
            ] or leaves
        else:
            keys = hint if isinstance(hint, list) else [hint]
            paths = [key if isinstance(key, tuple) else (key,) for key in keys]
            leaves = [
                ((*at, *key), y) for at in paths for key, y in tensor_paths(item_at(result, at))
            ]
        orders = (c.order, *ORDERS) if c.call == "chunk" else (TIME_FIRST, LANES_FIRST)
        fits = [
            OutputLayout.of(path, y, orders, len(x), x.shape[1], c.hints.context)
            for path, y in leaves
        ]
        layouts = [layout for layout in fits if layout is not None]
        if not layouts or (self.hints.several and None in fits):
            shapes = [tuple(leaf.shape) for _, leaf in tensor_paths(result)]
            raise MisfitError(
                f"it returned tensors of shapes {shapes} for {x.shape[0]} steps of {x.shape[1]}"
                " lanes, without one output per step in what is to be the outputs"
            )
        return [tuple(layouts)] if self.hints.several else [(layout,) for layout in layouts]

    def _lanes(self, c: Convention, x: Tensor, state: State) -> LaneLayout:
        """Where the lanes of the state are: shown by a call with fewer lanes."""
        twin, states = self.twins[0], {x.shape[1]: state}
        if x.shape[1] > 1:
            twin.restore()
            # a module that was made for a number of lanes raises an error
            with suppress(*CALL_ERRORS):
                states[x.shape[1] - 1] = twin.first_call(c, x[:, :-1])[1]
        shapes = [shapes_of(one) for one in states.values()]
        if len(shapes) == 2 and shapes[0] == shapes[1]:
            raise MisfitError("it has a state without a dimension for lanes")
        return LaneLayout.infer(states, weight_of(twin.module))

    # ------------------------------------------------------------ the proof

    def _accepts(self, c: Convention, lanes: int) -> bool:
        """Whether a convention obeys every law on every twin; if not, the failure is noted."""
        live: dict[str, Law] = {}
        for i, twin in enumerate(self.twins):
            if i == 2 and all(law.holds for law in live.values()):
                break  # large inputs wake silent neurons
            try:
                for law in self._laws(c, twin, twin.inputs(lanes)):
                    if self.failures:  # a way that holds so far is measured to its end
                        self._check_time()
                    if law.name in LIVE:
                        live[law.name] = law if law.holds else live.get(law.name, law)
                    elif not law.holds:
                        return self._note(c, law=law)
            except CALL_ERRORS as error:
                return self._note(c, 1.5, error)
        is_stateless = self._is_link and c.is_inside and not c.is_stateful
        for law in () if is_stateless else live.values():
            if not law.holds:
                return self._note(c, law=law)
        return True

    def _laws(self, c: Convention, twin: Twin, x: Tensor) -> Iterator[Law]:
        """Those of any adapter, and on weights that hide nothing those of the author's own calls.

        Also on the module's own weights, if it cannot be copied.
        """
        twin.restore()
        with twin.bound(c) as bound:
            laboratory = Laboratory(bound, twin.module, x, by_step=c.call != "chunk")
            states = [bound.initial_state(x.shape[1]) for _ in range(2)]
            yield Law("random", difference(*states), 0.0)
            yield from laboratory.measure(credit=twin is self.twins[0] or not self.modes.get(""))
            yield Law("kept", math.inf if self._beside else 0.0, 0.0)
            if twin is self.twins[:2][-1]:
                steps = long_steps(max(self._steps, LONG_STEPS * self._is_link), twin.module)
                if c.call == "chunk" and steps > STEPS:
                    yield from self._long(c, x.shape[1], steps)
                long = twin.inputs(x.shape[1], steps)
                yield from self._own(bound, twin, laboratory, long)
                if self.modes.get(""):
                    try:
                        yield from laboratory.measure(self.modes)
                        if c.call == "last":
                            yield from self._own(bound, twin, laboratory, long)
                    except CALL_ERRORS as error:
                        text = f"{type(error).__name__}: {error}".split("\n")[0]
                        yield Law("repeat", math.nan, 0.0, text, training=True)
        twin.restore()

    def _long(self, c: Convention, lanes: int, steps: int) -> Iterator[Law]:
        """The law of long chunks, on weights that hide nothing and let no recurrence grow."""
        for twin in reversed(self.twins[:2]):
            x = twin.inputs(lanes, steps)
            with suppress(NotFiniteError), twin.bound(c) as bound:
                yield Laboratory(bound, twin.module, x).measure_long(x)
                return

    def _own(
        self, bound: ModuleAdapter, twin: Twin, laboratory: Laboratory, long: Tensor
    ) -> Iterator[Law]:
        """The author's own call must give the same, with its gradients.

        It shows the start; and that a module that returns its last output, and would else be run
        on each step alone, was not made for whole sequences.
        """
        c, law = bound.convention, partial(Law, training=laboratory.training is not None)
        is_last = c.call == "last" and not c.hints.context and c.written is None
        if c.start not in (None, OWN, ZEROS) and not c.attributes and not is_last:
            return  # the user says it, or the author in a method for that
        x = long if is_last else laboratory.x if c.call == "chunk" else laboratory.x[:1]

        def own(start: Any) -> tuple[Tensor, State]:
            laboratory.restore()
            author = replace(c, start=start, call="chunk" if is_last else c.call)
            with laboratory.constant_randomness(), twin.bound(author) as module:
                result, after = module.first_call(x)
            if is_last:
                return item_at(result, c.outputs[0].path), ()
            return bound.read(result, c.padded(x)), c.lanes.lanes_first(after)

        calls: list[tuple[Tensor, State]] = []
        for start in (None, ZEROS) if c.start == ZEROS else (c.start,):
            with suppress(*CALL_ERRORS):
                calls = calls or [own(start), own(start)]
        name, tolerance = "start", laboratory.tolerance
        if is_last:
            name, tolerance = "last", 10 * tolerance
        if not calls:  # it needs a state
            yield law(name, math.inf if is_last else 0.0, 0.0)
            return
        yield law("random", difference(*calls), tolerance)
        (y, state), (z, end) = calls[0], laboratory.run(x)
        end = () if is_last else end[STATE] if c.hints.context else end
        if is_last:  # all outputs, or the last
            fits = [z[-1], *(z.movedim((0, 1), order) for order in ORDERS if max(order) < z.dim())]
            fits = [part.reshape(y.shape) for part in fits if part.numel() == y.numel()]
            z = min(fits, key=partial(difference, y), default=z)
        deviation = difference((y, state), (z, end))
        leaves = [p for p in twin.module.parameters() if p.requires_grad]
        with suppress(RuntimeError):  # of a layer whose outputs are written in place
            rows = _row(y, state), _row(z, end)
            deviation = max(deviation, gradient_difference(*rows, leaves))
        yield law(name, deviation, tolerance)


def _row(y: Tensor, state: State) -> Tensor:
    """Outputs and a state as one row of numbers."""
    leaves = [leaf for leaf in (y, *trees.tensors(state)) if leaf.is_floating_point()]
    return torch.cat([leaf.to(y.dtype).flatten() for leaf in leaves])


def _own_methods(module: nn.Module) -> list[str]:
    """The methods of a module that make a state or put one back, by their names."""
    kind = type(module)
    names = [n for n in dir(kind) if STARTS.match(n) and not hasattr(nn.Module, n)]
    names = [
        n
        for n in names
        if callable(getattr(kind, n))
        and not re.search("weight|param", n)
        and (names_state(n) or re.search("init|reset", n))  # not `zeros(x)`
    ]
    return sorted(names, key=lambda n: (n != "initial_state", not names_state(n), n))


def _together(names: list[str]) -> Iterable[tuple[str, ...]]:
    """All names together, then each alone."""
    return dict.fromkeys([tuple(names), *zip(names, strict=True)] if names else ())


def _state_paths(c: Convention, result: Any) -> list[Path]:
    """Where the next state may be in a result, the usual places first."""
    count, pairs = len(c.arguments), items_of(result)
    if not count or not pairs:
        return [()]
    key, item = ([pair for pair in pairs if pair[0] in c.arguments] or pairs)[-1]
    paths: list[Path] = [(key,)] if count in (1, len(items_of(item))) else []
    if isinstance(result, (tuple, list)) and len(pairs) > 2:
        paths.append((slice(len(pairs) - count if count > 1 else 1, None),))
    shapes = {getattr(item, "shape", None) for _, item in pairs}
    return [*paths, ()] if isinstance(result, list) or len(shapes) == 1 else paths


def _is_under(path: Path, outer: Path) -> bool:
    """Whether an item is one at another path, or in it."""
    first = outer[0] if outer else None
    if isinstance(first, slice):
        return path[0] in range(100)[first]
    return path[: len(outer)] == outer
