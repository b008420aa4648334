"""The loop of updates that adapters must equal, written out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Source
from throughtime.gradient import Policy, Probe, Progress, UpdatePolicy, Window


@dataclass(frozen=True)
class Growing:
    """A stride that grows by one step with every update, from epoch to epoch."""

    first: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        del probe
        updates = at.memory or 0
        steps = source.remaining(self.first + updates)
        stop = at.step + steps
        window = Window(at.step, at.step, at.step, stop, stop) if steps else None
        return window, updates + (window is not None)


def plain_loop(
    net: Carried,
    stream: tt.Stream,
    optimizer: Any,
    gradient: Policy | UpdatePolicy,
    *,
    epochs: int = 1_000,
    stop: float | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    after: Callable[[], object] = lambda: None,
    loss_fn: nn.Module | None = None,
    resume: tuple[int, Callable[[], tt.Stream]] | None = None,
) -> list[tuple[float, int]]:
    """Loss and valid steps of each update, until an epoch's end or after `stop` updates.

    `resume`: after so many updates the loop goes on with a new stream, from the saved position.
    """
    records, policy_state, position = list[tuple[float, int]](), None, None
    while stream.epoch < epochs:
        run = tt.updates(
            net,
            stream,
            loss_fn or nn.MSELoss(),
            gradient=gradient,
            policy_state=policy_state,
            accumulate=accumulate,
        )
        if position is not None:
            run.load_state_dict(position)
            position = None
        for update in run:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            after()
            records.append((update.loss.item(), update.steps))
            if len(records) == stop:
                return records
            if resume and len(records) == resume[0]:
                position, stream = run.state_dict(), resume[1]()
                break
        policy_state = run.policy_state
    return records
