"""An Ignite engine that trains on a `tt.Stream` under any gradient policy."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any

import torch
from ignite.engine import Engine, EventEnum, Events, State
from torch import Tensor

import throughtime as tt
from throughtime.errors import DataError
from throughtime.gradient import LossFn, Policy, generators, set_generators
from throughtime.integrations.ignite.stepping import Stepping, device_of
from throughtime.integrations.stretches import Loader, Stretch, stretch


class StreamEvents(EventEnum):
    """Fired by a `StreamTrainer` in every update; filters count the updates of the run,
    `state.updates`.

    `GRADIENT_READY`: `.grad` is what the optimizer will see. `UPDATE_COMPLETED`: the weights are
    new.
    """

    GRADIENT_READY = "gradient_ready"
    UPDATE_COMPLETED = "update_completed"


class StreamTrainer(Engine):
    """What `stream_trainer` returns: an engine whose `state_dict` holds the carried state and the place in the stream."""

    def __init__(
        self,
        net: tt.Carried,
        loss_fn: LossFn,
        gradient: Policy,
        stepping: Stepping,
        chunks: int = 1,
        accumulate: int = 1,
    ) -> None:
        super().__init__(self._play)
        self._net, self._stepping, self._chunks = net, stepping, chunks
        self._begun = partial(
            tt.updates,
            net,
            loss_fn=loss_fn,
            gradient=gradient,
            scaler=stepping.scaler,
            accumulate=accumulate,
        )
        self._updates: tt.Updates | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._loader: Loader | None = None
        self._next = 0  # stretch of the epoch
        self._stepped = True
        self._output = math.nan
        counted: dict[Any, str] = dict.fromkeys(StreamEvents, "updates")
        self.register_events(*StreamEvents, event_to_attr=counted)
        self.add_event_handler(Events.EPOCH_STARTED, self._count_anew)

    # the order of the limits differs between releases
    def run(self, data: Any = None, max_epochs: int | None = None, **limits: int | None) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Plays `data`, a `tt.Stream` or a `Loader` of one, for `max_epochs` epochs.

        `limits` are those of `Engine.run`.
        """
        if isinstance(
            data, tt.Stream
        ):  # the same loader, so that every epoch has as many iterations as the first
            data = (
                self._loader
                if self._loader is not None and self._loader.stream is data
                else Loader(data, self._chunks)
            )
        if isinstance(data, Loader):
            self._loader = data
            if self._loaded is not None:
                data.load_state_dict({"next": self._loaded["next"]})
        return super().run(data, max_epochs, **limits)

    def state_dict(self) -> OrderedDict[str, Any]:
        """What any engine saves, and under `"stream"` the carried state, the place, and torch's random state."""
        place = self._loaded
        if place is None and self._updates is not None:
            random = generators(device_of(self._net))
            done: Any = self.state
            at = self._updates.state_dict(after_step=self._stepped)
            place = {
                "place": at,
                "next": self._next,
                "updates": done.updates - (not self._stepped),
                "random": random,
            }
        return OrderedDict(super().state_dict(), stream=place)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from there with the next `run`, to the bit if weights and optimizer are those of the same moment."""
        if "stream" not in state_dict:
            raise DataError(
                f"the state has {list(state_dict)}, expected 'stream' as well: it was saved from"
                " another kind of engine. Save the trainer itself: Checkpoint({'trainer':"
                " trainer, 'net': net, 'optimizer': optimizer}, ...)"
            )
        super().load_state_dict(
            {key: value for key, value in state_dict.items() if key != "stream"}
        )
        self._loaded, self._updates = state_dict["stream"], None
        state: Any = self.state
        state.updates = 0 if self._loaded is None else self._loaded["updates"]

    def _count_anew(self) -> None:
        state: Any = self.state
        state.updates = state.updates if state.iteration else 0

    def _play(self, engine: Engine, batch: Any) -> float:
        """What an iteration does."""
        del engine
        losses: list[Tensor] = []
        steps: list[int] = []
        self._net.train()
        for update in self._played(stretch(batch)):
            losses.append(update.loss)
            steps.append(update.steps)
            if self.should_terminate or self.should_terminate_single_epoch:
                break
        if losses:
            self._output = fmean(torch.stack(losses).tolist(), steps)
        return self._output

    def _played(self, part: Stretch) -> Iterator[tt.Update]:
        """The updates of a stretch: until it is over, or for the last one until there are none left."""
        updates = self._entered(part)
        self._next = part.index
        if (
            part.index == 0 and part.stream.position
        ):  # resumed within the last stretch, which counts as played: its rest comes first
            while (update := self._update(updates)) is not None:
                yield update
            updates = self._updates = self._begun(part.stream)
        self._next += 1
        while not part.over and (update := self._update(updates)) is not None:
            yield update

    def _entered(self, part: Stretch) -> tt.Updates:
        """The updates of the epoch: begun with its first stretch, or gone on with from a saved place."""
        if self._loaded is None and self._updates is not None and part.index:
            return self._updates
        self._updates = self._begun(part.stream)
        if self._loaded is not None:
            self._updates.load_state_dict(self._loaded["place"])
            set_generators(self._loaded["random"], device_of(self._net))
            self._loaded = None
        return self._updates

    def _update(self, updates: tt.Updates) -> tt.Update | None:
        state: Any = self.state
        self._stepping.optimizer.zero_grad()
        with self._stepping.autocast(device_of(self._net)):
            update = next(updates, None)
        if update is None:
            return None
        self._stepped = False
        state.update, state.updates = update, state.updates + 1
        self._stepping.clip()
        self.fire_event(StreamEvents.GRADIENT_READY)
        self._stepping.step()
        self._stepped = True
        self.fire_event(StreamEvents.UPDATE_COMPLETED)
        return update
