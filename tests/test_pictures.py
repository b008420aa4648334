"""The pictures of README and docs are those that their scripts draw, small, and shown somewhere."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
from docs.pictures import graph, heartbeats, idea, one_file, paths, recipes, resets, strides, tasks

from throughtime import Exact, Truncated

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
MODULES = (graph, heartbeats, idea, one_file, paths, recipes, resets, strides, tasks)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_files_are_what_the_script_draws(module: ModuleType) -> None:
    for name, svg in module.draw().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == svg, "run python -m docs.pictures"
        ET.fromstring(svg)
        assert len(svg) < 30_000
        assert "<script" not in svg
        assert "href" not in svg


def test_every_file_has_a_script_and_a_page() -> None:
    names = {name for module in MODULES for name in module.draw()}
    assert names == {path.name for path in FOLDER.glob("*.svg")}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert names == {name for name in names if f"pictures/{name}" in text}


def test_the_paths_are_those_of_k1_and_k2() -> None:
    rows = paths.reached(Truncated(stride=3, horizon=5), 8)
    reach = [sum(row) for row in rows]
    assert reach == [1, 2, 3, 3, 4, 5, 4, 5]
    assert paths.reached(Exact(), 5) == [[s <= t for s in range(5)] for t in range(5)]


def test_texts_are_large_enough_for_a_phone() -> None:
    for module in MODULES:
        for name, svg in module.draw().items():
            sizes = [float(size) for size in re.findall(r'font-size="([0-9.]+)"', svg)]
            assert min(sizes) >= 16, name


def test_readme_shows_the_figures_of_the_demo() -> None:
    scores = {
        text: [n["accuracy"] for n in idea.measured() if n["trained_on"] == name]
        for name, text in idea.ROWS
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stream, windows = scores.values()
    for score in (sum(stream) / 3, sum(windows) / 3, min(windows), max(windows)):
        assert f"{score:.1%}".replace("%", " %") in readme


@pytest.mark.slow
def test_the_network_of_the_stream_is_as_good_again() -> None:
    again = idea.train(seeds=(0,))["networks"]
    stream = [n for n in again if n["trained_on"] == idea.STREAM]
    before = next(n for n in idea.measured() if n["trained_on"] == idea.STREAM)
    assert stream[0]["accuracy"] == pytest.approx(before["accuracy"], abs=0.01)
