"""Data sets in splits and finished runs, in Python as on the command line."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import throughtime as tt
from throughtime.app.evaluate import evaluate_run
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import DataError, RunError


def write(folder: Path, names: str = "abc", sep: str = ",", decimal: str = ".") -> Path:
    """Files with a time stamp, two inputs, a class and a number."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        random = np.random.default_rng(ord(name))
        data = pd.DataFrame(random.normal(size=(300, 2)) * 5 + 3, columns=["u", "v"])
        data.insert(0, "date", pd.date_range("2026-01-01", periods=300, freq="h"))
        data["beat"] = np.where(data["u"].cumsum() > 0, "N", "V")
        data["level"] = data["u"].rolling(3, min_periods=1).mean()
        data.to_csv(folder / f"{name}.csv", index=False, sep=sep, decimal=decimal)
    return folder


def test_a_manifest_and_sub_folders_are_splits(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train", "ab")
    write(tmp_path / "data" / "test", "c")
    lines = ["id,split,inputs", "a,train,data/train/a.csv", "b,train,data/train/b.csv"]
    manifest = tmp_path / "manifest.csv"
    manifest.write_text("\n".join([*lines, "c,test,data/test/c.csv\n"]), encoding="utf-8")
    for path in (tmp_path / "data", str(manifest)):
        splits = tt.recordings(path, inputs=["u", "v"], targets="beat")
        assert {name: len(several) for name, several in splits.items()} == {"train": 2, "test": 1}
        assert splits.classes == ("N", "V")
        (chunk, *_) = tt.Stream(splits["train"], lanes=2, chunk=50)
        assert chunk.targets is not None
        assert set(chunk.targets.unique().tolist()) <= {0, 1}
        copied = pickle.loads(pickle.dumps(splits))
        assert (list(copied), copied.classes) == (list(splits), splits.classes)
    with pytest.raises(DataError, match=r"has the keys \['\w+'"):
        tt.Stream(tt.recordings(manifest, targets="beat"), lanes=1, chunk=5)


def test_recordings_are_those_of_one_file_each(tmp_path: Path) -> None:
    """The same numbers as tt.recording gives, whichever way the files are found."""
    folder = write(tmp_path / "data", sep=";", decimal=",")
    options: dict[str, Any] = {"inputs": ["u", "v"], "targets": "level"}
    splits = tt.recordings(folder, holdout=0.34, **options)
    assert {name: len(several) for name, several in splits.items()} == {"train": 2, "valid": 1}
    assert splits.classes == ()
    for recording in (*splits["train"], *splits["valid"]):
        one = tt.recording(folder / recording.name, **options)
        steps, other = recording.read(5, 99), one.read(5, 99)
        assert np.array_equal(steps.inputs, other.inputs)
        assert steps.targets is not None
        assert other.targets is not None
        assert np.array_equal(steps.targets, other.targets)


@pytest.fixture(scope="module", params=["beat", "level"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "data" / "train", "ab")
    write(folder / "data" / "test", "c")
    values: dict[str, Any] = {
        "data": str(folder / "data"),
        "out": str(folder / "run"),
        "inputs": ["u", "v"],
        "targets": [request.param],
        "hidden": 4,
        "lanes": 2,
        "stride": 20,
        "updates": 20,
    }
    training = Training.begin(Config(**values))
    training.run()
    return training.folder


def test_a_loaded_run_scores_as_the_command_line_does(trained: RunFolder) -> None:
    run = tt.load_run(trained.path)
    metrics: Any = (
        tt.metrics.Classification(run.classes) if run.classes else tt.metrics.Regression()
    )
    scores = tt.evaluate(run.net, run.recordings(), metrics=metrics)
    expected = evaluate_run(tt.load_run(trained.path))
    assert expected.split == "test"
    same = {name: expected.metrics[name] for name in scores.metrics}
    assert scores.metrics == pytest.approx(same, rel=1e-5)
    assert scores.steps == 300


def test_a_loaded_run_takes_raw_values_of_files_frames_and_live_rows(trained: RunFolder) -> None:
    run = tt.load_run(str(trained.path))
    path = trained.path.parent / "data" / "test" / "c.csv"
    frame = pd.read_csv(path)
    assert run.spec.layout.inputs == ("u", "v")
    mean = frame[["u", "v"]].to_numpy().mean(0)
    shift = run.net.module.get_buffer("standardise.shift")
    assert shift.numpy() == pytest.approx(mean, abs=1.0)
    outputs, state = tt.predict(run.net, run.recordings(path, targets=False)[0])
    for source in (frame, frame.drop(columns=["beat", "level"]), frame[["v", "u"]]):
        again, _ = tt.predict(run.net, tt.recording(source, inputs=run.spec.layout.inputs))
        assert torch.equal(again, outputs)
    (alone,) = run.recordings(path, "all", targets=False)
    assert torch.equal(tt.predict(run.net, alone)[0], outputs)
    predictor = tt.Predictor(run.net)
    rows = frame[["u", "v"]].to_numpy()
    live = torch.cat([predictor.step(row[None]) for row in rows])
    torch.testing.assert_close(live, outputs)
    torch.testing.assert_close(predictor.state, state)


def test_data_that_a_run_cannot_read_are_refused(trained: RunFolder, tmp_path: Path) -> None:
    run = tt.load_run(trained.path)
    (tmp_path / "a.csv").write_text("u\n1.0\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"inputs \['u', 'v'\] asked for, it has \['u'\]"):
        run.recordings(tmp_path / "a.csv", targets=False)
    with pytest.raises(RunError, match="no run there"):
        tt.load_run(tmp_path)
