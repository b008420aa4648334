"""Find how a module is called: try the usual ways first, accept one that obeys every law.

A way is tried on twins: copies of the module, the first with its own weights, the others with
noise on weights and buffers, so that a head that starts at zero or a neuron that is silent hides
nothing. All of a result that may be the outputs is listed before a law is measured.

Shapes: `T` steps, `B` lanes.
"""

import contextlib
import inspect
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime import state as trees
from throughtime.carry._adapter import LaneDim, LaneLayout, is_state
from throughtime.carry._calls import (
    STATE,
    BoundModule,
    Call,
    Convention,
    MisfitError,
    OutputLayout,
    Path,
    Start,
    call_method,
    item_at,
    tensor_paths,
    widen,
)
from throughtime.carry._inside import (
    CELL,
    LAYER,
    RECURRENT,
    Key,
    attributes,
    copied,
    is_turned,
    names_state,
    observe,
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
    LONG_STEPS,
    STEPS,
    ConstantRandomness,
    Snapshot,
    copy_of,
    long_steps,
    modes_of,
    perturb,
    quiet,
    set_modes,
    trial_inputs,
)
from throughtime.errors import StateError
from throughtime.state import State

CALL_ERRORS = (Exception,)  # a module that is called in a way it is not made for raises anything
LIVE = ("inputs", "memory")  # laws that one twin may break: its weights may hide the state
PATIENCE, REPORT = 10.0, 2.0  # seconds after which a search ends, and between reports
SIZES = ("batch_size", "batch_sz", "bsz", "batch")  # attributes that hold the number of lanes
FLAGS = {  # parameters that mark restarts, which calls are split at, and their value elsewhere
    **dict.fromkeys(("resets", "reset", "reset_mask", "done", "dones", "is_first", "first"), 0),
    **dict.fromkeys(("is_init", "episode_starts"), 0),
    **dict.fromkeys(("mask", "masks", "not_done", "nonterminal", "nonterminals", "continues"), 1),
}
SIZE = re.compile("hid|state|size|dim|units")
BEGINS = re.compile(r"module\._*(init|begin|zero|start|reset)")  # methods that say the start
RESETS = {"reset", "clear"}  # the other methods that may make a state have its name
MAKES_STATE = re.compile(r"_*(init|begin|zero|start|default|empty|create|make|get|reset|clear|new)")
_log = logging.getLogger("throughtime")


@dataclass(frozen=True)
class Hints:
    """What the user says about a module; None is found by trials. See `tt.carry`."""

    inputs: Callable[[Tensor], Any] | None = None
    output: int | str | tuple[int | str, ...] | list[Any] | None = None
    start: Any = None
    call: str | Callable[..., Any] | None = None
    context: int = 0
    batch_first: bool | None = None


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

    @property
    def weight(self) -> Tensor | None:
        """A weight of the module; None without any."""
        return next((p for p in self.module.parameters() if p.is_floating_point()), None)

    def prepare(self, method: str, lanes: int, c: Convention) -> None:
        """Call a method, as before a recording, and start from what it sets."""
        self.restore()
        set_attributes(self.module, dict.fromkeys(c.sizes, lanes))
        with contextlib.suppress(*CALL_ERRORS):
            x = c.arrange(self.inputs(lanes)[:1])[0]
            call_method(self.module, method, lanes, x)
            self._snapshot = Snapshot(self.module)

    def first_call(
        self, c: Convention, x: Tensor, calls: dict[str, Any] | None = None, *, restore: bool = True
    ) -> tuple[Any, State]:
        """The result of a call from the start of a recording, and the state after it.

        Args:
            c: how the module is called.
            x: inputs.
            calls: gets the calls of submodules.
            restore: whether attributes and buffers are put back before.
        """
        if restore:
            self.restore()
        bound = BoundModule(self.module, c, torch.zeros_like(x[:1, :1]))
        try:
            if calls is None:
                return bound.first_call(x)
            results: list[tuple[Any, State]] = []
            calls |= observe(self.module, lambda: results.append(bound.first_call(x)))
            return results[0]
        finally:
            bound.release()

    def own_call(self, c: Convention, x: Tensor) -> tuple[Tensor, State]:
        """Outputs and state of the author's own call, after the method that begins a recording."""
        self.restore()
        name = c.start.name.removeprefix("module.").removesuffix("(...)")
        bound = BoundModule(self.module, replace(c, start=Start()), torch.zeros_like(x[:1, :1]))
        try:
            if c.attributes and name != c.start.name:
                set_attributes(self.module, dict.fromkeys(c.sizes, x.shape[1]))
                state = call_method(self.module, name, x.shape[1], c.arrange(x[:1])[0])
                if state is not None and len(c.attributes) == 1:
                    set_attributes(self.module, {c.attributes[0]: state})
            past = [x.new_zeros(c.context, *x.shape[1:])] if c.context else []
            return bound.call(torch.cat([*past, x]), None)
        finally:
            bound.release()
            self.restore()


def twins_of(module: nn.Module, x: Tensor, noise: float = 1.0) -> list[Twin]:
    """Copies of a module with its weights and with others; itself if it refuses to be copied."""
    copies = [copy_of(module) for _ in range(3)]
    twins = [Twin(module if copies[0] is None else copies[0], x)]
    for twin, scale in zip(copies[1:], (1.0, 5.0), strict=True):
        if twin is not None:
            perturb(twin, noise)
            twins.append(Twin(twin, x, scale))
    return twins


def _remembered(
    twins: list[Twin], c: Convention, parts: Sequence[Tensor]
) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The attributes that a call changes, and those of them that the next call reads.

    Args:
        twins: of which the first and the last are called.
        c: how they are called.
        parts: inputs of three calls.
    """
    if not c.arguments and c.written is None:
        c = replace(c, start=Start())  # a method may put back what the first call has left
    changed: dict[Key, None] = {}
    kept: dict[Key, None] = {}
    for twin in {id(twin): twin for twin in (twins[0], twins[-1])}.values():

        def call(part: Tensor, values: Mapping[Key, Any], twin: Twin = twin) -> tuple[Any, Any]:
            twin.restore()
            set_attributes(twin.module, {key: copied(v) for key, v in values.items()})
            result, _ = twin.first_call(c, part, restore=False)
            return result, attributes(twin.module)

        twin.restore()
        before = attributes(twin.module)
        first, second = (call(part, {})[1] for part in parts[:2])
        changed |= {
            k: None for k, v in second.items() if k not in before or not _equal(before[k], v)
        }
        keys = [k for k in changed if k in first and k in second]
        after = call(parts[2], {k: second[k] for k in keys})
        for key in keys:
            source = before if _equal(first[key], second[key]) else first  # of a counter
            if key not in kept and key in source:
                other = call(parts[2], {k: (source if k == key else second)[k] for k in keys})
                counts = source is before  # the same after other inputs
                if counts or not _is_tensors(second[key], after[1].get(key)):  # or it collects
                    other[1][key] = after[1].get(key)
                kept |= {} if _equal(other, after) else {key: None}
        twin.restore()
    return (*changed,), (*kept,)


def stepwise_law(module: nn.Module, x: Tensor, steps: int) -> Law | None:
    """The law broken by a module that is to compute each step of each lane alone; None if none is.

    Args:
        module: a child of a chain; it is copied.
        x: its inputs `(T, B, ...)`.
        steps: of the chunks of the stream.
    """
    modes = modes_of(module)
    plain = Convention("chunk", "TB")
    for twin in twins_of(module, x):
        for training in (None, modes) if modes.get("") else (None,):
            twin.restore()
            x = twin.inputs(LANES, max(LONG_STEPS, long_steps(steps, module)))
            try:
                if training is None and _remembered([twin], plain, x.split(2))[1]:
                    return Law("repeat", math.inf, 0.0)
                set_modes(twin.module, training)
                with torch.no_grad(), ConstantRandomness() if training else nullcontext():
                    y = twin.module(x)
                    parts = [*x[:STEPS].split(1), x[STEPS:]]
                    alone = torch.cat([*map(twin.module, parts)])
                    other = twin.module(torch.cat([x[:, 1:2], x[:, 1:]], 1))
            except CALL_ERRORS as error:
                return Law("whole", math.nan, 0.0, str(error).split("\n")[0], training is not None)
            tolerance = 1e-5 * (1 + float(y.abs().max()))
            pairs = {"whole": (y, alone), "lanes": (y[:, 1:], other[:, 1:])}
            for name, pair in pairs.items():
                law = Law(name, difference(*pair), tolerance, training=training is not None)
                if not law.holds:
                    return law
    return None


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
        self.one_lane, self._beside = False, ()
        self.began = self._reported = time.monotonic()
        self.own_methods = _own_methods(module)
        self.noise = 1.0
        self.is_late = self.is_small = self.is_callable = self.has_state = False

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
        twin = self.twins[0]
        # a module may be made for a number of lanes, or for one
        for lanes in dict.fromkeys((LANES, self.x.shape[1], 1)):
            self.one_lane, x = lanes == 1, twin.inputs(lanes)
            for base in self._layouts(x):
                for proposal in self._proposals(base, x):
                    self.has_state = True
                    for convention in self._complete(proposal, x):
                        if self._accepts(convention, lanes):
                            return convention
                        if self._is_decided():
                            return None  # right but for a cut gradient or a long lag
            tried = [f.convention for f in self.failures if f.stage >= 2]
            if any(c is not None and c.call != "last" for c in tried):
                return None  # it takes so many lanes, and breaks a law
        return None

    def _is_decided(self) -> bool:
        """Whether the last way that was tried is right but for a cut gradient or a long lag."""
        law, c = self.failures[-1].law, self.failures[-1].convention
        if law is not None and law.name == "start" and c is not None:
            return bool(c.arguments) and c.start.name.startswith("module.")  # two starts
        return law is not None and law.name in ("value", "credit", "long", "random")

    def _note(
        self,
        stage: float,
        convention: Convention | None,
        law: Law | None = None,
        error: Exception | None = None,
    ) -> None:
        """Remember a way that was not accepted."""
        self.failures.append(Failure(stage - 30 * self.one_lane, convention, law, error))
        self._check_time()

    def _check_time(self) -> None:
        """Report that a search goes on, and end it.

        Raises:
            OutOfTimeError: it has taken too long.
        """
        now = time.monotonic()
        if now - self._reported > REPORT:
            self._reported = now
            _log.warning(
                "tt.carry has tried %d ways of calling %s in %.0f s, and gives up after %.0f s",
                *(len(self.failures), type(self.module).__name__, now - self.began, PATIENCE),
            )
        if now - self.began > PATIENCE:
            raise OutOfTimeError

    # ------------------------------------------------------------ calls and inputs

    def _layouts(self, x: Tensor) -> Iterator[Convention]:
        """Calls and layouts of inputs, the usual ones first."""
        hints, module = self.hints, self.twins[0].module
        written = hints.call if callable(hints.call) else None
        sizes = tuple(
            (name, key)
            for name, part in module.named_modules()
            for key in SIZES
            if type(vars(part).get(key)) is int
        )
        layers = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
        orders = ["BT", "TB"] if any(m.batch_first for m in layers) else ["TB", "BT"]
        orders += ["BDT"] if x.dim() == 3 and x.is_floating_point() else []
        orders = orders if hints.batch_first is None else ["BT" if hints.batch_first else "TB"]
        calls: list[Any] = [*get_args(Call)]
        for call in [call for call in calls if call == hints.call] or calls:
            own = ["B"] if call == "step" else ["TB"] if hints.inputs else orders
            own = own + ["" if call == "step" else "T"] * self.one_lane
            kinds = product(own, (False, True) if x.shape[2:] == (1,) else (False,))
            for order, drop in kinds:
                plain = Convention(call, order, drop, hints.inputs, hints.context, written)
                yield replace(plain, sizes=sizes)

    # ------------------------------------------------------------ where the state is

    def _proposals(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with a place of the state and a start."""
        if base.written is not None:
            zeros = _state_zeros(self.module, 1)
            yield from self._started(base, [*self._made(), Start(), *zeros])
            return
        count = 1
        if base.transform is not None:
            try:
                count = len(base.arrange(x))
            except CALL_ERRORS as error:
                self._note(0, base, error=error)
                return
        parameters = parameters_of(self.module.forward)
        if base.transform is None and is_turned(parameters):
            self._note(0, base, error=MisfitError("takes its state before its inputs"))
            return
        parameters = parameters[count:]
        required = [p.name for p in parameters if p.default is p.empty and p.name not in FLAGS]
        optional = [p for p in parameters if p.default is not p.empty and p.name not in FLAGS]
        named = [p.name for p in optional if names_state(p.name)]
        others = [p.name for p in optional if p.default is None and p.name not in named]
        flags = [p.name for p in parameters if p.name in FLAGS and p.default is p.empty]
        weight = self.twins[0].weight
        real = torch.get_default_dtype() if weight is None else weight.dtype
        kinds = product((real, torch.bool), (False, True)) if flags else [(real, False)]
        for dtype, column in kinds:
            constants = [(n, torch.tensor(FLAGS[n], dtype=dtype, device=x.device)) for n in flags]
            plain = replace(base, constants=tuple((*pair, column) for pair in constants))
            inside = self._inside(plain, x) if not required else {}
            yield from inside.get("attributes", ())  # an argument is an option then
            needed = [name for name in required if names_state(name)] or required
            for names in [tuple(required)] if required else _together(named):
                if len(needed) < len(required):
                    break  # an input beside the state
                yield from self._in_arguments(replace(plain, arguments=names), bool(inside))
            yield from inside.get("ports", ())
            for names in _together(others) if not required else ():
                yield from self._in_arguments(replace(plain, arguments=names), True)

    def _made(self) -> Iterator[Start]:
        """What methods of the module return or set."""
        for name in self.own_methods:
            yield Start(f"module.{name}(...)", partial(_from_method, name))

    def _started(self, base: Convention, starts: Iterable[Start]) -> Iterator[Convention]:
        """A convention with each start, or with that of the user."""
        start = self.hints.start
        if start is not None:
            starts = [Start("start(...)", partial(_user_start, start, d)) for d in (None, 0, 1)]
        for one in starts:
            yield replace(base, start=one)

    def _in_arguments(self, base: Convention, optional: bool) -> Iterator[Convention]:
        """A state in arguments, with each way in which it may start."""
        yield from self._started(base, [*self._made(), Start()])
        if self.hints.start is not None:
            return
        layers = {n: m for n, m in self.module.named_modules() if n and isinstance(m, RECURRENT)}
        for name, layer in layers.items() if len(layers) == 1 else ():
            port = LAYER if isinstance(layer, nn.RNNBase) else CELL
            yield replace(base, ports={name: port}, start=RECORDED)
        for start in _state_zeros(self.module, len(base.arguments)) if not optional else ():
            yield replace(base, start=start)

    def _inside(self, base: Convention, x: Tensor) -> dict[str, Iterator[Convention]]:
        """States in attributes and in submodules, from what one call of the module does."""
        twin, lanes = self.twins[0], x.shape[1]
        part = x[:1] if base.call == "step" else x
        for prepare in ("", *self.own_methods):
            for one in self.twins if prepare else ():
                one.prepare(prepare, lanes, base)
            try:
                calls: dict[str, Any] = {}
                twin.first_call(base, part, calls)
                break
            except CALL_ERRORS as error:
                if not prepare:
                    self._note(0, base, error=error)
        else:
            return {}
        self.is_callable = True
        try:
            kept = _remembered(self.twins, base, self._parts(base, x))[1]
        except CALL_ERRORS:
            kept = ()
        # a step without a state has no layers that keep one
        steps = len(part) + base.context
        choices = ports_of(twin.module, calls, steps) if base.call != "step" else []
        choices += [{}] if base.context else []
        ports = (replace(base, ports=ports) for ports in choices)
        return {
            "attributes": self._started(base, [*self._made(), RECORDED] if kept else []),
            "ports": (one for c in ports for one in self._started(c, [Start(), RECORDED])),
        }

    @staticmethod
    def _parts(c: Convention, x: Tensor) -> Sequence[Tensor]:
        """Inputs of three calls."""
        return x.split(2) if c.call == "chunk" else x.split(1)

    # ------------------------------------------------------------ shapes

    def _complete(self, base: Convention, x: Tensor) -> Iterator[Convention]:
        """Conventions with the places of outputs, state and lanes, from calls of the module."""
        twin, parts = self.twins[0], self._parts(base, x)
        x = x if base.call == "chunk" else x[:1]
        try:
            changed, kept = _remembered(self.twins, base, parts)
            if not base.arguments and not base.ports and base.written is None:
                base, kept = replace(base, attributes=kept), ()
            numbers = attributes(twin.module)  # a counter goes on counting, as in use
            scratch = [k for k in changed if not _is_number(numbers.get(k))]
            base = replace(base, scratch=tuple(k for k in scratch if k not in base.attributes))
            result, after = twin.first_call(base, x)
        except CALL_ERRORS as error:
            self._note(0, base, error=error)
            return
        for path in _state_paths(base, result):
            located = replace(base, result=path)
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
                elif base.attributes or not base.context:
                    continue
            except CALL_ERRORS as error:
                self._note(1 + isinstance(error, StateError), located, error=error)
                continue
            self._beside = kept
            for outputs in choices:
                yield replace(located, outputs=outputs)

    def _outputs(self, c: Convention, result: Any, state: State, x: Tensor) -> list[OutputLayout]:
        """The tensors of a result that could be the outputs; a row of them where all are asked."""
        hint = self.hints.output
        held = {id(leaf) for leaf in trees.tensors(state)} if is_state(state) else set[int]()
        if hint is None or hint == "all":
            leaves = [*tensor_paths(result)]
            is_argument = bool(c.arguments)
            own = [
                (p, y)
                for p, y in leaves
                if not (_is_under(p, c.result) if is_argument else id(y) in held)
            ]
            leaves = own or _sinks(leaves)
        else:
            paths = [
                i if isinstance(i, tuple) else (i,)
                for i in (hint if isinstance(hint, list) else [hint])
            ]
            try:
                leaves = [leaf for p in paths for leaf in tensor_paths(item_at(result, p), p)]
            except MisfitError:
                return []
        steps = (len(x) + c.context, len(x)) if c.context else (len(x),)
        fits = [
            next(filter(None, (_fit(path, y, c, n, x.shape[1]) for n in steps)), None)
            for path, y in leaves
        ]
        layouts = [layout for layout in fits if layout is not None]
        if isinstance(hint, list) or (hint == "all" and not isinstance(result, Tensor)):
            same = {layout.order for layout in layouts}
            if len(layouts) < len(fits) or not fits or len(same) > 1:
                return []
            row = OutputLayout((), layouts[0].order, None, tuple(layouts))
            self.choices = []
            return [replace(row, features=tuple(row.read(result, *x.shape[:2]).shape[2:]))]
        self.choices = layouts
        return layouts

    def _lanes(self, c: Convention, x: Tensor, state: State) -> LaneLayout:
        """Where the lanes of the state are: as torch.nn has them, or by a call with fewer lanes."""
        lanes, weight = x.shape[1], self.twins[0].weight
        if lanes == 1:
            return LaneLayout.infer({1: state}, weight)
        try:
            result, after = self.twins[0].first_call(c, x[:, : lanes - 1])
        except CALL_ERRORS:  # it was made for a number of lanes
            dims = [[d for d, n in enumerate(t.shape) if n == lanes] for t in trees.tensors(state)]
            if not all(dims):
                raise
            return LaneLayout.of(tuple(LaneDim(1 if 1 in d else d[0]) for d in dims), state, weight)
        other = item_at(result, c.result) if c.arguments else after
        if [t.shape for t in trees.tensors(state)] == [t.shape for t in trees.tensors(other)]:
            raise MisfitError("has a state without a dimension for lanes")
        return LaneLayout.infer({lanes: state, lanes - 1: other}, weight)

    # ------------------------------------------------------------ the proof

    def _accepts(self, c: Convention, lanes: int) -> bool:
        """Whether a convention obeys every law on every twin; if not, the failure is noted."""
        hidden: dict[str, Law] = {}
        for i, twin in enumerate(self.twins):
            if i == 2 and all(law.holds for law in hidden.values()):
                break  # large inputs wake silent neurons
            failure = self._failure(c, twin, lanes, hidden)
            if failure is not None:
                self._note(*failure)
                return False
        for law in hidden.values():
            if not law.holds:
                self._note(2.9 + RANK[law.name], c, law)
                return False
        return True

    def _failure(
        self, c: Convention, twin: Twin, lanes: int, hidden: dict[str, Law]
    ) -> Failure | None:
        """The first law that a twin breaks; None if it breaks none but those that are `hidden`."""
        try:
            for law in self._laws(c, twin, twin.inputs(lanes)):
                if self.failures:  # a way that holds so far is measured to its end
                    self._check_time()
                if law.name in LIVE:
                    hidden[law.name] = law if law.holds else hidden.get(law.name, law)
                elif not law.holds:
                    return Failure(2.9 + RANK[law.name] + 15 * law.training, c, law)
        except NotFiniteError as error:
            i = self.twins.index(twin)
            if not self._soften(i):
                return Failure(1.5, c, error=error)
            return self._failure(c, self.twins[min(i, len(self.twins) - 1)], lanes, hidden)
        except CALL_ERRORS as error:
            return Failure(1.5, c, error=error)
        return None

    def _soften(self, i: int) -> bool:
        """Change the weights of twins whose outputs are not finite; False if nothing is left."""
        if i == 0:  # large weights overflow within a trial: smaller ones, once
            was_small, self.is_small = self.is_small, True
            if was_small or self.twins[0].module is self.module:
                return False
            changed = self.twins
        else:  # noise may make a weight negative that stands under a root
            self.noise *= 0.1
            twins = twins_of(self.module, self.x, self.noise)
            self.twins[1:] = twins[1:] if self.noise > 0.005 else []
            changed = self.twins[1:] if self.is_small else []
        for twin in changed:
            perturb(twin.module, 0.0, scale=0.1)
        return True

    def _laws(self, c: Convention, twin: Twin, x: Tensor) -> Iterator[Law]:
        """Those of any adapter, and on weights that hide nothing those of the author's own calls.

        Also on the module's own weights, if it cannot be copied.
        """
        twin.restore()
        bound = BoundModule(twin.module, c, torch.zeros_like(x[:1, :1]))
        laboratory = Laboratory(bound, twin.module, x, by_step=c.call != "chunk")
        try:
            states = [bound.initial_state(x.shape[1], None) for _ in range(2)]
            yield Law("random", state_difference(*states), 0.0)
            yield from laboratory.measure()
            yield Law("kept", math.inf if self._beside else 0.0, 0.0)
            if twin is not self.twins[:2][-1]:
                return
            for law in (self._start, self._last):
                yield from law(bound, twin, laboratory)
            steps = long_steps(len(self.x), twin.module)
            if c.call == "chunk" and steps > STEPS:
                yield laboratory.measure_long(twin.inputs(x.shape[1], steps))
            if self.modes.get(""):
                try:
                    yield from laboratory.measure(self.modes)
                except CALL_ERRORS as error:
                    text = f"{type(error).__name__}: {error}".split("\n")[0]
                    yield Law("repeat", float("nan"), 0.0, text, training=True)
        finally:
            bound.release()
            twin.restore()

    def _start(self, bound: BoundModule, twin: Twin, laboratory: Laboratory) -> Iterator[Law]:
        """The initial state must give what the module gives by itself, and its gradients."""
        c, tolerance = bound.convention, laboratory.tolerance
        if c.start.name.startswith("start(") or (not c.attributes and BEGINS.match(c.start.name)):
            return  # the user says it, or the author in a method for that
        x = laboratory.x if c.call == "chunk" else laboratory.x[:1]
        leaves = [p for p in twin.module.parameters() if p.requires_grad]

        def values(y: Tensor, state: State) -> list[Tensor]:
            """Outputs and state as one row, and their gradients."""
            numbers = [leaf for leaf in (y, *trees.tensors(state)) if leaf.is_floating_point()]
            row = torch.cat([leaf.to(y.dtype).flatten() for leaf in numbers])
            grads: Sequence[Tensor] = ()
            with contextlib.suppress(RuntimeError):  # of a layer whose outputs are written in place
                grads = gradients(row, leaves) if leaves and row.requires_grad else ()
            return [row.detach(), *grads]

        own: list[list[Tensor]] = []
        for _ in range(2):
            try:
                y, after = twin.own_call(c, x)
            except CALL_ERRORS:
                return  # it needs a state
            own.append(values(y, c.lanes.lanes_first(after)))
        yield Law("random", difference(own[0][0], own[1][0]), tolerance)
        y, end = laboratory.run(x)
        carried = values(y, end[STATE] if c.context else end)
        if len(carried) == len(own[0]):
            pairs = map(relative_difference, own[0][1:], carried[1:])
            deviation = max([difference(own[0][0], carried[0]), *pairs])
        else:
            deviation = math.inf
        yield Law("start", deviation, tolerance)

    def _last(self, bound: BoundModule, twin: Twin, laboratory: Laboratory) -> Iterator[Law]:
        """Steps one by one must give what one call of the whole sequence gives: all, or its last.

        Otherwise a module that was made for whole sequences would be run on each step alone.
        """
        c = bound.convention
        if c.call != "last" or c.context or c.written is not None:
            return
        x = twin.inputs(laboratory.x.shape[1], long_steps(len(self.x), twin.module))
        for modes in (None, self.modes) if self.modes.get("") else (None,):
            laboratory.training = modes
            with torch.no_grad(), nullcontext() if modes is None else ConstantRandomness():
                y, _ = laboratory.run(x)
                laboratory.restore()
                whole = BoundModule(twin.module, replace(c, call="chunk", start=Start()), x[:1, :1])
                try:
                    result, _ = whole.first_call(x)
                finally:
                    whole.release()
            deviations = [
                difference(item.reshape(expected.shape), expected)
                for item in _outputs_of(result, c.outputs.path, *x.shape[:2])
                for expected in (y[-1], y)
                if item.numel() == expected.numel()
            ]
            deviation = min(deviations, default=float("inf"))
            yield Law("last", deviation, 10 * laboratory.tolerance, training=modes is not None)
        laboratory.training = None


RANK = {name: i for i, name in enumerate(["last", *LAWS])} | {"last": 0}
RECORDED = Start("what the module itself starts from", BoundModule.recorded)


def _own_methods(module: nn.Module) -> list[str]:
    """The methods of a module that make a state or put one back, by their names."""
    names = [n for n in dir(type(module)) if not (hasattr(nn.Module, n) or n.startswith("__"))]
    names = [n for n in names if MAKES_STATE.match(n) and not re.search("weight|param", n)]
    names = [n for n in names if names_state(n) or n.strip("_").startswith("init") or n in RESETS]
    names = [n for n in names if is_method(module, n)]
    return sorted(names, key=lambda n: (n != "initial_state", not names_state(n), n))


def is_method(module: nn.Module, name: str) -> bool:
    """Whether a module has a method of a name, not a parameter or a submodule."""
    value = inspect.getattr_static(module, name, None)  # a property may raise, as Lightning's do
    return callable(value) and not isinstance(value, nn.Module)


def _equal(a: Any, b: Any) -> bool:
    """Whether two nestings hold equal numbers."""
    first, second = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(first) != len(second):
        return False
    for s, t in zip(first, second, strict=True):
        if isinstance(s, Tensor) and isinstance(t, Tensor):
            if difference(s, t) > 0:
                return False
        elif s is not t and not (_is_number(s) and _is_number(t) and np.array_equal(s, t)):
            return False
    return True


def _is_tensors(a: Any, b: Any) -> bool:
    """Whether two values are the same nesting of tensors of the same shapes."""
    rows = [[getattr(t, "shape", None) for t in pytree.tree_leaves(value)] for value in (a, b)]
    return rows[0] == rows[1] and None not in rows[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.ndarray))


def _together(names: list[str]) -> list[tuple[str, ...]]:
    """All names together, then each alone."""
    return [*dict.fromkeys(([tuple(names)] if names else []) + [(name,) for name in names])]


def _from_method(name: str, bound: BoundModule, lanes: int) -> State:
    return bound.from_method(name, lanes)


def _user_start(start: Any, dim: int | None, bound: BoundModule, lanes: int) -> State:
    """The state of the user's: a value, or a function of the lanes, or of module and lanes."""
    if callable(start):
        count = len(parameters_of(start))
        start = start(lanes) if count == 1 else start(bound.module, lanes)
    like = bound.weight
    state = trees.map_tensors(
        lambda t: t if like is None else t.to(like if t.is_floating_point() else like.device), start
    )
    return widen(state, lanes, dim)


def _zero_state(shape: tuple[int | None, ...], count: int, bound: BoundModule, lanes: int) -> State:
    """Zeros of a shape in which None is the number of lanes; as many as a state has tensors."""
    like = bound.example if bound.weight is None else bound.weight
    zeros = like.new_zeros([lanes if n is None else n for n in shape])
    return zeros if count == 1 else (zeros,) * count


def _state_zeros(module: nn.Module, count: int) -> Iterator[Start]:
    """Zeros that a module may take which requires a state: as of its layers, then by sizes."""
    layers = [m for m in module.modules() if isinstance(m, RECURRENT)]
    rows = [m.num_layers * (1 + m.bidirectional) for m in layers if isinstance(m, nn.RNNBase)][:1]
    sizes = [getattr(m, "proj_size", 0) or m.hidden_size for m in layers]
    sizes += [v for k, v in vars(module).items() if type(v) is int and SIZE.search(k)]
    sizes += [n for p in module.parameters() for n in p.shape]
    forms: list[list[int | None]] = [*([n, None] for n in rows), [None], *([None, n] for n in rows)]
    for size in [*dict.fromkeys(sizes)][:6]:
        for form, pairs in product(forms, (1, 2) if count == 1 else (count,)):
            yield Start("zeros", partial(_zero_state, (*form, size), pairs))


def _state_paths(c: Convention, result: Any) -> list[Path]:
    """Where the next state may be in a result, the usual places first."""
    count = len(c.arguments)
    if not count or isinstance(result, Tensor):
        return [()]
    is_row = isinstance(result, (tuple, list))
    names = getattr(result, "__dataclass_fields__", result)
    keys: list[Any] = [*range(len(result))] if is_row else [*names]
    paths: list[Path] = [(slice(len(keys) - count, None),)] if is_row and count > 1 else []
    paths += [(slice(1, None),)] if is_row and count == 1 and len(keys) > 2 else []
    items = [(key,) for key in keys[::-1] if count in (1, _length(item_at(result, (key,))))]
    return items[:1] + paths + items[1:] + [()]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (tuple, list)) else -1


def _is_under(path: Path, outer: Path) -> bool:
    """Whether an item is one at another path, or in it."""
    first = outer[0] if outer else None
    if isinstance(first, slice):
        return path[0] in range(100)[first]
    return path[: len(outer)] == outer


def _flows(state: State, other: State) -> bool:
    """Whether tensors are computed from all tensors of a state."""
    into, total = trees.tensors(state), sum(t.sum() for t in trees.tensors(other))
    if not isinstance(total, Tensor) or not all(t.requires_grad for t in (total, *into)):
        return False
    grads: Any = torch.autograd.grad(total, into, retain_graph=True, allow_unused=True)
    return not any(grad is None for grad in grads)


def _sinks(leaves: list[tuple[Path, Tensor]]) -> list[tuple[Path, Tensor]]:
    """Of states that are all of a result the one that all others flow into; else all."""
    tensors = [leaf for _, leaf in leaves]
    if len(tensors) < 2 or not all(t.requires_grad for t in tensors):
        return leaves

    def is_end(i: int) -> bool:
        others = [t for j, t in enumerate(tensors) if j != i]
        return _flows(tuple(others), tensors[i])

    ends = [leaf for i, leaf in enumerate(leaves) if is_end(i)]
    return ends if len(ends) == 1 else leaves


def _fit(path: Path, y: Tensor, c: Convention, steps: int, lanes: int) -> OutputLayout | None:
    """The layout of a tensor with one output for each step and lane; None for others."""
    if not y.is_floating_point():
        return None
    if c.call == "chunk":
        orders = ["BT", "TB", "BCT", "T"] if c.order == "BT" else ["TB", "BT", "BCT", "T"]
        orders = (["BCT"] if c.order == "BDT" else []) + orders + [f"flat {o}" for o in orders[:2]]
    else:
        orders = ["B", "TB", "BT", ""]
    for order in orders if lanes == 1 else [o for o in orders if o not in ("T", "")]:
        try:
            read = OutputLayout((), order).read(y, steps, lanes)
        except MisfitError:
            continue
        return OutputLayout(path, order, tuple(read.shape[2:]))
    return None


def _outputs_of(result: Any, path: Path, steps: int, lanes: int) -> Iterator[Tensor]:
    """The outputs of all steps, or of the last one, as a call with all steps may return them."""
    item = item_at(result, path)
    if not isinstance(item, Tensor):
        return
    items = item_at(result, path[:-1]) if path else ()
    if isinstance(items, list) and len(items) == steps:  # an output for each step
        item = torch.stack(items)
    yield item
    if item.dim() > 1 and item.shape[1] == steps:
        yield item.transpose(0, 1)
    if item.dim() and item.shape[0] == steps * lanes:
        yield item.unflatten(0, (lanes, steps)).transpose(0, 1)


def _no_outputs(result: Any, x: Tensor) -> str:
    shapes = [tuple(leaf.shape) for _, leaf in tensor_paths(result)]
    return (
        f"returned tensors of shapes {shapes} for {x.shape[0]} steps of {x.shape[1]} lanes, without"
        " one output per step in what is to be the outputs"
    )
