"""A finished run on recordings: its model and a split of them, and the metrics."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from throughtime._files import write_atomically
from throughtime.app.baselines import Baselines
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, one_thread, unbroken_stream
from throughtime.app.recordings import OnPhase
from throughtime.app.run_folder import json_safe
from throughtime.app.scores import ClassScores
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.stream import Recording

_LANES, _CHUNK = 64, 512  # recordings evaluated at the same time, and steps


def evaluate_recordings(
    evaluator: Evaluator,
    spec: ModelSpec,
    recordings: list[Recording],
    config: Config,
    on_phase: OnPhase | None = None,
    classes: ClassScores | None = None,
) -> Evaluation:
    """Metrics on unbroken recordings, as the model is deployed; all of them on this rank.

    Those of a forecast include a comparison with the baselines. `classes` gets all outputs.
    """
    baselines = Baselines.of_forecast(spec, recordings, config)
    played = recordings if baselines is None else baselines.recordings
    stream = unbroken_stream(played, spec, config, min(len(played), _LANES), _CHUNK)
    for chunk in stream:
        own = chunk if baselines is None else baselines.own_targets(chunk)
        outputs = evaluator.add(own)
        if baselines is not None:
            baselines.add(chunk, outputs)
        if classes is not None:
            classes.add(*own.to(outputs.device).valid_pairs(outputs))
        if on_phase is not None:
            on_phase("evaluating", min(stream.position or stream.steps, stream.steps), stream.steps)
    result = evaluator.result(stream)
    compared = {} if baselines is None else baselines.compute()
    return replace(result, metrics=result.metrics | compared)


def evaluate_run(
    run: Run, data: Path | None = None, split: str | None = None, on_phase: OnPhase | None = None
) -> dict[str, Any]:
    """Compute the metrics of a run on a split.

    Args:
        run: its model and settings.
        data: recordings; default: those of the run.
        split: which of them; default: see `recordings_for`.
        on_phase: called as recordings are opened and evaluated.

    Returns:
        What `scores-SPLIT.json` holds: `split`, `update` of the weights, `data`, `steps`,
        `metrics`, and those of each of the `recordings`; for classes the scores of each of the
        `classes` and the `confusion`, a row for each true class.
    """
    spec = run.spec
    split, recordings = recordings_for(spec, run.config, data, split, on_phase=on_phase)
    classes = ClassScores(spec.classes) if spec.classes else None
    with one_thread(when=spec.is_small(min(len(recordings), _LANES))):
        evaluator = Evaluator(run.net, metrics=spec.metrics())
        scores = evaluate_recordings(evaluator, spec, recordings, run.config, on_phase, classes)
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
    from throughtime.app.report.page import write_report  # imports matplotlib

    report = run.files.report
    try:
        text = json.dumps(json_safe(content, texts=True), indent=1, allow_nan=False)
        write_atomically(path, text.encode())
        write_report(run)
    except OSError as error:
        why = error.strerror or error
        return f"{path.name} and {report.name} are not saved in {run.folder}: {why}"
    return f"{path} and {report} written"
