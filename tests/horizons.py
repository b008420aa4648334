"""`tt.Adaptive` that records its horizons, to test that they outlast an epoch."""

from dataclasses import dataclass, field

import throughtime as tt
from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.gradient import Objective, Update
from throughtime.gradient.adaptive import AdaptiveState
from throughtime.state import State


@dataclass(frozen=True)
class RecordingAdaptive(tt.Adaptive):
    """Records the position, the horizon and the age of its measurement before every update."""

    record: list[tuple[int, int, int | None]] = field(
        default_factory=list[tuple[int, int, int | None]], repr=False
    )

    def update(
        self, net: Carried, source: Source, objective: Objective, state: AdaptiveState
    ) -> tuple[Update | None, AdaptiveState]:
        self.record.append((source.position, state.horizon, state.since_measured))
        return super().update(net, source, objective, state)

    def hand_overs(self) -> list[tuple[int, int]]:
        """The horizon at the end of each epoch, and that at the start of the next one."""
        pairs = zip(self.record, self.record[1:], strict=False)
        return [(last[1], first[1]) for last, first in pairs if first[0] == 0]


@dataclass(frozen=True)
class ForgetfulAdaptive(RecordingAdaptive):
    """A mutant: every epoch starts from the shortest horizon."""

    def init(self, carried: State, previous: AdaptiveState | None) -> AdaptiveState:
        del previous
        return super().init(carried, None)
