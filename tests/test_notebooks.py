"""The notebooks are true: their cells run; they store no outputs; they install what is at hand."""

import ast
import importlib.util
import json
import re
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


def test_pages_that_notebooks_link_exist() -> None:
    for notebook in NOTEBOOKS:
        for text in cells(notebook, "markdown"):
            for target in re.findall(r"\]\(([^)#]+)\)", text):
                assert (FOLDER / target).is_file(), f"{notebook.name}: {target}"


@pytest.mark.parametrize("kernel", ["docs/tutorial", "."])  # the folder that it starts in
@pytest.mark.parametrize(
    ("wheel", "in_clone", "built", "expected"),
    [
        ("/ci/throughtime-0.1.0.whl", True, True, "/ci/throughtime-0.1.0.whl"),
        (None, True, True, "CLONE/dist/throughtime-0.1.0-py3-none-any.whl"),
        (None, True, False, "CLONE"),
        (None, False, False, "throughtime"),
    ],
)
def test_the_first_cell_installs_the_wheel_of_ci_or_the_clone_or_the_package(
    wheel: str | None,
    in_clone: bool,
    built: bool,
    expected: str,
    kernel: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "docs" / "tutorial"
    folder.mkdir(parents=True)
    if in_clone:
        (tmp_path / "constraints.txt").touch()
    if built:
        (tmp_path / "dist").mkdir()
        (tmp_path / "dist" / "throughtime-0.1.0-py3-none-any.whl").touch()
    calls: list[list[str]] = []
    monkeypatch.chdir(tmp_path / kernel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: calls.append(words))
    monkeypatch.delenv("THROUGHTIME_WHEEL", raising=False)
    if wheel is not None:
        monkeypatch.setenv("THROUGHTIME_WHEEL", wheel)
    first = {cells(notebook)[0] for notebook in NOTEBOOKS}
    assert len(first) == 1
    exec(first.pop(), {})
    pins = ["--constraint", f"{tmp_path}/constraints.txt"] if in_clone else []
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    expected = expected.replace("CLONE", str(tmp_path)) + "[plot,wfdb]"
    assert calls == [[*install, *pins, expected]]


def test_the_first_cell_installs_nothing_where_throughtime_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: calls.append(words))
    exec(cells(NOTEBOOKS[0])[0], {})
    assert calls == []
