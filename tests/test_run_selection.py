"""Which weights a run keeps, and when it stops early: to the bit on resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from test_cli import run
from test_run import _lines, finish, flags, goes_on, settings, stop_at, write_recordings
from test_run_kills import MASKED
from throughtime.app.evaluate import evaluate_run
from throughtime.app.load import load_run
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder, load_checkpoint
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import ConfigError

# A rate at which the scores on validation rise and fall.
UNSTEADY: dict[str, Any] = {"lr": 0.05, "valid_every": 6, "updates": 60, "hidden": 8}
TASKS = ["classify", "regress"]


def validations(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in folder.read_metrics() if row["kind"] == "valid"]


def best_of(rows: list[dict[str, Any]], task: str) -> dict[str, Any]:
    key = {"classify": lambda row: row["macro_f1"], "regress": lambda row: -row["loss"]}[task]
    return max(rows, key=key)


def weights_at(data: Path, out: Path, update: int, **more: Any) -> dict[str, torch.Tensor]:
    """The weights of the run at an update, of a training that is stopped there."""
    training = Training.begin(Config(**settings(data, out, **UNSTEADY | more)))
    stop_at(training, update)
    return dict(training.net.module.state_dict())


@pytest.mark.parametrize("task", TASKS)
def test_the_model_has_the_weights_of_the_best_validation(tmp_path: Path, task: str) -> None:
    data = write_recordings(tmp_path / "data")
    folder = finish(settings(data, tmp_path / "run", **UNSTEADY, task=task))
    rows = validations(folder)
    assert [row["update"] for row in rows] == list(range(6, 61, 6))
    best = best_of(rows, task)
    assert best["update"] < 60  # otherwise the last ones would do
    net, spec = load_model(folder.model)
    assert spec.update == best["update"]
    expected = weights_at(data, tmp_path / "short", spec.update, task=task, keep="last")
    torch.testing.assert_close(net.module.state_dict(), expected, rtol=0, atol=0)
    scores = evaluate_run(load_run(folder.path), None, "valid")
    names = {name for name in scores.metrics if name in best}
    assert {name: scores.metrics[name] for name in names} == {name: best[name] for name in names}
    assert len(names) > 1
    assert scores.update == spec.update
    last = finish(settings(data, tmp_path / "last", **UNSTEADY, task=task, keep="last"))
    assert load_model(last.model)[1].update == 60
    assert _lines(last) == _lines(folder)  # what is kept changes no training


@pytest.mark.parametrize(("task", "at"), [("classify", 6), ("regress", 29)])
def test_a_stopped_run_keeps_the_same_best_to_the_bit(tmp_path: Path, task: str, at: int) -> None:
    more = UNSTEADY | {"task": task, "schedule": "cosine", "weight_decay": 0.1}
    whole = goes_on(tmp_path, at, **more | {"layers": 2})
    assert load_model(whole.model)[1].update < 60


@pytest.mark.parametrize("more", [{"valid_every": 0}, {"holdout": 0.0}], ids=str)
def test_without_validation_the_last_weights_are_kept_with_a_remark(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    data = write_recordings(tmp_path / "data")
    if "holdout" in more:
        (data / "recordings.csv").write_text(
            "id,inputs,targets\n0,0_x.npy,0_y.npy\n1,1_x.npy,1_y.npy\n", encoding="utf-8"
        )
    training = Training.begin(Config(**settings(data, tmp_path / "run", updates=5, **more)))
    training.run()
    assert load_model(training.folder.model)[1].update == 5
    assert any("the last weights are kept" in remark for remark in training.dataset.remarks)
    quiet = Training.begin(
        Config(**settings(data, tmp_path / "last", updates=5, keep="last", **more))
    )
    assert not any("the last weights" in remark for remark in quiet.dataset.remarks)
    if "holdout" in more:
        with pytest.raises(
            ConfigError, match=r"--patience .* count validations .* hold recordings"
        ):
            Training.begin(Config(**settings(data, tmp_path / "p", patience=2, **more)))


def test_patience_stops_early_says_so_and_trains_on_when_asked(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    values = settings(data, tmp_path / "run", **UNSTEADY, patience=2)
    output = run(*flags(values))
    folder = RunFolder(Path(values["out"]))
    rows = validations(folder)
    best = best_of(rows, "classify")
    assert rows[-1]["update"] < 60
    assert rows.index(best) == len(rows) - 3
    assert f"by the model of update {best['update']};" in output
    full = finish(settings(data, tmp_path / "full", **UNSTEADY))
    assert _lines(full)[: len(_lines(folder))] == _lines(folder)
    page = folder.report.read_text(encoding="utf-8")
    assert f"of update {best['update']}, the best" in page
    run("train", "--resume", folder.path, "--updates", "61")
    assert load_checkpoint(folder.checkpoint)["done"]["count"] > rows[-1]["update"]


def test_dropout_of_a_module_of_ones_own_acts_in_training_only(tmp_path: Path) -> None:
    data, code = write_recordings(tmp_path / "data"), tmp_path / "masked.py"
    code.write_text(MASKED, encoding="utf-8")
    values = settings(data, tmp_path / "run", layers=2, model=f"{code}:Masked", updates=20)
    x, training = torch.randn(30, 2, 2), Training.begin(Config(**values))
    state = training.net.initial_state(2)
    once, again = (training.net(x, state)[0] for _ in range(2))
    assert not torch.equal(once, again)
    training.run()
    folder = training.folder
    net, _ = load_model(folder.model)
    assert torch.equal(net(x, state)[0], net(x, state)[0])
    audits: list[str] = []
    for _ in range(2):
        run("audit", folder.path, "--horizons", "10", "--steps", "40")
        audits.append(folder.audit.read_text(encoding="utf-8"))
    assert audits[0] == audits[1]  # no masks are drawn
    assert json.loads(audits[0])["update"] == load_model(folder.model)[1].update
