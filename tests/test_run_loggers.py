"""The loggers of a run, read back through their own packages."""

import importlib
import json
import math
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from test_run import finish, kill_at, settings, stop_at, write_recordings
from throughtime.app import loggers
from throughtime.app.config import Config
from throughtime.app.run_folder import RunFolder
from throughtime.app.train import Training
from throughtime.errors import MissingExtraError, RunError

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
    ("train", "f1[0]"): "train/f1/0",
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
    values = settings(data, tmp_path / "run", **MORE, logger=["tensorboard"])
    folder = stop_and_resume(values)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    for (kind, name), tag in NAMES.items():
        scalars = events.Scalars(tag)
        found = {event.step: event.value for event in scalars}
        assert len(found) == len(scalars)
        assert same(found, expected(folder, kind, name)), tag
    assert events.Tensors("settings/text_summary")


@pytest.fixture
def file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The small client of mlflow has no database."""
    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return uri


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_every_line(tmp_path: Path, file_store: str) -> None:
    mlflow = pytest.importorskip("mlflow")
    data = write_recordings(tmp_path / "data")
    folder = finish(settings(data, tmp_path / "run", **MORE, logger=["mlflow"]))
    client = mlflow.MlflowClient(tracking_uri=file_store)
    (only,) = client.search_runs([client.get_experiment_by_name("throughtime").experiment_id])
    assert only.info.status == "FINISHED"
    assert only.info.run_name == "run"
    assert only.data.params["lanes"] == "2"
    for (kind, name), tag in NAMES.items():
        history = client.get_metric_history(only.info.run_id, tag)
        found = {metric.step: metric.value for metric in history}
        assert same(found, expected(folder, kind, name)), tag


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_wandb_has_every_line_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    data = write_recordings(tmp_path / "data")
    folder = finish(settings(data, tmp_path / "run", **MORE, logger=["wandb"]))
    wandb.teardown()  # another process writes its files: wait for it
    files = sorted((folder.path / "wandb").glob("offline-run-*/run-*.wandb"))
    history: dict[int, dict[str, float]] = {}
    for path in files:
        for step, row in wandb_rows(path):
            history.setdefault(step, {}).update(row)
    for (kind, name), tag in NAMES.items():
        found = {step: row[tag] for step, row in history.items() if tag in row}
        wanted = expected(folder, kind, name)
        missing = found.keys() ^ wanted.keys()
        assert not missing, (tag, [path.stat().st_size for path in files])
        assert same(found, wanted), (tag, sorted(found.items()), sorted(wanted.items()))


def wandb_rows(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps and values in a file of wandb: a log of LevelDB after a header of 7 bytes."""
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := 32_768 - position % 32_768) < 7:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind not in {1, 4}:  # neither whole nor the last part
            continue
        record = records.Record()
        record.ParseFromString(parts)
        parts = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }
            yield int(values["_step"]), values


@contextmanager
def broken(*_: object) -> Generator[Any]:
    yield lambda *_: raising(OSError("the server is gone"))


@contextmanager
def refusing(*_: object) -> Generator[Any]:
    raise ConnectionError("refused\nand more")
    yield


def raising(error: Exception) -> None:
    raise error


def test_a_logger_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_recordings(tmp_path / "data")
    plain = finish(settings(data, tmp_path / "plain", **MORE))
    monkeypatch.setitem(loggers._LOGGERS, "tensorboard", broken)
    with pytest.warns(UserWarning, match=r"--logger tensorboard failed \(OSError: the server"):
        folder = finish(settings(data, tmp_path / "run", **MORE, logger=["tensorboard"]))
    assert folder.model.read_bytes() == plain.model.read_bytes()
    monkeypatch.setitem(loggers._LOGGERS, "tensorboard", refusing)
    values = settings(data, tmp_path / "refused", **MORE, logger=["tensorboard"])
    with pytest.raises(RunError, match=r"cannot start \(ConnectionError: refused and more\); mend"):
        finish(values)


def test_a_missing_package_is_one_line_before_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    values = settings(tmp_path / "nowhere", tmp_path / "run", logger=["wandb"])
    with pytest.raises(MissingExtraError) as refused:
        Training.begin(Config(**values))
    assert str(refused.value) == "--logger wandb needs wandb; pip install 'throughtime[wandb]'"
