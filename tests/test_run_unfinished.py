"""Runs that are not finished: killed before or after their first checkpoint, or stopped."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_cli import run
from test_run import settings, stop_at, write_recordings
from throughtime import tensor_files
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config
from throughtime.app.train import Training


def stopped(out: Path, **more: object) -> RunFolder:
    """A run of 60 updates that is stopped at its third."""
    values = settings(write_recordings(out.parent / "data", (400, 250, 300)), out, **more)
    training = Training.begin(Config(**values))
    stop_at(training, 3)
    return training.folder


def test_every_command_reads_the_model_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tmp_path / "run")
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


@pytest.mark.parametrize("command", ["eval", "predict", "export", "audit"])
def test_a_folder_without_a_run_is_called_that_by_every_command(
    command: str, tmp_path: Path
) -> None:
    more = ["--out", str(tmp_path / "net.js")] if command == "export" else []
    for place_without_run in (tmp_path / "nosuch", tmp_path):
        complained = run(command, place_without_run, *more, ok=False)
        assert f"{place_without_run}: no run there" in complained
        assert "--resume" not in complained
