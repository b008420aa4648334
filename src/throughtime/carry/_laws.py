"""The laws of carrying a state, measured on any adapter.

repeat    two equal calls give equal outputs
value     a call does not change the state that it gets
inputs    an input changes the output of its own step or of a later one
causal    an input changes no earlier output
lanes     the inputs of one lane change no other lane, and lanes run alone with their states
shape     the state keeps its shape from call to call
whole     chunks with the state carried give what one call gives
memory    outputs depend on the state
credit    gradients flow through the state: chunks give the gradients of one call

These too, on a module that is called by a convention:

random    two recordings start from the same state
kept      no attribute beside the state is read by the next call
long      the same as `whole`, with chunks as long as those of the stream
start     the start gives what the module gives without a state, and its gradients
last      steps one by one end where one call of the whole sequence ends

Every law is a deviation and what is allowed. Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._calls import OWN, STATE, ZEROS, Adapter
from throughtime.carry._inside import Key, attributes, get_attributes, set_attributes
from throughtime.carry._layout import ORDERS, MisfitError, item_at, shapes_of
from throughtime.carry._trial import (
    ConstantRandomness,
    Snapshot,
    changed_inputs,
    random_normal,
    set_modes,
    weight_of,
)
from throughtime.state import State

SINGLE = 1e-6  # the rounding of a computation in float32, relative


class Sentences(NamedTuple):
    """What a module does that breaks a law, and what to change."""

    broken: str
    advice: str


# The later the broken one is, the nearer is the way.
LAWS: dict[str, Sentences] = {
    "last": Sentences(
        "steps one by one do not end where one call of the whole sequence ends",
        "It was made for whole sequences: attention, pooling or a convolution over all steps"
        " cannot be carried. Let forward(x, state) return (y, state) for each step",
    ),
    "repeat": Sentences(
        "two equal calls in evaluation mode give different outputs",
        "Random numbers: give functional dropout training=self.training. A counter in an attribute,"
        " or in an object of another class: let forward(x, state) return (y, state) with it",
    ),
    "value": Sentences(
        "a call changes the state that it gets, in place",
        "Return a new state instead of writing into the one that came in",
    ),
    "inputs": Sentences(
        "its outputs do not depend on its inputs",
        "Check what forward computes from its inputs",
    ),
    "causal": Sentences(
        "an input changes the outputs of earlier steps",
        "A stream has no future: attention over all steps, a layer that runs backwards,"
        " normalisation over time or a convolution that looks ahead cannot be carried. Use what"
        " has passed only",
    ),
    "lanes": Sentences(
        "the inputs of one lane change another lane",
        "Lanes are independent recordings. If the module takes the other order of time and batch,"
        " write tt.carry(module, batch_first=True) or batch_first=False; if it reshapes time into"
        " the batch or normalises over the batch, let each lane be computed alone",
    ),
    "shape": Sentences(
        "the shape of its state changes from call to call",
        "A state is stored, reset and exported: give it a fixed size, such as the last N steps,"
        " with zeros before the first",
    ),
    "whole": Sentences(
        "chunks with the state carried do not give what one call gives",
        "Something is kept outside the state, or is not kept: past steps of a convolution (write"
        " tt.carry(module, context=STEPS)), attention over the steps of a call, a sum or a norm"
        " over time, a variable of forward. Let forward(x, state) return (y, state) with all that"
        " it needs",
    ),
    "memory": Sentences(
        "its outputs do not depend on the state that it gets",
        "If the module has a memory, say where: tt.carry(module, call=lambda m, x, state: (y,"
        " state)). If it has none, there is nothing to carry",
    ),
    "credit": Sentences(
        "no gradient, or a part of it, flows through the state to the chunk before",
        "The module detaches its state. Remove .detach(), .data or no_grad() from its forward, or"
        " give a spike a surrogate gradient: tt.updates cuts the gradient where its policy says,"
        " and keeps memory flat",
    ),
    "kept": Sentences(
        "what it returns depends on attributes beside its state, which calls change",
        "It keeps a part of its state in attributes. Let forward(x, state) return (y, state) with"
        " all of it, or keep all of it in attributes, a count of steps as a tensor (lanes,)",
    ),
    "random": Sentences(
        "two recordings start from different states: its start is random, or what an earlier call"
        " has left in attributes",
        "Give it one that is fixed, and set attributes to it, such as to None, before tt.carry",
    ),
    "start": Sentences(
        "it gives other outputs, or gradients, for no state than from the start that was tried, or"
        " its start is random",
        "Its recordings start from something that no layer shows: give the module a method"
        " initial_state(lanes) that returns it, or write tt.carry(module, start=lambda m, lanes:"
        " ...)",
    ),
    "long": Sentences(
        "long chunks with the state carried do not give what one call gives",
        "A call reads steps that are further back than its state: keep the past of a convolution,"
        " tt.carry(module, context=STEPS) with (kernel_size - 1) * dilation, or let forward(x,"
        " state) return (y, state) with all that it needs",
    ),
}
# Measured on any adapter
MEASURED = ("repeat", "value", "inputs", "causal", "lanes", "shape", "whole", "memory", "credit")
EXACT = ("random", "value", "inputs", "memory", "shape")
# The exceptions that a module raises for inputs or a state that do not fit it.
MISFIT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True)
class Law:
    """A law that was measured.

    Attributes:
        name: of the law.
        deviation: the largest one measured; for `inputs` and `memory`, what a difference that is
            needed falls short of.
        tolerance: what is allowed.
        error: of a call that failed, instead of a deviation.
        training: whether it was measured in training mode.
    """

    name: str
    deviation: float
    tolerance: float
    error: str = ""
    training: bool = False

    @property
    def holds(self) -> bool:
        """Whether the module obeys it."""
        return self.deviation <= self.tolerance


class NotFiniteError(ValueError):
    """A module computes outputs that are not finite."""


class Laboratory:
    """Runs an adapter on inputs `(T, B, ...)`, always from the same attributes and buffers.

    Args:
        adapter: of `module`.
        module: a copy; its modes are changed.
        x: inputs `(T, B, ...)`.
        chunks: lengths of chunks, with T as their sum.
        tolerance: relative to the largest output; by default a hundred roundings, and at least
            those of a computation in float32.
        long: inputs as long as the chunks of the stream, if they are to be tried.

    Attributes:
        training: the modes of all parts in which laws are measured; None for evaluation.
        outputs: of one call with all steps, without a graph.
        end: the state after it.
    """

    def __init__(
        self,
        adapter: Adapter,
        module: nn.Module,
        x: Tensor,
        chunks: Sequence[int] = (3, 4),
        tolerance: float | None = None,
        long: Tensor | None = None,
    ) -> None:
        self.adapter, self.module, self.x, self._steps = adapter, module, x, long
        self._c: Any = getattr(adapter, "convention", None)
        self._early, self._late, self._lengths = x[: chunks[0]], x[chunks[0] :], [*chunks]
        # puts attributes, buffers and modes back
        self.restore, weight = Snapshot(module).restore, weight_of(module)
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        self._rounding = 100 * torch.finfo(dtype).eps
        # a module in float64 may compute in float32 inside
        self._relative = max(self._rounding, SINGLE) if tolerance is None else tolerance
        self.training: dict[str, bool] | None = None

    def measure(
        self, names: Sequence[str] = MEASURED, training: dict[str, bool] | None = None
    ) -> Iterator[Law]:
        """The laws, one by one, so that a caller may stop at the first that is broken.

        Args:
            names: of the laws.
            training: the modes of all parts, to measure in training, with dropout and random
                numbers replaced by constants; None for evaluation.
        """
        self.training, is_training = training, training is not None
        self.restore()
        set_modes(self.module, training)
        self.restore = Snapshot(self.module).restore
        self._starts = [self.adapter.initial_state(self.x.shape[1]) for _ in range(2)]
        with torch.set_grad_enabled(is_training):  # as in use
            y, self.end = self.run(self.x)
            self.outputs = y.detach()
            self._first, self._middle = self.run(self._early)
            self._before = trees.map_leaves(torch.clone, trees.detach(self._middle))
            self._later = self.run(self._late, *self._lengths[1:], state=self._middle)
        self._scale = 1 + float(self.outputs.abs().max())
        self.tolerance, self._needed = (n * self._scale for n in (self._relative, self._rounding))
        for name in names:
            measure: Callable[[], float] = getattr(self, f"_{name}")
            try:
                with torch.set_grad_enabled(
                    is_training or name in ("credit", "start", "last", "kept")
                ):
                    deviation, error = measure(), ""
            except MISFIT_ERRORS as raised:
                deviation, error = math.nan, str(raised).split("\n")[0]
            tolerance = self.tolerance * (10 if name in ("long", "last") else name not in EXACT)
            yield Law(name, deviation, tolerance, error, is_training)

    def _random(self) -> float:
        first, second = self._starts
        if not isinstance(self._c.start, tuple):  # the user's own may differ between lanes
            second = trees.map_leaves(lambda leaf: leaf[:1].expand(leaf.shape), second)
        return difference(first, second)

    def _repeat(self) -> float:
        # in evaluation, what the first run left in attributes and buffers must not matter
        return self._apart(*self.run(self.x, restore=False))

    def _value(self) -> float:
        return difference(self._middle, self._before)

    def _inputs(self) -> float:
        self._change = self._moved(self.x.shape[1] - 1)
        return max(0.0, self._needed - float(self._change[len(self.x) // 2 :, -1].max()))

    def _causal(self) -> float:
        return float(self._change[: len(self.x) // 2, -1].max())

    def _moved(self, lane: int) -> Tensor:
        """By how much another input of a lane in the middle changes each output `(T, B)`."""
        y, _ = self.run(changed_inputs(self.x, len(self.x) // 2, lane))
        return (y.detach() - self.outputs).abs().reshape(*y.shape[:2], -1).amax(2)

    def _lanes(self) -> float:
        if (lanes := self.x.shape[1]) == 1:
            return 0.0
        mixed = max(float(self._change[:, :-1].max()), float(self._moved(0)[:, 1:].max()))
        if self.training:
            return mixed  # a mask may be drawn for each row of the batch
        try:
            alone = self._alone([lanes - 1, 0])
        except MISFIT_ERRORS:  # it is made for a number of lanes
            alone = self._alone([*range(lanes)][::-1])
        return max(mixed, alone)

    def _alone(self, lanes: list[int]) -> float:
        index = torch.tensor(lanes, device=self.x.device)
        y, _ = self.run(self._late[:, index], state=trees.select(self._before, index))
        return difference(y, self._later[0][:, index])

    def _shape(self) -> float:
        first, *others = map(shapes_of, (self._starts[0], self._before, self.end))
        return 0.0 if others == [first, first] else math.inf

    def _whole(self) -> float:
        y, end = self._later
        deviations = [self._apart(torch.cat([self._first, y]), end)]
        if self.training is None:
            # what steps leave in attributes and buffers must not matter to a chunk either
            *head, last = self._lengths
            deviations.append(self._apart(*self.run(self.x, *[1] * sum(head), last)))
        return max(deviations)

    def _memory(self) -> float:
        y, _ = self.run(self._late)
        return max(0.0, self._needed - difference(y, self.outputs[-len(y) :]))

    def _credit(self) -> float:
        """The difference of two gradients of the outputs: in one call and in chunks."""
        x = self.x.clone().requires_grad_() if self.x.is_floating_point() else self.x
        leaves = [p for p in (*self.module.parameters(), x) if p.requires_grad]
        try:
            y, z = (self.run(x, *chunks)[0] for chunks in ((), self._lengths))
            if not leaves or not (y.requires_grad and z.requires_grad):
                return 0.0
            deviation = gradient_difference(y, z, leaves)
            is_stepped = self._c is not None and self._c.call != "chunk"
            # what it detaches gets no gradient at all then
            return math.inf if is_stepped and self._cuts_credit() else deviation
        except RuntimeError:  # of torch's LSTM in float32 whose outputs are written in place
            if self.training is None:
                raise
            return 0.0

    def _cuts_credit(self) -> bool:
        """Whether a tensor of the state changes outputs and gets no gradient from them.

        Where the module gets one step at a time, it is detached however the steps are divided. The
        first step after it and the later ones are two questions: what a step returns may be cut
        where what it computes is not.
        """
        state = trees.map_leaves(_fresh_leaf, self.run(self._early)[1])
        y, _ = self.run(self._late, state=state)
        for leaf in filter(trees.differentiable, trees.tensors(state)):
            other = trees.map_leaves(lambda t, k=leaf: t * 0.5 + 0.1 if t is k else t, state)
            with torch.no_grad():
                changed, _ = self.run(self._late, state=other)
            for part, moved in ((y[:1], changed[:1]), (y[1:], changed[1:])):
                if (
                    difference(moved, part) > self.tolerance
                    and not gradients(part, [leaf])[0].any()
                ):
                    return True
        return False

    def run(
        self, x: Tensor, *chunks: int, state: State = (), restore: bool = True
    ) -> tuple[Tensor, State]:
        """Outputs and the final state; in one call unless lengths of chunks are given.

        In training each call starts from the same buffers, which it may change for itself: a step
        of power iteration or a count of calls depends on how the steps are divided.

        Raises:
            NotFiniteError: outputs are not finite.
        """
        if restore:
            self.restore()
        if state == ():
            state = trees.map_leaves(torch.clone, self._starts[0])
        outputs: list[Tensor] = []
        for part in x.split(chunks or (len(x),)):
            if self.training is not None:
                self.restore()
                random.seed(0)
            with self.constant_randomness():
                y, state = self.adapter.run(part, state)
            outputs.append(y)
        y = torch.cat(outputs)
        if not torch.isfinite(y).all():
            raise NotFiniteError("the outputs are not finite")
        return y, state

    def constant_randomness(self) -> Any:
        """The context of a call: in training, dropout and random numbers are constants."""
        return nullcontext() if self.training is None else ConstantRandomness()

    def _apart(self, y: Tensor, end: State) -> float:
        """The difference from one call."""
        return difference((y, end), (self.outputs, self.end))

    # ------------------------------------------------------------ with the author's own calls

    def _long(self) -> float:
        x: Any = self._steps
        if self._c.call != "chunk":
            return 0.0
        try:
            y, z = (self.run(x, *chunks)[0] for chunks in ((), (len(x) // 2, -(-len(x) // 2))))
        except NotFiniteError:  # noise lets a recurrence grow
            return 0.0
        return difference(y, z) * self._scale / (1 + float(y.abs().max()))

    def _kept(self) -> float:
        """How much the attributes that a call leaves change what the next one makes and leaves.

        Counts of calls go on far beyond those of a trial.
        """
        adapter: Any = self.adapter
        self.restore()
        rows = [attributes(self.module)]
        has_numbers = any(type(value) in (int, float) for value in rows[0].values())
        for _ in range(2 * has_numbers):
            self.run(self.x, state=self._starts[0], restore=False)
            rows.append(attributes(self.module))
        counts = {
            key: value + 1000 * (value - rows[-2][key])
            for key, value in rows[-1].items()
            if type(value) in (int, float) and len({row.get(key) for row in rows}) == 3
        }
        if counts:
            self.restore()
            set_attributes(self.module, counts)
            late = self.run(self.x, state=self._starts[0], restore=False)
            numbers = {key: rows[0].get(key) for key in counts}
            if (deviation := max(self._apart(*late), self._uneven(numbers))) > self.tolerance:
                return deviation
        if self._c.attributes:
            return 0.0
        keys, adapter.touched = adapter.touched, ()
        before, x = self.x[:6].split(3)
        rows = list[Any]()
        try:
            for parts in ((x,), (before, x)):
                self.restore()
                ys = [adapter.run(part, self._starts[0])[0] for part in parts]
                rows.append([ys[-1], get_attributes(self.module, keys)])
        finally:
            adapter.touched = keys
        return difference(*rows)

    def _uneven(self, numbers: dict[Key, Any]) -> float:
        """The difference of many steps and their gradients from those with equal counts."""
        x = torch.cat([self.x] * 10)
        steps = [1] * len(x)
        y = self.run(x, *steps)
        hook = self.module.register_forward_pre_hook(lambda m, _: set_attributes(m, numbers))
        z = self.run(x, *steps)
        hook.remove()
        return self._difference(y, z)

    def _start(self) -> float:
        adapter: Any = self.adapter
        c = self._c
        if c.start not in (None, OWN, *ZEROS) and not c.attributes:
            return 0.0  # the user says it, or the author in a method for that
        x, calls = self.x if c.call == "chunk" else self.x[:1], list[Any]()
        for start in (None, c.start) if c.start in ZEROS else (c.start,):
            with suppress(Exception):  # it needs a state
                calls = calls or [self._own(x, start, c.call) for _ in range(2)]
        if not calls:
            return 0.0
        y, end = self.run(x)
        end = end[STATE] if c.hints.context else end
        try:
            rows = [(adapter.read(y, x), c.lanes.lanes_first(state)) for y, state in calls]
        except MisfitError:
            if c.hints.context:
                return 0.0  # its first steps alone have fewer outputs: it needs the zeros
            raise
        return max(difference(*rows), self._difference(rows[0], (y, end)))

    def _last(self) -> float:
        c = self._c
        x: Any = self._steps
        if c.call != "last" or c.hints.context or c.hints.call:
            return 0.0
        y = item_at(self._own(x, c.start, "chunk")[0], c.outputs[0].path)
        z, _ = self.run(x)
        # all outputs, or the last
        fits = [z[-1], *(z.movedim((0, 1), order) for order in ORDERS if max(order) < z.dim())]
        fits = [part.reshape(y.shape) for part in fits if part.numel() == y.numel()]
        return self._difference(y, min(fits, key=partial(difference, y), default=z))

    def _own(self, x: Tensor, start: Any, call: Any) -> tuple[Any, State]:
        """What the author's own call returns, and the state after it."""
        adapter: Any = self.adapter
        self.restore()
        bare = replace(self._c.hints, context=0)
        adapter.convention = replace(self._c, hints=bare, start=start, call=call)
        try:
            with self.constant_randomness():
                return adapter.first_call(x)
        finally:
            adapter.convention = self._c

    def _difference(self, *calls: Any) -> float:
        """The difference of two outputs and states, and that of their gradients."""
        leaves = [p for p in self.module.parameters() if p.requires_grad]
        deviation = difference(*calls)
        with suppress(RuntimeError):  # of a layer whose outputs are written in place
            y, z = calls
            return max(deviation, gradient_difference(y, z, leaves))
        return deviation


def _fresh_leaf(leaf: Tensor) -> Tensor:
    leaf = leaf.detach().clone()
    return leaf.requires_grad_() if trees.differentiable(leaf) else leaf


def gradients(y: State, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss of all outputs, or of a tree of them; zeros without a graph."""
    parts = [part for part in trees.tensors(y) if part.is_floating_point()]
    loss = sum((part * random_normal(part.shape, 2).to(part)).sum() for part in parts)
    if not (leaves and isinstance(loss, Tensor) and loss.requires_grad):
        return [*map(torch.zeros_like, leaves)]
    grads = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    return [grad.to_dense() for grad in grads]


def gradient_difference(y: State, z: State, leaves: Sequence[Tensor]) -> float:
    """The largest difference of two gradients, relative to the largest number of each tensor."""
    pairs = zip(gradients(y, leaves), gradients(z, leaves), strict=True)
    return max(
        (difference(a, b) / (1 + float(a.abs().max())) for a, b in pairs if a.numel()), default=0.0
    )


def difference(first: Any, second: Any) -> float:
    """The largest difference of the tensors of two nestings; infinite if their shapes differ.

    Infinities of one sign are equal, and so are two NaN.
    """
    rows = [trees.named_tensors([tree]) for tree in (first, second)]
    if [(name, leaf.shape) for name, leaf in rows[0]] != [(n, leaf.shape) for n, leaf in rows[1]]:
        return math.inf
    return max((_distance(a, b) for (_, a), (_, b) in zip(*rows, strict=True)), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().to_dense(), b.detach().to_dense()
    if not a.numel() or (a.dtype == b.dtype and torch.equal(a, b)):  # usually: one operator
        return 0.0
    a, b = (t.cpu().to(torch.promote_types(t.dtype, torch.float64)) for t in (a, b))
    distance = (a - b).abs().nan_to_num(math.inf, math.inf)  # one NaN would hide the others
    return float(distance.masked_fill(torch.isclose(a, b, 0, 0, equal_nan=True), 0).max())
