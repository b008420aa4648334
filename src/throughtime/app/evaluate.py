"""A finished run on recordings: its model and a split of them, and the metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_json
from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, make_stream
from throughtime.app.scores import MODEL, ClassScores
from throughtime.chunk import Chunk
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.files import write_atomically
from throughtime.metrics import Metrics
from throughtime.stream import Recording
from throughtime.stream.recording import RecordingView, StepArrays
from throughtime.stream.targets import ForecastRecording, later_rows

_LANES, _CHUNK = 64, 512  # recordings evaluated at the same time, and steps


@dataclass(frozen=True)
class BaselineRecording(RecordingView):
    """A forecast with the values of the baselines as series; what they lack is as a missing target.

    Attributes:
        whole: the forecast.
        lags: of each baseline, by name: the steps before the present of its value, for each ahead.
    """

    whole: ForecastRecording
    lags: Mapping[str, Sequence[int]]

    def read(self, start: int, stop: int) -> StepArrays:
        steps = self.whole.read(start, stop)
        count, first = len(steps.inputs), max(0, start - max(map(max, self.lags.values())))
        rows = self.whole.whole.read(first, start + count).targets
        if rows is None:
            return steps
        series = {
            name: later_rows(rows, [start - first - lag for lag in lags], count)
            for name, lags in self.lags.items()
        }
        return steps._replace(series=series)


class Baselines:
    """Errors of a model and of forecasts without one, the value now and that of the last season.

    Seasonal persistence takes the value of one season before the time of the forecast, or of the
    latest season before that which is known (Hyndman & Athanasopoulos, Forecasting: Principles and
    Practice, section 5.2: naive and seasonal naive). All are measured on the same steps: those that
    have a target and all of these values. `skill = 1 - error / error of the baseline`, of squared
    errors, is above 0 where the model is better (Murphy 1988).

    Args:
        spec: of the model.
        recordings: that are evaluated.
        season: steps of a season; one that ends with the present is no other baseline.

    Attributes:
        recordings: with the values of the baselines, if the model forecasts numbers.
    """

    def __init__(
        self, spec: ModelSpec, recordings: Sequence[Recording], season: int | None
    ) -> None:
        ahead, self._lags = spec.layout.ahead, dict[str, list[int]]()
        self.recordings: list[Any] = [*recordings]
        if ahead and spec.layout.task == "regress":
            self._lags["persistence"] = [0] * len(ahead)
            if season and any(n % season for n in ahead):
                self._lags["season"] = [-n % season for n in ahead]
            self.recordings = [BaselineRecording(r, self._lags) for r in self.recordings]
        self._columns, self._steps = spec.target_names, 0
        self._errors = np.zeros((1 + len(self._lags), len(self._columns)))

    def add(self, chunk: Chunk, outputs: Tensor) -> None:
        """Add the outputs `(T, B, C)` of a chunk, which is where they are."""
        if not self._lags:
            return
        rows, targets = chunk.valid_pairs(outputs)
        parts = targets, rows, *(chunk[name][chunk.mask] for name in self._lags)
        values = torch.stack([part.reshape(rows.shape).double() for part in parts])  # of N rows
        kept = values[:, values.isfinite().all(dim=2).all(dim=0)]
        self._steps += kept.shape[1]
        self._errors += (kept[1:] - kept[0]).square().sum(dim=1).cpu().numpy()

    def compute(self) -> Metrics:
        """The errors by name; empty if no step can be compared.

        `model/rmse[column]`, `persistence/rmse[column]` and so on, and `persistence/skill[column]`,
        that of the model against it.
        """
        if not self._steps:
            return {}
        metrics: Metrics = {"compared/steps": float(self._steps)}
        means = (self._errors / self._steps).tolist()
        for name, errors in zip((MODEL, *self._lags), means, strict=True):
            for column, error, own in zip(self._columns, errors, means[0], strict=True):
                metrics[f"{name}/rmse[{column}]"] = math.sqrt(error)
                if name != MODEL:
                    skill = 1 - own / error if error else math.nan
                    metrics[f"{name}/skill[{column}]"] = skill
        return metrics


def evaluate_recordings(
    evaluator: Evaluator,
    spec: ModelSpec,
    recordings: list[Recording],
    config: Config,
    classes: ClassScores | None = None,
) -> Evaluation:
    """Metrics on unbroken recordings, as the model is deployed; all of them on this rank.

    Those of a forecast include a comparison with the baselines. `classes` gets all outputs.
    """
    baselines = Baselines(spec, recordings, config.season)
    lanes = min(len(recordings), _LANES)
    stream = make_stream(baselines.recordings, spec, config, lanes, _CHUNK)
    for chunk in stream:
        outputs = evaluator.add(chunk)
        sent = chunk.to(outputs.device)
        baselines.add(sent, outputs)
        if classes is not None:
            classes.add(*sent.valid_pairs(outputs))
    result = evaluator.result(stream)
    return replace(result, metrics=result.metrics | baselines.compute())


def evaluate_run(run: Run, data: Path | None = None, split: str | None = None) -> dict[str, Any]:
    """Compute the metrics of a run on a split.

    Args:
        run: its model and settings.
        data: recordings; default: those of the run.
        split: which of them; default: see `recordings_for`.

    Returns:
        What `scores-SPLIT.json` holds: `split`, `update` of the weights, `data`, `steps`,
        `metrics`, and those of each of the `recordings`; for classes the scores of each of the
        `classes` and the `confusion`, a row for each true class.
    """
    spec = run.spec
    split, recordings = run.in_split(data, split)
    classes = ClassScores(spec.classes) if spec.classes else None
    evaluator = Evaluator(run.net, metrics=spec.metrics())
    scores = evaluate_recordings(evaluator, spec, recordings, run.config, classes)
    content: dict[str, Any] = {
        "split": split,
        "update": spec.update,
        "data": str(data or run.config.data),
        "steps": scores.steps,
        "metrics": scores.metrics,
        "recordings": scores.recordings,
    }
    return content | (classes.facts() if classes is not None else {})


def keep_results(run: Run, path: Path, content: Mapping[str, Any]) -> str:
    """Write results into the folder of a run, and its report; in words what is written or not.

    Args:
        run: its model and settings.
        path: the file of the results.
        content: plain values.
    """
    from throughtime.app.page import write_report  # imports matplotlib

    report = run.files.report
    try:
        write_atomically(path, to_json(content, indent=1, inf_nan_mode="strings"))
        write_report(run)
    except OSError as error:
        why = error.strerror or error
        return f"{path.name} and {report.name} are not saved in {run.folder}: {why}"
    return f"{path} and {report} written"
