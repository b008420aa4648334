"""Scoring a finished run on whole recordings, and keeping what came out in its folder."""

import json
from dataclasses import replace
from pathlib import Path

from throughtime._files import write_atomically
from throughtime.app import data as datasets
from throughtime.app.config import Config, make_config
from throughtime.app.folder import Folder
from throughtime.app.manifest import find
from throughtime.app.model import Spec, load_model
from throughtime.app.opened import open_recordings
from throughtime.app.threads import one_thread, small
from throughtime.app.train import EVALUATION_LANES, scored
from throughtime.predict import Evaluation
from throughtime.stream import Recording


def recordings_for(spec: Spec, data: Path, split: str, config: Config) -> list[Recording]:
    """The recordings of a split with the columns and classes of the model, their labels as in its run."""
    found = find(data, spec.static)
    wanted = found if split == "all" else datasets.of_splits(found, (split,))
    form = replace(
        spec.form, label_every=config.label_every, label_at=config.label_at, outside=config.outside
    )
    opened = open_recordings(wanted, form)
    holdout = 0.0 if split == "all" else config.holdout
    splits, _ = datasets.split(
        [(one.split, datasets.Numeric(one.recording, spec.task == "regress")) for one in opened],
        holdout,
    )
    chosen = datasets.choose(splits, split)
    return (
        [datasets.Labelled(r, spec.classes) for r in chosen] if spec.task == "classify" else chosen
    )


def usual_split(data: Path | None, config: Config) -> str:
    """The split that is meant when none is named: `test`; without named splits what was held out, or all of other data."""
    if any(files.split for files in find(data or Path(config.data), config.static)):
        return "test"
    return "valid" if data is None else "all"


def adjusted(config: Config, missing: str | None) -> Config:
    """The settings of a run, inputs that are not finite treated as asked for now."""
    return (
        config
        if missing is None
        else make_config({**config.settings(), "missing": missing}, source="the command line")
    )


def assess(
    folder: Folder, data: Path | None, split: str | None, missing: str | None
) -> tuple[str, Evaluation]:
    """Scores the run's model on a split of `data` (default: its own) and writes
    `scores-SPLIT.json`; returns the split's name too.

    Raises:
        RunError: the folder holds no run that reached a checkpoint.
        DataError: no such split, or recordings that the model does not fit.
    """
    config = replace(adjusted(folder.read_config(), missing), device="cpu")
    net, spec = load_model(folder.model)
    split = split or usual_split(data, config)
    recordings = recordings_for(spec, data or Path(config.data), split, config)
    with one_thread(when=small(spec, min(len(recordings), EVALUATION_LANES))):
        found = scored(net, spec, recordings, config)
    content = {
        "split": split,
        "data": str(data or config.data),
        "steps": found.steps,
        "figures": found.metrics,
        "recordings": found.recordings,
    }
    write_atomically(folder.scores(split), json.dumps(content, indent=1).encode())
    return split, found
