"""A stretch of steps with its losses: played forward, then its losses blamed on the weights, piece by piece.

Shapes: `B` lanes, `C` outputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Never, TypeAlias

import torch
from torch import Tensor

from throughtime.chunk import Chunk, Source
from throughtime.errors import RunError
from throughtime.gradient.gather import Gathered, weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.sweep import Adjoint, Piece, Pulled, Sweep

Gate: TypeAlias = Callable[[int, Adjoint], Adjoint]  # what the adjoint becomes on its way back across the edge before piece `index`


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
    def played(cls, sweep: Sweep, source: Source, objective: Objective) -> "Stretch":
        """Takes the steps of the sweep from the source and runs them forward."""
        masses: list[float] = []
        valid = 0
        outputs = chunk = None
        for chunk, outputs in sweep.forward(_taken(source, sweep)):
            masses.append(objective.mass(chunk))
            valid += chunk.valid
        if outputs is None or chunk is None:
            raise RuntimeError("a sweep without pieces")
        return cls(sweep, masses, valid, outputs.detach(), chunk)

    def loss(self, piece: Piece, objective: Objective) -> Tensor | None:
        """The part of the mean loss of all that comes from one piece; `None` where no step counts."""
        if not piece.chunk.valid:
            return None
        return objective.loss(piece.outputs, piece.chunk) * (self.masses[piece.index] / sum(self.masses))

    def descend(self, objective: Objective, gate: Gate, begin: int) -> Tensor:
        """Adds the gradient of the mean loss to `.grad`, once; returns the loss, detached.

        Raises:
            RunError: a gradient is not finite; nothing is added.
        """
        gathered = Gathered(weights_of(self.sweep.net))
        total = torch.zeros((), device=self.outputs.device)
        for _, loss, pulled in self._pulled(objective, gate, gathered.weights):
            total = total if loss is None else total + loss
            gathered.add(pulled.weights)
        objective.check_depends(gathered.sums)
        if objective.scaler is None and gathered.faulty() is not None:
            self._blame(objective, gate, begin)
        gathered.deliver()
        return total

    def _pulled(self, objective: Objective, gate: Gate, weights: list[Tensor]) -> Iterator[tuple[Piece, Tensor | None, Pulled]]:
        """Piece by piece from the last: its loss, and what it and all later losses say to the weights."""
        adjoint: Adjoint | None = None
        for piece in self.sweep.backward():
            loss = self.loss(piece, objective)
            pulled = piece.pull(weights, [] if loss is None else [(objective.scaled(loss), None)], adjoint)
            yield piece, None if loss is None else loss.detach(), pulled
            adjoint = gate(piece.index, pulled.adjoint)
            del loss, piece  # their graph goes before the next one is built

    def _blame(self, objective: Objective, gate: Gate, begin: int) -> Never:
        """Runs back once more to find where the first number that is none came from."""
        net = self.sweep.net
        names = [name for name, weight in net.named_parameters() if weight.requires_grad]
        for piece, loss, pulled in self._pulled(objective, gate, weights_of(net)):
            for name, gradient in zip(names, pulled.weights, strict=True):
                if gradient is not None and not bool(gradient.to_dense().isfinite().all()):
                    start, stop = (begin + bound for bound in self.sweep.bounds[piece.index : piece.index + 2])
                    raise RunError(not_finite(name, start, stop, piece.chunk, None if loss is None else loss.item()))
        raise RunError("the gradient is not finite, though every chunk's is: their sum is too large for the weights' type")


def not_finite(name: str, start: int, stop: int, chunk: Chunk, loss: float | None) -> str:
    """The message for a gradient that is not finite."""
    recordings = sorted(set(chunk.recording[chunk.recording >= 0].tolist()))
    listed = ", ".join(map(str, recordings[:5])) + (", ..." if len(recordings) > 5 else "")
    return (
        f"the gradient of '{name.removeprefix('module.')}' is not finite (NaN or infinite) in the chunk of steps {start} to {stop - 1} of the epoch "
        f"(recording {listed}), whose part of the loss is {loss}. `.grad` and the weights are as they were. Look at the inputs and "
        "targets of these steps; if they are sound, the gradient explodes: lower the learning rate, or cut or clip the credit "
        "(tt.Truncated, or tt.Exact with clip_adjoint)."
    )


def lane_norms(adjoint: Adjoint) -> Tensor | None:
    """The norm of each lane over all leaves, `(B,)`; `None` if no credit comes."""
    squares = [leaf.detach().float().reshape(len(leaf), -1).square().sum(1) for leaf in adjoint if leaf is not None]
    return torch.stack(squares).sum(0).sqrt() if squares else None


def scaled(adjoint: Adjoint, factors: Tensor) -> Adjoint:
    """Every lane times its factor, `(B,)`."""
    return [None if a is None else a * factors.to(a.dtype).view(-1, *[1] * (a.dim() - 1)) for a in adjoint]


def _taken(source: Source, sweep: Sweep) -> Iterator[Chunk]:
    for start, stop in pairwise(sweep.bounds):
        chunk = source.take(stop - start)
        if chunk is not None:
            yield chunk
