"""A stretch of steps with its losses: played forward, then its losses blamed on the weights, piece
by piece.

Shapes: `B` lanes, `C` outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Never, TypeAlias

import torch
from torch import Tensor

from throughtime.chunk import Chunk, Source
from throughtime.errors import RunError
from throughtime.gradient.finite import not_finite
from throughtime.gradient.gather import Gathered, weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.sweep import Adjoint, Piece, Sweep

Crossing: TypeAlias = Callable[
    [Adjoint], Adjoint
]  # what an adjoint becomes on its way back across an edge between pieces


@dataclass(frozen=True, eq=False)
class Stretch:
    """A sweep that has been run forward, and what the mean loss of each of its pieces weighs.

    Attributes:
        sweep: the pieces.
        masses: what each piece weighs in the mean loss of all.
        valid: the number of valid steps.
        outputs: `(T, B, C)` of the last piece, detached.
        chunk: the last piece's steps.
    """

    sweep: Sweep
    masses: list[float]
    valid: int
    outputs: Tensor
    chunk: Chunk

    @classmethod
    def played(cls, sweep: Sweep, chunks: Iterable[Chunk], objective: Objective) -> "Stretch":
        """Runs the chunks, one for each piece of the sweep, forward."""
        masses: list[float] = []
        valid = 0
        last: tuple[Chunk, Tensor] | None = None
        for last in sweep.forward(chunks):
            masses.append(objective.mass(last[0]))
            valid += last[0].valid
        if last is None:
            raise RuntimeError("a sweep without pieces")
        return cls(sweep, masses, valid if any(masses) else 0, last[1].detach(), last[0])

    @cached_property
    def mass(self) -> float:
        """What all pieces weigh together."""
        return sum(self.masses)

    def losses(
        self, piece: Piece, objective: Objective, edges: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """The parts of the mean loss of all that come from one piece, cut at `edges`, by the step
        where each part begins.

        A part in which no step counts is left out.
        """
        begin, end = self.sweep.bounds[piece.index : piece.index + 2]
        found: dict[int, Tensor] = {}
        for start, stop in pairwise([begin, *(edge for edge in edges if begin < edge < end), end]):
            part = piece.chunk[start - begin : stop - begin]
            mass = objective.mass(part)
            if mass:
                found[start] = objective.loss(piece.outputs[start - begin : stop - begin], part) * (
                    mass / self.mass
                )
        return found

    def descend(
        self, objective: Objective, crossing: Crossing, begin: int, weight: float = 1.0
    ) -> Tensor:
        """Adds the gradient of `weight` times the mean loss to `.grad`, once; returns the mean
        loss, detached.

        `begin` is the stretch's place in the epoch, for messages.

        Raises:
            RunError: a gradient is not finite; nothing is added.
        """
        gathered = Gathered(weights_of(self.sweep.net, objective.loss_fn))
        total = torch.zeros((), device=self.outputs.device)
        for step in self._back(objective, crossing, gathered.weights):
            total = total + step.loss
            gathered.add(step.gradients, weight)
        objective.check_depends(gathered.sums)
        if objective.scaler is None and (
            gathered.faulty() is not None or not bool(total.isfinite())
        ):
            self._blame(objective, crossing, begin, gathered)
        gathered.deliver()
        return total

    def _back(
        self, objective: Objective, crossing: Crossing, weights: Sequence[Tensor]
    ) -> Iterator["_Step"]:
        """Piece by piece from the last."""
        adjoint: Adjoint | None = None
        checked = False
        for piece in self.sweep.backward():
            losses = list(self.losses(piece, objective).values())
            if losses and not checked:
                objective.check_weights(piece.outputs, piece.chunk)
                checked = True
            pulled = piece.pull(
                weights, [(objective.scaled(loss), None) for loss in losses], adjoint
            )
            loss = losses[0].detach() if losses else torch.zeros((), device=piece.outputs.device)
            step = _Step(piece.index, piece.chunk, loss, pulled.weights)
            del losses, piece  # their graph goes before the next one is built
            yield step
            adjoint = crossing(pulled.adjoint) if step.index else None

    def _blame(
        self, objective: Objective, crossing: Crossing, begin: int, gathered: Gathered
    ) -> Never:
        """Runs back once more to find where it began: at the first loss that is no number, else at the last gradient that is none."""
        found: str | None = None
        for step in self._back(objective, crossing, gathered.weights):
            pairs = zip(gathered.names, step.gradients, strict=True)
            faulty = [
                name
                for name, g in pairs
                if g is not None and not bool(g.to_dense().isfinite().all())
            ]
            sound = bool(step.loss.isfinite())
            if not sound or (faulty and found is None):
                start, stop = (
                    begin + bound for bound in self.sweep.bounds[step.index : step.index + 2]
                )
                found = not_finite(
                    faulty[0] if faulty else "loss_fn", start, stop, step.chunk, step.loss.item()
                )
        raise RunError(
            found
            or "the gradient is not finite, though every chunk's is: their sum is too large for the weights' type"
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """One piece of the way back: its part of the loss, and what it and all later losses say to the weights."""

    index: int
    chunk: Chunk
    loss: Tensor
    gradients: Sequence[Tensor | None]


def lane_norms(adjoint: Adjoint) -> Tensor | None:
    """The norm of each lane over all leaves, `(B,)`; `None` if no credit comes."""
    found = [leaf.detach().abs() for leaf in adjoint if leaf is not None]
    found = [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in found]
    squares = [leaf.reshape(len(leaf), -1).square().sum(1) for leaf in found]
    return torch.stack(squares).sum(0).sqrt() if squares else None


def scaled(adjoint: Adjoint, factors: Tensor) -> Adjoint:
    """Every lane times its factor, `(B,)`."""
    return [
        (
            None
            if a is None
            else a
            * factors.to(a.real.dtype if a.is_complex() else a.dtype).view(-1, *[1] * (a.dim() - 1))
        )
        for a in adjoint
    ]


def taken(source: Source, bounds: Sequence[int]) -> Iterator[Chunk]:
    """The next steps of a source, piece by piece."""
    for start, stop in pairwise(bounds):
        chunk = source.take(stop - start)
        if chunk is not None:
            yield chunk
