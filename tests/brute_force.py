"""Updates by brute force: autograd over single steps, with the state reset by hand.

The oracle of test_random_updates.py. It imports nothing of the library, and follows its
documentation alone. T steps, B lanes; a state is a tuple of leaves `(..., B, H)`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

State = tuple[Tensor, ...]
# The credit that crosses a step, so many steps after the start of its span.
Gate = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]


class StepNet(Protocol):
    """A plain net that takes one step of all lanes, inputs `(B, ...)` to outputs `(B, C)`."""

    def start(self, lanes: int) -> State: ...
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


class Steps(NamedTuple):
    """An epoch: inputs and targets `(T, B, ...)`, resets and valid `(T, B)` bool."""

    inputs: Tensor
    targets: Tensor
    resets: Tensor
    valid: Tensor


class Span(NamedTuple):
    """The steps of an update: without a graph from `lead`, with one from `start`."""

    lead: int
    start: int
    counted: int
    stop: int


class Task(NamedTuple):
    """An epoch and the updates to make of it.

    Attributes:
        steps: the epoch.
        spans: the steps of the updates.
        loss_fn: maps outputs `(N, C)` and targets to their mean loss.
        weigh: the weight of targets in a mean of means; without one they make no update.
        accumulate: spans for each update.
        gate: maps credit to the credit that goes on, every `gate_every` steps of a span.
        gate_every: steps between two gates.
        per: what the sum of the losses is divided by, instead of by its weight.
    """

    steps: Steps
    spans: Sequence[Span]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    weigh: Callable[[Tensor], float]
    accumulate: int = 1
    gate: Gate | None = None
    gate_every: int = 1
    per: float | None = None


class Answer(NamedTuple):
    """The mean loss of an update, and its valid steps; `.grad` of the net holds its gradient."""

    loss: Tensor
    steps: int


class _Part(NamedTuple):
    answer: Answer
    weight: float
    grads: Sequence[Tensor | None]


class _Crossing(torch.autograd.Function):
    """The state itself; the gate gets its gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, step: int, *leaves: Tensor) -> State:
        ctx.gate, ctx.step = gate, step
        return tuple(leaf.clone() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gate(ctx.step, grads)


def clipped(norm: float) -> Gate:
    """A limit for the norm of each lane's credit, over all leaves."""

    def gate(_: int, grads: Sequence[Tensor]) -> list[Tensor]:
        rows = torch.cat([grad.movedim(-2, 0).flatten(1) for grad in grads], 1)
        norms = rows.norm(dim=1, keepdim=True)
        factors = torch.where(norms > norm, norm / norms, 1.0)
        return [grad * factors for grad in grads]

    return gate


def every(steps: int, stride: int, first: int | None = None) -> list[int]:
    """The ends of strides; the first may be shorter, and the last is what remains."""
    return [*range(stride if first is None else first, steps, stride), steps]


def truncated(stops: Sequence[int], stride: int, horizon: int, burn_in: int) -> list[Span]:
    """Spans back through the last `horizon` steps; chunks, if that is the stride."""
    spans = list[Span]()
    for counted, stop in pairwise([0, *stops]):
        start = counted if horizon == stride else max(0, stop - horizon)
        spans.append(Span(max(0, start - burn_in), start, counted, stop))
    return spans


def whole(stops: Sequence[int]) -> list[Span]:
    """Spans that have nothing in common; every loss reaches back to the start of its own."""
    return [Span(start, start, start, stop) for start, stop in pairwise([0, *stops])]


def updates(net: StepNet, task: Task) -> Iterator[Answer]:
    """Answers for `accumulate` spans each, under the weights that the net has at that time."""
    steps, states = task.steps, dict[int, State]()  # entering a step, as computed last
    parameters = [weight for weight in net.parameters() if weight.requires_grad]
    parts = list[_Part]()
    for number, span in enumerate(task.spans, 1):
        outputs = _run(net, task, span, states)
        valid = steps.valid[span.counted : span.stop]
        targets = steps.targets[span.counted : span.stop][valid]
        weight = task.weigh(targets)
        if weight > 0:
            loss = task.loss_fn(outputs[valid], targets)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            parts.append(_Part(Answer(loss.detach(), len(targets)), weight, grads))
        if parts and (number % task.accumulate == 0 or number == len(task.spans)):
            yield _deliver(parts, parameters, task.per)
            parts = []


def _run(net: StepNet, task: Task, span: Span, states: dict[int, State]) -> Tensor:
    """The outputs of the steps that count, one step after another."""
    inputs, _, resets, _ = task.steps
    lanes, outputs = resets.shape[1], list[Tensor]()
    state = states[span.lead] if span.lead else net.start(lanes)
    for step in range(span.lead, span.stop):
        age = step - span.start
        if age > 0 and task.gate is not None and age % task.gate_every == 0:
            state = _Crossing.apply(task.gate, age, *state)
        states[step] = tuple(leaf.detach() for leaf in state)
        with torch.set_grad_enabled(age >= 0):
            entering = states[step] if age <= 0 else state
            reset = resets[step].unsqueeze(1)
            leaves = zip(net.start(lanes), entering, strict=True)
            y, state = net.step(inputs[step], tuple(torch.where(reset, *pair) for pair in leaves))
        if step >= span.counted:
            outputs.append(y)
    states[span.stop] = tuple(leaf.detach() for leaf in state)
    return torch.stack(outputs)


def _deliver(
    parts: Sequence[_Part], parameters: Sequence[torch.nn.Parameter], per: float | None
) -> Answer:
    """Add the mean of the parts' gradients, by weight, to `.grad`."""
    total = sum(part.weight for part in parts)
    for part in parts:
        for weight, grad in zip(parameters, part.grads, strict=True):
            if grad is not None:
                share = grad * (part.weight / (per or total))
                weight.grad = share if weight.grad is None else weight.grad + share
    losses = torch.stack([part.answer.loss * (part.weight / total) for part in parts])
    return Answer(losses.sum(), sum(part.answer.steps for part in parts))
