"""The laws of carrying a state, measured on any adapter.

repeat    two equal calls give equal outputs
value     a call does not change the state that it gets
inputs    an input changes the output of its own step or of a later one
causal    an input changes no earlier output
lanes     the inputs of one lane change no other lane, and lanes run alone with their states
whole     chunks with the state carried give what one call gives
memory    outputs depend on the state
credit    gradients flow through the state: chunks give the gradients of one call
long      the same as `whole`, with chunks as long as those of the stream

Those that compare with the module as its author calls it are in `_subject`. Every law is a
deviation and what is allowed. Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import Adapter
from throughtime.carry._trial import (
    ConstantRandomness,
    Snapshot,
    changed_inputs,
    random_normal,
    set_modes,
)
from throughtime.state import State

NOT_FINITE = "the outputs are not finite"
SINGLE = 1e-6  # the rounding of a computation in float32, relative


class Sentences(NamedTuple):
    """What a module does that breaks a law, and what to change."""

    broken: str
    advice: str


# A wrong call breaks the first, a wrong layout the next two: the later one is, the more it says.
LAWS: dict[str, Sentences] = {
    "last": Sentences(
        "steps one by one do not end where one call of the whole sequence ends",
        "It was made for whole sequences: attention, pooling or a convolution over all steps"
        " cannot be carried. Let forward(x, state) return (y, state) for each step",
    ),
    "inputs": Sentences(
        "its outputs do not depend on its inputs",
        "Check what forward computes from its inputs",
    ),
    "lanes": Sentences(
        "the inputs of one lane change another lane",
        "Lanes are independent recordings. If the module takes the other order of time and batch,"
        " write tt.carry(module, batch_first=True) or batch_first=False; if it reshapes time into"
        " the batch or normalises over the batch, let each lane be computed alone",
    ),
    "repeat": Sentences(
        "two equal calls in evaluation mode give different outputs",
        "Random numbers: give functional dropout training=self.training. A random initial state:"
        " tt.carry(module, start=lambda lanes: ...) with one that is fixed. A counter in an"
        " attribute, or in an object of another class: make it a part of the state",
    ),
    "causal": Sentences(
        "an input changes the outputs of earlier steps",
        "A stream has no future: attention over all steps, a layer that runs backwards,"
        " normalisation over time or a convolution that looks ahead cannot be carried. Use what"
        " has passed only",
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
        "Name the parameter, or the attribute, that is the state: tt.carry(module,"
        " state='hidden'). If there is none, the module has no memory, and nothing is to be"
        " carried",
    ),
    "value": Sentences(
        "a call changes the state that it gets, in place",
        "Return a new state instead of writing into the one that came in",
    ),
    "credit": Sentences(
        "no gradient, or a part of it, flows through the state to the chunk before",
        "The module detaches its state. Remove .detach(), .data or no_grad() from its forward:"
        " tt.updates cuts the gradient where its policy says, and keeps memory flat",
    ),
    "start": Sentences(
        "it gives other outputs for no state than for a state of zeros",
        "Its recordings start from something that no layer shows: give the module a method"
        " initial_state(lanes) that returns it, or write tt.carry(module, start=lambda lanes: ...)",
    ),
    "long": Sentences(
        "long chunks with the state carried do not give what one call gives",
        "A call reads steps that are further back than its state: keep the past of a convolution,"
        " tt.carry(module, context=STEPS) with (kernel_size - 1) * dilation, or let forward(x,"
        " state) return (y, state) with all that it needs",
    ),
    "kept": Sentences(
        "what it returns depends on attributes beside its state, which calls change",
        "It keeps a part of its state in attributes. Let forward take and return all of it, or"
        " keep all of it in attributes and write tt.carry(module, state='hidden') for the one",
    ),
}


@dataclass(frozen=True)
class Law:
    """A law that was measured.

    Attributes:
        name: of the law.
        deviation: the largest one measured; for `inputs` and `memory`, what a difference that is
            needed falls short of.
        tolerance: what is allowed.
        error: of a call that failed, instead of a deviation.
        detached: the attribute that holds a state without its gradient.
    """

    name: str
    deviation: float
    tolerance: float
    error: str = ""
    detached: str = ""

    @property
    def plain(self) -> str:
        """The name without the mode in which it was measured."""
        return self.name.removeprefix("training ")

    @property
    def holds(self) -> bool:
        """Whether the module obeys it."""
        return self.deviation <= self.tolerance


class _Parts(NamedTuple):
    """A run in chunks.

    Attributes:
        first: the outputs of the first chunk.
        before: a copy of the state after it.
        state: that state itself, which the later calls got.
        second: the outputs of the later chunks.
        end: the state after them.
    """

    first: Tensor
    before: State
    state: State
    second: Tensor
    end: State


class Laboratory:
    """Runs an adapter on inputs `(T, B, ...)`, always from the same attributes and buffers.

    Args:
        adapter: of `module`.
        module: a copy; its modes are changed.
        x: inputs `(T, B, ...)`.
        chunks: lengths of chunks, with T as their sum.
        tolerance: relative to the largest output; by default a hundred roundings, and at least
            those of a computation in float32.
        by_step: whether the module gets one step at a call, so that a state that it detaches
            carries no gradient at all.

    Attributes:
        training: the modes of all parts in which laws are measured; None for evaluation.
        evaluated: outputs and final state of one call in evaluation.
        leaves_nothing: whether a call in evaluation leaves attributes and buffers as they were.
    """

    def __init__(
        self,
        adapter: Adapter,
        module: nn.Module,
        x: Tensor,
        chunks: Sequence[int] = (3, 4),
        tolerance: float | None = None,
        by_step: bool = False,
    ) -> None:
        self.adapter, self.module, self.x = adapter, module, x
        self._by_step = by_step
        self._lengths, self._cut = [*chunks], chunks[0]
        self._snapshot = Snapshot(module)
        dtype = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        self._rounding = 100 * torch.finfo(dtype).eps
        # a module in float64 may compute in float32 inside
        self._relative = max(self._rounding, SINGLE) if tolerance is None else tolerance
        self.training: dict[str, bool] | None = None
        self.evaluated: tuple[Tensor, State] | None = None
        self.leaves_nothing = False

    def measure(self, training: dict[str, bool] | None = None) -> Iterator[Law]:
        """The laws, one by one, so that a caller may stop at the first that is broken.

        Args:
            training: the modes of all parts, to measure in training what can be measured there,
                with dropout and random numbers replaced by constants; None for evaluation.
        """
        self.training = training
        self.__dict__.pop("_parts", None)
        prefix = "" if training is None else "training "
        set_modes(self.module, training)
        names = ["repeat", "value", "inputs", "causal", "lanes", "whole", "memory", "credit"]
        if training is not None:
            names = [name for name in names if name not in ("value", "memory")]
        with self._gradients():
            y, state = self.run(self.x)
        self._y, self._end = y.detach(), trees.detach(state)
        scale = 1 + float(self._y.abs().max()) if y.numel() else 1.0
        self.tolerance, self._needed = self._relative * scale, self._rounding * scale
        if training is None:
            self.evaluated = self._y, self._end
        elif self.evaluated is not None and self._apart(*self.evaluated) <= self._needed:
            # neither dropout nor batch statistics; only what happens between chunks may differ
            names = ["chunks", "credit"]
        for name in names:
            measure: Callable[[], float] = getattr(self, f"_{name}")
            try:
                with self._gradients():
                    deviation, error = measure(), ""
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as raised:
                deviation, error = float("nan"), str(raised).split("\n")[0]
            tolerance = 0.0 if name in ("value", "inputs", "memory") else self.tolerance
            yield Law(prefix + name.replace("chunks", "whole"), deviation, tolerance, error)

    def _gradients(self) -> torch.set_grad_enabled:
        """Gradients as in use: a module may compute otherwise with them, so all runs agree."""
        return torch.set_grad_enabled(self.training is not None)

    def run(
        self, x: Tensor, *chunks: int, state: State = (), restore: bool = True
    ) -> tuple[Tensor, State]:
        """Outputs and the final state; in one call unless lengths of chunks are given."""
        if restore:
            self._snapshot.restore()
            set_modes(self.module, self.training)
        if state == ():
            state = self.adapter.initial_state(x.shape[1], None)
        outputs: list[Tensor] = []
        for part in x.split(chunks or (len(x),)):
            y, state = self._run_chunk(part, state)
            outputs.append(y)
        y = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if not torch.isfinite(y).all():
            raise ValueError(NOT_FINITE)
        return y, state

    def _run_chunk(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One call; in training always from the same buffers, which a call may change for itself.

        A step of power iteration or a count of calls depends on how the steps are divided.
        """
        if self.training is None:
            return self.adapter.run(x, state)
        self._snapshot.restore()
        set_modes(self.module, self.training)
        random.seed(0)
        with ConstantRandomness():
            return self.adapter.run(x, state)

    def _repeat(self) -> float:
        # in evaluation, what the first run left in attributes and buffers must not matter
        return self._apart(*self.run(self.x, restore=self.training is not None))

    def _inputs(self) -> float:
        steps, lanes = self.x.shape[:2]
        step, lane = steps // 2, lanes - 1
        y, _ = self.run(changed_inputs(self.x, step, lane))
        self._moved = (y.detach() - self._y).abs().reshape(steps, lanes, -1).amax(2)
        return max(0.0, self._needed - float(self._moved[step:, lane].max()))

    def _causal(self) -> float:
        return float(self._moved[: len(self.x) // 2, -1].max())

    def _lanes(self) -> float:
        lanes = self.x.shape[1]
        if lanes == 1:
            return 0.0
        moved = float(self._moved[:, : lanes - 1].max())
        if self.training is not None:  # where a mask may be drawn for each row of the batch
            y, _ = self.run(changed_inputs(self.x, len(self.x) // 2, 0))  # or it mixes upwards
            return max(moved, difference(y[:, 1:], self._y[:, 1:]))
        cut = self._cut
        picks = torch.tensor([lanes - 1, 0], device=self.x.device)
        state, together = self._parts.before, self._parts.second
        try:
            alone, _ = self.run(self.x[cut:, picks], state=trees.select(state, picks))
        except (RuntimeError, ValueError):  # it is made for a number of lanes: reorder them
            picks = list(reversed(range(lanes)))
            alone, _ = self.run(self.x[cut:, picks], state=trees.select(state, picks))
        return max(moved, difference(alone, together[:, picks]))

    def _whole(self) -> float:
        deviation = self._chunks()
        if not deviation <= self.tolerance:
            return deviation
        return max(deviation, self._apart(*self.run(self.x, *[1] * len(self.x))))

    def _chunks(self) -> float:
        first, _, _, second, end = self._parts
        if self.leaves_nothing or self.training is not None:
            return self._apart(torch.cat([first, second]), end)
        # what a call leaves in attributes and buffers must not matter either
        return self._apart(*self.run(self.x, *self._lengths))

    def _apart(self, y: Tensor, end: State) -> float:
        """The difference from one call."""
        return max(difference(y, self._y), state_difference(end, self._end))

    @cached_property
    def _parts(self) -> "_Parts":
        """The first chunk and the others: several laws need them, in each mode run once."""
        cut, *lengths = self._lengths
        first, state = self.run(self.x[:cut])
        if self.training is None:
            self.leaves_nothing = self._snapshot.holds()
        before = trees.map_leaves(torch.clone, trees.detach(state))
        second, end = self.run(self.x[cut:], *lengths, state=state)
        return _Parts(first, before, state, second, end)

    @torch.no_grad()
    def measure_long(self, x: Tensor) -> Law:
        """The law `whole` in evaluation, on two chunks of more steps than those of the trial.

        Args:
            x: inputs `(T, B, ...)`.
        """
        self.training = None
        middle = len(x) // 2
        whole, _ = self.run(x)
        chunks, _ = self.run(x, middle, len(x) - middle)
        return Law("long", difference(whole, chunks), 10 * self.tolerance)

    def _memory(self) -> float:
        cut = self._cut
        y, _ = self.run(self.x[cut:])
        return max(0.0, self._needed - difference(y, self._y[cut:]))

    def _value(self) -> float:
        return state_difference(self._parts.state, self._parts.before)

    @torch.enable_grad()
    def _credit(self) -> float:
        """The difference of two gradients of the outputs: in one call and in chunks.

        Where the module gets one step at a call, a tensor of the state that changes outputs and
        gets no gradient counts as infinite: it is detached however the steps are divided.
        """
        if self.training is not None:
            return self._credit_in_training()
        x = self.x.clone().requires_grad_() if self.x.is_floating_point() else self.x
        leaves = [p for p in (*self.module.parameters(), x) if p.requires_grad]
        grads: list[list[Tensor]] = []
        for chunks in ((), self._lengths):
            y, _ = self.run(x, *chunks)
            if not leaves or not y.requires_grad:
                return 0.0
            grads.append(gradients(y, leaves))
        deviation = max(map(relative_difference, *grads))
        if self._by_step and deviation <= self.tolerance and self._cuts_credit():
            return float("inf")
        return deviation

    def _credit_in_training(self) -> float:
        """Infinite where a tensor of the state gets a gradient in evaluation, and none here."""
        carries = self._reached(self._parts.state, self._parts.second)
        if all(carries):
            return 0.0
        training, self.training = self.training, None
        _, state = self.run(self.x[: self._cut])
        evaluated = self._reached(state, self.run(self.x[self._cut :], state=state)[0])
        self.training = training
        pairs = zip(evaluated, carries, strict=True)
        return float("inf") if any(before and not now for before, now in pairs) else 0.0

    def _reached(self, state: State, y: Tensor) -> list[bool]:
        """Whether each tensor of a state gets a gradient of outputs."""
        leaves = trees.tensors(state)
        entering = [leaf for leaf in leaves if leaf.requires_grad]
        if not entering or not y.requires_grad:
            return [False] * len(leaves)
        try:
            rest = iter(gradients(y, entering))
        except RuntimeError:  # torch's LSTM in float32 under outputs written in place: not measured
            return [True] * len(leaves)
        return [leaf.requires_grad and bool(next(rest).any()) for leaf in leaves]

    def _cuts_credit(self) -> bool:
        """Whether some tensor of the state changes outputs and gets no gradient from them.

        The first step after it and the later ones are two questions: what a step returns may be cut
        where what it computes is not.
        """
        cut = self._cut
        _, state = self.run(self.x[:cut])
        state = trees.map_leaves(_fresh_leaf, state)
        y, _ = self.run(self.x[cut:], state=state)
        for steps in (slice(1), slice(1, None)):
            for leaf, reached in zip(
                trees.tensors(state), self._reached(state, y[steps]), strict=True
            ):
                if reached or not leaf.requires_grad:
                    continue
                with torch.no_grad():
                    other = trees.map_leaves(
                        lambda t, k=leaf: t * 0.5 + 0.1 if t is k else t, state
                    )
                    changed, _ = self.run(self.x[cut:], state=other)
                if difference(changed[steps], y[steps]) > self.tolerance:
                    return True
        return False


def _fresh_leaf(leaf: Tensor) -> Tensor:
    leaf = leaf.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


def loss_weights(y: Tensor) -> Tensor:
    """Random weights for a loss of all outputs."""
    return random_normal(y.shape, torch.Generator("cpu").manual_seed(2)).to(y)


def gradients(y: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss of all outputs."""
    loss = (y * loss_weights(y)).sum()
    grads = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    return [grad.to_dense() for grad in grads]


def relative_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two gradients, relative to the largest number of the first."""
    return difference(a, b) / (1 + float(a.abs().max())) if a.numel() else 0.0


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; infinite if their shapes differ.

    Infinities of one sign are equal, and so are two NaN.
    """
    a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape:
        return float("inf")
    if a.dtype == b.dtype and torch.equal(a, b):  # the usual case: one operator, infinities too
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = a.detach().double(), b.detach().double()
    distance = (a - b).abs()
    largest = float(distance.max()) if a.numel() else 0.0
    if math.isnan(largest):  # it would hide the other numbers; of two infinities it is a part
        same = (a == b) | (a.isnan() & b.isnan())
        largest = float(distance.nan_to_num(math.inf, math.inf).masked_fill(same, 0).max())
    return largest


def state_difference(a: State, b: State) -> float:
    """The largest difference of the tensors of two states; infinite if one has more of them."""
    first, second = trees.tensors(a), trees.tensors(b)
    if len(first) != len(second):
        return float("inf")
    return max(map(difference, first, second), default=0.0)
