"""Find how a module is called: try the usual ways first, accept one that obeys every law.

A way is tried on twins: copies of the module, the first with its own weights, the others with
noise on weights and buffers, so that a head that starts at zero or a neuron that is silent hides
nothing. All of a result that may be the outputs is listed before a law is measured.

Shapes: `T` steps, `B` lanes.
"""

import contextlib
import logging
import math
import re
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import LaneLayout, is_state
from throughtime.carry._calls import (
    CALLS,
    FEATURES_FIRST,
    LANES_FIRST,
    ORDERS,
    OWN,
    STATE,
    TIME_FIRST,
    Convention,
    Hints,
    MisfitError,
    ModuleAdapter,
    Order,
    OutputLayout,
    Path,
    item_at,
    items_of,
    layer_zeros,
    tensor_paths,
)
from throughtime.carry._inside import (
    Key,
    attributes,
    copied,
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
    gradients,
    relative_difference,
    state_difference,
)
from throughtime.carry._trial import (
    LANES,
    STEPS,
    Snapshot,
    copy_of,
    long_steps,
    modes_of,
    perturb,
    quiet,
    set_modes,
    trial_inputs,
    weight_of,
)
from throughtime.errors import StateError
from throughtime.state import State

CALL_ERRORS = (Exception,)  # a module that is called in a way it is not made for raises anything
LIVE = ("inputs", "memory")  # laws that one twin may break: its weights may hide the state
PATIENCE, REPORT = 10.0, 2.0  # seconds after which a search ends, and between reports
ZEROS = (layer_zeros,)  # a start
STARTS = re.compile(r"_*(init|begin|zero|start|reset)")  # methods that say the start
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
        self.module, self._example, self._scale = module, example, scale
        self._snapshot = Snapshot(module)
        self.restore()

    def restore(self) -> None:
        """Put attributes and buffers back; evaluation mode."""
        self._snapshot.restore()
        set_modes(self.module, None)

    def inputs(self, lanes: int, steps: int = STEPS) -> Tensor:
        """Inputs of a trial, in the dtype of the weights."""
        return trial_inputs(self._example, self.module, lanes, steps, self._scale)

    @contextlib.contextmanager
    def bound(self, c: Convention) -> Generator[ModuleAdapter]:
        """The copy, called by a convention."""
        bound = ModuleAdapter(self.module)
        bound.bind(c, self._example)
        try:
            yield bound
        finally:
            bound.release()

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
    for twin in {id(twin): twin for twin in (twins[0], twins[-1])}.values():

        def call(part: Tensor, values: dict[Key, Any], twin: Twin = twin) -> list[Any]:
            twin.restore()
            set_attributes(twin.module, {key: copied(value) for key, value in values.items()})
            return [twin.first_call(c, part)[0], attributes(twin.module)]

        twin.restore()
        before = attributes(twin.module)
        first = call(parts[0], {})[1]
        values = {k: v for k, v in first.items() if k not in before or not _is_same(before[k], v)}
        if not values:
            continue
        after, (_, longer) = call(parts[1], {}), call(parts[2], {})
        for key, value in values.items():
            form = _state_form(value)
            is_fixed = form is not None and form == _state_form(longer.get(key))
            changed[key] = is_fixed and changed.get(key, True)
        # of attributes, those that hold a state
        other = call(parts[1], values)
        for row in (after, other):
            row[1] = [row[1].get(key) for key, is_fixed in changed.items() if is_fixed]
        is_read |= not _is_same(after, other)
        twin.restore()
    return (*changed,), tuple(key for key, is_fixed in changed.items() if is_fixed and is_read)


class Search:
    """The search for the convention of one module.

    Args:
        module: the user's; it is copied.
        x: example inputs `(T, B, ...)`.
        hints: what the user says.
    """

    def __init__(self, module: nn.Module, x: Tensor, hints: Hints) -> None:
        self.module, self.x, self.hints = module, x, hints
        self.failures: list[Failure] = []
        self.modes = modes_of(module)
        self.choices: list[OutputLayout] = []  # more than one where the user must choose
        self.began = self._reported = time.monotonic()
        self.own_methods = _own_methods(module)
        self.is_late = self.is_callable = self.has_state = False
        self._beside = False

    def find(self) -> Convention | None:
        """The first convention that obeys every law on every twin; None if there is none."""
        with quiet(self.x.device):
            snapshot = Snapshot(self.module)
            self.twins = twins_of(self.module, self.x)
            try:
                return self._find()
            except OutOfTimeError:
                self.is_late = True
                return None
            finally:
                if self.twins[0].module is self.module:
                    snapshot.restore()

    def _find(self) -> Convention | None:
        # a module may be made for a number of lanes, or for one
        for lanes in dict.fromkeys((LANES, self.x.shape[1], 1)):
            x = self.twins[0].inputs(lanes)
            for base in self._layouts(x):
                started = chain.from_iterable(map(self._started, self._places(base, x)))
                for convention in chain.from_iterable(self._complete(c, x) for c in started):
                    if self._accepts(convention, lanes):
                        return convention
                    law = self.failures[-1].law
                    if law is not None and law.name in ("value", "credit", "long", "random"):
                        return None  # right but for a cut gradient or a long lag
            if any(failure.stage >= 2 for failure in self.failures):
                return None  # it takes so many lanes, and breaks a law
        return None

    def _note(
        self,
        stage: float,
        c: Convention | None,
        law: Law | None = None,
        error: Exception | None = None,
    ) -> bool:
        """Remember a way that was not accepted; report that a search goes on, or end it.

        Raises:
            OutOfTimeError: it has taken too long.
        """
        one_lane = c is not None and any(dim.dim is None for dim in c.lanes.dims)
        self.failures.append(Failure(stage - 30 * one_lane, c, law, error))
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

    def _layouts(self, x: Tensor) -> Iterator[Convention]:
        """Calls and layouts of inputs, the usual ones first."""
        hints = self.hints
        orders = [TIME_FIRST, LANES_FIRST]
        if any(isinstance(m, nn.RNNBase) and m.batch_first for m in self.module.modules()):
            orders.reverse()
        orders += [FEATURES_FIRST] if x.dim() == 3 and x.is_floating_point() else []
        if hints.batch_first is not None:
            orders = [LANES_FIRST if hints.batch_first else TIME_FIRST]
        calls: list[Any] = [*CALLS]
        for call in [call for call in calls if call == hints.call] or calls:
            own = [TIME_FIRST] if call == "step" or hints.inputs else orders
            for order, drop in product(own, (False, True) if x.shape[2:] == (1,) else (False,)):
                yield Convention(hints, call, order, drop)

    def _places(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with a place of the state."""
        if base.written is not None:
            yield base
            return
        try:
            count = len(base.arrange(x))
            parameters = parameters_of(self.module.forward)
            if base.hints.inputs is None and is_turned(parameters):
                raise MisfitError("takes its state before its inputs")
        except CALL_ERRORS as error:
            self._note(0, base, error=error)
            return
        required = [p.name for p in parameters[count:] if p.default is p.empty]
        if required:
            if len({*map(names_state, required)}) == 1:
                yield replace(base, arguments=(*required,))
            return
        yield base  # attributes: an argument is an option then
        named = [p.name for p in parameters[count:] if names_state(p.name)]
        others = [p.name for p in parameters[count:] if p.default is None and p.name not in named]
        for names in _together(named):
            yield replace(base, arguments=names)
        twin, steps = self.twins[0], len(x) + base.hints.context
        with contextlib.suppress(*CALL_ERRORS):
            whole = replace(base, call="chunk")
            for ports in ports_of(twin.module, lambda: twin.first_call(whole, x), steps):
                if ports and base.call != "step":
                    yield replace(base, ports=ports)
        for names in _together(others):
            yield replace(base, arguments=names)

    def _started(self, c: Convention) -> Iterator[Convention]:
        """A convention with each start, or with that of the user."""
        starts: list[Any] = [None, OWN] if c.ports else [*self.own_methods, None]
        if c.arguments and layer_zeros(self.module, 1) is not None:
            starts.append(ZEROS)
        for start in starts if self.hints.start is None else [(self.hints.start,)]:
            yield replace(c, start=start)

    def _complete(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with the places of outputs, state and lanes, from calls of the module."""
        twin, sizes = self.twins[0], (2, 2, 3) if base.call == "chunk" else (1, 1, 5)
        inside = not base.arguments and not base.ports and base.written is None
        self.has_state |= not inside
        parts = x.split(sizes)
        x = x if base.call == "chunk" else x[:1]
        # other starts show the layout of the state if that of the user is not in it
        for start in (base.start, None, ZEROS) if self.hints.start is not None else (base.start,):
            first = replace(base, start=start)
            try:
                # a method may put back what the first call has left
                plain = replace(first, start=None) if inside else first
                changed, kept = remembered(self.twins, plain, parts)
                first = replace(first, attributes=kept if inside else (), scratch=changed)
                twin.restore()
                result, after = twin.first_call(first, x)
                break
            except CALL_ERRORS as error:
                self._note(0, first, error=error)
        else:
            return
        base = replace(first, start=base.start)
        self.is_callable, self.has_state = True, self.has_state or bool(kept)
        self._beside = bool(kept) and not inside
        for path in _state_paths(base, result):
            located = replace(first, result=path)
            try:
                state = item_at(result, path) if base.arguments else after
                choices = self._outputs(located, result, state, x)
                if not choices:
                    raise MisfitError(_no_outputs(result, x))
                is_named = self.hints.output is not None
                if is_named and path and any(_is_under(o.path, path) for o in choices):
                    continue  # the user names it as an output
                if is_state(state):
                    located = replace(located, lanes=self._lanes(located, x, state))
                elif inside and not base.hints.context:
                    return
            except CALL_ERRORS as error:
                self._note(1 + isinstance(error, StateError), located, error=error)
                continue
            for outputs in choices:
                yield replace(located, start=base.start, outputs=outputs)

    def _outputs(self, c: Convention, result: Any, state: State, x: Tensor) -> list[OutputLayout]:
        """The tensors of a result that could be the outputs; a row of them where all are asked."""
        hint, leaves = self.hints.output, [*tensor_paths(result)]
        if hint is None or hint == "all":
            held = [*map(id, trees.tensors(state))] if is_state(state) else []
            is_argument = bool(c.arguments)
            leaves = [
                (path, y)
                for path, y in leaves
                if not (_is_under(path, c.result) if is_argument else id(y) in held)
            ] or leaves
        else:
            keys = hint if isinstance(hint, list) else [hint]
            paths = [key if isinstance(key, tuple) else (key,) for key in keys]
            leaves = [leaf for path in paths for leaf in tensor_paths(item_at(result, path), path)]
        orders = (c.order, *ORDERS) if c.call == "chunk" else (TIME_FIRST, LANES_FIRST)
        skips = {c.hints.context, 0}
        fits = [[_fit(path, y, orders, x, skip) for skip in skips] for path, y in leaves]
        layouts = [next(filter(None, row)) for row in fits if any(row)]
        if isinstance(hint, list) or (hint == "all" and not isinstance(result, Tensor)):
            if len(layouts) < len(fits) or len({layout.order for layout in layouts}) != 1:
                return []
            row = OutputLayout((), layouts[0].order, (), 0, tuple(layouts))
            layouts = [replace(row, features=tuple(row.read(result, *x.shape[:2]).shape[2:]))]
        self.choices = layouts
        return layouts

    def _lanes(self, c: Convention, x: Tensor, state: State) -> LaneLayout:
        """Where the lanes of the state are: shown by a call with fewer lanes."""
        twin, states = self.twins[0], {x.shape[1]: state}
        if x.shape[1] > 1:
            twin.restore()
            # a module that was made for a number of lanes raises an error
            with contextlib.suppress(*CALL_ERRORS):
                states[x.shape[1] - 1] = twin.first_call(c, x[:, :-1])[1]
        shapes = [[leaf.shape for leaf in trees.tensors(one)] for one in states.values()]
        if len(shapes) == 2 and shapes[0] == shapes[1]:
            raise MisfitError("has a state without a dimension for lanes")
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
                        return self._note(2.9 + RANK[law.name] + 15 * law.training, c, law)
            except CALL_ERRORS as error:
                return self._note(1.5, c, error=error)
        for law in live.values():
            if not law.holds:
                return self._note(2.9 + RANK[law.name], c, law)
        return True

    def _laws(self, c: Convention, twin: Twin, x: Tensor) -> Iterator[Law]:
        """Those of any adapter, and on weights that hide nothing those of the author's own calls.

        Also on the module's own weights, if it cannot be copied.
        """
        twin.restore()
        with twin.bound(c) as bound:
            laboratory = Laboratory(bound, twin.module, x, by_step=c.call != "chunk")
            states = [bound.initial_state(x.shape[1], None) for _ in range(2)]
            yield Law("random", state_difference(*states), 0.0)
            yield from laboratory.measure(credit=twin is self.twins[0] or not self.modes.get(""))
            yield Law("kept", math.inf if self._beside else 0.0, 0.0)
            if twin is self.twins[:2][-1]:
                steps = long_steps(len(self.x), twin.module)
                long = twin.inputs(x.shape[1], steps)
                if c.call == "chunk" and steps > STEPS:
                    yield from self._long(c, x.shape[1], steps)
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
            with contextlib.suppress(NotFiniteError), twin.bound(c) as bound:
                yield Laboratory(bound, twin.module, x).measure_long(x)
                return

    def _own(
        self, bound: ModuleAdapter, twin: Twin, laboratory: Laboratory, long: Tensor
    ) -> Iterator[Law]:
        """The author's own call must give the same, with its gradients.

        It shows the start; and that a module that returns its last output, and would else be run
        on each step alone, was not made for whole sequences.
        """
        c, training = bound.convention, laboratory.training is not None
        is_last = c.call == "last" and not c.hints.context and c.written is None
        if c.start not in (None, OWN, ZEROS) and not c.attributes and not is_last:
            return  # the user says it, or the author in a method for that
        x = long if is_last else laboratory.x if c.call == "chunk" else laboratory.x[:1]

        def own(start: Any) -> tuple[Any, State]:
            laboratory.restore()
            author = replace(c, start=start, call="chunk" if is_last else c.call)
            with laboratory.constant_randomness(), twin.bound(author) as module:
                result, after = module.first_call(x)
            if is_last:
                return item_at(result, c.outputs.path), ()
            return bound.read(result, bound.padded(x)), c.lanes.lanes_first(after)

        calls: list[tuple[Any, State]] = []
        for start in (None, ZEROS) if c.start == ZEROS else (c.start,):
            with contextlib.suppress(*CALL_ERRORS):
                calls = calls or [own(start), own(start)]
        name, tolerance = (
            ("last", 10 * laboratory.tolerance) if is_last else ("start", laboratory.tolerance)
        )
        if not calls:  # it needs a state
            yield Law(name, math.inf if is_last else 0.0, 0.0, training=training)
            return
        yield Law(
            "random", difference(_row(*calls[0]), _row(*calls[1])), tolerance, training=training
        )
        (y, state), (z, end) = calls[0], laboratory.run(x)
        end = () if is_last else end[STATE] if c.hints.context else end
        if is_last:  # all outputs, or the last
            fits = [_fit((), y, (order,), x) for order in ORDERS]
            ys = [fit.read(y, *x.shape[:2]) for fit in fits if fit is not None]
            pairs = [
                (w, part) for w in [*ys, y] for part in (z, z[-1]) if w.numel() == part.numel()
            ]
            pairs = [(w.reshape(part.shape), part) for w, part in pairs]
            y, z = min(pairs, key=lambda pair: difference(*pair), default=(y, z))
        rows = [_row(y, state), _row(z, end)]
        leaves = [p for p in twin.module.parameters() if p.requires_grad]
        deviation = difference(*rows)
        with contextlib.suppress(RuntimeError):  # of a layer whose outputs are written in place
            grads = [gradients(row, leaves) for row in rows]
            deviation = max(deviation, *map(relative_difference, *grads), 0.0)
        yield Law(name, deviation, tolerance, training=training)


def _row(y: Tensor, state: State) -> Tensor:
    """Outputs and a state as one row of numbers."""
    leaves = [leaf for leaf in (y, *trees.tensors(state)) if leaf.is_floating_point()]
    return torch.cat([leaf.to(y.dtype).flatten() for leaf in leaves])


RANK = {name: i for i, name in enumerate(["last", *LAWS])} | {"last": 0}


def _own_methods(module: nn.Module) -> list[str]:
    """The methods of a module that make a state or put one back, by their names."""
    kind = type(module)
    names = [n for n in dir(kind) if not hasattr(nn.Module, n) and STARTS.match(n)]
    names = [n for n in names if callable(getattr(kind, n)) and not re.search("weight|param", n)]
    names = [n for n in names if names_state(n) or re.search("init|reset", n)]  # not `zeros(x)`
    return sorted(names, key=lambda n: (n != "initial_state", not names_state(n), n))


def _is_same(a: Any, b: Any) -> bool:
    """Whether two nestings have equal tensors; what else they hold does not count."""
    rows = [trees.named_tensors([tree]) for tree in (a, b)]
    return [*map(_form, rows[0])] == [*map(_form, rows[1])] and all(
        difference(s, t) == 0 for (_, s), (_, t) in zip(*rows, strict=True)
    )


def _form(leaf: tuple[str, Tensor]) -> tuple[str, torch.Size]:
    return leaf[0], leaf[1].shape


def _state_form(value: Any) -> Any:
    """The names and shapes of the tensors of a state; None for what is none."""
    return [*map(_form, trees.named_tensors(value))] if is_state(value) else None


def _together(names: list[str]) -> Iterable[tuple[str, ...]]:
    """All names together, then each alone."""
    return dict.fromkeys(([tuple(names)] if names else []) + [(name,) for name in names])


def _state_paths(c: Convention, result: Any) -> list[Path]:
    """Where the next state may be in a result, the usual places first."""
    count, pairs = len(c.arguments), items_of(result)
    if not count or not pairs:
        return [()]
    named = [pair for pair in pairs if pair[0] in c.arguments]
    key, item = (named or pairs)[-1]
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


def _fit(
    path: Path, y: Any, orders: Iterable[Order], x: Tensor, skip: int = 0
) -> OutputLayout | None:
    """The layout of a tensor with one output for each step and lane; None for others."""
    steps, lanes, orders = len(x) + skip, x.shape[1], [*orders]
    shape = y.shape if isinstance(y, Tensor) and y.is_floating_point() else ()
    layouts = [
        OutputLayout(path, (t, b), tuple(n for i, n in enumerate(shape) if i not in (t, b)), skip)
        for t, b in orders
        if len(shape) > max(t, b) and (shape[t], shape[b]) == (steps, lanes)
    ]
    is_flat = shape[:1] == (steps * lanes,)
    flat = [OutputLayout(path, orders[0], tuple(shape[1:]), skip)] * is_flat
    single = [OutputLayout(path, orders[0], tuple(shape), skip)] * (steps * lanes == 1)
    layouts = flat + layouts if steps == 1 else layouts + flat
    return next(iter(layouts + single * bool(shape)), None)


def _no_outputs(result: Any, x: Tensor) -> str:
    shapes = [tuple(leaf.shape) for _, leaf in tensor_paths(result)]
    return (
        f"returned tensors of shapes {shapes} for {x.shape[0]} steps of {x.shape[1]} lanes, without"
        " one output per step in what is to be the outputs"
    )
