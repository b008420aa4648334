"""Ignite engines that train and evaluate on a `tt.Stream`, under any gradient policy.

`create_supervised_tbptt_trainer`, for batches from a loader, is in `ignite_tbptt`.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` valid steps.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

import throughtime as tt
from throughtime.carry import Carried
from throughtime.carry.carried import device_of
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, DataError, MissingExtraError
from throughtime.evaluation import warn_of_cuts
from throughtime.gradient import LossFn, Policy, Update, generators, set_generators
from throughtime.integrations._ignite_step import OptimizerStep
from throughtime.integrations.loader import Loader, StreamBatch, as_stream_batch
from throughtime.updates import Updates

try:
    from ignite.engine import Engine, EventEnum, Events, State
    from ignite.metrics import Metric

    from throughtime.integrations.ignite_tbptt import (
        Tbptt_Events,
        _detach_hidden,
        create_supervised_tbptt_trainer,
    )
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "ignite":
        raise
    raise MissingExtraError(
        "throughtime.integrations.ignite needs Ignite: pip install 'throughtime[ignite]'"
    ) from error

__all__ = [
    "Loader",
    "StreamEvaluator",
    "StreamEvents",
    "StreamTrainer",
    "Tbptt_Events",
    "_detach_hidden",
    "create_supervised_tbptt_trainer",
]


class StreamEvents(EventEnum):
    """Fired by a `StreamTrainer` in every update; filters count the updates, `state.updates`.

    `GRADIENT_READY`: `.grad` is what the optimizer will use. `UPDATE_COMPLETED`: the weights are
    new.

    Example:
        >>> from throughtime.integrations.ignite import StreamEvents
        >>> StreamEvents.UPDATE_COMPLETED(every=100).filter is not None
        True
    """

    GRADIENT_READY = "gradient_ready"
    UPDATE_COMPLETED = "update_completed"


class StreamTrainer(Engine):
    """An Ignite engine that trains on a stream: `trainer.run(stream, max_epochs=5)`.

    The state is carried over the whole stream and reset where recordings start. For batches from a
    loader of your own use `create_supervised_tbptt_trainer`.

    Args:
        net: made by `tt.carry`.
        optimizer: any; stepped once per update.
        loss_fn: as for `tt.updates`.
        gradient: `tt.Truncated(...)`, `tt.Exact(...)` or another policy.
        chunks: how many chunks of the stream one iteration takes, with all updates that fall due in
            them. More chunks reduce the share of Ignite's own cost per iteration.
        accumulate: as for `tt.updates`: so many of the policy's updates are one.
        max_norm: the gradient is clipped to this global norm.
        amp_mode: "amp" runs net and loss under `torch.autocast`.
        scaler: a `torch.amp.GradScaler`; only with `amp_mode`.

    `state.output` of an iteration is the mean loss over its valid steps; an iteration without an
    update keeps that of the one before. Each update fires `StreamEvents`; handlers read it from
    `state.update`, and the number of updates from `state.updates`. `terminate()` in a handler stops
    after the present update. `state_dict()` holds the carried state, the position in the stream and
    torch's random state; an epoch that was terminated and not loaded again starts anew.

    Raises:
        ConfigError: settings that contradict each other. Running on anything but a `tt.Stream` or a
            `Loader` of one raises `DataError`.

    Cost: that of `tt.updates`, and Ignite's per iteration.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.ignite import StreamTrainer
        >>> recording = {"inputs": torch.randn(50, 3), "targets": torch.randn(50)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> optimizer, loss_fn = torch.optim.Adam(net.parameters()), torch.nn.MSELoss()
        >>> trainer = StreamTrainer(net, optimizer, loss_fn, gradient=tt.Truncated(stride=10))
        >>> state = trainer.run(stream, max_epochs=2)
        >>> state.iteration, state.updates
        (6, 10)
    """

    def __init__(
        self,
        net: Carried,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        *,
        gradient: Policy,
        chunks: int = 1,
        accumulate: int = 1,
        max_norm: float | None = None,
        amp_mode: Literal["amp"] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(self._run_batch)
        self._step = OptimizerStep(optimizer, max_norm, amp_mode, scaler)
        self._net, self._chunks = net, chunks
        self._options: dict[str, Any] = {
            "loss_fn": loss_fn,
            "gradient": gradient,
            "scaler": scaler,
            "accumulate": accumulate,
        }
        self._updates: Updates | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._loader: Loader | None = None
        self._next_batch = 0  # of the epoch
        self._optimizer_stepped = True
        self._output = math.nan
        counters: dict[Any, str] = dict.fromkeys(StreamEvents, "updates")
        self.register_events(*StreamEvents, event_to_attr=counters)
        self.add_event_handler(Events.EPOCH_STARTED, self._reset_count)

    # the order of the limits differs between releases
    def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, data: Any = None, max_epochs: int | None = None, **limits: int | None
    ) -> State:
        """Train on `data`, a `tt.Stream` or a `Loader` of one, for `max_epochs` epochs.

        `limits` are those of `Engine.run`.
        """
        if isinstance(data, tt.Stream):
            # the same loader, so that every epoch has as many iterations as the first
            same = self._loader is not None and self._loader.stream is data
            data = self._loader if same else Loader(data, self._chunks)
        if isinstance(data, Loader):
            self._loader = data
            if self._loaded is not None:
                data.load_state_dict({"next": self._loaded["next"]})
        return super().run(data, max_epochs, **limits)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The engine's state, and under `"stream"` the carried state, position and randomness."""
        position = self._loaded
        if position is None and self._updates is not None:
            state: Any = self.state
            position = {
                "position": self._updates.state_dict(after_step=self._optimizer_stepped),
                "next": self._next_batch,
                "updates": state.updates - (not self._optimizer_stepped),
                "random": generators(device_of(self._net)),
            }
        return OrderedDict(super().state_dict(), stream=position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from there with the next `run`.

        The run is equal to the bit if weights and optimizer are those of the same moment.
        """
        if "stream" not in state_dict:
            raise DataError(
                f"the state has {list(state_dict)}, expected 'stream' as well: it was saved from"
                " another kind of engine. Save the trainer itself: Checkpoint({'trainer':"
                " trainer, 'net': net, 'optimizer': optimizer}, ...)"
            )
        own = {key: value for key, value in state_dict.items() if key != "stream"}
        super().load_state_dict(own)
        self._loaded, self._updates = state_dict["stream"], None
        state: Any = self.state
        state.updates = 0 if self._loaded is None else self._loaded["updates"]

    def _reset_count(self) -> None:
        state: Any = self.state
        state.updates = state.updates if state.iteration else 0

    def _run_batch(self, engine: Engine, batch: Any) -> float:
        """One iteration."""
        del engine
        losses: list[Tensor] = []
        steps: list[int] = []
        self._net.train()
        for update in self._run_updates(as_stream_batch(batch)):
            losses.append(update.loss)
            steps.append(update.steps)
            if self.should_terminate or self.should_terminate_single_epoch:
                break
        if losses:
            self._output = fmean(torch.stack(losses).tolist(), steps)
        return self._output

    def _run_updates(self, batch: StreamBatch) -> Iterator[Update]:
        """The updates of a batch; the last batch of an epoch has all that are left."""
        updates = self._epoch_updates(batch)
        self._next_batch = batch.index
        if batch.index == 0 and batch.stream.position:
            # resumed within the last batch, which is counted already: its rest comes first
            while (update := self._next_update(updates)) is not None:
                yield update
            updates = self._new_updates(batch.stream)
        self._next_batch += 1
        while not batch.is_finished and (update := self._next_update(updates)) is not None:
            yield update

    def _epoch_updates(self, batch: StreamBatch) -> Updates:
        """The updates of the epoch: new with its first batch, or from a loaded position."""
        if self._loaded is None and self._updates is not None and batch.index:
            return self._updates
        updates = self._new_updates(batch.stream)
        if self._loaded is not None:
            updates.load_state_dict(self._loaded["position"])
            set_generators(self._loaded["random"], device_of(self._net))
            self._loaded = None
        return updates

    def _new_updates(self, stream: tt.Stream) -> Updates:
        """The updates of another epoch; a policy may learn from epoch to epoch."""
        previous = None if self._updates is None else self._updates.policy_state
        self._updates = tt.updates(self._net, stream, policy_state=previous, **self._options)
        return self._updates

    def _next_update(self, updates: Updates) -> Update | None:
        update = self._step.next_update(updates, self._net)
        if update is None:
            return None
        self._optimizer_stepped = False
        state: Any = self.state
        state.update, state.updates = update, state.updates + 1
        self._step.clip()
        self.fire_event(StreamEvents.GRADIENT_READY)
        self._step.step()
        self._optimizer_stepped = True
        self.fire_event(StreamEvents.UPDATE_COMPLETED)
        return update


class StreamEvaluator(Engine):
    """An Ignite engine that runs a net over a stream for metrics: `evaluator.run(stream).metrics`.

    The net runs in evaluation mode under `no_grad` and is put back. A training in progress keeps
    its state, as long as the stream is another one. `tt.evaluate` needs no metrics of Ignite, and
    gives those of each recording too.

    Args:
        net: made by `tt.carry`.
        metrics: by name; each gets outputs `(N, C)` and targets of the valid steps of a chunk, so
            that its means are over valid steps: classes `(N,)`, numbers `(N, C)`, also if C is 1.

    `state.output` is `(outputs, targets)`. An iteration is a chunk that has a valid step.

    Raises:
        DataError: when run, on anything but a `tt.Stream` with targets.

    Cost: one forward pass; memory for one chunk, and what the metrics keep.

    Example:
        >>> import torch, throughtime as tt
        >>> from ignite.metrics import MeanSquaredError
        >>> from throughtime.integrations.ignite import StreamEvaluator
        >>> recording = {"inputs": torch.zeros(50, 3), "targets": torch.ones(50)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.GRU(3, 1, bias=False))
        >>> StreamEvaluator(net, {"mse": MeanSquaredError()}).run(stream).metrics
        {'mse': 1.0}
    """

    def __init__(self, net: Carried, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__(self._run_chunk)
        self._net = net
        for name, metric in (metrics or {}).items():
            metric.attach(self, name)

    # the order of the limits differs between releases
    def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, data: Any = None, max_epochs: int | None = None, **limits: int | None
    ) -> State:
        """Evaluate one epoch of `data`, a `tt.Stream` of its own.

        Raises:
            DataError: `data` is no stream, or has no targets.
            ConfigError: more epochs than one, or a part of one.

        Warns:
            UserWarning: the stream cuts recordings; see `tt.evaluate`.
        """
        if not isinstance(data, tt.Stream):
            raise DataError(
                f"an evaluation got a {type(data).__name__}, expected a tt.Stream:"
                " evaluator.run(tt.Stream(recordings, ...))"
            )
        if max_epochs not in (None, 1) or limits:
            raise ConfigError(
                f"max_epochs={max_epochs}, {limits}: an evaluation is one whole epoch:"
                " evaluator.run(stream)"
            )
        warn_of_cuts(data)
        # the number of chunks that have a valid step may differ from run to run
        self.state.epoch_length = None
        return super().run(_scored_chunks(self._net, data), 1)

    @staticmethod
    def _run_chunk(engine: Engine, item: tuple[tt.Predictor, Chunk]) -> tuple[Tensor, Tensor]:
        del engine
        predictor, chunk = item
        return chunk.valid_pairs(predictor._run_chunk(chunk))


def _scored_chunks(net: Carried, stream: tt.Stream) -> Iterator[tuple[tt.Predictor, Chunk]]:
    """The chunks of a stream that have a valid step, with the predictor that runs them.

    The others only carry the state on: a mean over no steps is NaN.
    """
    predictor = tt.Predictor(net, stream.lanes)
    for chunk in (c.to(predictor.device) for c in stream):
        if chunk.targets is None:
            raise DataError(
                "the recordings of this stream have no targets; to run the net without metrics"
                " use tt.predict"
            )
        if chunk.valid_steps:
            yield predictor, chunk
        else:
            predictor._run_chunk(chunk)
