"""The loop of updates that adapters must equal, written out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Source
from throughtime.gradient import Policy, Probe, Progress, Window


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
    gradient: Policy,
    *,
    epochs: int = 1_000,
    stop: float | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    after: Callable[[], object] = lambda: None,
) -> list[tuple[float, int]]:
    """Loss and valid steps of each update, until an epoch's end or after `stop` updates."""
    records, policy_state = list[tuple[float, int]](), None
    for _ in range(epochs):
        run = tt.updates(
            net,
            stream,
            nn.MSELoss(),
            gradient=gradient,
            policy_state=policy_state,
            accumulate=accumulate,
        )
        for update in run:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            after()
            records.append((update.loss.item(), update.steps))
            if len(records) == stop:
                return records
        policy_state = run.policy_state
    return records
