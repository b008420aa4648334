"""What commands print as they work: a line of 80 columns on a terminal, plain lines elsewhere."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from test_cli import run, signals
from throughtime.app import console, train
from throughtime.app.cli import commands
from throughtime.app.config import PANELS, Config
from throughtime.app.console import ProgressDisplay, progress_line
from throughtime.app.flags import print_error
from throughtime.app.run_folder import RunFolder
from throughtime.app.train import Training

LATE: dict[str, Any] = {
    "update": 1_234_567,
    "updates": 2_000_000,
    "loss": 12345.6789,
    "macro_f1": 0.5,
    "accuracy": 0.987,
    "frames": 10**12,
    "training_seconds": 86_399.0,
    "waiting": 0.55,
}


def settings(folder: Path, **values: Any) -> dict[str, Any]:
    u, y = signals()
    np.savez(folder / "plant.npz", inputs=u, targets=y)
    small = {"task": "regress", "hidden": 4, "lanes": 2, "stride": 20, "lr": 0.01}
    return {"data": str(folder / "plant.npz"), "out": str(folder / "run"), **small, **values}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = tmp_path_factory.mktemp("run")
    training = Training.begin(Config(**settings(place, updates=5)))
    training.run()
    return training.folder


def test_each_phase_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, soft_wrap=True)
    monkeypatch.setattr(console, "out", terminal)
    with ProgressDisplay() as display:
        display.train(LATE)
        display._status._live.refresh()
        display.phase("opening recordings", 12_345, 12_345_678)
        display._status._live.refresh()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue().replace("\r", "\n"))
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    assert any("left" in line for line in lines), lines
    assert any("opening recordings: 0%" in line for line in lines), lines
    assert max(map(len, lines)) <= 80


def test_every_long_phase_is_shown_elsewhere_in_plain_lines(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PLAIN_EVERY", -1.0)
    data = folder.path.parent / "plant.npz"
    said = run("train", data, "--task", "regress", "--updates", "2", "--out", tmp_path / "run")
    for phase in ("opening recordings", "reading recordings", "evaluating"):
        assert f"{phase}: 100%\n" in said
    said = run("eval", folder.path)
    assert "opening recordings: 100%\n" in said
    assert "evaluating: 100%\n" in said
    assert "predicting: 100%\n" in run("predict", folder.path, data, "--out", tmp_path / "p.npy")
    said = run("audit", folder.path, "--horizons", "10", "--max-lag", "20")
    for phase in ("comparing horizons", "tracing losses back", "comparing cold starts"):
        assert f"{phase} ...\n" in said


def test_json_is_all_that_is_printed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PLAIN_EVERY", -1.0)
    scores = json.loads(run("eval", folder.path, "--json"), parse_constant=pytest.fail)
    assert scores == json.loads(folder.scores("valid").read_text(encoding="utf-8"))
    audited = json.loads(
        run("audit", folder.path, "--horizons", "10", "--max-lag", "20", "--json"),
        parse_constant=pytest.fail,
    )
    assert audited == json.loads(folder.audit.read_text(encoding="utf-8"))
    assert "Scores: valid" in folder.report.read_text(encoding="utf-8")


def test_speed_and_time_left_leave_out_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes a second of a false clock, a validation a thousand."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    evaluate = train.evaluate_recordings

    def pass_time(seconds: float, step: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return step(*arguments)

        return timed

    monkeypatch.setattr(train, "evaluate_recordings", pass_time(1000.0, evaluate))
    values = settings(tmp_path, updates=10, valid_every=2)
    lines = list[Any]()
    for training in (
        lambda: Training.begin(Config(**values)),
        lambda: Training.resume(tmp_path / "run", updates=14),
    ):
        prepared = training()
        prepared.optimizer.register_step_post_hook(pass_time(1.0, lambda *_: None))
        prepared.run(lines.append)
    left = [re.search(r"\S+ left", progress_line(line)) for line in lines]
    assert [match[0] for match in left if match] == [
        f"0:00:0{n} left" for n in (*range(9, -1, -1), 3, 2, 1, 0)
    ]
    rows = [row for row in RunFolder(tmp_path / "run").read_metrics() if row["kind"] == "train"]
    assert [row["training_seconds"] for row in rows] == [*range(1, 15)]
    assert rows[-1]["seconds"] == 14 + 1000 * 6


def test_an_error_is_one_plain_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "a folder " * 30 + "[red] :warning:"
    print_error(long)
    assert capsys.readouterr().err == f"error: {long}\n"


def test_options_of_train_are_in_panels_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["train", "--help"], prog_name="throughtime", standalone_mode=False)
    headings = re.findall(r"^(\w+):$", capsys.readouterr().out, re.MULTILINE)
    assert headings == [*PANELS.values(), "Options"]
