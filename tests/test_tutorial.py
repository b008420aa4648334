"""The tutorial is true: its blocks run in order, as a reader runs them, and reach what it says."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from throughtime.app.cli import main

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial" / "heartbeats.md"
INSTALL = ("python3 -m venv .venv", ". .venv/bin/activate", "python3 -m pip install -c constraints")

# data and trainings that reach no score
SHORTER = ((r"--updates \d+", "--updates 60"), (r"range\(5\)", "range(1)"), (r"=180", "=40"))


def run_line(line: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a command of throughtime in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_blocks_of_the_tutorial_run_and_reach_its_scores(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    text = TUTORIAL.read_text(encoding="utf-8")
    for longer, short in SHORTER if quick else ():
        text = re.sub(longer, short, text)
    commands = 0
    for number, (kind, block) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE), 1
    ):
        if kind == "python":
            exec(compile(block, f"{TUTORIAL.name}, block {number}", "exec"), names)
        for line in block.splitlines() if kind == "bash" else ():
            if not line.startswith(INSTALL):
                commands += 1
                code = run_line(line, monkeypatch)
                assert code in {0, None}, f"{line}\n{capsys.readouterr().err}"
    assert commands == 4
    run = tmp_path / "runs" / "heartbeats"
    scores = json.loads((run / "scores-test.json").read_text(encoding="utf-8"))["metrics"]
    if not quick:
        assert scores["f1[early]"] > 0.85
        assert names["result"].metrics["f1[early]"] > 0.85
        assert {label for _, label in names["beats"]} == {"normal", "early"}
    assert "Where the gradient goes" in (run / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "heartbeats.onnx").is_file()
