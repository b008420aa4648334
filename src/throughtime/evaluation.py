"""Evaluation: loss and metrics of whole recordings, chunk by chunk, state carried, without a graph.

The state of a training in progress is never touched.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from throughtime._device import real_type, send
from throughtime.carry.carried import Carried, dtype_of
from throughtime.chunk import Chunk, Placement, join
from throughtime.distributed import ranks_of
from throughtime.errors import DataError, ModelError, counted, listed, warn_caller
from throughtime.gradient.objective import LossFn, Objective, target_kind
from throughtime.metrics import (
    Classification,
    MergeableMetric,
    Metric,
    Metrics,
    Sums,
    TorchMetricAdapter,
    as_metric,
)
from throughtime.nn.affine import needs_whole_recordings
from throughtime.predict import Predictor, check_standardised
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream.sources import Recordings
from throughtime.stream.stream import whole_stream


@dataclass(frozen=True)
class Evaluation:
    """The result of `tt.evaluate`.

    Attributes:
        loss: mean over all valid steps, NaN where no step is valid; `None` without a `loss_fn`.
        steps: number of valid steps.
        metrics: over all recordings together; empty without `metrics`.
        recordings: metrics by recording's name; a recording cut into parts counts as one.
    """

    loss: Any  # a float or None, which a type checker would ask every caller about
    steps: int
    metrics: Metrics
    recordings: dict[str, Metrics]


def evaluate(
    net: Carried,
    data: Stream | Recordings,
    loss_fn: LossFn | None = None,
    *,
    metrics: Metric | nn.Module | None = None,
) -> Evaluation:
    """Loss and metrics of whole recordings, with the state carried as in training.

    The net runs in evaluation mode under `no_grad` and is put back; the carried state of a training
    in progress is a value elsewhere and cannot be disturbed.

    A stream with more lanes than recordings cuts recordings, and each part starts from the initial
    state: a warning says so. On several ranks each plays its share of a stream, and all return the
    loss and the metrics over all of them.

    Args:
        net: made by `tt.carry`.
        data: recordings, as for `tt.Stream`: whole ones are played, up to 64 side by side, all of
            them on every rank. Or one epoch of a `tt.Stream`, which sets lanes, chunk, dtype and
            more; not the one that training iterates.
        loss_fn: as for `tt.updates`; its means are weighted by valid steps, those of torch's losses
            of classes by the weights of the classes, so that the cut into chunks changes nothing.
        metrics: `tt.metrics.Classification(classes)`, `tt.metrics.Regression()`, any
            `torchmetrics.Metric` or `MetricCollection`, or your own `tt.metrics.Metric`, which a
            net with several outputs needs.

    Returns:
        An `Evaluation`: the loss and the metrics over all recordings, and the metrics of each.

    Raises:
        DataError: the recordings have no targets, or a stream plays only a rank's share and
            the metrics have no `merge`.
        ModelError: a loss of torch, or metrics of ours or of torchmetrics, for several outputs.

    Warns:
        UserWarning: a stream cuts recordings; the message names the `lanes=` that does not.

    Cost: one forward pass; memory for one chunk, and for all outputs with a `tt.SequenceLoss` that
    is not additive.

    Example:
        >>> import torch, throughtime as tt
        >>> recording = {"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> tt.evaluate(net, recording, torch.nn.MSELoss()).steps
        50
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> tt.evaluate(net, stream, metrics=tt.metrics.Regression()).loss is None
        True
    """
    how = "recording" if needs_whole_recordings(net) else None
    stream = data if isinstance(data, Stream) else whole_stream(data, standardise=how)
    evaluator = Evaluator(net, loss_fn, metrics=metrics)
    evaluator.check(stream)
    placement = stream._placement
    stream._place(evaluator._placement)  # a block is sent to a device once, not chunk by chunk
    try:
        with evaluator._predictor._ready():
            for chunk in stream:
                evaluator._add(chunk)
    finally:
        stream._place(placement)
    return evaluator.result(stream)


def warn_of_cuts(stream: Stream) -> None:
    """Warn where the stream cuts recordings: an evaluation starts each part from the start."""
    stream._sync_ranks()
    spans = [span.recording for row in stream._schedule.spans for span in row]
    if cuts := len(spans) - len({*spans}):
        count, ranks = len(stream.recordings), stream._shard.ranks
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        lanes = f"lanes={count // ranks}" if count >= ranks else f"lanes={count}, rank=0, ranks=1"
        warn_caller(
            f"lanes={stream.lanes}{each} for {counted(count, 'recording')}"
            f" ({listed(r.name for r in stream.recordings)}): the stream cuts recordings into"
            f" parts, and {cuts} of the parts start from the initial state instead of the state"
            " that the steps before them leave. To evaluate whole recordings write"
            f" tt.Stream(..., {lanes}), or give the recordings themselves to tt.evaluate"
        )


class Evaluator:
    """An evaluation chunk by chunk, for loops of one's own.

    `tt.evaluate` evaluates a whole stream.

    Args:
        net: made by `tt.carry`.
        loss_fn: as for `tt.evaluate`.
        metrics: as for `tt.evaluate`.

    Cost: one forward pass; memory for one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.evaluation import Evaluator
        >>> recording = {"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> evaluator = Evaluator(net, torch.nn.MSELoss())
        >>> [tuple(evaluator.add(chunk).shape) for chunk in stream]
        [(20, 1, 1), (20, 1, 1), (10, 1, 1)]
        >>> evaluator.result(stream).steps
        50
    """

    def __init__(
        self,
        net: Carried,
        loss_fn: LossFn | None = None,
        *,
        metrics: Metric | nn.Module | None = None,
    ) -> None:
        self._predictor = Predictor(net)
        self._objective = None if loss_fn is None else Objective(loss_fn, split=True)
        kind = "classes" if isinstance(metrics, Classification) else target_kind(loss_fn)
        self._placement = Placement(self._predictor.device, dtype_of(net), kind)
        self._metric = None if metrics is None else as_metric(metrics)
        # by recording; None: over all of them
        self._metrics: dict[int | None, Any] = {}
        if self._metric is not None:
            self._metrics = defaultdict(self._metric.new)
        self._loss: Tensor | float = 0.0
        self._weight, self._steps = 0.0, 0
        self._state: State = None
        # outputs and steps, for a loss of all of them together
        self._joined: list[tuple[Tensor, Chunk]] = []
        self._checked: Stream | None = None

    def check(self, stream: Stream) -> None:
        """Refuse metrics that ranks cannot add up; warn where the stream cuts recordings.

        `result` checks a stream that has not been checked before.

        Raises:
            DataError: the stream plays a rank's share, and the metrics have no `merge`.

        Warns:
            UserWarning: as for `tt.evaluate`.
        """
        self._checked = stream
        check_standardised(self._predictor.net, stream)
        warn_of_cuts(stream)
        ranks = ranks_of(self._predictor.net, stream)
        if ranks.count > 1 and not isinstance(self._metric, MergeableMetric | None):
            raise DataError(
                f"the stream plays the share of rank {ranks.rank} of {ranks.count}, and these"
                " metrics cannot be added up over ranks: give them a method merge(other), as"
                " Classification and Regression have, or write tt.Stream(..., rank=0, ranks=1),"
                " which plays everything. A metric of torchmetrics adds up ranks itself: take"
                " evaluator = throughtime.evaluation.Evaluator(net), and for every chunk"
                " outputs = evaluator.add(chunk), then, if chunk.valid_steps,"
                " metric.update(*chunk.valid_pairs(outputs))"
            )

    def add(self, chunk: Chunk) -> Any:
        """Plays the next chunk, from the initial state if it is the first; its outputs `(T, B, C)`.

        Raises:
            DataError: the chunk has no targets.
        """
        with self._predictor._ready():
            return self._add(chunk.convert(self._placement))

    def _add(self, chunk: Chunk) -> Any:
        """As `add`, for a chunk where the net needs it, when the net is ready."""
        objective = self._objective
        if chunk.targets is None and not (objective and objective.sequences):
            raise DataError(
                "the recordings of this stream have no targets; to run the net without scoring it"
                " use tt.predict"
            )
        resets = chunk.resets if chunk.any_reset else None
        outputs, self._state = self._predictor._run(chunk.inputs, self._state, resets)
        unpacked = self._predictor._unpacked
        self._steps += chunk.valid_steps
        if objective:
            if objective.joins:
                self._joined.append((outputs, chunk))
            elif chunk.valid_steps:
                self._add_loss(outputs, chunk)
        if self._metric is not None and chunk.valid_steps:
            rows, targets = chunk.valid_pairs(outputs)
            single = isinstance(self._metric, Sums | TorchMetricAdapter)
            if single and self._predictor.net.adapter.unpack:
                raise ModelError(
                    "the net has several outputs, and this metric takes one tensor. Give an object"
                    " with new(), compute() and update(outputs, targets), which adds the items that"
                    " it needs to metrics of its own: self.own.update(outputs[0], targets)"
                )
            owners = chunk.metadata.recording[chunk.span][chunk.metadata.mask[chunk.span]]
            indices, counts = map(Tensor.tolist, owners.unique(return_counts=True))
            self._metrics[None].update(unpacked(rows), targets)
            if len(indices) > 1:
                order = send(owners.argsort(stable=True), rows.device)
                rows, targets = rows.index_select(0, order), targets.index_select(0, order)
            parts = zip(indices, rows.split(counts), targets.split(counts), strict=True)
            for recording, rows, targets in parts:
                self._metrics[recording].update(unpacked(rows), targets)
        return unpacked(outputs)

    def _add_loss(self, outputs: Tensor, chunk: Chunk) -> None:
        objective: Any = self._objective
        objective.bind(self._predictor.net.adapter.unpack)
        with torch.enable_grad():  # a loss may compute gradients itself
            loss, weight = objective(outputs, chunk)
        self._loss += loss.detach().to(real_type(loss)) * weight  # waits for no device
        self._weight += weight

    def result(self, stream: Stream) -> Evaluation:
        """The result over all chunks, those of other ranks included: all ranks must call it."""
        if stream is not self._checked:
            self.check(stream)
        if self._joined:
            outputs, chunks = zip(*self._joined, strict=True)
            self._add_loss(torch.cat(outputs), join(chunks))
            self._joined = []
        total, weight, steps = float(self._loss), self._weight, self._steps
        metrics: dict[int | None, Any] = {**self._metrics}
        ranks = ranks_of(self._predictor.net, stream)
        if ranks.count > 1:
            total, weight, steps = ranks.total([total, weight, steps])
            metrics, *others = ranks.gather(metrics)
            for recording, metric in chain.from_iterable(other.items() for other in others):
                if (own := metrics.setdefault(recording, metric)) is not metric:
                    own.merge(metric)
        loss = None
        if self._objective is not None:
            loss = total / weight if weight else math.nan
        names = [recording.name for recording in stream.recordings]
        counts = Counter(names)
        whole = metrics.pop(None, None if self._metric is None else self._metric.new())
        return Evaluation(
            loss,
            int(steps),
            {} if whole is None else whole.compute(),
            {
                name if counts[name] == 1 else f"{name} (#{i})": metrics[i].compute()
                for i, name in enumerate(names)
                if i in metrics
            },
        )
