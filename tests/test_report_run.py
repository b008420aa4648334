"""The report of a run: it describes the run, and its numbers are those of the run folder."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from test_cli import run
from test_run import finish, settings, write_recordings
from throughtime.app.audit import AuditReport
from throughtime.app.load import load_run
from throughtime.app.report import audit_section
from throughtime.app.report.run_page import write_report
from throughtime.app.run_folder import RunFolder
from throughtime.diagnose import Reach

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that has been audited."""
    path = tmp_path_factory.mktemp("reported")
    folder = finish(
        settings(write_recordings(path / "data"), path / "run", class_weights="balanced")
    )
    run("audit", folder.path, "--horizons", "10,40", "--max-lag", "40")
    return folder


def page_of(folder: RunFolder) -> str:
    return write_report(load_run(folder.path)).read_text(encoding="utf-8")


def descriptions(page: str) -> dict[str, str]:
    """The description of each chart by its title."""
    pictures = re.findall(r"<title id=[^>]*>([^<]*)</title><desc [^>]*>([^<]*)</desc>", page)
    return dict(pictures)


def test_the_page_is_one_well_formed_file_that_sends_no_request(folder: RunFolder) -> None:
    page = page_of(folder)
    assert ET.fromstring(page).tag == "html"
    assert not re.search(
        r"https?:|<script|<link|\bsrc=", page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    )
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_every_chart_has_a_description(folder: RunFolder) -> None:
    page = page_of(folder)
    charts = descriptions(page)
    assert {
        "Loss",
        "Throughput",
        "Memory",
        "How far back the gradient goes",
        "Gradient by part of the state",
    } <= set(charts)
    assert all(words.strip() for words in charts.values())
    assert page.count("<svg") == len(charts)


def test_settings_are_described_in_words(folder: RunFolder) -> None:
    page, config = page_of(folder), folder.read_config()
    for words in (
        f"{config.model.upper()} with 1 layer of {config.hidden} units",
        "predicts one of 3 classes",
        f"Seed {config.seed} sets the weights",
        f"an update every {config.stride} steps",
        "each class has the inverse of its frequency as weight",
    ):
        assert words in page


def test_the_throughput_is_that_of_the_log_lines(folder: RunFolder, tmp_path: Path) -> None:
    """Ten frames per second between any two lines, whose clock leaves out validation."""
    rows = folder.read_metrics()
    paced = [
        row
        | {
            "seconds": 10.0 * i + 100 * sum(r["kind"] == "valid" for r in rows[:i]),
            "training_seconds": 10.0 * i,
            "frames": 100 * i,
        }
        for i, row in enumerate(rows)
    ]
    copied = RunFolder(tmp_path / "run")
    copied.path.mkdir()
    for path in (folder.config, folder.model):
        (copied.path / path.name).write_bytes(path.read_bytes())
    copied.metrics.write_text("".join(json.dumps(row) + "\n" for row in paced), encoding="utf-8")
    page = page_of(copied)
    assert re.search(r"frames per second</dt>\s*<dd>10</dd>", page), page[:3000]
    assert "half of them above 10." in descriptions(page)["Throughput"]
    drawn = ET.fromstring(
        re.findall(r"<svg.*?</svg>", page)[[*descriptions(page)].index("Throughput")]
    )
    (line,) = [e.attrib["d"] for e in drawn.iter(f"{SVG}path") if "clip-path" in e.attrib]
    heights = {height for _, height in re.findall(r"[ML]([\d.]+) ([\d.]+)", line)}
    assert len(heights) == 1
    assert any(row["kind"] == "valid" for row in rows)


def test_missing_measurements_are_omitted(folder: RunFolder, tmp_path: Path) -> None:
    copied = RunFolder(tmp_path / "run")
    copied.path.mkdir()
    for path in (folder.config, folder.model):
        (copied.path / path.name).write_bytes(path.read_bytes())
    rows = [
        {k: v for k, v in row.items() if k != "waiting"} | {"peak_memory": None}
        for row in folder.read_metrics()
    ]
    copied.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page = page_of(copied)
    assert "Throughput" in descriptions(page)
    assert "Memory" not in descriptions(page)
    assert "Where the gradient goes" not in page


def reach_of(folder: RunFolder) -> Reach:
    return AuditReport.read(folder.audit).reach


def test_window_of_training_is_marked(folder: RunFolder) -> None:
    page = page_of(folder)
    assert (
        page.count("window of training, 10") == 2
    )  # the curves and the heat map; the stride is 10
    assert "Training truncated it after 10 steps" in page
    assert "window of training" not in audit_section.gradient_by_lag(reach_of(folder)).svg


def test_the_share_beyond_the_window_is_that_of_the_norms(folder: RunFolder) -> None:
    """With equal norms, half of the sum lies beyond half of the lags and none beyond the last."""
    flat = replace(reach_of(folder), lags=tuple(range(1, 41)), norms=(0.25,) * 40)
    assert audit_section.gradient_by_lag(flat, 20).caption.endswith(
        "Training truncated it after 20 steps, leaving out 50.0% of the sum."
    )
    assert audit_section.gradient_by_lag(flat, 40).caption.endswith("leaving out 0.0% of the sum.")
    assert "Training truncated" not in audit_section.gradient_by_lag(flat).caption


def test_the_heat_map_has_a_row_for_each_part_of_the_state(folder: RunFolder) -> None:
    reach = reach_of(folder)
    drawn = ET.fromstring(audit_section.gradient_by_part(reach).svg)
    labels = [e.text for e in drawn.iter(f"{SVG}text")]
    assert {"recurrent.h", "recurrent.c"} <= set(labels)
    rows = [g for g in drawn.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    assert len(rows) == len(reach.by_leaf)
    only = replace(reach, by_leaf={"h": reach.norms})
    assert (
        len(audit_section.audit_figures(replace(AuditReport.read(folder.audit), reach=only))) == 3
    )  # the curve says it already


def test_the_cells_of_the_heat_map_are_the_means_of_their_lags(folder: RunFolder) -> None:
    """A part with a gradient at a single lag is coloured there only."""
    lags = tuple(range(1, 41))
    spike = tuple(1.0 if lag == 30 else 0.0 for lag in lags)
    reach = replace(
        reach_of(folder),
        lags=lags,
        norms=(1.0,) * 40,
        by_leaf={"flat": (1.0,) * 40, "spike": spike},
    )
    rows = [
        g
        for g in ET.fromstring(audit_section.gradient_by_part(reach).svg).iter(f"{SVG}g")
        if g.find(f"{SVG}title") is not None
    ]
    flat, spiked = ([e.attrib for e in row.iter(f"{SVG}rect")] for row in rows)
    assert {cell["fill-opacity"] for cell in flat} == {"1.00"}
    assert len(spiked) == 1
    assert float(spiked[0]["x"]) > float(flat[len(flat) // 2]["x"])
