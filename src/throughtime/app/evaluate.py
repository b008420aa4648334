"""A finished run on recordings: its model and a split of them, and the metrics."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from throughtime._files import write_atomically
from throughtime.app.baselines import Baselines
from throughtime.app.config import Config
from throughtime.app.dataset import recordings_for
from throughtime.app.model import (
    ModelSpec,
    check_device,
    load_model,
    one_thread,
    unbroken_stream,
)
from throughtime.app.recordings import OnPhase
from throughtime.app.run_folder import RunFolder
from throughtime.carry.carried import Carried
from throughtime.evaluation import Evaluation, Evaluator, L
from throughtime.stream import Recording
from throughtime.stream.manifest import find_recordings

_LANES = 64  # recordings evaluated at the same time
_CHUNK = 512
Missing: TypeAlias = Literal["error", "mask"]


class RunOnData(NamedTuple):
    """A model of a run, and recordings for it.

    Attributes:
        net: on its device.
        spec: its description.
        config: the settings of the run, those of the call over them.
        data: the path of the recordings.
        split: their split.
        recordings: all of it.
    """

    net: Carried
    spec: ModelSpec
    config: Config
    data: Path
    split: str
    recordings: list[Recording]


def open_run(
    folder: RunFolder,
    data: Path | None,
    split: str | None,
    missing: Missing | None,
    device: str = "cpu",
    on_phase: OnPhase | None = None,
) -> RunOnData:
    """Open the model and the recordings of a run, or other recordings.

    Args:
        folder: of the run.
        data: recordings; default: those of the run.
        split: which of them; default: `test` if the data have named splits; otherwise what was held
            out, or all of other data.
        missing: how to treat inputs that are not finite; default: as in training.
        device: where to compute.
        on_phase: called as recordings are opened.

    Raises:
        RunError: the folder holds no run that reached a checkpoint.
        DataError: no such split, or recordings that the model does not fit.
        ConfigError: no such device.
    """
    config = folder.read_config()
    config = replace(config, device=device, missing=missing or config.missing)
    check_device(device)
    net, spec = load_model(folder.model)
    path = data or Path(config.data)
    split = split or default_split(config, data)
    recordings = recordings_for(spec, path, split, config.holdout, on_phase)
    return RunOnData(net.to(device), spec, config, path, split, recordings)


def default_split(config: Config, data: Path | None) -> str:
    """`test` where splits are named; else what was held out, or all of other data than the run's.

    Args:
        config: of the run.
        data: other data.
    """
    entries = find_recordings(data or Path(config.data), config.static)
    if any(entry.split for entry in entries):
        return "test"
    return "valid" if data is None else "all"


def evaluate_recordings(
    evaluator: Evaluator[L],
    spec: ModelSpec,
    recordings: list[Recording],
    config: Config,
    on_phase: OnPhase | None = None,
) -> Evaluation[L]:
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
    folder: RunFolder,
    data: Path | None,
    split: str | None,
    missing: Missing | None,
    on_phase: OnPhase | None = None,
) -> tuple[str, Evaluation[None]]:
    """Compute the metrics of a run on a split and write `scores-SPLIT.json`; see `open_run`.

    Returns:
        The name of the split, and the metrics.
    """
    net, spec, config, data, split, recordings = open_run(
        folder, data, split, missing, on_phase=on_phase
    )
    with one_thread(when=spec.is_small(min(len(recordings), _LANES))):
        evaluator = Evaluator(net, metrics=spec.metrics())
        scores = evaluate_recordings(evaluator, spec, recordings, config, on_phase)
    content = {
        "split": split,
        "update": spec.update,
        "data": str(data),
        "steps": scores.steps,
        "metrics": scores.metrics,
        "recordings": scores.recordings,
    }
    write_atomically(folder.scores(split), json.dumps(content, indent=1).encode())
    return split, scores
