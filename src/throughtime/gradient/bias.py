"""What truncations cost: their gradients and the exact one, of the same stretch at the same
weights, in one sweep.

A gradient is linear in what autograd starts from. So the piece that is run again for the exact
gradient serves every truncation too: gates stand wherever one of them cuts, and each takes its own
way back through the same graph, its gates closed. A truncation whose windows overlap takes several
ways, so that each is free of overlap. Cost: two forward passes per step, a backward pass for the
exact gradient, and one for each truncation (about horizon / stride of them where windows overlap).

Shapes: `B` lanes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.gradient import schedule
from throughtime.gradient.budget import Room
from throughtime.gradient.gate import Gate
from throughtime.gradient.gather import Gathered, weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.replay import unnoticed
from throughtime.gradient.schedule import Course, Window
from throughtime.gradient.stretch import Stretch
from throughtime.gradient.sweep import Adjoint, Piece, Sweep, Verify
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found.

    Attributes:
        loss: the mean loss of the stretch.
        exact: the exact gradient, one tensor for each weight.
        truncated: that of each truncation.
    """

    loss: float
    exact: list[Tensor]
    truncated: list[list[Tensor]]


@dataclass(frozen=True)
class Probe:
    """Where gradients are compared: some steps, the state entering them, and how to run them.

    Attributes:
        net: made by `tt.carry`.
        read: gives the steps between two places of the stretch.
        steps: how many there are.
        state: the state entering the first; `None` for the net's initial state.
        objective: the loss.
        room: the memory for it.
        verify: as for `tt.Exact`.
    """

    net: Carried
    read: Callable[[int, int], Chunk]
    steps: int
    state: State
    objective: Objective
    room: Room
    verify: Verify = "first"

    def compare(self, plans: Sequence[Sequence[Window]]) -> Comparison:
        """The exact gradient and that of every plan.

        Generators, buffers and `.grad` stay as they were.
        """
        first = self.read(0, 1)
        with torch.enable_grad(), unnoticed(self.net, first.inputs.device):
            entering = (
                trees.detach(self.net.initial_state(first.lanes, like=first.inputs))
                if self.state is None
                else self.state
            )
            length = self.room.length(
                self.net, self.steps, lambda n: self.read(0, n), entering, self.objective
            )
            contenders = [schedule.courses(plan) for plan in plans]
            gates = {
                cut: Gate() for courses in contenders for course in courses for cut in course.cuts
            }
            bounds = schedule.pieces(self.steps, length)
            sweep = Sweep(
                self.net,
                bounds,
                self.read,
                self.state,
                offload=self.room.offload,
                verify=self.verify,
                gates=gates,
            )
            stretch = Stretch.played(
                sweep, (self.read(a, b) for a, b in pairwise(bounds)), self.objective
            )
            if not stretch.valid:
                raise DataError(
                    f"none of the {self.steps} steps has a target that counts: there is no gradient"
                    " to compare"
                )
            return _compare(stretch, self.objective, contenders)


@dataclass(eq=False)
class Flow:
    """The credit of one course on its way back through the pieces."""

    course: Course
    gathered: Gathered
    adjoint: Adjoint | None = None

    def through(
        self, piece: Piece, losses: Mapping[int, Tensor], gates: Mapping[int, Gate], *, last: bool
    ) -> None:
        """Takes the credit through one piece; `last` lets its graph go."""
        for place, gate in gates.items():
            gate.factor = 0.0 if place in self.course.cuts else 1.0
        roots = [(loss, None) for step, loss in losses.items() if self.course.counts(step)]
        pulled = piece.pull(self.gathered.weights, roots, self.adjoint, keep=not last)
        self.gathered.add(pulled.weights)
        self.adjoint = pulled.adjoint


def _compare(
    stretch: Stretch, objective: Objective, contenders: Sequence[Sequence[Course]]
) -> Comparison:
    exact = Course(((0, stretch.sweep.bounds[-1]),), frozenset())
    sums = [Gathered(weights_of(stretch.sweep.net)) for _ in range(len(contenders) + 1)]
    flows = [
        Flow(exact, sums[0]),
        *(Flow(course, sums[i]) for i, courses in enumerate(contenders, 1) for course in courses),
    ]
    edges = sorted(
        {
            edge
            for courses in contenders
            if len(courses) > 1
            for course in courses
            for span in course.spans
            for edge in span
        }
    )
    total = 0.0
    for piece in stretch.sweep.backward():
        losses = stretch.losses(piece, objective, edges)
        total += sum(loss.item() for loss in losses.values())
        for flow in flows:
            flow.through(piece, losses, stretch.sweep.gates(piece.index), last=flow is flows[-1])
        del piece, losses
    objective.check_depends(sums[0].sums)
    found = [s.dense() for s in sums]
    return Comparison(total, found[0], found[1:])
