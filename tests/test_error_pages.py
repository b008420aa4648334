"""The pages titled with error messages: each loop fails as the page says, each mend runs."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from throughtime.diagnose.draw import Drawing, draw

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


def test_every_page_names_its_message_its_cause_and_both_mends() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        headings = re.findall(r"^## (.*)", text, re.MULTILINE)
        assert headings[-1 if headings[-1] == "With throughtime" else -2] == "With throughtime", (
            page
        )
        assert "In plain PyTorch" in headings, page
        assert "reference/doctor/TT" in text, page


def test_error_pages_and_doctor_codes_are_linked_both_ways() -> None:
    codes = FOLDER.parent / "reference" / "doctor"
    for code in sorted(codes.glob("TT*.md")):
        links = re.findall(r"\]\(\.\./\.\./([\w/-]+\.md)\)", code.read_text(encoding="utf-8"))
        assert links, code
        for link in links:
            back = (FOLDER.parent / link).read_text(encoding="utf-8")
            assert not link.startswith("errors/") or code.name in back, f"{link}: {code.name}"


def drawing(page: Path) -> Drawing:
    """The graph of the first block of a page, at its last backward pass or of all losses."""
    names: dict[str, Any] = {"__name__": "__main__"}
    drawings: list[Drawing] = []
    backward = torch.Tensor.backward

    def draw_and_run(loss: torch.Tensor, *args: Any, **options: Any) -> None:
        drawings.append(draw(loss))
        backward(loss, *args, **options)

    with mock.patch.object(torch.Tensor, "backward", draw_and_run):
        outcome(BLOCK.findall(page.read_text(encoding="utf-8"))[0][0], names, page.name)
    total = names.get("total")
    return drawings[-1] if total is None else draw(total)


@pytest.mark.parametrize("picture", sorted(FOLDER.glob("pictures/*.svg")), ids=lambda p: p.stem)
def test_the_picture_is_that_of_the_loop(picture: Path) -> None:
    """The pictures stay as files; their descriptions count what the loop has."""
    page = FOLDER / f"{picture.stem}.md"
    assert f"pictures/{picture.name}" in page.read_text(encoding="utf-8")
    described = re.findall(r"<desc[^>]*>(.*)</desc>", picture.read_text(encoding="utf-8"))
    graph = drawing(page)
    chunks = "; ".join(f"chunk {i}: {c.steps} steps" for i, c in enumerate(graph.chunks, 1))
    counts = re.sub(r", \d+ nodes(?=[;.])", "", described[0])
    assert counts.startswith(f"{str(graph).splitlines()[0]}. {chunks}.")
