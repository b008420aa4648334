"""Folders of recordings: sub-folders, splits, links, what is left out; columns and their roles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import throughtime as tt
from throughtime.app.data import Dataset, open_dataset
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec
from throughtime.app.settings import Config
from throughtime.errors import ConfigError, DataError
from throughtime.stream.manifest import find_recordings, read_folder

TEXT = "u,y\n" + "1,2\n3,5\n" * 30


def make(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT + f"{number},0\n" if name.endswith(".csv") else "text")
    return folder


def names_of(folder: Path) -> list[tuple[str, str]]:
    return [(entry.name, entry.split) for entry in find_recordings(folder)]


@pytest.mark.parametrize("valid", ["val", "Validation"])
def test_files_of_all_sub_folders_are_recordings_and_some_are_splits(
    valid: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "p", "b.csv", "a/2.csv", "a/deep/er/1.csv")
    assert names_of(folder) == [("a/2.csv", ""), ("a/deep/er/1.csv", ""), ("b.csv", "")]
    folder = make(tmp_path / "d", "train/x/1.csv", "train/2.csv", f"{valid}/1.csv", "test/1.csv")
    assert sorted(names_of(folder)) == sorted(
        [
            ("train/x/1.csv", "train"),
            ("train/2.csv", "train"),
            (f"{valid}/1.csv", "valid"),
            ("test/1.csv", "test"),
        ]
    )
    settings = {"data": str(folder), "task": "regress", "targets": ["y"], "out": str(tmp_path)}
    data = open_dataset(Config(**settings))
    assert (len(data.train), len(data.valid)) == (2, 1)
    assert data.remarks[0] == "splits as in the data (train 2, valid 1)"


def test_recordings_beside_or_in_two_splits_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", "train/1.csv", "2.csv", "more/3.csv")
    with pytest.raises(DataError, match=r"\['2.csv', 'more/3.csv'\]"):
        find_recordings(folder)
    folder = make(tmp_path / "b", "train/1.csv", "train/test/1.csv")
    with pytest.raises(
        DataError, match=r"'train/test/1.csv' lies in folders of the splits test and train"
    ):
        find_recordings(folder)


def test_hidden_files_runs_and_predictions_are_left_out(tmp_path: Path) -> None:
    folder = make(
        tmp_path / "d",
        *("1.csv", ".hidden.csv", ".git/2.csv", "__MACOSX/3.csv", "runs/a/metrics.jsonl"),
        *("runs/a/extra.csv", "runs/a/deep/extra.csv", "p/predictions.json", "p/1.csv"),
        *("notes.txt.bak", "sub/README.md"),
    )
    assert names_of(folder) == [("1.csv", "")]
    assert read_folder(folder)[1] == ["notes.txt.bak", "sub/README.md"]
    settings = {"data": str(folder), "task": "regress", "targets": ["y"], "out": str(tmp_path)}
    assert (
        "2 files left out: of no known format: notes.txt.bak, sub/README.md"
        in open_dataset(Config(**settings)).remarks
    )


def test_a_folder_reached_by_links_is_read_once_and_a_loop_ends(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "a/1.csv")
    other = make(tmp_path / "elsewhere", "2.csv")
    Path(folder / "a" / "loop").symlink_to(folder)
    Path(folder / "linked").symlink_to(other)
    Path(folder / "z").symlink_to(folder / "a")
    assert names_of(folder) == [("a/1.csv", ""), ("linked/2.csv", "")]


def test_a_manifest_in_the_folder_wins(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "a/1.csv", "a/2.csv")
    (folder / "a" / "recordings.csv").write_text("id;split;inputs\n1;train;1.csv\n2;test;2.csv\n")
    with pytest.raises(DataError, match=r"recordings\.csv.*text"):  # a recording, of text
        tt.Stream(folder, 1, 5)
    assert names_of(folder / "a") == [("1", "train"), ("2", "test")]  # Excel writes semicolons
    (folder / "recordings.csv").write_text("id,inputs\nx,a/1.csv\n")
    assert names_of(folder) == [("x", "")]


def anomaly_files(folder: Path) -> Path:
    """Files as those of SKAB: semicolons, time stamps, sub-folders, a column that must not leak."""
    random = np.random.default_rng(0)
    for name in ("valve1/0", "valve1/1", "valve2/0", "other/9", "other/10"):
        steps = 200
        anomaly = (np.arange(steps) // 50) % 2
        values = random.normal(size=(steps, 2)) + anomaly[:, None]
        times = np.datetime64("2020-03-09T10:14:33") + np.arange(steps) + (np.arange(steps) > 99)
        change = np.abs(np.diff(anomaly, prepend=0))
        lines = ["datetime;Current;Volume Flow RateRMS;anomaly;changepoint"]
        lines += [
            f"{str(t).replace('T', ' ')};{a:.5f};{b:.5f};{float(y)};{float(c)}"
            for t, (a, b), y, c in zip(times, values, anomaly, change, strict=True)
        ]
        path = folder / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


def dataset(folder: Path, **settings: Any) -> Any:
    base = {"data": str(folder), "task": "classify", "targets": ["anomaly"], "out": "unused"}
    return open_dataset(Config(**base | settings))


def test_columns_that_are_excluded_and_times_are_no_inputs(tmp_path: Path) -> None:
    """A mutant that ignores `exclude` has the column of change points among the inputs."""
    data = dataset(anomaly_files(tmp_path), exclude=["changepoint"])
    assert data.layout.inputs == ("Current", "Volume Flow RateRMS")
    assert data.classes == ("0", "1")
    assert data.train[0].read(0, 5).inputs.shape == (5, 2)
    assert dataset(tmp_path).layout.inputs[-1] == "changepoint"


def test_rows_that_go_back_in_time_are_refused_unless_times_are_excluded(tmp_path: Path) -> None:
    path = anomaly_files(tmp_path) / "other/9.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[100:], *lines[1:100]]))
    with pytest.raises(
        DataError,
        match=r"recording 'other/9.csv': row 101 of 'datetime', 2020-03-09T10:14:33, is earlier",
    ):
        dataset(tmp_path)
    assert len(dataset(tmp_path, exclude=["datetime"]).train) == 4


def reading(data: Dataset) -> Run:
    """A run that only reads recordings."""
    config = Config(data="d")
    spec = ModelSpec.from_data(config, data, None)
    return Run(Path(), tt.carry(torch.nn.GRU(1, 1)), spec, config)


def hourly(folder: Path, minutes: dict[str, int], rows: int = 60) -> Path:
    folder.mkdir(exist_ok=True)
    for name, step in minutes.items():
        times = np.datetime64("2020-03-28T00:00") + np.arange(rows) * np.timedelta64(step, "m")
        lines = [f"{str(t)[:10]} {str(t)[11:]},{i / 7:.3f},{i % 2}" for i, t in enumerate(times)]
        (folder / f"{name}.csv").write_text("\n".join(["time,u,anomaly", *lines]))
    return folder


def test_evenly_spaced_time_stamps_are_the_rate_of_a_run(tmp_path: Path) -> None:
    """Mutant: one that `--rate` does not replace."""
    data = dataset(hourly(tmp_path / "a", {"x": 30, "y": 30}))
    assert data.layout.inputs == ("u",)
    assert data.layout.rate == pytest.approx(1 / 1800)
    mixed = hourly(tmp_path / "b", {"x": 30, "y": 60})
    with pytest.raises(DataError, match=r"y.csv' has 0.00027\S* rows per second, .* --rate N"):
        dataset(mixed)
    other = dataset(mixed, rate=2.0)
    assert (other.layout.rate, other.layout.rate_set) == (2.0, True)
    with pytest.raises(DataError, match=r"what the model was trained on has 0.00055"):
        reading(data).recordings(mixed / "y.csv", targets=False)
    assert len(reading(other).recordings(mixed / "y.csv", targets=False)[0]) == 60
    assert tt.recordings(mixed, targets="anomaly", rate=2.0)["train"]


def test_unevenly_spaced_time_stamps_have_no_rate(tmp_path: Path) -> None:
    folder = hourly(tmp_path / "a", {"x": 30, "y": 30})
    lines = (folder / "y.csv").read_text().splitlines()
    (folder / "y.csv").write_text("\n".join(lines[:20] + lines[22:]))
    assert dataset(folder).layout.rate == pytest.approx(1 / 1800)  # of the even one
    with pytest.raises(ConfigError, match=r"--rate 0.0: Input should be greater than 0"):
        dataset(folder, rate=0.0)
