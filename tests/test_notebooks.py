"""The notebooks are true: their cells run; they store no outputs; they install what is at hand."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "tutorial"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook: Path, kind: str = "code") -> list[str]:
    """The sources of the cells of a kind."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow  # make docs runs them as well, in a kernel
@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame:DeprecationWarning")  # of wfdb
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(cells(notebook), 1):
        exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)


def test_notebooks_store_no_outputs_and_parse() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["ecg-to-live", "fix-my-loop"]
    for notebook in NOTEBOOKS:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
        for source in cells(notebook):
            ast.parse(source)
            assert max(map(len, source.splitlines())) <= 88  # of a code block on the site


def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the first cell runs."""
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: calls.append(words))
    (first,) = {cells(notebook)[0] for notebook in NOTEBOOKS}
    exec(first, {})
    return calls


def test_the_first_cell_installs_the_wheel_of_ci_or_the_clone_or_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed(monkeypatch) == []  # throughtime is there
    kernel, wheel = tmp_path / "docs" / "tutorial", tmp_path / "dist" / "throughtime-0.1.0.whl"
    kernel.mkdir(parents=True)
    monkeypatch.chdir(kernel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("THROUGHTIME_WHEEL", raising=False)
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    assert installed(monkeypatch) == [[*install, "throughtime[plot,wfdb]"]]
    (tmp_path / "constraints.txt").touch()
    install += ["--constraint", f"{tmp_path}/constraints.txt"]
    assert installed(monkeypatch) == [[*install, f"{tmp_path}[plot,wfdb]"]]
    wheel.parent.mkdir()
    wheel.touch()
    assert installed(monkeypatch) == [[*install, f"{wheel}[plot,wfdb]"]]
    monkeypatch.setenv("THROUGHTIME_WHEEL", "/ci/own.whl")
    assert installed(monkeypatch) == [[*install, "/ci/own.whl[plot,wfdb]"]]
