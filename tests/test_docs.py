"""README and docs are true: their Python runs, their commands exist and do what they say."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_cli import leave_out_charts
from test_folders import anomaly_files
from throughtime.app import cli
from throughtime.app.cli import main
from throughtime.app.settings import Config

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
RECIPES, TUTORIAL = "docs/how-to/recipes", "docs/tutorial/heartbeats.md"
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
ERRORS = [page for page in PAGES if "docs/errors/" in page and not page.endswith("index.md")]
IN_ORDER = "docs/how-to/extending.md", TUTORIAL  # whose commands need the files of their blocks
PLAIN = [p for p in PAGES if not p.startswith((RECIPES, "docs/errors")) and p not in IN_ORDER]
Names = dict[str, Any]


def all_blocks(page: str) -> list[tuple[str, str]]:
    """Kind and text of each block, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in all_blocks(page) if kind == language]


def lines_of(page: str) -> list[str]:
    """The commands of a page."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line]


class Reader:
    """Does in an empty folder, in this process, what a page says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.names = folder, patch, Names(__name__="__main__")
        patch.chdir(folder)
        leave_out_charts(patch)
        patch.setattr(sys, "path", list(sys.path))

    def type(self, line: str) -> object:
        """The exit code of a command of throughtime."""
        self.patch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    def follow(self, page: str, *shorter: tuple[str, str]) -> None:
        """Every block in order; patterns are replaced first."""
        for number, (kind, text) in enumerate(all_blocks(page), 1):
            for longer, short in shorter:
                text = re.sub(longer, short, text)  # noqa: PLW2901
            if kind == "python":
                exec(compile(text, f"{page}, block {number}", "exec"), self.names)
            for line in text.splitlines() if kind == "bash" else ():
                if line.startswith("throughtime"):
                    assert self.type(line) in {0, None}, line


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty"
)  # a page that resumes where it saved
@pytest.mark.parametrize("page", [page for page in PLAIN if blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, reader: Reader) -> None:
    run = subprocess.run

    def run_here(words: list[str], **options: Any) -> object:
        """Run a command of throughtime without a new interpreter that imports torch."""
        if words[:3] != [sys.executable, "-m", "throughtime"]:
            return run(words, **options)
        assert reader.type(shlex.join(words[2:])) in {0, None}
        return None

    reader.patch.setattr("subprocess.run", run_here)
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page}, block {number}", "exec"), reader.names)
    assert len(reader.names) > 5


@pytest.mark.filterwarnings("ignore:Using non-full backward hooks")
@pytest.mark.parametrize("page", ERRORS)
def test_the_loop_of_an_error_fails_with_its_message_and_the_mends_run(page: str) -> None:
    text, names = (ROOT / page).read_text(encoding="utf-8"), Names(__name__="__main__")
    pairs = re.findall(
        r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE
    )
    for code, expected in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(code, page, "exec"), names)
            except RuntimeError as error:
                print(f"{type(error).__name__}: {error}")
        assert printed.getvalue().split() == expected.split()
    assert pairs[0][1]  # the first loop shows the fault
    assert any("tt." in code for code, _ in pairs)


def test_every_block_of_a_page_is_of_a_kind_that_is_run() -> None:
    kinds = {kind for page in PAGES for kind, _ in all_blocks(page)}
    assert kinds - {"rust"} == {"bash", "python", "c", "javascript", "text"}  # see also test_deploy
    for page in PAGES:
        for section in (ROOT / page).read_text(encoding="utf-8").split("\n## "):
            assert "```rust" not in section or "has not been run" in section


def test_the_commands_of_the_pages_run(reader: Reader) -> None:
    """Those of throughtime on a small set of the same form, with fewer updates."""
    small_ecg(reader.folder / "ecg")
    anomaly_files(reader.folder / "valves")
    mine = [line for p in PLAIN for line in lines_of(p) if line.startswith("throughtime")]
    for line in mine:
        more = " --steps 200" if line.startswith("throughtime export") else ""
        assert reader.type(re.sub(r"--updates \d+", "--updates 3", line) + more) in {0, None}, line
    assert len(mine) == 10
    assert (reader.folder / "predictions" / "valve1" / "0.csv").is_file()
    assert np.load(reader.folder / "200.npy").shape == (900, 3)


def small_ecg(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    rows = ["id,split,inputs,targets"]
    for name, split in (("100", "train"), ("102", "train"), ("104", "valid"), ("200", "test")):
        np.save(folder / f"{name}_adc.npy", random.integers(900, 1100, 900).astype(np.int16))
        np.save(folder / f"{name}_labels.npy", (np.arange(900) // 20 % 3).astype(np.uint8))
        rows.append(f"{name},{split},{name}_adc.npy,{name}_labels.npy")
    (folder / "recordings.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_the_blocks_of_the_page_on_extensions_run(reader: Reader) -> None:
    small_ecg(reader.folder / "ecg")
    reader.follow(IN_ORDER[0])
    config = (reader.folder / "runs" / "growing" / "config.toml").read_text(encoding="utf-8")
    assert "growing.py:Growing" in config
    assert 'gradient_arg = ["longest=80"]' in config


# data and trainings that reach no score
SHORTER = (
    *((r"--updates \d+", "--updates 20"), (r"range\(5\)", "range(1)"), (r"=180", "=40")),
    ("--horizons 25,50,200 --steps 1000 --max-lag 200", "--horizons 25 --steps 200 --max-lag 20"),
)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_blocks_of_the_tutorial_run_and_reach_its_scores(quick: bool, reader: Reader) -> None:
    reader.follow(TUTORIAL, *(SHORTER if quick else ()))
    run = reader.folder / "runs" / "heartbeats"
    scores = json.loads((run / "scores-test.json").read_text(encoding="utf-8"))["metrics"]
    if not quick:
        assert scores["f1[early]"] > 0.85
        assert reader.names["result"].metrics["f1[early]"] > 0.85
        assert {label for _, label in reader.names["beats"]} == {"normal", "early"}
    assert "Where the gradient goes" in (run / "report.html").read_text(encoding="utf-8")
    assert (reader.folder / "heartbeats.onnx").is_file()


COMMANDS = {"ecg": 4, "wiener-hammerstein": 3, "rlc": 3, "nab": 4, "digits": 2, "forecasting": 3}
SMALLER = (
    ("--(updates|epochs) [0-9]+", "--updates 3"),
    ("--hidden [0-9]+", "--hidden 4"),
    ("(?m)^(throughtime audit .*)$", r"\1 --horizons 20 --steps 80 --max-lag 40"),
    ("DATA/", f"{DATA}/"),
)


@pytest.mark.slow  # most read long recordings
@pytest.mark.parametrize("page", COMMANDS)
def test_the_blocks_of_a_recipe_run(page: str, reader: Reader) -> None:
    if page != "forecasting" and not DATA.is_dir():  # it generates its data
        pytest.skip("the data sets are not in ../shared/data")
    before = sorted(DATA.rglob("*"))
    reader.follow(f"{RECIPES}/{page}.md", *SMALLER)
    assert list(reader.folder.glob("runs/*/report.html"))
    assert sorted(DATA.rglob("*")) == before
    assert reader.type("throughtime eval runs/none") == 2  # what fails is seen


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_recipe_in_python_finds_the_alarms_and_answers_live_as_offline(
    quick: bool, reader: Reader
) -> None:
    reader.follow(f"{RECIPES}/python.md", *([("patience = 30", "patience = 1")] if quick else []))
    assert quick or reader.names["best_score"] > 0.8
    assert quick or reader.names["result"].metrics["macro_f1"] > 0.75
    assert len(reader.names["answers"]) == 500


def test_the_commands_of_recipes_have_flags_that_exist() -> None:
    for page, count in COMMANDS.items():
        lines = lines_of(f"{RECIPES}/{page}.md")
        assert len(lines) == count
        for line in lines:
            command, *words = shlex.split(line)[1:]
            parameters = cli.commands.commands[command].params
            flags = {f for p in parameters for f in (*p.opts, *p.secondary_opts)}
            assert {word.split("=")[0] for word in words if word.startswith("--")} <= flags, line


def test_every_page_and_file_that_is_named_exists() -> None:
    """Links of pages, pages in messages and docstrings, files in the tables on extensions."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            path = (ROOT / page).parent / target
            assert target.startswith("http") or path.is_file(), f"{page}: {target}"
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {page for text in sources for page in re.findall(r"\bdocs/[\w./-]+\.md", text)}
    assert named
    assert not [page for page in named if not (ROOT / page).is_file()]
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / IN_ORDER[0]).read_text("utf-8"), re.MULTILINE)
    package = ROOT / "src" / "throughtime"
    for file in [file for row in rows for file in re.findall(r"`([\w./]+)`", row)]:
        places = package, ROOT, package / "kernels" / "cpu"
        assert re.search(r"NAME|TTnnn", file) or any((p / file).exists() for p in places), file


def test_every_flag_of_train_is_a_setting_and_the_other_way_round() -> None:
    flags = {p.name for p in cli.commands.commands["train"].params}
    assert flags - {"config", "resume", "trust_code"} == set(Config.model_fields)
