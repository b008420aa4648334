"""The site: its pages are sorted and reachable, and its reference has every public name."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import throughtime as tt

DOCS = Path(__file__).parent.parent / "docs"


def listed(page: str) -> list[str]:
    """The names of an autosummary table on a page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    tables = re.findall(r"autosummary::(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [name for table in tables for name in re.findall(r"^   ([\w.]+)$", table, re.MULTILINE)]


def test_every_public_name_is_in_the_api_reference_once() -> None:
    names = [name for name in listed("reference/api.md") if "." not in name and name != "errors"]
    assert sorted(names) == sorted(set(tt.__all__) - {"__version__"})


def site_module(name: str) -> Any:
    """A module of the folder of the site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_flags_is_made_from_the_command_line() -> None:
    written = site_module("write_flags")
    assert written.PAGE.read_text(encoding="utf-8") == written.page(), (
        "run python docs/write_flags.py"
    )
