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
from throughtime.app.config import PANELS, make_config
from throughtime.app.console import ProgressDisplay, progress_line
from throughtime.app.flags import print_error
from throughtime.app.run_folder import RunFolder
from throughtime.app.train import Training, TrainProgress

LATE = TrainProgress(
    1_234_567,
    2_000_000,
    12345.6789,
    {"accuracy": 0.987, "macro_f1": 0.5},
    123_456.0,
    86_399.0,
    12_345_000_000,
    0.55,
)


def settings(folder: Path, **values: Any) -> dict[str, Any]:
    u, y = signals()
    np.savez(folder / "plant.npz", inputs=u, targets=y)
    small = {"task": "regress", "hidden": 4, "lanes": 2, "stride": 20, "lr": 0.01}
    return {"data": str(folder / "plant.npz"), "out": str(folder / "run"), **small, **values}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = tmp_path_factory.mktemp("run")
    training = Training.begin(make_config(settings(place, updates=5)))
    training.run()
    return training.folder


@pytest.mark.parametrize("width", [10, 40, 60, 72, 200])
def test_a_line_of_progress_fits(width: int) -> None:
    line = progress_line(LATE, width)
    assert len(line) <= width or line == "update 1234567/2000000"
    assert line.split("  ") == [p for p in progress_line(LATE).split("  ") if p in line.split("  ")]
    assert ("left" in line) == (width >= 60)


def test_each_phase_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown_on_a_terminal(monkeypatch)
    with ProgressDisplay() as display:
        display.train(LATE)
        display.phase("opening recordings", 12_345, 12_345_678)
        display.phase("comparing horizons", 0, 0)
        display._bars.refresh()
        shown = screen.getvalue()
        display.phase("comparing horizons", 1, 1)
        display.phase("opening recordings", 12_345_678, 12_345_678)
        assert len(display._tasks) == 1
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", shown).replace("\r", "\n")
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines() if line.strip()]
    assert any("1d" in line or "left" in line for line in lines), frames
    for line in lines:
        assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip()) <= 80, line


def shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, soft_wrap=True)
    monkeypatch.setattr(console, "out", terminal)
    return screen


def test_something_moves_whenever_no_phase_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is listed before the first phase is called."""

    def lines() -> list[str]:
        display._bars.refresh()
        last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()[-1]
        screen.truncate(0)
        return last.split()[:1]

    screen = shown_on_a_terminal(monkeypatch)
    with ProgressDisplay() as display:
        assert lines() == ["listing"]
        display.phase("opening recordings", 1, 2)
        assert lines() == ["opening"]
        display.phase("opening recordings", 2, 2)
        assert lines() == ["working"]


def test_a_validation_leaves_room_for_the_line_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=72, soft_wrap=True)
    monkeypatch.setattr(console, "out", terminal)
    with ProgressDisplay() as display:
        display.train(LATE)
        display.phase("evaluating", 1, 2)
        display._bars.refresh()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()
    last = next(line.rstrip() for line in reversed(lines) if "training" in line)
    assert last.endswith("━ " + progress_line(LATE, 50))


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
    lines = list[TrainProgress]()
    for training in (
        lambda: Training.begin(make_config(values)),
        lambda: Training.resume(tmp_path / "run", updates=14),
    ):
        prepared = training()
        prepared.optimizer.register_step_post_hook(pass_time(1.0, lambda *_: None))
        prepared.run(lines.append)
    assert [line.frames_per_second for line in lines] == pytest.approx([40.0] * 14, abs=13)
    assert [line.remaining_seconds for line in lines] == [*range(9, -1, -1), 3, 2, 1, 0]
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
