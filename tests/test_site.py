"""The site: its pages are sorted and reachable, and its reference has every public name."""

import importlib
import re
from pathlib import Path

import pytest

import throughtime as tt

DOCS = Path(__file__).parent.parent / "docs"
KINDS = {"tutorial", "how-to", "errors", "explanation", "reference"}
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not path.is_relative_to(DOCS / "reference" / "api")  # generated
)


def listed(page: str) -> list[str]:
    """The names of an autosummary table on a page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    tables = re.findall(r"autosummary::(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [name for table in tables for name in re.findall(r"^   ([\w.]+)$", table, re.MULTILINE)]


def test_every_page_is_of_one_kind() -> None:
    assert {page.split("/")[0] for page in PAGES} == KINDS | {"index.md"}


def test_every_public_name_is_in_the_api_reference_once() -> None:
    names = [name for name in listed("reference/api.md") if "." not in name and name != "errors"]
    assert sorted(names) == sorted(set(tt.__all__) - {"__version__"})


@pytest.mark.parametrize(
    "module",
    [n for n in listed("reference/api.md") if "." in n or n in tt._MODULES or n == "errors"],
)
def test_the_public_names_of_a_module_have_docstrings_so_that_they_are_rendered(
    module: str,
) -> None:
    loaded = importlib.import_module(f"throughtime.{module}")
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == loaded.__name__
    ]
    assert names
    assert not [name for name in names if not getattr(loaded, name).__doc__]
