"""The laws of carrying a state, measured on any adapter.

repeat    two equal calls give equal outputs
value     a call does not change the state that it gets
inputs    an input changes the output of its own step or of a later one
causal    an input changes no earlier output
lanes     the inputs and the restart of one lane change no other, and lanes run alone
shape     the state keeps its shape from call to call
whole     chunks with the state carried give what one call gives
memory    outputs depend on the state
credit    gradients flow through the state: chunks, also long ones, give the gradients of one call

These too, on a module that is called by a convention:

random    two recordings start from the same state
kept      calls change no attribute beside the state that the next call reads, and no number
long      the same as `whole`, with chunks as long as those of the stream
start     the start gives what the module gives without a state, and its gradients
last      steps one by one end where one call of the whole sequence ends

Every law is a deviation and what is allowed. Shapes: `T` steps, `B` lanes, `D` input features.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._calls import STATE, ZEROS, Adapter, Convention, Ran
from throughtime.carry._inside import (
    ConstantRandomness,
    Snapshot,
    attributes,
    changed_inputs,
    get_attributes,
    parameters_of,
    random_normal,
    set_modes,
    weight_of,
)
from throughtime.carry._layout import MisfitError, shapes_of
from throughtime.state import State

SINGLE = 1e-6  # the rounding of a computation in float32, relative


# What a module does that breaks a law, up to the first dot, and what to change. The later the law,
# the nearer is the way.
LAWS = {
    "last": (
        "steps one by one do not end where one call of the whole sequence ends. It was made for"
        " whole sequences: attention, pooling or a convolution over all steps cannot be carried."
        " Let forward(x, state) return (y, state) for each step"
    ),
    "repeat": (
        "two equal calls in evaluation mode give different outputs. Random numbers: give"
        " functional dropout training=self.training. A counter: let forward(x, state) return (y,"
        " state) with it"
    ),
    "value": (
        "a call changes the state that it gets, in place. Return a new state instead of writing"
        " into the one that came in"
    ),
    "inputs": (
        "its outputs do not depend on its inputs. Check what forward computes from its inputs"
    ),
    "causal": (
        "an input changes the outputs of earlier steps. A stream has no future: attention over all"
        " steps, a layer that runs backwards, a mean over time or a convolution that looks ahead"
        " cannot be carried. Use what has passed only"
    ),
    "lanes": (
        "the inputs of one lane change another lane. Lanes are independent recordings. If the"
        " module takes the other order of time and batch, write tt.carry(module, batch_first=True)"
        " or batch_first=False; if it reshapes time into the batch or normalises over the batch,"
        " let each lane be computed alone"
    ),
    "shape": (
        "the shape of its state changes from call to call. Give it a fixed size, such as the last"
        " N steps, with zeros before the first"
    ),
    "whole": (
        "chunks with the state carried do not give what one call gives. Something is kept outside"
        " the state, or is not kept: past steps of a convolution (write tt.carry(module,"
        " context=STEPS)), attention over the steps of a call, a sum or normalisation over time, a"
        " variable of forward, a state after dropout. Let forward(x, state) return (y, state) with"
        " all that it needs; dropout belongs on outputs"
    ),
    "memory": (
        "its outputs do not depend on the state that it gets. If the module has a memory, say"
        " where: tt.carry(module, call=lambda m, x, state: (y, state)). If it has none, there is"
        " nothing to carry"
    ),
    "credit": (
        "no gradient, or a part of it, flows through the state to the chunk before. The module"
        " detaches its state. Remove .detach(), .data or no_grad() from its forward, or give a"
        " spike a surrogate gradient: tt.updates cuts the gradient where its policy says"
    ),
    "kept": (
        "what it returns depends on attributes beside its state, which calls change, or calls"
        " change a number. Let forward(x, state) return (y, state) with all of its state, or keep"
        " all of it in attributes, a count of steps as a tensor (lanes,). Remove a count that"
        " nothing reads"
    ),
    "random": (
        "two recordings start from different states: its start is random, or what an earlier call"
        " has left in attributes. Give it one that is fixed, and set attributes to it, such as to"
        " None, before tt.carry"
    ),
    "start": (
        "it gives other outputs, or gradients, for no state than from the start that was tried, or"
        " its start is random. Say what a recording starts from: tt.carry(module, start=lambda m,"
        " lanes: ...), or let forward without a state start from its method initial_state(lanes)."
        " With context=, pad the inputs once, by all its steps, and no layer inside"
    ),
    "long": (
        "long chunks with the state carried do not give what one call gives. A call reads steps"
        " that are further back than its state: keep the past of a convolution, tt.carry(module,"
        " context=STEPS) with (kernel_size - 1) * dilation, or let forward(x, state) return (y,"
        " state) with all that it needs"
    ),
}
# Measured on any adapter
MEASURED = ("repeat", "value", "inputs", "memory", "causal", "lanes", "shape", "whole", "credit")
EXACT = ("random", "value", "inputs", "memory", "shape")
GRADIENTS = ("credit", "start", "last", "kept")  # measured with a graph
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


class Runs:
    """Calls of an adapter, each from the same attributes and buffers.

    Args:
        adapter: of `module`.
        module: a copy; its modes are changed.
        lanes: B.
        training: the modes of all parts, to run in training, with dropout and random numbers
            replaced by constants; none for evaluation.
    """

    def __init__(
        self, adapter: Any, module: nn.Module, lanes: int, training: Sequence[bool] = ()
    ) -> None:
        self.adapter, self.module, self.is_training = adapter, module, bool(training)
        set_modes(module, training)
        self.convention = getattr(adapter, "convention", Convention())
        self.restore = Snapshot(module).restore  # puts attributes, buffers and modes back
        # of a call: in training, dropout and random numbers are constants
        self.randomness = ConstantRandomness if training else nullcontext[None]
        self.starts = [adapter.initial_state(lanes) for _ in range(2)]

    def __call__(self, x: Tensor, *chunks: int, state: State = (), restore: bool = True) -> Ran:
        """Outputs and the final state; in one call unless lengths of chunks are given.

        In training each call starts from the same buffers, which it may change for itself: a step
        of power iteration or a count of calls depends on how the steps are divided.

        Raises:
            FloatingPointError: outputs are not finite.
        """
        if restore:
            self.restore()
        if state == ():
            state = trees.map_leaves(torch.clone, self.starts[0])
        outputs: list[Tensor] = []
        for part in x.split(chunks or (len(x),)):
            if self.is_training:
                self.restore()
                random.seed(0)
            with self.randomness():
                y, state = self.adapter.run(part, state)
            outputs.append(y)
        y = torch.cat(outputs)
        if not torch.isfinite(y).all():
            raise FloatingPointError("the outputs are not finite")
        return y, state

    def own(self, x: Tensor, start: Any, unit: Any) -> tuple[Any, State]:
        """What the author's own call returns, and the state after it."""
        self.restore()
        with self.randomness():
            return self.otherwise(context=0, start=start, unit=unit).first_call(x)

    def otherwise(self, **options: Any) -> Any:
        """The adapter, with another convention."""
        adapter = copy.copy(self.adapter)
        adapter.convention = replace(self.convention, **options)
        return adapter


def measured(
    adapter: Adapter,
    module: nn.Module,
    x: Tensor,
    names: Sequence[str] = MEASURED,
    *,
    chunks: Sequence[int] = (3, 4),
    tolerance: float | None = None,
    training: Sequence[bool] = (),
    long: Tensor | None = None,
) -> Iterator[Law]:
    """The laws, one by one, so that a caller may stop at the first that is broken.

    Args:
        adapter: of `module`.
        module: a copy; its modes, attributes and buffers are changed.
        x: inputs `(T, B, ...)`.
        names: of the laws.
        chunks: lengths of chunks, with T as their sum.
        tolerance: relative to the largest output; by default a hundred roundings, and at least
            those of a computation in float32.
        training: as in `Runs`.
        long: inputs as long as the chunks of the stream, for the law `long`.
    """
    runs, weight = Runs(adapter, module, x.shape[1], training), weight_of(module)
    rounding = 100 * torch.finfo(torch.get_default_dtype() if weight is None else weight.dtype).eps
    # a module in float64 may compute in float32 inside
    relative = max(rounding, SINGLE) if tolerance is None else tolerance
    with torch.set_grad_enabled(runs.is_training):  # as in use
        y, end = runs(x)
        scale = 1 + float(y.detach().abs().max())
        laws = _of_any(runs, x, [*chunks], (y.detach(), end), (relative * scale, rounding * scale))

    def far(law: Callable[..., float]) -> float:
        """A law in chunks as long as those of the stream: a call may detach now and then."""
        with suppress(FloatingPointError):  # noise lets a recurrence grow
            if long is not None and c.unit == "chunk":
                return law(runs, long, [len(long) // 2, -(-len(long) // 2)], scale)
        return 0.0

    c, near = runs.convention, laws["credit"]
    laws |= {
        "credit": lambda: max(near(), far(_credit)),
        "random": lambda: difference(
            runs.starts[0],
            # the user's may differ between lanes
            trees.map_leaves(
                lambda s: s if isinstance(c.start, tuple) else s[:1].expand(s.shape), runs.starts[1]
            ),
        ),
        "kept": lambda: kept_difference(runs, x),
        "long": lambda: far(_long_difference),
        "start": lambda: _own_difference(runs, x, c.unit),
        "last": lambda: _own_difference(runs, long, "chunk") if c.unit == "last" else 0.0,
    }
    for name in names:
        try:
            with torch.set_grad_enabled(runs.is_training or name in GRADIENTS):
                deviation, error = laws[name](), ""
        except MISFIT_ERRORS as raised:
            deviation, error = math.nan, str(raised).split("\n")[0]
        allowed = relative * scale * (10 if name in ("long", "last") else name not in EXACT)
        yield Law(name, deviation, allowed, error, runs.is_training)


def _of_any(
    runs: Runs, x: Tensor, lengths: list[int], whole: Any, limits: tuple[float, float]
) -> dict[str, Callable[[], float]]:
    """The laws of any adapter.

    Args:
        runs: of it.
        x: inputs.
        lengths: of chunks.
        whole: outputs and state of one call.
        limits: what is allowed, and by how much outputs must change where they have to.
    """
    (outputs, end), middle, count = whole, len(x) // 2, x.shape[1]
    early, late = x[: lengths[0]], x[lengths[0] :]
    first, state = runs(early)
    before = trees.map_leaves(torch.clone, trees.detach(state))
    second, last = runs(late, *lengths[1:], state=state)

    @cache
    def changed(lane: int) -> Tensor:
        """By how much another input of a lane in the middle changes each output `(T, B)`."""
        y, _ = runs(changed_inputs(x, middle, lane))
        return (y.detach() - outputs).abs().reshape(*y.shape[:2], -1).amax(2)

    def alone(*lanes: int) -> float:
        index = torch.tensor(lanes, device=x.device)
        y, _ = runs(late[:, index], state=trees.select(before, index))
        return difference(y, second[:, index])

    def mixed() -> float:
        if count == 1:
            return 0.0
        deviation = float(torch.cat([changed(count - 1)[:, :-1], changed(0)[:, 1:]]).max())
        if runs.is_training:
            return deviation  # a mask may be drawn for each row of the batch
        restarted = torch.arange(count, device=x.device) == 0
        y, _ = runs(late, state=trees.reset(before, runs.starts[0], restarted))
        deviation = max(deviation, difference(y[:, 1:], second[:, 1:]))
        try:
            return max(deviation, alone(count - 1, 0))
        except MISFIT_ERRORS:  # it is made for a number of lanes
            return max(deviation, alone(*range(count)[::-1]))

    def divided() -> float:
        deviation = difference((torch.cat([first, second]), last), whole)
        if runs.is_training:
            return deviation
        # what steps leave in attributes and buffers must not matter to a chunk either
        return max(
            deviation, difference(runs(x, *[1] * (len(x) - lengths[-1]), lengths[-1]), whole)
        )

    shapes = [*map(shapes_of, (runs.starts[0], before, end))]
    return {
        # in evaluation, what the first run left in attributes and buffers must not matter
        "repeat": lambda: difference(runs(x, restore=False), whole),
        "value": lambda: difference(state, before),
        "inputs": lambda: max(0.0, limits[1] - float(changed(count - 1)[middle:, -1].max())),
        "causal": lambda: float(changed(count - 1)[:middle, -1].max()),
        "lanes": mixed,
        "shape": lambda: 0.0 if shapes[1:] == shapes[:-1] else math.inf,
        "whole": divided,
        "memory": lambda: max(0.0, limits[1] - difference(runs(late)[0], second)),
        "credit": lambda: _credit(runs, x, lengths, limits[0]),
    }


def _credit(runs: Runs, x: Tensor, lengths: list[int], limit: float) -> float:
    """The difference of two gradients of the outputs: in one call and in chunks."""
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    leaves = [p for p in (*runs.module.parameters(), x) if p.requires_grad]
    try:
        y, z = (runs(x, *chunks)[0] for chunks in ((), lengths))
        if not leaves or not (y.requires_grad and z.requires_grad):
            return 0.0
        # what a step detaches gets no gradient at all
        if runs.convention.unit != "chunk" and cuts_credit(runs, x, lengths[0], limit):
            return math.inf
        return gradient_difference(y, z, leaves)
    except RuntimeError:  # of torch's LSTM in float32 whose outputs are written in place
        if not runs.is_training:
            raise
        return _credit(Runs(runs.adapter, runs.module, x.shape[1]), x, lengths, limit)


def cuts_credit(runs: Runs, x: Tensor, early: int, limit: float) -> bool:
    """Whether a tensor of the state changes outputs and gets no gradient from them.

    Where the module gets one step at a time, it is detached however the steps are divided. The
    first step after it and the later ones are two questions: what a step returns may be cut where
    what it computes is not.
    """

    def fresh(leaf: Tensor) -> Tensor:
        return leaf.detach().clone().requires_grad_(trees.differentiable(leaf))

    state = trees.map_leaves(fresh, runs(x[:early])[1])
    y, _ = runs(x[early:], state=state)
    for leaf in filter(trees.differentiable, trees.tensors(state)):
        other = trees.map_leaves(lambda t, k=leaf: t * 0.5 + 0.1 if t is k else t, state)
        z, _ = runs(x[early:], state=other)
        for part in (slice(1), slice(1, None)):
            if difference(z[part], y[part]) > limit and not gradients(y[part], [leaf])[0].any():
                return True
    return False


# ---------------------------------------------------------------- with the author's own calls


def _long_difference(runs: Runs, x: Tensor, lengths: list[int], scale: float) -> float:
    y, z = (runs(x, *chunks)[0] for chunks in ((), lengths))
    return difference(y, z) * scale / (1 + float(y.abs().max()))


def _own_difference(runs: Runs, x: Any, unit: str) -> float:
    """The difference from the author's own call without a state, if that is possible.

    Args:
        runs: of the module.
        x: inputs.
        unit: of the author's call; it is longer than in use where a chunk gives the last outputs.
    """
    adapter, c = runs.adapter, runs.convention
    parameters = parameters_of(runs.module.forward)
    required = any(p.default is p.empty for p in parameters if p.name in c.arguments)
    is_same, is_said = unit == c.unit, c.start != ZEROS and (required or isinstance(c.start, tuple))
    if c.call or (is_said and is_same and c.start and not c.attributes):
        return 0.0  # the user says it, or the author in a method for that
    x, calls = x if unit == "chunk" else x[:1], list[Any]()
    for start in (c.start,) if is_said or c.attributes else (None, c.start):
        with suppress(*[Exception] * is_same):  # it needs a state
            calls = calls or [runs.own(x, start, unit) for _ in range(2)]
    if not calls:
        return 0.0
    y, end = runs(x)
    try:
        rows = [(adapter.read(own, y), c.lanes.lanes_first(state)) for own, state in calls]
    except MisfitError:
        if c.context:
            return 0.0  # its first steps alone have fewer outputs: it needs the zeros
        if is_same:
            raise
        y = y[-1:]
        rows = [(adapter.read(own, y), c.lanes.lanes_first(state)) for own, state in calls]
    own = _difference(runs, rows[0], (y, end[STATE] if c.context else end))
    return max(difference(*rows), own)


def _difference(runs: Runs, y: State, z: State) -> float:
    """The difference of two outputs and states, and that of their gradients."""
    leaves = [p for p in runs.module.parameters() if p.requires_grad]
    with suppress(RuntimeError):  # of a layer whose outputs are written in place
        return max(difference(y, z), gradient_difference(y, z, leaves))
    return difference(y, z)


def kept_difference(runs: Runs, x: Tensor) -> float:
    """How much the attributes that a call leaves change what the next one makes and leaves.

    A number that calls change may count them, and change outputs long after a trial.
    """
    c, rows = runs.convention, list[Any]()
    runs.restore()
    for _ in range(2):
        runs(x[:1], restore=False)
        held = attributes(runs.module).items()
        rows.append({key: v for key, v in held if type(v) in (int, float)})
    if rows[0] != rows[1]:
        return math.inf
    if c.attributes:
        return 0.0
    rows, (early, x), adapter = [], x[:6].split(3), runs.otherwise(scratch=())
    for parts in ((x,), (early, x)):
        runs.restore()
        ys = [adapter.run(part, runs.starts[0])[0] for part in parts]
        rows.append([ys[-1], get_attributes(runs.module, c.scratch)])
    return difference(*rows)


def gradients(y: State, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss of all outputs, or of a tree of them; zeros without a graph."""
    parts = [part for part in trees.tensors(y) if part.requires_grad]
    if not (leaves and parts):
        return [*map(torch.zeros_like, leaves)]
    weights = [random_normal(part.shape, 2).to(part) for part in parts]
    grads = torch.autograd.grad(parts, leaves, weights, retain_graph=True, materialize_grads=True)
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
    rows = [dict(trees.named_tensors([tree])) for tree in (first, second)]
    if rows[0].keys() != rows[1].keys():
        return math.inf
    return max((_distance(leaf, rows[1][name]) for name, leaf in rows[0].items()), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if not a.numel() or (a.dtype == b.dtype and torch.equal(a, b)):  # usually: one operator
        return 0.0
    a, b = (  # one NaN would hide the others
        t.detach().cpu().to(torch.promote_types(t.dtype, torch.float64)).nan_to_num(1e300)
        for t in (a, b)
    )
    return float((a - b).abs().max())
