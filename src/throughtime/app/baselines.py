"""Forecasts without a model, to compare with: the value now, and the value of the last season.

Persistence says that the target keeps its present value. Seasonal persistence says that it returns
to the value of one season before the time of the forecast, or of the latest season before that
which is known (Hyndman & Athanasopoulos, Forecasting: Principles and Practice, section 5.2: naive
and seasonal naive). All are measured on the same steps: those that have a target and all of these
values. `skill = 1 - MSE / MSE of the baseline` is above 0 where the model is better (Murphy 1988).

Shapes: `N` steps, `C` outputs or classes, `K` target columns, each of every row ahead, `F`
forecasts: the model and the baselines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.model import ModelSpec
from throughtime.app.report.tables import DataTable
from throughtime.chunk import Chunk
from throughtime.errors import RunError, listed
from throughtime.metrics import Metrics
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import RecordingView, StepArrays
from throughtime.stream.targets import IGNORE_INDEX, ForecastRecording, later_rows

MODEL = "model"
_NAMES = {MODEL: "model", "persistence": "value now", "season": "value one season before"}
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
    lags: tuple[tuple[int, ...], ...]

    def read(self, start: int, stop: int) -> StepArrays:
        ahead, stop = self.whole.ahead, min(stop, len(self))
        first = max(0, start - max(map(max, self.lags)))
        steps = self.whole.whole.read(first, min(stop + max(ahead), len(self)))
        if steps.targets is None:
            raise RunError(f"recording '{self.name}' has no targets to compare with")
        rows = steps.targets.reshape(len(steps.targets), -1)
        own, *others = (
            later_rows(rows, [start - first + n for n in shifts], stop - start)
            for shifts in (ahead, *([-lag for lag in lags] for lags in self.lags))
        )
        targets = np.concatenate([own, *map(_unmasked, others)], axis=1)
        return steps._replace(inputs=steps.inputs[start - first : stop - first], targets=targets)


def _unmasked(values: Array) -> Array:
    if values.dtype.kind == "f":
        return np.where(np.isnan(values), np.inf, values).astype(values.dtype)
    return np.where(values == IGNORE_INDEX, _UNKNOWN_CLASS, values)


class Baselines:
    """Errors of the model and of the baselines on the same steps.

    Args:
        recordings: those of a forecast.
        lags: of the baselines, by name.
        columns: names of the targets; empty for classes.

    Attributes:
        recordings: with the values of the baselines.
        steps: that are compared.
        squared: sums of squared errors, `(F, K)`, or of wrong classes.
    """

    def __init__(
        self,
        recordings: Sequence[ForecastRecording],
        lags: Mapping[str, tuple[int, ...]],
        columns: tuple[str, ...],
    ) -> None:
        self._columns, self._names = columns, (MODEL, *lags)
        self.recordings = [BaselineRecording(r, tuple(lags.values())) for r in recordings]
        self.steps = 0
        self.squared = np.zeros((len(self._names), max(1, len(columns))))

    @classmethod
    def of_forecast(
        cls, spec: ModelSpec, recordings: Sequence[Recording], config: Config
    ) -> "Baselines | None":
        """Those of a model; None if it forecasts neither classes nor numbers."""
        layout = spec.layout
        forecasts = [r for r in recordings if isinstance(r, ForecastRecording)]
        if not forecasts or spec.is_multilabel:
            return None
        season = None if config.season is None else config.season // layout.frame_size
        lags = baseline_lags(layout.steps_ahead, season)
        return cls(forecasts, lags, () if spec.classes else spec.target_names)

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
        answers = rows if self._columns else rows.argmax(dim=1, keepdim=True)
        values = torch.stack([own, answers.to(own), *others]).double()
        known = values[2:].isfinite() if self._columns else values[2:] != _UNKNOWN_CLASS
        kept = values[:, known.all(dim=2).all(dim=0)]
        errors = (kept[1:] - kept[0]).abs()
        if not self._columns:
            errors = (errors > 0).double()
        self.steps += kept.shape[1]
        self.squared += errors.square().sum(dim=1).cpu().numpy()

    def compute(self) -> Metrics:
        """The errors by name; empty if no step can be compared.

        For numbers `model/rmse[column]`, `persistence/rmse[column]` and so on, and
        `persistence/skill[column]`, that of the model against it. For classes `model/accuracy`
        and `persistence/accuracy`.
        """
        metrics: Metrics = {"compared/steps": float(self.steps)} if self.steps else {}
        squared = self.squared / max(1, self.steps)
        for f, name in enumerate(self._names if self.steps else ()):
            if not self._columns:
                metrics[f"{name}/accuracy"] = 1 - float(squared[f, 0])
            for k, column in enumerate(self._columns):
                metrics[f"{name}/rmse[{column}]"] = math.sqrt(squared[f, k])
                if name != MODEL:
                    model, base = float(squared[0, k]), float(squared[f, k])
                    metrics[f"{name}/skill[{column}]"] = 1 - model / base if base else math.nan
        return metrics


def is_comparison(name: str) -> bool:
    """Whether a metric of a forecast is one of the comparison with the baselines."""
    return name.startswith(tuple(f"{prefix}/" for prefix in ("compared", *_NAMES)))


def baseline_table(metrics: Mapping[str, float]) -> DataTable | None:
    """Model and baselines of the metrics of a forecast, by target; None where there are none."""
    if "compared/steps" not in metrics:
        return None
    steps = f"forecasts on the same {metrics['compared/steps']:,.0f} steps"
    if "model/accuracy" in metrics:
        names = [name for name in _NAMES if f"{name}/accuracy" in metrics]
        rows = [[_NAMES[name], metrics[f"{name}/accuracy"]] for name in names]
        return DataTable(["forecast", "accuracy"], rows, steps.capitalize())
    skills, columns = _skills(metrics), ["target", "model"]
    for name in skills:
        columns += [_NAMES[name], "skill"]
    rows = [
        [target, metrics[f"model/rmse[{target}]"]]
        + [v for n, of in skills.items() for v in (metrics[f"{n}/rmse[{target}]"], of[target])]
        for target in skills["persistence"]
    ]
    caption = f"RMSE of {steps}. A skill above 0: the model has the smaller squared error"
    return DataTable(columns, rows, caption)


def _skills(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The skill of the model against each baseline, by target."""
    prefixes = {name: f"{name}/skill[" for name in _NAMES}
    skills = {
        name: {key[len(prefix) : -1]: v for key, v in metrics.items() if key.startswith(prefix)}
        for name, prefix in prefixes.items()
    }
    return {name: values for name, values in skills.items() if values}


def skill_advice(metrics: Mapping[str, float], config: Config) -> str:
    """What to try where a baseline is the better forecast; empty where none is.

    Example:
        >>> config = Config(data="a.csv", targets=("y",), ahead=24)
        >>> metrics = {"model/rmse[y]": 2.0, "persistence/skill[y]": -0.5}
        >>> skill_advice(metrics, config)[:67]
        'y: the value now is the better forecast. Try --difference, by which'
    """
    worse = {
        name: [target for target, skill in skills.items() if skill < 0]
        for name, skills in _skills(metrics).items()
    }
    if not any(worse.values()):
        return ""
    better = [f"{listed(t)}: the {_NAMES[n]} is the better forecast" for n, t in worse.items() if t]
    advice: list[str] = []
    if not config.difference and worse["persistence"]:
        advice.append("--difference, by which the net learns the change from now")
    credit = config.credit_steps()
    season = (config.season or 0) // config.frame_size
    if worse.get("season") and config.gradient == "truncated" and credit and credit < season:
        advice.append(f"--horizon {season}: credit flows back {credit} steps, less than a season")
    advice.append("more --updates, a smaller --lr, or inputs that lead the target")
    return "; ".join(better) + ". Try " + "; or ".join(advice)
