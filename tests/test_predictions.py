"""Predictions of many recordings: files, names, columns, and what an error leaves."""

import csv
from pathlib import Path

import numpy as np
import pytest

from test_cli import run
from test_folders import anomaly_files
from throughtime.app.predictions import file_names
from throughtime.errors import ConfigError
from throughtime.stream.formats import open_table

SETTINGS = ["--targets", "anomaly", "--exclude", "changepoint"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on files in sub-folders, and the folder."""
    base = tmp_path_factory.mktemp("predictions")
    data = anomaly_files(base / "data")
    run("train", data, *SETTINGS, "--updates", "3", "--hidden", "4", "--lanes", "2",
        "--out", base / "run")  # fmt: skip
    return base / "run", data


NAMES = ["other/10", "other/9", "valve1/0", "valve1/1", "valve2/0"]


def listing(folder: Path) -> list[str]:
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    return sorted(files - {"predictions.json"})


def test_every_recording_has_a_file_with_what_a_single_prediction_writes(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, data = trained
    out = tmp_path / "p"
    printed = run("predict", folder, data, "--split", "all", "--out", out)
    assert printed.count(": 200 steps\n") == 5
    assert listing(out) == [f"{name}.csv" for name in NAMES]
    run("predict", folder, data / "valve1/1.csv", "--out", tmp_path / "single.csv")
    assert (tmp_path / "single.csv").read_bytes() == (out / "valve1/1.csv").read_bytes()


def test_columns_are_named_by_class_and_times_are_those_of_the_source(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = trained
    monkeypatch.chdir(tmp_path)
    run("predict", folder, data / "other/9.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]
    for form in ("npy", "csv"):
        run("predict", folder, data / "other/9.csv", "--out", tmp_path / f"p.{form}")
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "predictions.csv").read_bytes()
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["step", "time", "class", "p[0]", "p[1]"]
    assert list(rows[0]) == names
    values = np.load(tmp_path / "p.npy")
    assert values.shape == (200, 2)
    written = [[float(row["p[0]"]), float(row["p[1]"])] for row in rows]
    np.testing.assert_allclose(written, values, atol=1e-6)
    assert [int(row["class"]) for row in rows] == values.argmax(axis=1).tolist()
    source = open_table(data / "other/9.csv")
    times = source.read(0, 200, ["datetime"])[:, 0]
    np.testing.assert_array_equal(np.array([row["time"] for row in rows], "M8[ns]"), times)


def test_the_split_is_that_of_eval(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = trained
    run("predict", folder, "--out", tmp_path / "held-out")  # the last by name
    assert listing(tmp_path / "held-out") == ["valve2/0.csv"]
    run("predict", folder, data, "--split", "train", "--out", tmp_path / "train")
    assert listing(tmp_path / "train") == [f"{name}.csv" for name in NAMES[:-1]]
    run("predict", folder, data / "other", "--out", tmp_path / "other")
    assert listing(tmp_path / "other") == ["10.csv", "9.csv"]
    assert "no recordings in split 'tst'" in run(
        "predict", folder, data, "--split", "tst", "--out", tmp_path / "none", ok=False
    )
    assert not (tmp_path / "none").exists()


def test_recordings_need_no_targets_to_be_predicted(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, data = trained
    for name in ("a", "b"):
        lines = (data / "other/9.csv").read_text().splitlines()
        (tmp_path / "new" / name).mkdir(parents=True)
        cut = [";".join(line.split(";")[:3]) for line in lines]
        (tmp_path / "new" / name / "x.csv").write_text("\n".join(cut))
    run("predict", folder, tmp_path / "new", "--out", tmp_path / "p")
    whole = tmp_path / "whole.csv"
    run("predict", folder, data / "other/9.csv", "--out", whole)
    for name in ("a", "b"):
        assert (tmp_path / "p" / name / "x.csv").read_bytes() == whole.read_bytes()


def test_an_error_leaves_whole_files_and_says_which(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, _ = trained
    data = anomaly_files(tmp_path / "data")
    path = data / "valve1" / "0.csv"
    lines = path.read_text().splitlines()
    fields = lines[150].split(";")
    lines[150] = ";".join([fields[0], "", *fields[2:]])
    path.write_text("\n".join(lines))
    out = tmp_path / "p"
    message = run("predict", folder, data, "--split", "all", "--out", out, ok=False)
    assert "valve1/0.csv" in message
    assert listing(out) == ["other/10.csv", "other/9.csv"]
    printed = run("predict", folder, data, "--split", "all", "--out", out, "--on-nan", "hold")
    assert "1 without an answer" in printed
    assert listing(out) == [f"{name}.csv" for name in NAMES]


def test_names_of_files_stay_within_the_folder_and_apart() -> None:
    names = ["a/1.csv", "../../etc/x", "/abs", ".hidden", "n:o|t?*", "x" * 300, "CON", "r[80:100]"]
    files = file_names(names)
    assert len({file.casefold() for file in files}) == len(names)
    for part in "/".join(files).split("/"):
        assert part
        assert not part.startswith(".")
        assert len(part) < 140
    assert (files[0], files[-1]) == ("a/1", "r-80-100")
    with pytest.raises(ConfigError, match=r"one file; rename one: a/1\.csv, A/1\.csv"):
        file_names(["a/1.csv", "A/1.csv"])


REFUSED = [
    (
        ["{data}", "--out", "p.csv"],
        "--out p.csv: predictions are written as .npy or .csv, those of many recordings as .csv",
    ),
    (["{data}", "--out", "{data}"], "is a recording itself; choose another --out"),
    (["{data}/valve1/0.csv", "--out", "{data}/other/9.csv"], "is a recording itself"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_what_does_not_go_together_is_refused(
    trained: tuple[Path, Path], arguments: list[str], reason: str
) -> None:
    folder, data = trained
    before = {path: path.read_bytes() for path in data.rglob("*.csv")}
    words = [word.format(data=data) for word in arguments]
    assert reason in run("predict", folder, *words, ok=False)
    assert {path: path.read_bytes() for path in data.rglob("*.csv")} == before
