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
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._calls import OWN, UNITS, ZEROS, Convention, ModuleAdapter
from throughtime.carry._inside import (
    LANES,
    LONG_STEPS,
    MAX_STEPS,
    RECURRENT,
    STEPS,
    Key,
    Snapshot,
    ancestors,
    attributes,
    copy_of,
    is_turned,
    names_state,
    parameters_of,
    perturb,
    plain_name,
    quiet,
    reach_of,
    returned_names,
    sample_inputs,
    set_modes,
    weight_of,
)
from throughtime.carry._laws import LAWS, MEASURED, Law, difference, measured
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
    items_at,
    shapes_of,
    tensor_paths,
)
from throughtime.errors import ModelError, StateError
from throughtime.state import State

CALL_ERRORS = (Exception,)  # a module that is called in a way it is not made for raises anything
LIVE = ("inputs", "memory")  # laws that one twin may break: its weights may hide the state
NEAR = ("value", "credit", "long", "random")  # the way is right, the module is not
# Seconds of processor time after which a search ends, and says that it goes on.
PATIENCE, REPORT = 10.0, 2.0
# methods that say the start
STARTS = re.compile(
    r"(?!.*(weight|param))_*(get_|make_)?"
    r"(init|begin|zero|start|reset|alloc|empty|creat|new|default)"
)
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
    convention: Convention
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

    @contextmanager
    def bound(self, c: Convention) -> Generator[ModuleAdapter]:
        """The copy, called by a convention, in evaluation mode."""
        set_modes(self.module, ())
        adapter = ModuleAdapter(self.module, c, self._example)
        try:
            yield adapter
        finally:
            adapter.close()
            self._snapshot.restore()

    def first_call(self, c: Convention, x: Tensor) -> tuple[Any, State, dict[Key, Any]]:
        """The result of a call from the start of a recording, and the state after it.

        Also the attributes that it changes and their values after it, but for numbers.
        """
        with self.bound(c) as bound:
            before = attributes(self.module)
            result, state = bound.first_call(x)
            after = attributes(self.module).items()
        return result, state, {k: v for k, v in after if difference(before.get(k, x), v)}


def twins_of(module: nn.Module, x: Tensor) -> list[Twin]:
    """Copies of a module with its weights and with others; itself if it refuses to be copied."""
    own, other = copy_of(module), copy_of(module)
    if own is None or other is None:
        return [Twin(module, x)]
    perturb(other)
    return [Twin(own, x), Twin(other, x, 1.0), Twin(other, x, 5.0)]


class Search:
    """The search for the convention of one module.

    Args:
        module: the user's; it is copied.
        x: example inputs `(T, B, ...)`.
        base: what the user says.
        steps: of the chunks of the stream.
        is_link: whether the module is in a chain, and may compute each step alone, without a state.
    """

    def __init__(
        self, module: nn.Module, x: Tensor, base: Convention, steps: int, *, is_link: bool = False
    ) -> None:
        self.module, self.x, self.base = module, x, base
        self.steps, self.is_link = steps, is_link
        self.failures: list[Failure] = []
        self.choices: list[Outputs] = []  # more than one where the user must choose
        self.began, self._is_reported = time.thread_time(), False
        self.own_methods = _own_methods(module)
        self.is_late = self.is_turned = False

    def find(self) -> Convention | None:
        """The first convention that obeys every law on every twin; None if there is none."""
        with quiet(self.x.device):
            self.modes = [m.training for m in self.module.modules()]
            self.twins = twins_of(self.module, self.x)
            try:
                # a module may be made for a number of lanes, or for one
                for lanes in dict.fromkeys((LANES, self.x.shape[1], 1)):
                    for convention in self._conventions(self.twins[0].inputs(lanes)):
                        if self._accepts(convention, lanes):
                            return convention
                        law = self.failures[-1].law
                        if law is None or (convention.context and convention.is_inside):
                            continue  # a context as long as a trial passes all laws but `long`
                        # no state is another start than that of the author's method
                        is_asked = law.name == "start" and convention.start in self.own_methods
                        if is_asked or law.name in NEAR:
                            return None
                    if any(failure.stage >= 2 for failure in self.failures):
                        return None  # it takes so many lanes, and breaks a law
            except OutOfTimeError:
                self.is_late = True
        return None

    def _note(
        self,
        c: Convention,
        stage: float = 0.0,
        error: Exception | None = None,
        law: Law | None = None,
    ) -> bool:
        """Remember a way that was not accepted."""
        if law is not None:
            stage = 3 + [*LAWS].index(law.name) + len(LAWS) * law.training
        self.failures.append(Failure(stage, c, law, error))
        return self._check_time()

    def _check_time(self) -> bool:
        """Report that a search goes on, or end it.

        Raises:
            OutOfTimeError: it has taken too long.
        """
        seconds = time.thread_time() - self.began
        if seconds > REPORT and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "tt.carry still tries ways of calling %s, and gives up after %.0f s",
                type(self.module).__name__,
                PATIENCE,
            )
        if seconds > PATIENCE:
            raise OutOfTimeError
        return False

    # ------------------------------------------------------------ ways

    def _conventions(self, x: Tensor) -> Iterator[Convention]:
        """Conventions to measure, the usual ones first."""
        base = self.base
        orders = [TIME_FIRST, LANES_FIRST]
        if any(isinstance(m, nn.RNNBase) and m.batch_first for m in self.module.modules()):
            orders.reverse()
        orders += [FEATURES_FIRST] * (x.dim() == 3)
        if base.batch_first is not None:
            orders = [LANES_FIRST if base.batch_first else TIME_FIRST]
        for unit in UNITS:
            for order in orders[:1] if unit == "step" or base.inputs else orders:
                for drop in (False, True)[: 1 + (x.shape[2:] == (1,))]:
                    c = replace(base, unit=unit, order=order, drop=drop)
                    try:
                        calls = [*self._places(c, x)]
                    except CALL_ERRORS as error:
                        self._note(c, error=error)
                        continue
                    for call in calls:
                        if not (call.layers and self._is_broken(call)):
                            yield from self._complete(call, x)

    def _is_broken(self, c: Convention) -> bool:
        """Whether the author's own state breaks a law that its layers inside might keep.

        What the module does to its state between calls would be passed over silently.
        """
        return not c.context and any(
            law is not None and law.name == "whole" and tried.order == c.order
            for _, tried, law, _ in self.failures
            if tried.arguments or tried.attributes
        )

    def _places(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with a place of the state.

        Raises:
            MisfitError: an argument is neither inputs nor a state.
        """
        if base.call:
            yield base
            return
        parameters = parameters_of(self.module.forward)
        if base.inputs is None and is_turned(parameters):
            raise MisfitError(
                f"takes {parameters[0].name} before its inputs: write call=lambda m, x, state: ..."
            )
        options = parameters[len(base.arrange(x)) :]
        if required := tuple(p.name for p in options if p.default is p.empty):
            if len({*map(names_state, required)}) > 1 or "len" in str(required):
                raise MisfitError(f"requires {required}")
            yield replace(base, arguments=required)
            return
        yield base  # attributes: an argument is an option then
        named = [p.name for p in options if names_state(p.name) and not isinstance(p.default, bool)]
        others = [p.name for p in options if p.default is None and p.name not in named]
        for names in _together(named):
            yield replace(base, arguments=names)
        if base.unit != "step":
            yield from self._layers(base, x)
        for names in _together(others):
            yield replace(base, arguments=names)

    def _layers(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """The convention with the state in layers and cells that a call runs over its steps."""
        names = [
            name
            for name, part in self.module.named_modules()
            if name and isinstance(part, RECURRENT) and not getattr(part, "bidirectional", False)
        ]
        hooked = replace(base, unit="chunk", layers=(*names,))
        try:
            with self.twins[0].bound(hooked) as bound:
                seen = bound.recorded(hooked.padded(x)).seen
        except CALL_ERRORS as error:
            self._note(hooked, 1.5 * isinstance(error, ModelError) * bool(names), error)
            return
        steps = len(x), len(x) + base.context
        # a layer may run over several sequences, which a law shows
        if layers := [n for n in names if seen[n] and 0 in [seen[n] % t for t in steps]]:
            yield replace(base, layers=(*layers,))

    def _starts(self, c: Convention) -> list[Any]:
        """The starts to try; others than that of the user may show where the lanes are."""
        if c.start is not None:
            return [c.start, None, ZEROS]
        if c.layers:
            return [None, OWN]
        return [*self.own_methods, None, *[ZEROS] * bool(c.arguments)]

    def _complete(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with the places of outputs, state and lanes, from calls of the module."""
        parts, x = (x[:2], x[:3]), x if base.unit == "chunk" else x[:1]
        for start in self._starts(base):
            first = replace(base, start=start)
            try:
                changed = self._changed(first, *parts)
                kept = tuple(key for key, is_fixed in changed.items() if is_fixed)
                first = replace(first, attributes=kept * base.is_inside, scratch=(*changed,))
                result, after, _ = self.twins[0].first_call(first, x)
            except CALL_ERRORS as error:
                self._note(first, 1.5 * isinstance(error, ModelError), error)
                continue
            for keys in _state_keys(first, result):
                c = replace(first, result=keys)
                try:
                    state = items_at(after, keys)  # all of it, but for an argument
                    choices = self._outputs(c, result, state, x)
                    if c.arguments and is_state(state):
                        self._check_order(c, result, state, choices)
                    c = self._with_lanes(c, result, state, x)
                except CALL_ERRORS as error:
                    self._note(c, 1 + isinstance(error, StateError), error)
                    continue
                self.choices = choices
                c = replace(c, start=start if base.start is None else base.start)
                yield from (replace(c, outputs=outputs) for outputs in choices)
            if base.start is not None:
                return

    def _changed(self, c: Convention, *parts: Tensor) -> dict[Key, bool]:
        """The attributes that calls change, and whether they may be a state: of a fixed shape."""
        rows: dict[Key, list[Any]] = {}
        for twin, x in zip((self.twins[0], self.twins[-1]), parts, strict=True):
            for key, value in twin.first_call(c, x)[2].items():
                rows.setdefault(key, []).append(shapes_of(value) if is_state(value) else None)
        return {k: None not in row and row.count(row[0]) == len(row) for k, row in rows.items()}

    def _outputs(self, c: Convention, result: Any, state: State, x: Tensor) -> list[Outputs]:
        """What of a result could be the outputs: one tensor each, or several where all are asked.

        Raises:
            MisfitError: there is nothing.
        """
        leaves = tensor_paths(result)
        if c.output in (None, "all"):
            held = [] if c.arguments or not is_state(state) else [*map(id, trees.tensors(state))]
            others = [(p, y) for p, y in leaves if p[:1] not in zip(c.result) and id(y) not in held]
            leaves = others or leaves
            for _, value in trees._by_path(result):
                if not isinstance(value, (Tensor, int, float, str, type(None))):
                    kind = type(value).__name__
                    raise MisfitError(
                        f"it returns a {kind}, which may be the outputs: name a tensor,"
                        " tt.carry(module, output=...)"
                    )
        else:
            keys = c.output if isinstance(c.output, list) else [c.output]
            paths = [key if isinstance(key, tuple) else (key,) for key in keys]
            leaves = [((*p, *key), y) for p in paths for key, y in tensor_paths(item_at(result, p))]
        orders = (c.order, *ORDERS) if c.unit == "chunk" else (TIME_FIRST, LANES_FIRST)
        sizes = len(x), x.shape[1], c.context
        fits = [OutputLayout.of(path, y, orders, sizes, x.dim()) for path, y in leaves]
        layouts = [*filter(None, fits)]
        if not layouts or (c.several and None in fits):
            raise MisfitError(
                f"it returned tensors of shapes {[tuple(y.shape) for _, y in tensor_paths(result)]}"
                f" for {x.shape[0]} steps of {x.shape[1]} lanes, without one output per step: let"
                " forward(x, state) return one"
            )
        if c.output is not None and layouts[0].path[:1] in zip(c.result):
            raise MisfitError("the outputs are not the state")
        return [tuple(layouts)] if c.several else [(layout,) for layout in layouts]

    def _check_order(
        self, c: Convention, result: Any, state: State, choices: list[Outputs]
    ) -> None:
        """Refuse a result that may be turned: no law tells tensors of one shape apart.

        The last item is the state, and several are in the order of the arguments. That is not so
        if the forward returns its arguments' names in another order; or, without these names, if
        all of the last item is computed from the outputs, or the outputs have no graph.

        Raises:
            MisfitError: it may be turned.
        """
        names = [*map(plain_name, returned_names(self.module.forward))]
        taken = [n for n in map(plain_name, c.arguments) if n in names]
        returned = [n for n in names if n in taken][-len(taken) :]
        y, after = item_at(result, choices[0][0].path), trees.tensors(state)
        last, node = after[-1], y.grad_fn
        is_turned = len(after) == 1 and c.output is None and node in (None, *ancestors(last))
        is_turned = is_turned and ancestors(y).isdisjoint(ancestors(last, node))
        self.is_turned |= is_turned
        is_turned = (
            names[-1] != returned[-1] if returned else is_turned and difference(y, last) != 0
        )
        if returned != taken or (is_turned and y.shape == last.shape):
            raise MisfitError(
                "it returns its state before its outputs, or states in another order than the"
                " arguments, as it seems, and no law tells tensors of one shape apart"
            )

    def _with_lanes(self, c: Convention, result: Any, state: State, x: Tensor) -> Convention:
        """The convention with the lanes of its state, which a call with fewer shows.

        Raises:
            MisfitError: there is no state, or none of lanes.
        """
        if not is_state(state):
            if not c.is_inside or c.context:
                return c
            is_plain = (c.unit, c.order, c.drop) == ("chunk", TIME_FIRST, False)
            if self.is_link and is_plain and isinstance(result, Tensor):
                return replace(c, scratch=())  # nobody will restore it
            raise MisfitError(
                "no recurrent layer of torch.nn runs over its steps, and no state was found in its"
                " arguments or attributes: there is nothing to carry, as in attention over steps,"
                " or it is a variable of forward. Let forward(x, state) return (y, state), write"
                " tt.carry(module, call=..., start=...), or try batch_first=True or False"
            )
        states = {x.shape[1]: state}
        if x.shape[1] > 1:
            # a module that was made for a number of lanes raises an error
            with suppress(*CALL_ERRORS):
                states[x.shape[1] - 1] = self.twins[0].first_call(c, x[:, :-1])[1]
        shapes = [*map(shapes_of, states.values())]
        if len(shapes) == 2 and shapes[0] == shapes[1]:
            raise MisfitError("it has a state without a dimension for lanes")
        return replace(c, lanes=LaneLayout.infer(states))

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
                        memory = live.get("memory", law)
                        is_unread = c.attributes and law.name == "whole" and not memory.holds
                        return self._note(c, law=memory if is_unread else law)
            except CALL_ERRORS as error:
                return self._note(c, 1.5, error)
        is_stateless = self.is_link and c.is_inside and not (c.lanes.dims or c.context)
        for law in () if is_stateless else live.values():
            if not law.holds:
                return self._note(c, law=law)
        return True

    def _laws(self, c: Convention, twin: Twin, x: Tensor) -> Iterator[Law]:
        """Those of any adapter, and on weights that hide nothing those of the author's own calls.

        Also on the module's own weights, if it cannot be copied.
        """
        is_second = twin is self.twins[:2][-1]
        is_training = is_second and self.modes[0]
        # those of a chunk, or the reach of convolutions
        steps = max(self.steps, LONG_STEPS * self.is_link, 2 * (reach_of(twin.module) + 1), STEPS)
        long = twin.inputs(x.shape[1], min(steps, MAX_STEPS))
        names = ["random", *MEASURED, "kept", *("long", "start", "last") * is_second]
        if self.modes[0] or not is_second:
            names.remove("credit")  # in training, if that is how the module is used
        with twin.bound(c) as bound:
            yield from measured(bound, twin.module, x, names, long=long)
        if not is_training:
            return
        names = [*MEASURED, "last"]
        try:
            with twin.bound(c) as bound:
                yield from measured(bound, twin.module, x, names, training=self.modes, long=long)
        except CALL_ERRORS as error:
            text = f"{type(error).__name__}: {error}".split("\n")[0]
            yield Law("repeat", math.nan, 0.0, text, training=True)


def _own_methods(module: nn.Module) -> list[str]:
    """The methods of a module that make a state or put one back, by their names."""
    kind = type(module)
    names = [
        n
        for n in dir(kind)
        if STARTS.match(n) and not hasattr(nn.Module, n) and callable(getattr(kind, n))
        if (names_state(n) or re.search("init|reset", n))  # not `zeros(x)`
    ]
    return sorted(names, key=lambda n: (n != "initial_state", not names_state(n), n))


def _together(names: list[str]) -> Iterable[tuple[str, ...]]:
    """All names together, then each alone."""
    return dict.fromkeys([tuple(names), *zip(names, strict=True)] if names else ())


def _state_keys(c: Convention, result: Any) -> list[Path]:
    """The keys of a result that may be the next state, the usual ones first; none for all of it."""
    level = trees._level(result)
    if not c.arguments or level is None:
        return [()]
    count, keys = len(c.arguments), [*level[0]]
    last = ([key for key in keys if key in c.arguments] or keys)[-1]
    shapes = {getattr(item, "shape", None) for item in level[1]}
    is_whole = isinstance(result, list) or len(shapes) == 1
    return [*dict.fromkeys([(last,), (*keys[-count:],)]), *[()] * is_whole]
