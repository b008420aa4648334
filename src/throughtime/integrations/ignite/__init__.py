"""Ignite: its trainer for truncated backpropagation made right, and engines that play a `tt.Stream` under any policy."""

from throughtime.errors import MissingExtraError

try:
    from throughtime.integrations.ignite.evaluated import StreamEvaluator, create_stream_evaluator
    from throughtime.integrations.ignite.iteration import Tbptt_Events, _detach_hidden
    from throughtime.integrations.ignite.streamed import stream_trainer
    from throughtime.integrations.ignite.supervised import create_supervised_tbptt_trainer
    from throughtime.integrations.ignite.trainer import StreamEvents, StreamTrainer
    from throughtime.integrations.stretches import Loader
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
    "create_stream_evaluator",
    "create_supervised_tbptt_trainer",
    "stream_trainer",
]
