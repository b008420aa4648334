"""One iteration of Ignite's trainer: a batch, chunk by chunk, with its events, and the state that it may carry."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from ignite.engine import Engine, EventEnum, Events

import throughtime as tt
from throughtime.errors import DataError
from throughtime.integrations.ignite.batches import Batch
from throughtime.integrations.ignite.chunked import Way


class Tbptt_Events(EventEnum):  # the name that scripts import
    """Fired by the trainer around every chunk.

    `every=`, `once=` and other filters count the chunks of the run.
    """

    TIME_ITERATION_STARTED = "time_iteration_started"
    TIME_ITERATION_COMPLETED = "time_iteration_completed"


def _detach_hidden(hidden: Any) -> Any:
    """The state without its graph."""
    return tt.state.detach(hidden)


@dataclass
class Iteration:
    """What the engine calls with each batch; `state.hidden` of the engine is what it carries."""

    way: Way
    lanes: Callable[[Batch], int | None]
    carry: bool
    weighted: bool
    kept: Any = None
    kept_lanes: int | None = None

    def __call__(self, engine: Engine, batch: Batch) -> float | None:
        losses: list[float] = []
        steps: list[int] = []
        state: Any = engine.state
        for played in self.way.play(
            batch, self._entering(state, batch), partial(self._begin, engine)
        ):
            if self.carry:
                self.kept = state.hidden = (
                    None if played.hidden is None else _detach_hidden(played.hidden)
                )
            if not played.steps:
                break
            state.output = played.loss
            losses.append(played.loss)
            steps.append(played.steps)
            engine.fire_event(Tbptt_Events.TIME_ITERATION_COMPLETED)
            if engine.should_terminate or engine.should_terminate_single_epoch:
                break
        if not losses:
            return None
        return fmean(losses, steps) if self.weighted else sum(losses) / len(losses)

    @staticmethod
    def _begin(engine: Engine) -> None:
        state: Any = engine.state
        state.time_iteration += 1
        engine.fire_event(Tbptt_Events.TIME_ITERATION_STARTED)

    def _entering(self, state: Any, batch: Batch) -> Any:
        if not self.carry:
            return None
        lanes = self.lanes(batch)
        if state.hidden is not None and state.hidden is self.kept and lanes != self.kept_lanes:
            raise DataError(
                f"the batch has {lanes} lanes, the carried state {self.kept_lanes}: with carry=True"
                " row i goes on where row i of the batch before it ended, so all batches of an"
                " epoch need the same rows. Leave out the last one, DataLoader(...,"
                " drop_last=True)"
            )
        self.kept_lanes = lanes
        return state.hidden

    def restart(self, engine: Engine) -> None:
        """An epoch begins from the start, unless it is resumed in its middle and a checkpoint brought the state."""
        state: Any = engine.state
        if state.iteration == 0:
            state.time_iteration = 0
        begins = state.epoch_length is not None and state.iteration % state.epoch_length == 0
        if self.carry and (begins or state.hidden is self.kept):
            state.hidden = None

    def engine(self) -> Engine:
        """The engine around it, with events that filters can count."""
        engine = Engine(self)
        counted: dict[Any, str] = dict.fromkeys(Tbptt_Events, "time_iteration")
        engine.register_events(*Tbptt_Events, event_to_attr=counted)
        if self.carry:
            state: Any = engine.state
            state.hidden = None
            engine.state_dict_user_keys.append("hidden")
        engine.add_event_handler(Events.EPOCH_STARTED, self.restart)
        return engine
