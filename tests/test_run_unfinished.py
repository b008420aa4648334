"""Runs that are not finished: killed before or after their first checkpoint, or stopped."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_cli import run
from test_run import settings, stop_at, write_recordings
from throughtime import tensor_files
from throughtime.app.settings import Config
from throughtime.app.train import Training


def test_every_command_reads_the_model_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(write_recordings(tmp_path / "data"), tmp_path / "run")
    folder = stop_at(Training.begin(Config(**values)), 3).folder
    reads = list[Path]()
    read = tensor_files.read_tensors
    monkeypatch.setattr(
        tensor_files, "read_tensors", lambda path, kind: (reads.append(path), read(path, kind))[1]
    )
    for command in (
        ["eval", folder.path],
        ["predict", folder.path, "--out", tmp_path / "predictions"],
        ["export", folder.path, "--out", tmp_path / "net.js", "--steps", "0"],
        ["audit", folder.path, "--horizons", "5", "--max-lag", "5", "--steps", "20"],
    ):
        run(*command)
        assert reads == [folder.model], command
        reads.clear()


def test_checkpoints_are_as_far_apart_as_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update takes 0.1 seconds of a clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    values = settings(
        write_recordings(tmp_path / "data", (400, 250, 300)),
        tmp_path / "run",
        updates=400,
        checkpoint_every=4.0,
        valid_every=0,
    )
    training = Training.begin(Config(**values))
    saves = list[float]()
    save = training.folder.save

    def pass_time(*_: object) -> None:
        now[0] += 0.1

    def noted_save(*content: Any) -> None:
        saves.append(round(now[0], 1))
        save(*content)

    training.optimizer.register_step_post_hook(pass_time)
    monkeypatch.setattr(training.folder, "save", noted_save)
    training.run()
    assert np.diff([0.0, *saves[:-2]]) == pytest.approx(4.0, abs=0.11)
