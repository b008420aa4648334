"""What a user is told where a command cannot do all of it, and what a spreadsheet may not do."""

import csv
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from test_cli import ended, run
from test_run import finish, settings, write_recordings
from throughtime import files as file_module


@pytest.mark.parametrize(
    "words", [["eval", "--split", "valid"], ["audit", "--horizons", "10", "--steps", "40"]]
)
def test_a_folder_that_cannot_be_written_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    folder = finish(settings(write_recordings(tmp_path / "data"), tmp_path / "run", updates=5))
    before = {path: path.read_bytes() for path in folder.path.iterdir()}

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    command = [words[0], folder.path, *words[1:]]
    with monkeypatch.context() as patch:
        patch.setattr(file_module, "write_together", refuse)
        code, printed, errors = ended(*command)
    assert code == 0, errors
    assert "macro_f1" in printed if words[0] == "eval" else "bias" in printed
    assert f"report.html are not saved in {folder.path}: Read-only file system" in printed
    assert before == {path: path.read_bytes() for path in folder.path.iterdir()}
    assert "not saved" not in run(*command)


def test_predictions_hold_no_formula(tmp_path: Path) -> None:
    rows = [f"{i % 7},{'=1+1' if i % 7 < 3 else '-2' if i % 7 < 5 else '@x'}" for i in range(300)]
    (tmp_path / "a.csv").write_text("u,y\n" + "\n".join(rows) + "\n", encoding="utf-8")
    finish(settings(tmp_path / "a.csv", tmp_path / "run", targets="y", updates=150, lr=0.05))
    run("predict", tmp_path / "run", tmp_path / "a.csv", "--out", tmp_path / "p.csv")
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    assert head == ["step", "class", "p[-2]", "p[=1+1]", "p[@x]"]
    assert {line[1] for line in lines} == {"'=1+1", "-2", "'@x"}


def test_scores_of_a_run_that_held_nothing_out_name_the_flag(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((90, 1)), targets=np.arange(90) // 9 % 2)
    values = settings(tmp_path / "a.npz", tmp_path / "run", holdout=0, updates=3)
    finish(values)
    code, _, errors = ended("eval", tmp_path / "run")
    assert code == 2
    assert (
        "no recordings in split 'valid'; there are train 1: name one of them with --split" in errors
    )
    assert "accuracy" in run("eval", tmp_path / "run", "--split", "train")
