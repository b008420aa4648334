"""The site: its pages are sorted and reachable, and its reference has every public name."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import throughtime as tt

DOCS = Path(__file__).parent.parent / "docs"
KINDS = {"tutorial", "how-to", "errors", "explanation", "reference"}
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not path.is_relative_to(DOCS / "reference" / "api")  # generated
    and not path.is_relative_to(DOCS / "locale")  # for translators
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


# As people ask in forums. In the browser each page is among the first two results.
QUESTIONS = {
    "Trying to backward through the graph a second time": "errors/backward-twice",
    "do I need retain_graph=True LSTM": "errors/retain-graph",
    "modified by an inplace operation hidden state": "errors/inplace-operation",
    "memory increases every iteration": "errors/memory-grows",
    "LSTM hidden state last batch size": "errors/last-batch",
    "difference between detach and detach_": "errors/detach",
    "register_backward_hook LSTMCell grad_input": "errors/backward-hook",
    "two losses backward": "errors/two-losses",
    "truncated BPTT pytorch k1 k2": "errors/k1-k2",
    "difference between k1 and k2": "explanation/truncation",
    "how to implement stateful LSTM": "how-to/migrating/keras",
    "carry hidden state between batches shuffle": "reference/doctor/TT207",
    "LSTM learns on windows but fails on long sequences": "explanation/windows",
    "truncated_bptt_steps": "how-to/migrating/lightning-1.9",
    "export LSTM with hidden state to ONNX": "how-to/deploy",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page_that_answers_a_question(question: str) -> None:
    """The search of the site shows the pages that have every word of the query."""
    language = site_module("_site").EnglishSearch({})
    text = (DOCS / f"{QUESTIONS[question]}.md").read_text(encoding="utf-8")
    words = {language.stem(word) for word in language.split(text)}
    asked = [w for w in language.split(question) if w.lower() not in language.stopwords]
    assert {language.stem(word) for word in asked} <= words
    assert len(asked) > 0
