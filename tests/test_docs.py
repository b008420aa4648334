"""README and docs are true: their Python runs, their commands exist and do what they say."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_folders import anomaly_files
from throughtime.app.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.parent.name not in {"recipes", "tutorial"}  # run by tests of their own
    ),
]

EXTENDING = "docs/how-to/extending.md"  # run by test_extending.py


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```",
        (ROOT / page).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty"
)  # a page that resumes where it saved
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if blocks(page, "python") and page != EXTENDING and "errors" not in page  # test_error_pages
    ],
)
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def run_here(words: list[str], **options: Any) -> object:
        """Run a command of throughtime without a new interpreter that imports torch."""
        if words[:3] != [sys.executable, "-m", "throughtime"]:
            return run(words, **options)
        monkeypatch.setattr(sys, "argv", words[2:])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in {0, None}
        return None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", run_here)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert len(names) > 5


def test_every_block_of_a_page_is_of_a_kind_that_is_run() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    kinds = {kind for text in texts for kind in re.findall(r"^```(\w+)$", text, re.MULTILINE)}
    assert kinds - {"rust"} == {"bash", "python", "c", "javascript", "text"}  # see also test_deploy
    for text in texts:
        for section in text.split("\n## "):
            assert "```rust" not in section or "has not been run" in section


def commands() -> list[str]:
    lines = [
        line.split("#")[0].strip()
        for page in PAGES
        if page != EXTENDING
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line]


def test_the_commands_of_the_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of throughtime on a small set of the same form, with fewer updates."""
    small_ecg(tmp_path / "ecg")
    anomaly_files(tmp_path / "valves")
    monkeypatch.chdir(tmp_path)
    mine = [line for line in commands() if line.startswith("throughtime")]
    for line in mine:
        words = shlex.split(re.sub(r"--updates \d+", "--updates 3", line))
        words += ["--steps", "1000"] if words[1] == "export" else []
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in {0, None}, capsys.readouterr().err
    assert len(mine) == 10
    assert (tmp_path / "predictions" / "valve1" / "0.csv").is_file()
    assert np.load(tmp_path / "200.npy").shape == (900, 3)


def small_ecg(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    rows = ["id,split,inputs,targets"]
    for name, split in (("100", "train"), ("102", "train"), ("104", "valid"), ("200", "test")):
        np.save(folder / f"{name}_adc.npy", random.integers(900, 1100, 900).astype(np.int16))
        np.save(folder / f"{name}_labels.npy", (np.arange(900) // 20 % 3).astype(np.uint8))
        rows.append(f"{name},{split},{name}_adc.npy,{name}_labels.npy")
    (folder / "recordings.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_every_page_that_is_linked_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert target.startswith("http") or (ROOT / page).parent.joinpath(target).is_file(), (
                f"{page}: {target}"
            )


def test_every_flag_of_train_is_a_setting_and_the_other_way_round() -> None:
    from throughtime.app.cli import commands
    from throughtime.app.settings import Config

    train = commands.commands["train"]
    flags = {p.name for p in train.params} - {"config", "resume", "trust_code"}
    assert flags == set(Config.model_fields)


def test_the_pages_that_the_package_names_exist() -> None:
    """Messages and docstrings name pages by their paths."""
    sources = (ROOT / "src").rglob("*.py")
    named = {
        page
        for source in sources
        for page in re.findall(r"\bdocs/[\w./-]+\.md", source.read_text(encoding="utf-8"))
    }
    assert named
    assert not [page for page in named if not (ROOT / page).is_file()]
