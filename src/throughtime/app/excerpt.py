"""An excerpt of a recording for the report: signal, targets and predictions.

Shapes: `T` steps, `D` input features, `C` classes or outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.model import ModelSpec
from throughtime.carry.carried import Carried
from throughtime.predict import Predictor
from throughtime.stream import Recording, Stream
from throughtime.stream.formats.table import Array

_SEARCHED = 20_000  # steps predicted from the start of the recording, state carried
_SHOWN = 1_500


@dataclass(frozen=True)
class SignalExcerpt:
    """Consecutive steps of a recording: its first input column, first target and predictions."""

    recording: str
    start: int
    signal: Array
    targets: Array
    predicted: Array


def busiest_excerpt(
    net: Carried, spec: ModelSpec, recording: Recording, config: Config
) -> SignalExcerpt:
    """The 1,500 of the first 20,000 steps with most classes, or the last ones for regression."""
    steps = min(len(recording), _SEARCHED)
    chunk = one_lane([recording], steps, spec, config).read(0, steps)
    predict = Predictor(net)
    parts = [predict(x.to(predict.device)).squeeze(1).cpu() for x in chunk.inputs.split(1024)]
    outputs = torch.cat(parts).numpy()
    targets = np.zeros(steps) if chunk.targets is None else first_column(chunk.targets).numpy()
    if spec.classes:
        start, predicted = _busiest(targets), outputs.argmax(axis=1)
    else:
        start, predicted = max(0, steps - _SHOWN), outputs[:, 0]
    shown = slice(start, start + _SHOWN)
    signal = first_column(chunk.inputs).numpy()
    return SignalExcerpt(recording.name, start, signal[shown], targets[shown], predicted[shown])


def one_lane(
    recordings: Sequence[Recording], chunk: int, spec: ModelSpec, config: Config
) -> Stream:
    """The recordings in order, on one lane of this process alone."""
    return Stream(
        recordings,
        1,
        chunk,
        seed=None,
        warm_up=config.warm_up,
        dtype=spec.torch_dtype,
        missing=config.missing,
        rank=0,
        ranks=1,
    )


def first_column(values: Tensor) -> Tensor:
    """The first column of the first lane of `(T, B, ...)`: `(T,)`."""
    return values[:, 0].reshape(len(values), -1)[:, 0]


def _busiest(targets: Array) -> int:
    """The start of the excerpt with most classes, then most changes of class."""
    starts = range(0, max(1, len(targets) - _SHOWN + 1), _SHOWN // 3)
    excerpts = [targets[start : start + _SHOWN] for start in starts]
    activity = [(len(np.unique(e)), np.count_nonzero(np.diff(e))) for e in excerpts]
    return starts[activity.index(max(activity))]
