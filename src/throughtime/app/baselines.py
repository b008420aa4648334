"""Forecasts without a model, to compare with: the value now, and the value of the last season.

Persistence says that the target keeps its present value. Seasonal persistence says that it returns
to the value of one season before the time of the forecast, or of the latest season before that
which is known (Hyndman & Athanasopoulos, Forecasting: Principles and Practice, section 5.2: naive
and seasonal naive). All are measured on the same steps: those that have a target and all of these
values. `skill = 1 - error / error of the baseline`, of squared errors or of wrong classes, is above
0 where the model is better (Murphy 1988).

Shapes: `N` steps, `C` outputs or classes, `K` target columns, each of every row ahead, `F`
forecasts: the model and the baselines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.model import ModelSpec
from throughtime.app.report.tables import MODEL
from throughtime.chunk import Chunk
from throughtime.errors import RunError
from throughtime.metrics import Metrics
from throughtime.stream import Recording
from throughtime.stream.recording import RecordingView, StepArrays
from throughtime.stream.targets import IGNORE_INDEX, ForecastRecording, later_rows

_UNKNOWN_CLASS = -1  # of a baseline; the step still has a target


def baseline_lags(ahead: Sequence[int], season: int | None) -> dict[str, tuple[int, ...]]:
    """How many steps before the present each baseline takes its value, for each step ahead.

    A season that ends with the present is not another baseline than the value now.

    Example:
        >>> baseline_lags([24], None), baseline_lags([24], 24), baseline_lags([1, 30], 24)
        ({'persistence': (0,)}, {'persistence': (0,)}, {'persistence': (0, 0), 'season': (23, 18)})
    """
    lags = {"persistence": (0,) * len(ahead)}
    if season is not None and any(n % season for n in ahead):
        lags["season"] = tuple(-n % season for n in ahead)
    return lags


@dataclass(frozen=True)
class BaselineRecording(RecordingView[ForecastRecording]):
    """A recording whose targets `(n, F * K)` are its own, and beside them those of the baselines.

    A value that a baseline lacks is infinite, or the class -1: it does not mask its step.
    """

    whole: ForecastRecording
    lags: tuple[int, ...]

    def read(self, start: int, stop: int) -> StepArrays:
        ahead, stop = self.whole.ahead, min(stop, len(self))
        first = max(0, start - max(self.lags))
        steps = self.whole.whole.read(first, min(stop + max(ahead), len(self)))
        if steps.targets is None:
            raise RunError(f"recording '{self.name}' has no targets to compare with")
        rows = steps.targets.reshape(len(steps.targets), -1)
        shifts = [start - first + n for n in (*ahead, *(-lag for lag in self.lags))]
        targets, floating = later_rows(rows, shifts, stop - start), rows.dtype.kind == "f"
        others = targets[:, len(ahead) * rows.shape[1] :]
        unknown = np.isnan(others) if floating else others == IGNORE_INDEX
        others[unknown] = np.inf if floating else _UNKNOWN_CLASS
        return StepArrays(steps.inputs[start - first : stop - first], targets, {})


class Baselines:
    """Errors of the model and of the baselines on the same steps.

    Args:
        spec: of the model.
        recordings: those of a forecast.
        season: steps of a season.

    Attributes:
        recordings: with the values of the baselines.
        steps: that are compared.
        errors: sums of squared errors, `(F, K)`, or of wrong classes.
    """

    def __init__(
        self, spec: ModelSpec, recordings: Sequence[ForecastRecording], season: int | None
    ) -> None:
        lags = baseline_lags(spec.layout.steps_ahead, season)
        every = tuple(n for several in lags.values() for n in several)
        self.recordings = [BaselineRecording(r, every) for r in recordings]
        self._names, self._numbers = (MODEL, *lags), not spec.classes
        self._columns = spec.target_names if self._numbers else ("",)
        self.steps, self.errors = 0, np.zeros((len(self._names), len(self._columns)))

    @classmethod
    def of_forecast(
        cls, spec: ModelSpec, recordings: Sequence[Recording], config: Config
    ) -> "Baselines | None":
        """Those of a model; `None` if it forecasts neither classes nor numbers."""
        forecasts = [r for r in recordings if isinstance(r, ForecastRecording)]
        if not forecasts or spec.is_multilabel:
            return None
        return cls(spec, forecasts, config.season and config.season // spec.layout.frame_size)

    def own_targets(self, chunk: Chunk) -> Chunk:
        """The chunk with the targets of the recordings alone."""
        if chunk.targets is None:
            return chunk
        columns = len(self._columns)
        own = chunk.targets[..., :columns] if columns > 1 else chunk.targets[..., 0]
        return Chunk(chunk.inputs, own, chunk.metadata, chunk.start, chunk.stop)

    def add(self, chunk: Chunk, outputs: Tensor) -> None:
        """Add the outputs `(T, B, C)` of a chunk."""
        rows, targets = chunk.to(outputs.device).valid_pairs(outputs)
        own, *others = targets.chunk(len(self._names), dim=1)
        answers = rows if self._numbers else rows.argmax(dim=1, keepdim=True)
        values = torch.stack([own, answers.to(own), *others]).double()
        known = values[2:].isfinite() if self._numbers else values[2:] != _UNKNOWN_CLASS
        kept = values[:, known.all(dim=2).all(dim=0)]
        errors = (kept[1:] - kept[0]).square() if self._numbers else (kept[1:] != kept[0]).double()
        self.steps += kept.shape[1]
        self.errors += errors.sum(dim=1).cpu().numpy()

    def compute(self) -> Metrics:
        """The errors by name; empty if no step can be compared.

        For numbers `model/rmse[column]`, `persistence/rmse[column]` and so on, and
        `persistence/skill[column]`, that of the model against it. For classes `model/accuracy`,
        `persistence/accuracy` and `persistence/skill`.
        """
        if not self.steps:
            return {}
        metrics: Metrics = {"compared/steps": float(self.steps)}
        for name, errors in zip(self._names, (self.errors / self.steps).tolist(), strict=True):
            for k, column in enumerate(self._columns):
                of, error = f"[{column}]" * self._numbers, errors[k]
                score = {"rmse": math.sqrt(error)} if self._numbers else {"accuracy": 1 - error}
                if name != MODEL:
                    own = self.errors[0, k] / self.steps
                    score["skill"] = 1 - own / error if error else math.nan
                metrics |= {f"{name}/{key}{of}": float(value) for key, value in score.items()}
        return metrics
