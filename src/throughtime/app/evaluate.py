"""A finished run on recordings: its model and a split of them, and the metrics."""

import json
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
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.stream import Recording

_LANES = 64  # recordings evaluated at the same time
_CHUNK = 512


def evaluate_recordings(
    evaluator: Evaluator,
    spec: ModelSpec,
    recordings: list[Recording],
    config: Config,
    on_phase: OnPhase | None = None,
) -> Evaluation:
    """Metrics on unbroken recordings, as the model is deployed; all of them on this rank.

    Those of a forecast include a comparison with the baselines.
    """
    lanes = min(len(recordings), _LANES)
    baselines = Baselines.of_forecast(spec, recordings, config)
    played = recordings if baselines is None else baselines.recordings
    stream = unbroken_stream(played, spec, config, lanes, _CHUNK)
    for chunk in stream:
        if baselines is None:
            evaluator.add(chunk)
        else:
            baselines.add(chunk, evaluator.add(baselines.own_targets(chunk)))
        if on_phase is not None:
            on_phase("evaluating", min(stream.position or stream.steps, stream.steps), stream.steps)
    result = evaluator.result(stream)
    compared = {} if baselines is None else baselines.compute()
    return replace(result, metrics=result.metrics | compared)


def evaluate_run(
    run: Run, data: Path | None = None, split: str | None = None, on_phase: OnPhase | None = None
) -> dict[str, Any]:
    """Compute the metrics of a run on a split and write them to `scores-SPLIT.json`.

    Args:
        run: its model and settings.
        data: recordings; default: those of the run.
        split: which of them; default: see `recordings_for`.
        on_phase: called as recordings are opened and evaluated.

    Returns:
        What the file holds: `split`, `update` of the weights, `data`, `steps`, `metrics`, and
        those of each of the `recordings`.
    """
    spec = run.spec
    split, recordings = recordings_for(spec, run.config, data, split, on_phase=on_phase)
    with one_thread(when=spec.is_small(min(len(recordings), _LANES))):
        evaluator = Evaluator(run.net, metrics=spec.metrics())
        scores = evaluate_recordings(evaluator, spec, recordings, run.config, on_phase)
    content: dict[str, Any] = {
        "split": split,
        "update": spec.update,
        "data": str(data or run.config.data),
        "steps": scores.steps,
        "metrics": scores.metrics,
        "recordings": scores.recordings,
    }
    write_atomically(run.files.scores(split), json.dumps(content, indent=1).encode())
    return content
