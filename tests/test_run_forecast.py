"""Forecasts of the command line: targets so many rows later, compared with persistence by hand.

Shapes: `T` rows.
"""

import csv
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_cli import run
from test_run import finish, settings
from throughtime.app.data import open_dataset
from throughtime.app.load import load_run
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import ConfigError, DataError
from throughtime.predict import predict
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array
from throughtime.stream.targets import IGNORE_INDEX

ROWS, CUT = 1000, 800


def hourly(folder: Path, *, state: bool = False) -> tuple[Path, Array]:
    """An hourly CSV file with time stamps, a daily cycle in `OT`, and two of its rows missing."""
    draw = np.random.default_rng(0)
    t = np.arange(ROWS)
    load = 5 * np.sin(2 * np.pi * t / 24) + draw.normal(size=ROWS)
    ot = np.round(20 + 0.01 * t + 3 * np.sin(2 * np.pi * t / 24) + draw.normal(size=ROWS), 3)
    path = folder / "hourly.csv"
    start = datetime(2020, 1, 1)  # noqa: DTZ001 (without a zone)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["date", "load", "OT"])
        for i in range(ROWS):
            value = ("warm" if ot[i] > 24 else "cold") if state else f"{ot[i]:.3f}"
            missing = i in (850, 900)
            rows.writerow([start + timedelta(hours=i), f"{load[i]:.3f}", "" if missing else value])
    if state:
        return path, np.where(ot > 24, "warm", "cold")
    ot[[850, 900]] = np.nan
    return path, ot


def targets_of(recording: Recording) -> Array:
    targets = recording.read(0, len(recording)).targets
    assert targets is not None
    return targets


def forecast(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    own = {"task": "regress", "targets": ["OT"], "ahead": 24, "updates": 20, "inputs": ["load"]}
    return settings(data, out, **{**own, **more})


def test_an_hourly_file_forecasts_from_the_command_line(tmp_path: Path) -> None:
    """Baselines are those of NumPy, on the steps that have a target and both values."""
    data, y = hourly(tmp_path)
    out = tmp_path / "run"
    words = f"train {data} --targets OT --ahead 24 --season 168 --updates 10"
    printed = run(*words.split(), "--missing", "mask", "--out", out)
    assert "inputs load, OT; targets OT" in printed
    assert printed.count("persistence/") == printed.count("season/") == 2
    run("eval", out)
    scores = json.loads((out / "scores-valid.json").read_text(encoding="utf-8"))["metrics"]

    held_out = y[CUT:]
    now = np.arange(ROWS - CUT - 24)
    target, season = held_out[now + 24], np.full(len(now), np.nan)
    season[144:] = held_out[now[144:] + 24 - 168]
    same = np.isfinite(target) & np.isfinite(held_out[now]) & np.isfinite(season)
    assert scores["compared/steps"] == same.sum() < np.isfinite(target).sum()
    trained = load_run(out)
    (part,) = trained.recordings(data, "valid")
    outputs, _ = predict(trained.net, part, dtype=trained.spec.torch_dtype, missing="mask")
    model = outputs.numpy()[now, 0]
    forecasts = {"model": model, "persistence": held_out[now], "season": season}
    errors = {name: (value - target)[same] for name, value in forecasts.items()}
    for name, error in errors.items():
        assert scores[f"{name}/rmse[OT]"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-4)
        if name != "model":
            skill = 1 - np.mean(errors["model"] ** 2) / np.mean(error**2)
            assert scores[f"{name}/skill[OT]"] == pytest.approx(skill, rel=1e-3)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("persistence/rmse") == page.count("season/skill") == 1


def test_targets_are_shifted_within_each_split(tmp_path: Path) -> None:
    data, y = hourly(tmp_path)
    dataset = open_dataset(Config(**forecast(data, tmp_path / "run")))
    for split, values in ((dataset.train, y[:CUT]), (dataset.valid, y[CUT:])):
        (recording,) = split
        expected = np.append(values[24:], np.full(24, np.nan))
        assert np.array_equal(targets_of(recording), expected, equal_nan=True)


def test_the_present_value_is_an_input_only_of_a_forecast(tmp_path: Path) -> None:
    data, _ = hourly(tmp_path)
    values = forecast(data, tmp_path / "run", inputs=["load", "OT"], missing="mask")
    assert open_dataset(Config(**values)).layout.inputs == ("load", "OT")
    with pytest.raises(DataError, match="inputs and targets of the same step"):
        open_dataset(Config(**{**values, "ahead": ()}))
    own = open_dataset(Config(**{**values, "ahead": (), "inputs": []})).layout.inputs
    assert own == ("load",)


def test_classes_are_forecast_and_compared(tmp_path: Path) -> None:
    data, labels = hourly(tmp_path, state=True)
    values = forecast(data, tmp_path / "run", task="classify", season=24, ahead=6)
    folder = finish(values)
    (recording,) = open_dataset(Config(**values)).train
    classes = ["cold", "warm"]
    codes = np.array([classes.index(label) for label in labels])
    expected = np.append(codes[6:CUT], [IGNORE_INDEX] * 6)
    assert np.array_equal(targets_of(recording), expected)
    assert not any("/" in name for row in folder.read_metrics() for name in row)


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def walk(folder: Path, steps: int = 4000) -> tuple[Path, Array]:
    """A slow walk `OT` of the level 50, whose changes follow the sign of `drift`."""
    draw = np.random.default_rng(3)
    drift = np.repeat(draw.choice([-1, 1], size=steps // 20), 20) * 0.05
    ot = np.round(50 + np.cumsum(drift + 0.02 * draw.normal(size=steps)), 4)
    table = np.stack([ot, drift], axis=1)
    np.savetxt(folder / "walk.csv", table, "%.4f", ",", header="OT,drift", comments="")
    return folder / "walk.csv", ot


def train(data: Path, out: Path, *words: str) -> str:
    options = "--targets OT --hidden 8 --lanes 4 --stride 25 --updates 60 --lr 0.01"
    return run("train", data, *options.split(), *words, "--out", out)


def scores_of(out: Path) -> dict[str, float]:
    run("eval", out)
    return json.loads((out / "scores-valid.json").read_text(encoding="utf-8"))["metrics"]


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file and a run of the changes to three later rows."""
    folder = tmp_path_factory.mktemp("walk")
    data, _ = walk(folder)
    said = train(data, folder / "run", "--ahead", "1-3", "--difference")
    assert "targets OT+1, OT+2, OT+3" in said
    return folder


def test_a_difference_wins_where_the_plain_target_loses_to_the_value_now(
    changes: Path, tmp_path: Path
) -> None:
    """Scores and baselines are those of the values themselves, on the same steps."""
    data, ot = walk(tmp_path)
    said = train(data, tmp_path / "plain", "--ahead", "1-3")
    plain, change = scores_of(tmp_path / "plain"), scores_of(changes / "run")
    assert "a skill below 0: try --difference" in " ".join(said.split())
    held_out = ot[3200:]
    for n in (1, 2, 3):
        errors = held_out[n : n + 797] - held_out[:797]
        for scores in (plain, change):
            rmse = scores[f"persistence/rmse[OT+{n}]"]
            assert rmse == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)
        assert plain[f"persistence/skill[OT+{n}]"] < 0 < 0.3 < change[f"persistence/skill[OT+{n}]"]


def test_a_difference_is_learned_in_units_of_the_change(tmp_path: Path) -> None:
    data, ot = walk(tmp_path)
    train(data, tmp_path / "run", "--ahead", "1,24", "--difference")
    trained = load_run(tmp_path / "run")
    past = ot[:3200]
    changes = [past[n:] - past[:-n] for n in (1, 24)]
    for statistic, key in ((np.mean, "shift"), (np.std, "scale")):
        expected = [statistic(change) for change in changes]
        value = trained.net.module.get_buffer(f"module.units.{key}")
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert value.max() < 0.5 * past.std()
    run("train", "--resume", tmp_path / "run", "--updates", "70")


def test_without_a_change_the_forecast_is_the_present_row(tmp_path: Path) -> None:
    """Of the right column, for each row ahead."""
    data, ot = walk(tmp_path)
    train(data, tmp_path / "run", "--ahead", "4,24", "--difference", "--inputs", "drift,OT")
    trained = load_run(tmp_path / "run")
    for key in ("shift", "scale"):
        trained.net.module.get_buffer(f"module.units.{key}").zero_()  # no change
    outputs, _ = predict(trained.net, trained.recordings(data, targets=False)[0])
    np.testing.assert_allclose(outputs, np.stack([ot, ot], 1), rtol=1e-5)


@pytest.mark.parametrize("suffix", ["onnx", "c", "nam"])
def test_an_exported_run_returns_values(suffix: str, changes: Path, tmp_path: Path) -> None:
    file, refused = tmp_path / f"net.{suffix}", suffix == "nam"
    said = run("export", changes / "run", "--out", file, "--steps", "1000", ok=not refused)
    assert ("tt.nn.Difference" in said) == refused
    assert ("verified on 1,000 steps at random" in said) != refused


def test_predictions_of_several_rows_ahead_have_a_column_each(
    changes: Path, tmp_path: Path
) -> None:
    run("predict", changes / "run", changes / "walk.csv", "--out", tmp_path / "p.csv")
    assert list(lines(tmp_path / "p.csv")[0]) == ["step", "y[OT+1]", "y[OT+2]", "y[OT+3]"]


def test_what_no_difference_can_be_made_of_is_refused(tmp_path: Path) -> None:
    data, _ = walk(tmp_path)
    values = settings(data, tmp_path / "run", targets=["OT"], task="regress", inputs=["drift"])
    with pytest.raises(ConfigError, match="--season and --difference belong to forecasts"):
        Config(**{**values, "difference": True})
    values |= {"difference": True, "ahead": 3}
    with pytest.raises(ConfigError, match=r"\['OT'\] is not among the inputs \(drift\): name it"):
        Training.begin(Config(**values))
    with pytest.raises(ConfigError, match="--difference belongs to numbers"):
        Config(**{**values, "task": "classify"})
    with pytest.raises(ConfigError, match="which --standardise recording takes out of their units"):
        Config(**{**values, "standardise": "recording"})
    with pytest.raises(ConfigError, match="several forecasts, which are of numbers"):
        Config(**{**values, "difference": False, "ahead": "1-3", "task": "classify"})


@pytest.mark.parametrize("ahead", ["1-", "24-1", "0-3", "1;2"])
def test_other_rows_ahead_are_refused(ahead: str, tmp_path: Path) -> None:
    values = settings(tmp_path / "a.csv", tmp_path / "run", targets=["OT"])
    with pytest.raises(ConfigError, match=r"--ahead .*: Input should be"):
        Config(**{**values, "ahead": ahead})


def test_a_change_from_a_missing_value_is_no_prediction(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = [f"{value:.3f}" for value in 1000 + draw.normal(size=300).cumsum()]
    values[100] = values[250] = ""
    data = tmp_path / "a.csv"
    data.write_text("u,y\n" + "".join(f"{i % 7},{y}\n" for i, y in enumerate(values)))
    words = ("--ahead", "1,2", "--difference", "--missing", "mask")
    train(data, tmp_path / "run", "--targets", "y", *words)
    out = tmp_path / "p.csv"
    run("predict", tmp_path / "run", data, "--missing", "mask", "--out", out)
    rows = lines(out)
    for i, row in enumerate(rows):
        numbers = [float(row["y[y+1]"]), float(row["y[y+2]"])]
        assert np.isnan(numbers).all() if i in {100, 250} else min(numbers) > 500, (i, numbers)


def test_a_change_from_an_input_needs_targets_among_the_inputs(tmp_path: Path) -> None:
    """An input of another file may have the name of a target and not be its present value."""
    (tmp_path / "x.csv").write_text("u,y\n" + "".join(f"{i % 7},{i % 5}\n" for i in range(200)))
    (tmp_path / "y.csv").write_text("y\n" + "".join(f"{1000 + i % 5}\n" for i in range(200)))
    (tmp_path / "m.csv").write_text("id,inputs,targets\na,x.csv,y.csv\n")
    words = ("--task", "regress", "--ahead", "2", "--difference", "--out", tmp_path / "run")
    said = run("train", tmp_path / "m.csv", *words, ok=False)
    assert "put the targets into the files of the inputs, or leave --difference out" in said


def test_a_baseline_without_an_error_has_no_skill(tmp_path: Path) -> None:
    """The skill was minus infinity, of a column that never changes."""
    rows = "".join(f"{i % 7},0\n" for i in range(300))
    (tmp_path / "a.csv").write_text("u,y\n" + rows)
    words = f"train {tmp_path / 'a.csv'} --task regress --targets y --ahead 3 --updates 1"
    run(*words.split(), "--out", tmp_path / "run")
    text = (tmp_path / "run" / "scores-valid.json").read_text(encoding="utf-8")
    metrics = json.loads(text)["metrics"]
    assert metrics["persistence/rmse[y]"] == 0
    assert metrics["persistence/skill[y]"] == "NaN"
