"""One window of truncated backpropagation: run through the net, its loss handed back as `.grad`.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.gradient.objective import Objective
from throughtime.gradient.schedule import Window
from throughtime.gradient.sweep import forget_casts, no_autocast
from throughtime.state import State


class Run(NamedTuple):
    """A window that has been run: the outputs that count, the state at its end, the state to start the next one."""

    outputs: Tensor
    state: State
    kept: State

    def backward(self, objective: Objective, chunk: Chunk) -> Tensor:
        """Adds the gradient of the loss of `chunk` to `.grad`; returns the loss, detached.

        The backward pass runs outside autocast, as torch recommends.
        """
        loss = objective.loss(self.outputs, chunk)
        if not loss.requires_grad:
            objective.check_depends([])
        scaled = objective.scaled(loss)
        if torch.is_autocast_enabled(loss.device.type):
            with no_autocast(loss):
                scaled.backward()
        else:  # the usual case, without the price of a context
            scaled.backward()
        return loss.detach()

    def detached(self) -> "Run":
        """The same without its graph."""
        state = trees.detach(self.state)
        return Run(
            self.outputs.detach(),
            state,
            state if self.kept is self.state else trees.detach(self.kept),
        )


def run_window(net: Carried, steps: Chunk, state: State, plan: Window) -> Run:
    """Runs `steps`, the window of `plan` and its lead, from `state`.

    Cut where the next one begins so that its state can be kept.
    """
    forget_casts(steps.inputs)
    if plan.start == 0 and plan.keep in (0, plan.stop):
        y, end = net(steps.inputs, state, steps.resets if steps.any_reset else None)
        kept = end if plan.keep else state
    else:
        outputs: list[Tensor] = []
        end = kept = state
        for start, stop in pairwise(sorted({0, plan.start, plan.keep, plan.stop})):
            part = steps[start:stop]
            if start == plan.start:
                forget_casts(steps.inputs)  # older torch keeps casts made without a graph
            with nullcontext() if start >= plan.start else torch.no_grad():
                y, end = net(part.inputs, end, part.resets if part.any_reset else None)
            kept = end if stop == plan.keep else kept
            outputs += [y] if start >= plan.start else []
        y = torch.cat(outputs)
    counted = plan.counted - plan.start
    return Run(y[counted:] if counted else y, end, kept)
