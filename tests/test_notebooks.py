"""The notebooks are true: their cells run; they store no outputs; they install what is at hand."""

import ast
import json
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
