"""A stretch of a recording to look at: signal, what was asked, what the model said.

Shapes: `T` steps, `D` input features, `C` outputs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from throughtime.app.config import Config
from throughtime.app.model import Spec
from throughtime.carry.carried import Carried
from throughtime.predict import Predictor
from throughtime.stream import Recording, Stream
from throughtime.stream.formats.table import Array

_LEAD = 20_000  # steps played from the start of the recording, state carried
_SHOWN = 1_500


@dataclass(frozen=True)
class Excerpt:
    """Consecutive steps of the first column of a recording, with targets and predictions of the first target column."""

    recording: str
    start: int
    signal: Array
    targets: Array
    predicted: Array


def busiest_excerpt(net: Carried, spec: Spec, recording: Recording, config: Config) -> Excerpt:
    """The liveliest 1,500 of the first 20,000 steps: those with most changes of class, or the last ones for regression."""
    steps = min(len(recording), _LEAD)
    stream = Stream(
        [recording],
        1,
        steps,
        seed=None,
        dtype=spec.torch_dtype,
        missing=config.missing,
        rank=0,
        ranks=1,
    )
    chunk = stream.read(0, steps)
    player = Predictor(net)
    parts = [player(part.to(player.device)).squeeze(1).cpu() for part in chunk.inputs.split(1024)]
    outputs = torch.cat(parts).numpy()
    targets = (
        np.zeros(steps)
        if chunk.targets is None
        else chunk.targets[:, 0].reshape(steps, -1)[:, 0].numpy()
    )
    predicted = outputs.argmax(axis=1) if spec.task == "classify" else outputs[:, 0]
    start = _liveliest(targets) if spec.task == "classify" else max(0, steps - _SHOWN)
    shown = slice(start, min(start + _SHOWN, steps))
    signal = chunk.inputs[:, 0].reshape(steps, -1)[:, 0].numpy()
    return Excerpt(recording.name, start, signal[shown], targets[shown], predicted[shown])


def _liveliest(targets: Array) -> int:
    """Where a window of the shown length sees most classes, then most changes of class."""
    starts = range(0, max(1, len(targets) - _SHOWN + 1), _SHOWN // 3)
    windows = [targets[s : s + _SHOWN] for s in starts]
    liveliness = [(len(np.unique(w)), int((np.diff(w) != 0).sum())) for w in windows]
    return starts[liveliness.index(max(liveliness))]
