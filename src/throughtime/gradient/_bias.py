"""The bias of truncations: their gradients and the exact one, at the same weights, in one pass.

A gradient is linear in the losses that autograd starts from. So the segment that is run again for
the exact gradient serves every truncation as well: gates are placed wherever one of them cuts, and
each flows back through the same graph with its own gates closed. A truncation whose windows overlap
flows several times, so that windows of one flow do not overlap.

Cost: two forward passes per step, a backward pass for the exact gradient, and one for each
truncation (about horizon / stride of them where windows overlap) and for a part of the losses.

Shapes: `B` lanes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.gradient import schedule
from throughtime.gradient._backward import (
    CreditFlow,
    GradientAccumulator,
    LossPass,
)
from throughtime.gradient._memory import MemoryBudget, preserve_rng_and_buffers
from throughtime.gradient._segments import CheckpointedPass, CreditGate, Verify
from throughtime.gradient.objective import Objective, trainable_weights
from throughtime.gradient.schedule import Window, WindowGroup
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class Comparison:
    """Gradients of the same steps.

    Attributes:
        loss: the mean loss.
        exact: the exact gradient, one tensor for each weight.
        truncated: that of each truncation.
        part: the exact gradient of a part of the losses, if asked for.
    """

    loss: float
    exact: list[Tensor]
    truncated: list[list[Tensor]]
    part: list[Tensor] | None = None


@dataclass(frozen=True)
class BiasProbe:
    """The steps on which gradients are compared, the state entering them, and how to run them.

    Attributes:
        net: made by `tt.carry`.
        read: returns the steps between two bounds.
        steps: their number.
        state: the state before the first step; `None` for the net's initial state.
        objective: the loss.
        memory: the budget of the pass.
        verify: as for `tt.Exact`.
    """

    net: Carried
    read: Callable[[int, int], Chunk]
    steps: int
    state: State
    objective: Objective
    memory: MemoryBudget
    verify: Verify = "first"

    def compare(
        self, plans: Sequence[Sequence[Window]], part: WindowGroup | None = None
    ) -> Comparison:
        """The exact gradient and that of every plan, and of a part of the losses if given.

        Random generators, buffers and `.grad` are left unchanged.
        """
        first = self.read(0, 1)
        with torch.enable_grad(), preserve_rng_and_buffers(self.net, first.inputs.device):
            entering = (
                trees.detach(self.net.initial_state(first.lanes, like=first.inputs))
                if self.state is None
                else self.state
            )
            groups = [schedule.group_windows(plan) for plan in plans]
            groups += [] if part is None else [[part]]
            cuts = {cut for plan in groups for group in plan for cut in group.cuts}
            length = self.memory.segment_steps(
                self.net,
                self.steps,
                lambda n: self.read(0, n),
                entering,
                self.objective,
                gates=len(cuts),
            )
            bounds = schedule.pieces(self.steps, length)
            checkpoints = CheckpointedPass(
                self.net,
                bounds,
                self.read,
                self.state,
                offload=self.memory.offload,
                verify=self.verify,
                gates={cut: CreditGate() for cut in cuts},
            )
            loss_pass = LossPass.run(
                checkpoints, (self.read(a, b) for a, b in pairwise(bounds)), self.objective
            )
            if not loss_pass.valid_steps:
                raise DataError(
                    f"none of the {self.steps} steps has a target that counts: there is no gradient"
                    " to compare"
                )
            loss, (exact, *others) = _gradients(loss_pass, self.objective, groups)
            return Comparison(loss, exact, others[: len(plans)], *others[len(plans) :])


def _gradients(
    loss_pass: LossPass, objective: Objective, plans: Sequence[Sequence[WindowGroup]]
) -> tuple[float, list[list[Tensor]]]:
    """The loss; the exact gradient, then that of each plan."""
    checkpoints = loss_pass.checkpoints
    steps = checkpoints.bounds[-1]
    exact = WindowGroup(((0, steps),), frozenset())
    grads = [GradientAccumulator(trainable_weights(checkpoints.net)) for _ in range(len(plans) + 1)]
    flows = [(exact, CreditFlow(grads[0]))]
    for plan, own in zip(plans, grads[1:], strict=True):
        flows += [(group, CreditFlow(own)) for group in plan]
    cuts = sorted(
        {
            bound
            for plan in plans
            for group in plan
            if sum(stop - start for start, stop in group.spans) < steps
            for span in group.spans
            for bound in span
        }
    )
    total = 0.0
    for segment in checkpoints.backward():
        losses = loss_pass.losses(segment, objective, cuts)
        total += sum(loss.item() for loss in losses.values())
        gates = checkpoints.gates(segment.index)
        for number, (group, flow) in enumerate(flows, 1):
            for step, gate in gates.items():
                gate.factor = 0.0 if step in group.cuts else 1.0
            roots = [(loss, None) for step, loss in losses.items() if group.counts(step)]
            flow.through(segment, roots, retain=number < len(flows))
            del roots
        del segment, losses
    objective.check_depends(grads[0].sums)
    return total, [own.dense() for own in grads]
