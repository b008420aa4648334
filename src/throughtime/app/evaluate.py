"""A finished run on recordings: its model and a split of them, and the metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from pydantic_core import to_json

from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, make_stream
from throughtime.app.scores import ClassScores, Scores, by_name
from throughtime.app.settings import Config
from throughtime.errors import RunError, one_line
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.files import write_atomically
from throughtime.stream.recording import RecordingView, StepArrays
from throughtime.stream.targets import ForecastRecording, later_rows

T = TypeVar("T")
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
        rows: Any = self.whole.whole.read(first, start + count).targets
        series = {
            name: later_rows(rows, [start - first - lag for lag in lags], count)
            for name, lags in self.lags.items()
        }
        return steps._replace(series=series)


def evaluate_recordings(
    evaluator: Evaluator,
    spec: ModelSpec,
    recordings: list[Any],
    config: Config,
    classes: ClassScores | None = None,
) -> Evaluation:
    """Metrics on unbroken recordings, as the model is deployed; all of them on this rank.

    Those of a forecast include a comparison with the value now and, with a season, with that of one
    season before the time of the forecast, or of the latest season before that which is known
    (Hyndman & Athanasopoulos, Forecasting: Principles and Practice, section 5.2: naive and seasonal
    naive). All are measured on the same steps: those that have a target and all of these values.
    `skill = 1 - error / error of the baseline`, of squared errors, is above 0 where the model is
    better (Murphy 1988). `classes` gets all outputs.
    """
    ahead, season = spec.layout.ahead if spec.layout.task == "regress" else (), config.season
    lags = {"persistence": [0] * len(ahead)} if ahead else {}
    if season and any(n % season for n in ahead):  # else it ends with the present
        lags["season"] = [-n % season for n in ahead]
    played: list[Any] = [BaselineRecording(one, lags) if lags else one for one in recordings]
    stream = make_stream(played, spec, config, min(len(played), _LANES), _CHUNK)
    errors, count = torch.zeros(1 + len(lags), spec.outputs, dtype=torch.double, device="cpu"), 0
    for chunk in stream:
        outputs = evaluator.add(chunk)
        sent = chunk.to(outputs.device)
        rows, targets = sent.valid_pairs(outputs)
        if classes is not None:
            classes.add(rows, targets)
        if lags:
            parts = targets, rows, *(sent[name][sent.mask] for name in lags)
            values = torch.stack([part.reshape(rows.shape).double() for part in parts])
            kept = values[:, values.isfinite().all(dim=2).all(dim=0)]
            count += kept.shape[1]
            errors += (kept[1:] - kept[0]).square().sum(dim=1).cpu()
    result = evaluator.result(stream)
    if not count:
        return result
    own, *others = errors / count
    columns = {"model/rmse": own.sqrt()}
    for name, baseline in zip(lags, others, strict=True):
        skill = 1 - own / baseline.where(baseline > 0, torch.nan)
        columns |= {f"{name}/rmse": baseline.sqrt(), f"{name}/skill": skill}
    compared = {"compared/steps": float(count), **by_name(columns, spec.target_names)}
    return replace(result, metrics={**result.metrics, **compared})


def evaluate_run(run: Run, data: Path | None = None, split: str | None = None) -> Scores:
    """Compute the metrics of a run on a split.

    Args:
        run: its model and settings.
        data: recordings; default: those of the run.
        split: which of them; default: see `Run.recordings`.
    """
    spec = run.spec
    split, recordings = run.in_split(data, split)
    classes = ClassScores(spec.classes) if spec.classes else None
    evaluator = Evaluator(run.net, metrics=spec.metrics())
    result = evaluate_recordings(evaluator, spec, recordings, run.config, classes)
    metrics, confusion = result.metrics, dict[str, list[int]]()
    if classes is not None:
        metrics = {**metrics, **classes.compute()}
        confusion = dict(zip(spec.classes, classes.total.confusion.tolist(), strict=True))
    return Scores(
        split,
        spec.update,
        str(data or run.config.data),
        result.steps,
        metrics,
        result.recordings,
        confusion,
    )


def read_results(path: Path, kind: type[T], command: str) -> T:
    """The results of a command that `keep_results` wrote.

    Raises:
        RunError: the file holds something else.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: not what `throughtime {command}` wrote ({one_line(error)}); remove it, or run"
            f" {command} again"
        ) from error


def keep_results(run: Run, path: Path, content: Any) -> str:
    """Write results into the folder of a run, and its report; in words what is written or not.

    Args:
        run: its model and settings.
        path: the file of the results.
        content: plain values, or a dataclass of them.
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
