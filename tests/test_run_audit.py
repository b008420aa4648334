"""The audit of a run: its numbers match training, are saved and drawn, and support the advice."""

import html
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic_core import to_json

import throughtime as tt
from test_cli import run
from test_run import finish, settings, write_recordings
from throughtime.app.audit import AuditReport, audit_run
from throughtime.app.evaluate import read_results
from throughtime.app.load import load_run
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import AuditOptions
from throughtime.app.train import Training
from throughtime.diagnose import Audit, Reach, SettlingTime
from throughtime.diagnose.audit import Truncation
from throughtime.diagnose.settling import ColdStart
from throughtime.errors import ConfigError

QUICK = ("--horizons", "10,40", "--max-lag", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with class weights that are not all one, and a report."""
    place = tmp_path_factory.mktemp("audited")
    data = write_recordings(place / "data")
    labels = np.load(data / "0_y.npy")
    np.save(data / "0_y.npy", np.where(np.arange(len(labels)) % 3 == 0, labels, 0))
    return finish(settings(data, place / "run", class_weights="balanced", lr=0.01, keep="last"))


def look(folder: RunFolder, **question: Any) -> AuditReport:
    return audit_run(load_run(folder.path), AuditOptions(run=folder.path, **question))


def test_an_audit_is_printed_kept_and_drawn(folder: RunFolder) -> None:
    said = run("audit", folder.path, *QUICK)
    assert "over 400 steps of 2 lanes, at fixed weights" in said
    assert "whole state" in said
    assert "recurrent.c" in said
    content = json.loads(folder.audit.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["update"] == 60
    page = folder.report.read_text(encoding="utf-8")
    assert page.count("Where the gradient goes") == 1
    for words in (
        "steps back within which 50",
        "What truncating the gradient costs",
        "worst parameter",
        "After a cold start",
    ):
        assert words in page
    found = read_results(folder.audit, AuditReport, "audit")
    assert content["settling"]["quantiles"]["1.0"] == found.settling.quantiles[1.0]
    assert [start["compared"] for start in content["settling"]["starts"]] == [40] * 64
    assert str(found) in said
    for part in (found.audit, found.reach, found.settling, found.advice()):
        assert html.escape(str(part)[1:]).replace("&#x27;", "&#39;") in page


def test_the_figures_are_those_of_training(folder: RunFolder) -> None:
    """The first steps of the stream that training played, and its weighted loss."""
    found = look(folder, horizons=(10, 40), steps=320, max_lag=40).audit
    config = folder.read_config()
    training = Training.begin(config.changed(out=str(folder.path / "again")))
    stream = tt.Stream(training.dataset.train, lanes=2, chunk=7, seed=config.seed)
    net = load_run(folder.path).net
    expected = tt.audit(net, stream, training.loss_fn, horizons=(10, 40), steps=320)
    assert found == expected
    unweighted = tt.audit(net, stream, torch.nn.CrossEntropyLoss(), horizons=(10, 40), steps=320)
    assert abs(unweighted.rows[0].bias - found.rows[0].bias) > 1e-4


def test_the_section_stays_when_the_run_is_evaluated_or_goes_on(
    folder: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(folder.path, tmp_path / "run"))
    run("audit", folder.path, *QUICK)
    run("eval", folder.path, "--split", "valid")
    page = folder.report.read_text(encoding="utf-8")
    assert "with the weights of update 60." in page
    run("train", "--resume", folder.path, "--updates", "70")
    page = folder.report.read_text(encoding="utf-8")
    assert "with the weights of update 60; the model has become that of update 70 since." in page
    run("audit", folder.path, *QUICK)
    assert "with the weights of update 70." in folder.report.read_text(encoding="utf-8")


def test_an_audit_leaves_the_run_as_it_is(folder: RunFolder) -> None:
    before = [
        path.read_bytes()
        for path in (folder.model, folder.checkpoint, folder.metrics, folder.config)
    ]
    threads = torch.get_num_threads()
    run("audit", folder.path, *QUICK)
    assert before == [
        path.read_bytes()
        for path in (folder.model, folder.checkpoint, folder.metrics, folder.config)
    ]
    assert torch.get_num_threads() == threads


def truncation(horizon: int, bias: float, stride: int | None = None) -> Truncation:
    return Truncation(horizon, stride or horizon, bias, 0.9, 1.0, {"weight": bias})


def audited(
    *rows: Truncation, memory_used: bool = True, norm: float = 1.0, **more: Any
) -> AuditReport:
    found = Audit(8000, 4, 0.5, norm, rows)
    contexts = {1: 1.0, 2: 0.9}
    goes = Reach(
        (1, 2),
        (1.0, 0.5),
        {"h": (1.0, 0.5)},
        4,
        {0.5: 1, 0.9: 2, 0.99: 2},
        0.8 if memory_used else 1.0,
        contexts,
    )
    starts = (ColdStart("0", 500, 100, 12),)
    cold = SettlingTime(starts, {0.5: 12, 0.9: 12, 0.99: 12, 1.0: 12}, 0, 0.01, 1.0, {0: 0.5})
    return AuditReport(7, found, replace(goes, **more), cold)


def noisy() -> AuditReport:
    report = audited(truncation(50, 0.4), truncation(200, 0.05))
    return replace(report, audit=replace(report.audit, noise=1.2))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (noisy(), "These figures cannot choose a window"),
        (audited(truncation(50, 0.02), memory_used=False), "cannot choose a window"),
        (audited(truncation(50, 0.0), norm=0.0), "cannot choose a window"),
        (
            audited(truncation(50, 0.4), truncation(200, 0.05)),
            "For a bias within 0.1, train with --stride 200.",
        ),
        (
            audited(truncation(50, math.inf)),
            "train with --gradient exact, or audit",
        ),
    ],
)
def test_the_advice_follows_from_the_figures(found: AuditReport, said: str) -> None:
    assert said in found.advice()


@pytest.mark.parametrize(
    "found",
    [
        audited(truncation(50, 0.4), truncation(200, 0.05)),
        audited(truncation(50, math.inf)),
    ],
)
def test_what_is_kept_is_read_back_and_any_reader_of_json_can_read_it(
    tmp_path: Path, found: AuditReport
) -> None:
    (tmp_path / "audit.json").write_bytes(to_json(found, inf_nan_mode="strings"))
    assert read_results(tmp_path / "audit.json", AuditReport, "audit") == found
    json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a_question_out_of_range_is_refused() -> None:
    wrong: dict[str, Any] = {
        "steps": 0,
        "max_lag": 0,
        "horizons": (0,),
    }
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            AuditOptions(run="run", **{name: value})
