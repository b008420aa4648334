"""`tt.Adaptive` that records its horizons, to test that they outlast an epoch."""

from dataclasses import dataclass, field
from typing import Any

import throughtime as tt
from throughtime.chunk import Source
from throughtime.gradient import Probe, Progress, Window


@dataclass(frozen=True)
class RecordingAdaptive(tt.Adaptive):
    """Records the position, the horizon and the age of its measurement before every update."""

    record: list[tuple[int, int, int | None]] = field(
        default_factory=list[tuple[int, int, int | None]], repr=False
    )

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        memory: dict[str, Any] = at.memory or {"horizon": self.min, "since": None}
        self.record.append((at.step, memory["horizon"], memory["since"]))
        return super().plan(source, at, probe)

    def hand_overs(self) -> list[tuple[int, int]]:
        """The horizon at the end of each epoch, and that at the start of the next one."""
        pairs = zip(self.record, self.record[1:], strict=False)
        return [(last[1], first[1]) for last, first in pairs if first[0] == 0]


@dataclass(frozen=True)
class ForgetfulAdaptive(RecordingAdaptive):
    """A mutant: every epoch starts from the shortest horizon."""

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        return super().plan(source, at if at.step else at._replace(memory=None), probe)
