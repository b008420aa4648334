"""The pages titled with error messages: each loop fails as the page says, each mend runs."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "errors"
PAGES = [page for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"]
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def outcome(code: str, names: dict[str, Any], origin: str) -> str:
    """What a block prints, or the last line of its traceback."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, origin, "exec"), names)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore:Using non-full backward hooks")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_loop_fails_with_the_message_and_the_mends_run(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    expected = [text.split() for _, text in blocks]
    results = [
        outcome(code, names, f"{page.name}, block {number}").split()
        for number, (code, _) in enumerate(blocks, 1)
    ]
    assert results == expected
    assert expected[0]  # the first loop shows the fault
    assert any("tt." in code for code, _ in blocks)
