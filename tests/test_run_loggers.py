"""The log of a run in TensorBoard, read back by its own package."""

import math
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from test_run import finish, kill_at, settings, stop_at, write_recordings
from throughtime.app.config import Config
from throughtime.app.run_folder import RunFolder
from throughtime.app.train import Training
from throughtime.errors import MissingExtraError

MORE: dict[str, Any] = {"updates": 20, "valid_every": 5, "lr": 0.02, "schedule": "cosine"}


def stop_and_resume(values: dict[str, Any], killed: int = 13, lost: int = 4) -> RunFolder:
    """A run that is killed after its checkpoint, with log lines since, and resumed."""
    training = Training.begin(Config(**values))
    stop_at(training, killed - lost)
    kill_at(Training.resume(training.folder.path), killed)
    Training.resume(training.folder.path).run()
    return training.folder


def expected(folder: RunFolder, kind: str, name: str) -> dict[int, float]:
    return {row["update"]: row[name] for row in folder.read_metrics() if row["kind"] == kind}


NAMES = {
    ("train", "loss"): "train/loss",
    ("train", "lr"): "train/lr",
    ("valid", "f1[0]"): "valid/f1/0",
    ("valid", "macro_f1"): "valid/macro_f1",
    ("valid", "loss"): "valid/loss",
}


def same(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return found.keys() == wanted.keys() and all(
        math.isclose(found[k], wanted[k], rel_tol=1e-6)
        or (math.isnan(found[k]) and math.isnan(wanted[k]))
        for k in wanted
    )


def test_tensorboard_has_every_line_once_when_the_run_is_killed_and_resumed(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = write_recordings(tmp_path / "data")
    values = settings(data, tmp_path / "run", **MORE, logger="tensorboard")
    folder = stop_and_resume(values)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    for (kind, name), tag in NAMES.items():
        scalars = events.Scalars(tag)
        found = {event.step: event.value for event in scalars}
        assert len(found) == len(scalars)
        assert same(found, expected(folder, kind, name)), tag
    assert events.Tensors("settings/text_summary")


def test_a_logger_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_recordings(tmp_path / "data")
    plain = finish(settings(data, tmp_path / "plain", **MORE))

    class Broken:
        def __init__(self, *_: object, **__: object) -> None:
            self.add_text = self.add_scalar = lambda *_: None

        def flush(self) -> None:
            raise OSError("the disk is full")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter", Broken)
    with pytest.warns(UserWarning, match=r"--logger tensorboard failed \(the disk is full\)"):
        folder = finish(settings(data, tmp_path / "run", **MORE, logger="tensorboard"))
    assert folder.model.read_bytes() == plain.model.read_bytes()


def test_a_missing_package_is_one_line_before_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    values = settings(tmp_path / "nowhere", tmp_path / "run", logger="tensorboard")
    with pytest.raises(MissingExtraError, match="needs tensorboard; pip install"):
        Training.begin(Config(**values))
