"""The executor: runs a planned window through the net and hands its loss back as `.grad`.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient.objective import Objective
from throughtime.gradient.schedule import Window
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
            raise ModelError(
                "the loss depends on no parameter that requires a gradient: is every parameter frozen, or does the net or loss_fn "
                "detach its outputs?"
            )
        scaled = objective.scaled(loss)
        if torch.is_autocast_enabled(loss.device.type):
            with torch.autocast(loss.device.type, enabled=False):
                scaled.backward()
        else:
            scaled.backward()
        return loss.detach()


def run_window(net: Carried, steps: Chunk, state: State, plan: Window) -> Run:
    """Runs `steps`, the window of `plan`, from `state`; cut where the next window starts so that its state can be kept.

    Weights that autocast cached belong to the model before its last update: the cache is emptied first.
    """
    if torch.is_autocast_enabled(steps.inputs.device.type):
        torch.clear_autocast_cache()
    if plan.keep in (plan.start, plan.stop):
        y, end = net(steps.inputs, state, steps.resets if steps.any_reset else None)
        kept = end if plan.keep == plan.stop else state
    else:
        first, second = steps.between(plan.start, plan.keep), steps.between(plan.keep, plan.stop)
        y_first, kept = net(first.inputs, state, first.resets if first.any_reset else None)
        y_second, end = net(second.inputs, kept, second.resets if second.any_reset else None)
        y = torch.cat([y_first, y_second])
    return Run(y[plan.counted :] if plan.counted else y, end, kept)
