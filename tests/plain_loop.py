"""The loop of updates that adapters must equal, written out, and the trainings they must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import recordings
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


LENGTHS = (61, 34, 50, 8, 3)
WINDOWS = tt.Truncated(7, 25)


@dataclass(frozen=True)
class Course:
    """Two epochs; `resume`: stopped after so many updates, and resumed in new objects."""

    gradient: Any = WINDOWS
    accumulate: int = 1
    clip: float | None = None
    bfloat16: bool = False
    resume: int = 0
    dropout: float = 0.3
    decay: float = 1.0  # of the learning rate, with every update
    cached: bool = True  # what autocast casts

    def net(self) -> Carried:
        torch.manual_seed(1)
        layers = nn.LSTM(3, 4), nn.Dropout(self.dropout), nn.Linear(4, 1)
        return tt.carry(nn.Sequential(*layers)).to(self.dtype)

    def stream(self, lanes: int = 2) -> tt.Stream:
        return tt.Stream(recordings(LENGTHS, outputs=1), lanes, 10, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.bfloat16 else torch.float64


COURSES = {
    "horizon": Course(),
    "exact": Course(tt.Exact(chunk=9)),
    "growing": Course(Growing(4)),
    "accumulated, clipped": Course(accumulate=3, clip=0.05),
    "bfloat16": Course(bfloat16=True),
    "resumed": Course(resume=7),
    "growing, resumed": Course(Growing(4), resume=13),
}
every_course = pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)


def adam(net: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def flat(net: nn.Module) -> Tensor:
    """All weights."""
    return torch.cat([weight.detach().cpu().flatten() for weight in net.parameters()])


@cache
def by_hand(course: Course, stop: float | None = None) -> Tensor:
    """The weights that the loop comes to."""
    net = course.net()
    optimizer = adam(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, course.decay)
    options: Any = {"accumulate": course.accumulate, "clip": course.clip, "after": schedule.step}
    torch.manual_seed(5)
    kind, on = torch.bfloat16, course.bfloat16
    with torch.autocast("cpu", kind, enabled=on, cache_enabled=course.cached):
        plain_loop(net, course.stream(), optimizer, course.gradient, epochs=2, stop=stop, **options)
    return flat(net)


def check(train: Callable[[Course, Path], Tensor], course: Course, folder: Path) -> None:
    """An adapter comes to the same bits, and to others where the course has no options."""
    found, expected = train(course, folder), by_hand(course)
    if course.bfloat16:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    other = by_hand(Course(course.gradient)).to(found.dtype)
    changed = course.bfloat16 or course.accumulate > 1 or course.decay < 1
    assert ((found - other).abs().max() > 1e-5) == changed
