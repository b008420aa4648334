"""Evaluation of a stream with Ignite's metrics, chunk by chunk, with a carried state of its own.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` valid steps.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ignite.engine import Engine, State
from ignite.metrics import Metric
from torch import Tensor

import throughtime as tt
from throughtime.errors import ConfigError, DataError


class Turn(NamedTuple):
    """A chunk with a valid step, its targets, and who plays it."""

    player: tt.Predictor
    chunk: tt.Chunk
    targets: Tensor


class Turns:
    """The chunks of a stream that have a valid step.

    The others only carry the state on, for a mean over none is NaN.
    """

    def __init__(self, net: tt.Carried, stream: tt.Stream) -> None:
        self._net, self._stream = net, stream

    def __iter__(self) -> Iterator[Turn]:
        player = tt.Predictor(self._net, self._stream.lanes)
        for chunk in (c.to(player.device) for c in self._stream):
            if chunk.targets is None:
                raise DataError(
                    "the recordings of this stream have no targets; to run the net without scoring"
                    " it use tt.predict"
                )
            if chunk.valid:
                yield Turn(player, chunk, chunk.targets)
            else:
                player(chunk.inputs, chunk.resets if chunk.any_reset else None)


class StreamEvaluator(Engine):
    """What `create_stream_evaluator` returns."""

    def __init__(self, net: tt.Carried) -> None:
        super().__init__(self._play)
        self._net = net

    # the order of the limits differs between releases
    def run(self, data: Any = None, max_epochs: int | None = None, **limits: int | None) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Plays one epoch of `data`, a `tt.Stream` of its own.

        Raises:
            DataError: `data` is no stream, or has no targets.
            ConfigError: more epochs than one, or a part of one.
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
        self.state.epoch_length = (
            None  # how many chunks have a valid step may differ from run to run
        )
        return super().run(Turns(self._net, data), 1)

    @staticmethod
    def _play(engine: Engine, turn: Turn) -> tuple[Tensor, Tensor]:
        del engine
        chunk = turn.chunk
        outputs = turn.player(chunk.inputs, chunk.resets if chunk.any_reset else None)[chunk.mask]
        targets = turn.targets[chunk.mask]
        if (
            targets.is_floating_point()
            and targets.shape != outputs.shape
            and targets.numel() == outputs.numel()
        ):
            targets = targets.view_as(outputs)  # (N,) against (N, 1) would be broadcast to (N, N)
        return outputs, targets


def create_stream_evaluator(
    net: tt.Carried, metrics: Mapping[str, Metric] | None = None
) -> StreamEvaluator:
    """An Ignite engine that runs a net over a stream for metrics: `evaluator.run(stream).metrics`.

    The net runs in evaluation mode under `no_grad` and is put back; a training in progress keeps
    its state, as long as the stream is another one. Without Ignite's metrics, and for scores of
    each recording, take `tt.evaluate`.

    Args:
        net: made by `tt.carry`.
        metrics: by name; each sees outputs `(N, C)` and targets `(N,)` or `(N, C)` of the valid
            steps of a chunk, so that its means are over valid steps.

    Returns:
        The engine; `state.output` is `(outputs, targets)`. An iteration is a chunk that has a valid
        step.

    Raises:
        DataError: when run, on anything but a `tt.Stream` with targets.

    Cost: one forward pass; memory for one chunk, and what the metrics keep.

    Example:
        >>> import torch, throughtime as tt
        >>> from ignite.metrics import MeanSquaredError
        >>> from throughtime.integrations.ignite import create_stream_evaluator
        >>> stream = tt.Stream({"inputs": torch.zeros(50, 3), "targets": torch.ones(50)}, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.GRU(3, 1, bias=False))
        >>> create_stream_evaluator(net, {"mse": MeanSquaredError()}).run(stream).metrics
        {'mse': 1.0}
    """
    evaluator = StreamEvaluator(net)
    for name, metric in (metrics or {}).items():
        metric.attach(evaluator, name)
    return evaluator
