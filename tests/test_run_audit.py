"""The audit of a run: its numbers match training, are saved and drawn, and support the advice."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import throughtime as tt
from test_cli import run
from test_run import finish, settings, write_recordings
from throughtime.app.audit import AuditJob, AuditReport
from throughtime.app.config import AuditOptions, Config, make_config
from throughtime.app.dataset import open_dataset
from throughtime.app.load import load_run
from throughtime.app.model import StandardisedError, one_thread
from throughtime.app.run_folder import RunFolder, json_safe
from throughtime.app.train import Training
from throughtime.diagnose import Audit, Reach, SettlingTime
from throughtime.diagnose.audit import Truncation
from throughtime.diagnose.settling import ColdStart
from throughtime.errors import ConfigError, DataError, RunError

QUICK = ("--horizons", "10,40", "--max-lag", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with class weights that are not all one, and a report."""
    place = tmp_path_factory.mktemp("audited")
    data = write_recordings(place / "data")
    labels = np.load(data / "0_y.npy")
    np.save(data / "0_y.npy", np.where(np.arange(len(labels)) % 3 == 0, labels, 0))
    return finish(settings(data, place / "run", class_weights="balanced", lr=0.01, keep="last"))


def look(
    folder: RunFolder, question: AuditOptions, data: Path | None = None, split: str | None = None
) -> AuditJob:
    return AuditJob(load_run(folder.path), question, data, split)


def test_an_audit_is_printed_kept_and_drawn(folder: RunFolder) -> None:
    said = run("audit", folder.path, *QUICK, "--stride", "10")
    assert (
        "auditing the first 320 of 400 steps of 2 lanes of split 'train': horizons 10, 40,"
        " stride 10" in said
    )
    assert "what cutting the gradient costs, against the exact one" in said
    assert "whole state" in said
    assert "recurrent.c" in said
    content = json.loads(folder.audit.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["update"] == 60
    page = folder.report.read_text(encoding="utf-8")
    assert page.count("Where the gradient goes") == 1
    for words in (
        "How far back the gradient goes",
        "What truncating the gradient costs",
        "Loss by context length",
        "worst parameter",
        "After a cold start",
        "A cold start beside the carried state",
    ):
        assert words in page
    for words in (
        "Where the gradient goes",
        "Gradient of the training losses",
        "recurrent.layer0.f",
    ):
        assert words in page
    found = AuditReport.read(folder.audit)
    assert content["settling"]["quantiles"]["1.0"] == found.settling.quantiles[1.0]
    assert [start["compared"] for start in content["settling"]["starts"]] == [40] * 64
    cold = str(found.settling)
    assert cold[1:] in page
    for words in (found.advice(folder.read_config()), found.warning(), cold[1:]):
        assert words in " ".join(said.split())
        assert words.replace("'", "&#39;") in page


def test_the_figures_are_those_of_training(folder: RunFolder) -> None:
    """The first steps of the stream that training played, and its weighted loss."""
    found = look(folder, AuditOptions(horizons=(10, 40))).run().audit
    config = folder.read_config()
    training = Training.begin(replace(config, out=str(folder.path / "again")))
    stream = tt.Stream(training.dataset.train, lanes=2, chunk=7, seed=config.seed)
    net = look(folder, AuditOptions(horizons=(10, 40))).net
    expected = tt.audit(net, stream, training.loss_fn, horizons=(10, 40), steps=320)
    assert found == expected
    unweighted = tt.audit(net, stream, torch.nn.CrossEntropyLoss(), horizons=(10, 40), steps=320)
    assert abs(unweighted.rows[0].bias - found.rows[0].bias) > 1e-4


def test_the_loss_of_a_regression_is_that_of_training(tmp_path: Path) -> None:
    folder = finish(
        settings(
            write_recordings(tmp_path / "data"),
            tmp_path / "run",
            task="regress",
            dtype="float64",
        )
    )
    loss_fn = look(folder, AuditOptions()).loss_fn
    assert isinstance(loss_fn, StandardisedError)
    np.testing.assert_array_equal(
        loss_fn.scale.numpy(), open_dataset(folder.read_config()).statistics.targets.scale
    )


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


def test_the_usual_horizons_are_as_long_as_an_epoch_allows(folder: RunFolder) -> None:
    usual = look(folder, AuditOptions())
    assert (usual.horizons, usual.steps) == (
        (10, 50, 200),
        400,
    )  # 10 is the run's own, 800 is longer than half of 400
    assert look(folder, AuditOptions(stride=20)).horizons == (50, 200)
    assert look(folder, AuditOptions(lanes=130)).horizons == (
        2,
    )  # five steps a lane: nothing usual is short enough, half of them is
    assert look(folder, AuditOptions(horizons=(40, 10, 10))).horizons == (10, 40)
    assert look(folder, AuditOptions(horizons=(10, 40))).steps == 320
    assert look(folder, AuditOptions(horizons=(10,), steps=33)).steps == 33


def test_other_recordings_are_those_that_eval_would_score(folder: RunFolder) -> None:
    data = Path(folder.read_config().data)
    assert look(folder, AuditOptions()).split == "train"
    with pytest.raises(
        DataError, match=r"no recordings in split 'test'; there are train \(2\), valid \(1\)"
    ):
        look(folder, AuditOptions(), data, "test")
    assert look(folder, AuditOptions(), data).split == "valid"  # there is no split test
    other = look(folder, AuditOptions(), data, "valid")
    assert (other.stream.lanes, other.stream.steps) == (1, 330)  # one recording stays whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--split", "tset"], "no recordings in split 'tset'; there are train (2), valid (1)"),
        (["--horizons", "50,200", "--stride", "100"], "50 is below --stride 100"),
        (
            ["--horizons", "50;200"],
            "--horizons '50;200': expected whole numbers of steps, such as 50,200,800",
        ),
        (["--horizons", "0"], "--horizons 0: expected whole numbers of steps, such as 50,200,800"),
        (
            ["--horizons", "500"],
            (
                "horizon 500 is not shorter than the 400 steps audited of a lane, so it would cut"
                " nothing: take shorter --horizons, fewer --lanes"
            ),
        ),
        (
            ["--horizons", "100", "--steps", "60"],
            "take more --steps, of 400, or shorter --horizons",
        ),
        (
            ["--stride", "400"],
            "horizon 400 is not shorter than the 400 steps",
        ),
        (["--lanes", "1000"], "1000 lanes, but the recordings have 650 steps"),
        (["--tolerance", "1.5"], "--tolerance 1.5: expected a number above 0 and below 1"),
        (["--device", "meta"], "--device meta: holds no numbers"),
    ],
)
def test_bad_questions_get_one_message_that_says_what_to_do(
    folder: RunFolder, arguments: list[str], said: str
) -> None:
    before = folder.audit.read_bytes() if folder.audit.is_file() else None
    complained = run("audit", folder.path, *arguments, ok=False)
    assert complained.startswith("error: ")
    assert said in complained
    assert before == (folder.audit.read_bytes() if folder.audit.is_file() else None)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "no run there" in run("audit", tmp_path, ok=False)


def test_class_weights_are_those_of_training_without_its_recordings(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    folder = finish(settings(data, tmp_path / "run", class_weights="balanced", updates=3))
    other = write_recordings(tmp_path / "other")
    data.rename(tmp_path / "gone")
    look(folder, AuditOptions(horizons=(10,), max_lag=10), other, "train")


def test_an_audit_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    from throughtime.app.report.page import write_report

    folder = finish(settings(write_recordings(tmp_path / "data"), tmp_path / "run", updates=3))
    for content in ("{", "[]", '{"split": "train"}'):
        folder.audit.write_text(content, encoding="utf-8")
        with pytest.raises(RunError, match=r"audit\.json: not what `throughtime audit` wrote"):
            write_report(load_run(folder.path))


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
    return AuditReport("train", "d", 7, 100_000, 0.1, found, replace(goes, **more), cold)


CONFIG = make_config({"data": "d", "task": "classify", "out": "o"})


def noisy() -> AuditReport:
    report = audited(truncation(50, 0.4), truncation(200, 0.05))
    return replace(report, audit=replace(report.audit, noise=1.2))


@pytest.mark.parametrize(
    ("found", "config", "said"),
    [
        (
            noisy(),
            CONFIG,
            (
                "These figures cannot choose a window. |g| is small against its sampling noise (1.2"
                " times |g|), as near a minimum: these relative biases are noise."
            ),
        ),
        (
            audited(truncation(50, 0.4), truncation(200, 0.05)),
            CONFIG,
            "A shorter stride with the same horizon usually has less bias, makes more updates",
        ),
        (
            audited(truncation(50, 0.4), truncation(200, 0.05)),
            CONFIG,
            "equal numbers of updates, rows have read unequal amounts of data.",
        ),
        (
            audited(truncation(50, 0.4), truncation(200, 0.05)),
            CONFIG,
            "Train with --stride 200: a bias of 0.05, within the tolerance of 0.1. A shorter",
        ),
        (
            audited(truncation(50, 0.4), truncation(200, 0.05, 50)),
            CONFIG,
            "Train with --stride 50 --horizon 200: a bias of 0.05, within",
        ),
        (
            audited(truncation(50, 0.02)),
            CONFIG,
            (
                "Train with --stride 50: a bias of 0.02, within the tolerance of 0.1. A"
                " shorter stride"
            ),
        ),
        (
            audited(truncation(50, 0.4)),
            CONFIG,
            "No audited horizon is long enough: the longest, 50 steps, has a bias of 0.4",
        ),
        (
            audited(truncation(50, 0.4)),
            CONFIG,
            ("Audit longer ones by --horizons, or train with the exact gradient, --gradient exact"),
        ),
        (
            audited(truncation(60_000, 0.4)),
            CONFIG,
            "train with the exact gradient, --gradient exact",
        ),
        (audited(truncation(50, math.inf)), CONFIG, "No audited horizon is long enough"),
        (
            audited(truncation(50, 0.02), memory_used=False),
            CONFIG,
            "These figures cannot choose a window, because the net does not use",
        ),
        (audited(truncation(50, 0.0), norm=0.0), CONFIG, "The gradient is zero everywhere"),
        (
            audited(truncation(100, 0.4)),
            CONFIG,
            "The run was trained with --stride 100, whose bias is 0.4.",
        ),
    ],
)
def test_the_advice_follows_from_the_figures(found: AuditReport, config: Config, said: str) -> None:
    assert said in found.advice(config)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, stride=None, gradient="exact"),
        replace(CONFIG, train_on="windows"),
        replace(CONFIG, horizon=400),
        replace(CONFIG, stride=50),
    ],
)
def test_a_row_is_that_of_the_run_only_if_its_gradients_were_cut_so(config: Config) -> None:
    found = audited(truncation(100, 0.4))
    assert found.own(CONFIG) == found.audit.rows[0]
    assert found.own(config) is None
    assert "The run was trained" not in found.advice(config)


def test_a_reach_as_long_as_the_lags_names_the_option_to_raise() -> None:
    report = audited(truncation(50, 0.4), shares={0.5: 2, 0.9: 2, 0.99: 2})
    assert "pass a larger max_lag" in report.reach.warning()
    assert "pass a larger --max-lag" in report.warning()


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
    content = json_safe(found.facts(), texts=True)
    (tmp_path / "audit.json").write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    assert AuditReport.read(tmp_path / "audit.json") == found
    json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "found",
    [
        audited(truncation(50, math.inf)),
        audited(truncation(50, 7.5), truncation(200, -0.0)),
        audited(
            truncation(50, 0.0),
            norm=0.0,
            norms=(0.0, 0.0),
            by_leaf={"h": (0.0, 0.0), "c": (0.0, math.nan)},
        ),
        audited(truncation(1, 0.3), norms=(1e30, 1e-30), contexts={1: 2.0}),
    ],
)
def test_whatever_was_found_can_be_drawn(found: AuditReport) -> None:
    from xml.etree import ElementTree as ET

    from throughtime.app.report.page import audit_charts
    from throughtime.app.report.tables import audit_table

    for chart in audit_charts(found, Config(data="data", task="classify", out="out")):
        svg = chart.draw()
        assert ET.fromstring(svg).attrib["aria-label"].startswith(chart.title)
        assert not re.search(r"\bnan\b", svg)
    assert len(audit_table(found.audit).rows) == len(found.audit.rows) + 1


def test_a_question_out_of_range_is_refused() -> None:
    wrong: dict[str, Any] = {
        "stride": 0,
        "steps": 0,
        "lanes": 0,
        "max_lag": 0,
        "tolerance": 0.0,
        "horizons": (0,),
    }
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            AuditOptions(**{name: value})


def test_one_thread_for_the_small_and_as_many_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        with one_thread(when=False):
            assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with one_thread():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
