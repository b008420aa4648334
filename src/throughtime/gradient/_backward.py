"""The backward pass over segments, and the gradient that it adds up.

    (g, a_i) += J_i' (dl_i, a_{i+1})        from the last segment to the first

with g the gradient of the weights and a_i the gradient of all later losses with respect to the
state entering segment i. Parameters get one whole gradient at the end, so their hooks run as after
an ordinary backward pass.

Shapes: `B` lanes, `C` outputs.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Never, TypeAlias

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.chunk import Chunk, Source
from throughtime.errors import RunError
from throughtime.gradient._finite import first_nonfinite, is_finite
from throughtime.gradient._segments import (
    CheckpointedPass,
    Cotangents,
    Segment,
    no_autocast,
    wide,
)
from throughtime.gradient.objective import Objective, trainable_weights

# called with the cotangents of the state between two segments, on their way back
BoundaryHook: TypeAlias = Callable[[Cotangents], Cotangents]


@dataclass(frozen=True, eq=False)
class VJP:
    """A vector-Jacobian product: gradients of weights, of the state entering, and of inputs."""

    weights: Sequence[Tensor | None]
    state: Cotangents
    inputs: Tensor | None = None


def vjp(
    segment: Segment,
    weights: Sequence[Tensor],
    roots: Sequence[tuple[Tensor, Tensor | None]],
    cotangents: Cotangents | None,
    *,
    retain: bool = False,
) -> VJP:
    """The vector-Jacobian product of a segment.

    Args:
        segment: with its graph.
        weights: whose gradients are needed.
        roots: tensors of the graph, each with its cotangent.
        cotangents: of the state after the segment.
        retain: whether to keep the graph for another product.
    """
    sources = [(root, cotangent) for root, cotangent in roots if root.requires_grad]
    if cotangents is not None:
        pairs = zip(trees.tensors(segment.after), cotangents, strict=True)
        sources += [(leaf, a) for leaf, a in pairs if a is not None and leaf.requires_grad]
    entering = trees.tensors(segment.before)
    targets = [*weights, *(leaf for leaf in entering if leaf.requires_grad)]
    if segment.inputs.requires_grad:
        targets.append(segment.inputs)
    if not sources or not targets:
        return VJP([None] * len(weights), [None] * len(entering))
    with suspended_hooks(weights), no_autocast(segment.inputs):
        grads = torch.autograd.grad(
            [root for root, _ in sources],
            targets,
            [cotangent for _, cotangent in sources],
            retain_graph=retain,
            allow_unused=True,
        )
    rest = iter(grads[len(weights) :])
    state = [next(rest) if leaf.requires_grad else None for leaf in entering]
    return VJP(grads[: len(weights)], state, next(rest, None))


class GradientAccumulator:
    """The sum of the gradients added so far, one for each weight."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.names, self.weights = list(weights), list(weights.values())
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Add `scale` times the gradients; `None` is zero."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self.sums[i]
            if total is None:
                # half precision would lose digits in a sum over many segments
                half = gradient.dtype in (torch.bfloat16, torch.float16)
                first = gradient.float() if half else gradient
                self.sums[i] = first.clone() if first is gradient and scale == 1 else first * scale
            elif total.is_sparse or gradient.is_sparse:
                self.sums[i] = total + gradient * scale
            else:
                total.add_(gradient, alpha=scale)

    def dense(self) -> list[Tensor]:
        """Every sum, zeros where nothing was added."""
        return [
            torch.zeros_like(w) if s is None else s.to_dense()
            for w, s in zip(self.weights, self.result(), strict=True)
        ]

    def result(self) -> list[Tensor | None]:
        """Every sum in the type of its weight."""
        return [
            None if s is None else s.to(w.dtype)
            for w, s in zip(self.weights, self.sums, strict=True)
        ]

    def is_nonfinite(self, loss: Tensor) -> bool:
        """Whether a gradient, or their loss, is not finite."""
        return not is_finite(loss, self.sums) and (
            self.nonfinite() is not None or not bool(loss.isfinite())
        )

    def nonfinite(self) -> str | None:
        """The name of the first weight whose gradient is not finite."""
        return first_nonfinite(zip(self.names, self.sums, strict=True))

    def deliver(self) -> None:
        """Add the sums to `.grad`, through autograd."""
        pairs = [(w, s) for w, s in zip(self.weights, self.result(), strict=True) if s is not None]
        if pairs:
            with torch.enable_grad():
                _Delivery.apply([s for _, s in pairs], *[w for w, _ in pairs]).backward()
        self.sums = [None] * len(self.weights)


class _Delivery(torch.autograd.Function):
    """A number whose gradient with respect to the weights is the accumulated one."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


@dataclass(eq=False)
class CreditFlow:
    """Credit flowing back through segments: the cotangents at the present boundary, and the sum.

    Attributes:
        grads: the gradient so far.
        cotangents: of the state between the last segment and the next one; `None` at the end.
    """

    grads: GradientAccumulator
    cotangents: Cotangents | None = None

    def through(
        self,
        segment: Segment,
        roots: Sequence[tuple[Tensor, Tensor | None]],
        *,
        scale: float = 1.0,
        retain: bool = False,
    ) -> VJP:
        """Flow back through one segment, from its `roots` and from the state after it."""
        product = vjp(segment, self.grads.weights, roots, self.cotangents, retain=retain)
        self.grads.add(product.weights, scale)
        self.cotangents = product.state
        return product


@dataclass(frozen=True, eq=False)
class LossPass:
    """A checkpointed pass that has been run forward, and its mean loss.

    Attributes:
        checkpoints: the segments.
        weights: of each segment's mean loss in that of all.
        valid_steps: the number of valid steps of all segments.
        outputs: `(T, B, C)` of the last segment, detached.
        chunk: the steps of the last segment.
    """

    checkpoints: CheckpointedPass
    weights: list[float]
    valid_steps: int
    outputs: Tensor
    chunk: Chunk

    @classmethod
    def run(
        cls, checkpoints: CheckpointedPass, chunks: Iterable[Chunk], objective: Objective
    ) -> "LossPass":
        """Run the chunks, one for each segment, forward."""
        weights: list[float] = []
        valid_steps = 0
        last: tuple[Chunk, Tensor] | None = None
        for last in checkpoints.forward(chunks):
            weights.append(objective.loss_weight(last[0]))
            valid_steps += last[0].valid_steps
        if last is None:
            raise RuntimeError("a pass without segments")
        return cls(
            checkpoints, weights, valid_steps if any(weights) else 0, last[1].detach(), last[0]
        )

    @cached_property
    def loss_weight(self) -> float:
        """Of all segments together."""
        return sum(self.weights)

    def losses(
        self, segment: Segment, objective: Objective, cuts: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """The parts of the mean loss that come from one segment, by the step where each begins.

        The segment is cut at `cuts`. A part without a valid step is left out.
        """
        begin, end = self.checkpoints.bounds[segment.index : segment.index + 2]
        losses: dict[int, Tensor] = {}
        for start, stop in pairwise([begin, *(cut for cut in cuts if begin < cut < end), end]):
            part = segment.chunk[start - begin : stop - begin]
            weight = objective.loss_weight(part)
            if weight:
                loss = objective.loss(segment.outputs[start - begin : stop - begin], part)
                losses[start] = loss * (weight / self.loss_weight)
        return losses

    def backward(
        self, objective: Objective, at_boundary: BoundaryHook, begin: int, scale: float = 1.0
    ) -> Tensor:
        """Add the gradient of `scale` times the mean loss to `.grad`, once.

        Args:
            objective: the loss.
            at_boundary: called with the cotangents between two segments.
            begin: the first step of the pass in its epoch, for messages.
            scale: of the gradient.

        Returns:
            The mean loss, detached.

        Raises:
            RunError: a gradient is not finite; nothing is added.
        """
        grads = GradientAccumulator(trainable_weights(self.checkpoints.net, objective.loss_fn))
        total = torch.zeros((), device=self.outputs.device)
        for step in self._steps(objective, at_boundary, grads, scale):
            total = total + step.loss
        objective.check_depends(grads.sums)
        if objective.scaler is None and grads.is_nonfinite(total):
            self._locate_nonfinite(objective, at_boundary, begin)
        grads.deliver()
        return total

    def _steps(
        self,
        objective: Objective,
        at_boundary: BoundaryHook,
        grads: GradientAccumulator,
        scale: float = 1.0,
    ) -> Iterator["_SegmentGradient"]:
        """Segment by segment from the last."""
        flow = CreditFlow(grads)
        checked = False
        for segment in self.checkpoints.backward():
            losses = list(self.losses(segment, objective).values())
            if losses and not checked:
                objective.check_weights(segment.outputs, segment.chunk)
                checked = True
            loss = losses[0].detach() if losses else torch.zeros((), device=self.outputs.device)
            roots = [(objective.scaled(loss), None) for loss in losses]
            product = flow.through(segment, roots, scale=scale)
            outputs = segment.outputs.detach()
            step = _SegmentGradient(segment.index, segment.chunk, loss, outputs, product.weights)
            del losses, roots, segment  # their graph is released before the next one is built
            yield step
            if step.index and flow.cotangents is not None:
                flow.cotangents = at_boundary(flow.cotangents)

    def _locate_nonfinite(
        self, objective: Objective, at_boundary: BoundaryHook, begin: int
    ) -> Never:
        """Run back once more to name the segment and the weight.

        The first loss that is not finite counts, else the last gradient that is not.
        """
        message: str | None = None
        grads = GradientAccumulator(trainable_weights(self.checkpoints.net, objective.loss_fn))
        for step in self._steps(objective, at_boundary, grads):
            name = first_nonfinite(zip(grads.names, step.gradients, strict=True))
            finite = bool(step.loss.isfinite())
            if not finite or (name is not None and message is None):
                start = begin + self.checkpoints.bounds[step.index]
                result = step.loss, step.outputs
                message = objective.nonfinite_message(name, result, step.chunk, start)
        raise RunError(
            message
            or "the gradient is not finite, though that of every chunk is: their sum is too large"
            " for the weights' type"
        )


@dataclass(frozen=True, eq=False)
class _SegmentGradient:
    """One segment of the backward pass: its loss, and the gradient of it and all later losses."""

    index: int
    chunk: Chunk
    loss: Tensor
    outputs: Tensor
    gradients: Sequence[Tensor | None]


@dataclass(eq=False)
class AdjointRecorder:
    """Records the norm of the cotangents at every boundary, and clips them there.

    Attributes:
        max_norm: longer cotangents of a lane are scaled down to it.
        scale: of a GradScaler.
        like: a chunk with the lanes and the device.
        norms: `(B,)` each, before they were clipped.
    """

    max_norm: float | None
    scale: float
    like: Chunk
    norms: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, cotangents: Cotangents) -> Cotangents:
        """The cotangents, each lane no longer than `max_norm`."""
        norms = lane_norms(cotangents)
        if norms is None:
            self.norms.append(self._zeros(self.like.lanes))
            return cotangents
        self.norms.append(norms / self.scale)
        if self.max_norm is None:
            return cotangents
        return scale_lanes(cotangents, (self.max_norm / self.norms[-1]).clamp(max=1.0))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.like.inputs.device)

    @property
    def adjoints(self) -> Tensor:
        """The norms, `(boundaries, B)`."""
        return torch.stack(self.norms) if self.norms else self._zeros(0, self.like.lanes)


def lane_norms(cotangents: Cotangents) -> Tensor | None:
    """The norm of each lane over all leaves, `(B,)`; `None` without any gradient."""
    leaves = [leaf.detach().abs() for leaf in cotangents if leaf is not None]
    leaves = [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves]
    squares = [leaf.reshape(len(leaf), -1).square().sum(1) for leaf in leaves]
    return torch.stack(squares).sum(0).sqrt() if squares else None


def scale_lanes(cotangents: Cotangents, factors: Tensor) -> Cotangents:
    """Every lane times its factor, `(B,)`."""

    def scale(leaf: Tensor) -> Tensor:
        real = leaf.real.dtype if leaf.is_complex() else leaf.dtype
        return leaf * factors.to(real).view(-1, *[1] * (leaf.dim() - 1))

    return [None if leaf is None else scale(leaf) for leaf in cotangents]


def take_segments(source: Source, bounds: Sequence[int]) -> Iterator[Chunk]:
    """The next steps of a source, segment by segment."""
    for start, stop in pairwise(bounds):
        chunk = source.take(stop - start)
        if chunk is not None:
            yield chunk


def deliver(
    grads: GradientAccumulator,
    objective: Objective,
    result: tuple[Tensor, Tensor],
    chunk: Chunk,
    start: int,
) -> None:
    """Check the gradient of one chunk's loss and add it to `.grad`.

    Args:
        grads: the gradient.
        objective: the loss.
        result: its value, and the outputs.
        chunk: the steps of the loss.
        start: the first of them in the epoch.

    Raises:
        RunError: loss or gradient are not finite; nothing is added. On a device the next update
            raises it, and zeros are added.
    """
    objective.check_depends(grads.sums)
    if objective.scaler is None:
        pairs = zip(grads.names, grads.sums, strict=True)
        named = {name: gradient for name, gradient in pairs if gradient is not None}
        late = objective.check_late(named, result, chunk, start)
        if not late and grads.is_nonfinite(result[0]):
            raise RunError(objective.nonfinite_message(grads.nonfinite(), result, chunk, start))
    grads.deliver()


@contextmanager
def suspended_hooks(weights: Sequence[Tensor]) -> Generator[None]:
    """Suspend the hooks of weights: they get the whole gradient when it is delivered."""
    # there is no public way
    suspended = [(hooks, dict(hooks)) for weight in weights if (hooks := weight._backward_hooks)]
    for hooks, _ in suspended:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in suspended:
            hooks.update(saved)


def norm(tensors: Iterable[Tensor | None]) -> float:
    """The norm of all of them together."""
    squares = [wide(t.detach().abs()).square().sum() for t in tensors if t is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
