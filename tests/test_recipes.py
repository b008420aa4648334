"""Each recipe's code blocks run in order on the real data, with few updates of a small net."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from throughtime.app import cli
from throughtime.app.cli import main

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs" / "how-to" / "recipes"
DATA = ROOT.parent / "shared" / "data"
COMMANDS = {"ecg": 4, "wiener-hammerstein": 3, "rlc": 3, "nab": 4, "digits": 2, "forecasting": 3}
QUICK = {"rlc", "forecasting"}  # the others read long recordings; their flags are tested always
SMALLER = (
    ("--updates [0-9]+", "--updates 3"),
    ("--epochs [0-9]+", "--updates 3"),
    ("--hidden [0-9]+", "--hidden 4"),
)


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and text of each, in order."""
    return re.findall(
        r"^```(\w+)\n(.*?)^```",
        (RECIPES / f"{page}.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )


def commands(page: str) -> list[str]:
    return [line for kind, text in blocks(page) if kind == "bash" for line in text.splitlines()]


def throughtime(line: str, patch: pytest.MonkeyPatch) -> object:
    """Runs a command of a page; its exit code."""
    for flag, smaller in SMALLER:
        line = re.sub(flag, smaller, line)
    quick = (
        ["--horizons", "20", "--steps", "80", "--max-lag", "40"]
        if line.startswith("throughtime audit")
        else []
    )
    patch.setattr(sys, "argv", [*shlex.split(line), *quick])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    "page",
    [page if page in QUICK else pytest.param(page, marks=pytest.mark.slow) for page in COMMANDS],
)
def test_the_blocks_of_a_recipe_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page != "forecasting" and not DATA.is_dir():  # it generates its data
        pytest.skip("the data sets are not in ../shared/data")
    monkeypatch.chdir(tmp_path)
    before = listing()
    for number, (kind, text) in enumerate(blocks(page), 1):
        here = text.replace("DATA/", f"{DATA}/")
        if kind == "python":
            exec(compile(here, f"{page}.md, block {number}", "exec"), {"__name__": "__main__"})
        for line in here.splitlines() if kind == "bash" else ():
            assert throughtime(line, monkeypatch) in {0, None}, f"{line}\n{capsys.readouterr().err}"
    assert [path.name for path in (tmp_path / "runs").iterdir() if (path / "report.html").is_file()]
    assert listing() == before
    assert throughtime("throughtime eval runs/none", monkeypatch) == 2  # what fails is seen


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_recipe_in_python_finds_the_alarms_and_answers_live_as_offline(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (kind, text) in enumerate(blocks("python"), 1):
        assert kind == "python"
        here = text.replace("epochs, patience = 30", "epochs, patience = 1") if quick else text
        exec(compile(here, f"python.md, block {number}", "exec"), names)
    assert quick or names["best_score"] > 0.8
    assert quick or names["result"].metrics["macro_f1"] > 0.75
    assert len(names["answers"]) == 500
    assert (tmp_path / "pump-6.png").stat().st_size > 5_000
    assert [path.name for path in (tmp_path / "runs" / "pumps").iterdir()]


def listing() -> list[Path]:
    return sorted(DATA.rglob("*"))


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_recipe_have_flags_that_exist(page: str) -> None:
    known = cli.commands.commands
    assert len(commands(page)) == COMMANDS[page]
    for line in commands(page):
        words = shlex.split(line)
        assert words[0] == "throughtime"
        flags = {
            flag
            for parameter in known[words[1]].params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= flags, line
