"""The page on extensions is true: its policy trains and resumes, its format plays."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from test_docs import ROOT, small_ecg
from throughtime.app.cli import main

PAGE = ROOT / "docs" / "how-to" / "extending.md"


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block, in order."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_ecg(tmp_path / "ecg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict[str, object] = {"__name__": "__main__"}
    for number, (language, text) in enumerate(blocks(), 1):
        if language == "python":
            exec(compile(text, f"extending.md, block {number}", "exec"), names)
        for line in text.splitlines() if language == "bash" else ():
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code in {0, None}, f"{line}\n{capsys.readouterr().err}"
    config = (tmp_path / "runs" / "growing" / "config.toml").read_text(encoding="utf-8")
    assert "growing.py:Growing" in config
    assert "longest = 80" in config
