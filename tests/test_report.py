"""The report of a run: one page without scripts, whose figures are those of the run."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

import throughtime as tt
from test_cli import run
from test_run import finish, settings, write_recordings
from throughtime.app import page as report
from throughtime.app.load import load_run
from throughtime.app.page import chart, play
from throughtime.app.run_folder import RunFolder
from throughtime.app.scores import ClassScores, number_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that has been audited and scored."""
    path = tmp_path_factory.mktemp("reported")
    data = write_recordings(path / "data")
    folder = finish(settings(data, path / "run", class_weights="balanced"))
    run("audit", folder.path, "--horizons", "10,40", "--max-lag", "40", "--steps", "100")
    run("eval", folder.path)
    return folder


@pytest.fixture(scope="module")
def page(folder: RunFolder) -> str:
    return page_of(folder)


def page_of(folder: RunFolder) -> str:
    return report.write_report(load_run(folder.path)).read_text(encoding="utf-8")


def copied(folder: RunFolder, path: Path, rows: Sequence[Mapping[str, object]]) -> RunFolder:
    """The run with another log, without audit and scores."""
    path.mkdir()
    for file in (folder.config, folder.model):
        (path / file.name).write_bytes(file.read_bytes())
    copy = RunFolder(path)
    for row in rows:
        copy.add_metrics(row)
    return copy


def test_the_page_is_one_well_formed_file_that_sends_no_request(
    folder: RunFolder, page: str
) -> None:
    assert ET.fromstring(page).tag == "html"
    addresses = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert not re.search(r"https?:|<script|<link|\bsrc=|\bon\w+=", addresses)
    references = re.findall(r'href="([^"]*)', page)
    assert all(ref.startswith(("#", "data:image/png")) for ref in references)
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 0
    assert page == page_of(folder)


def test_sections_come_in_the_order_of_the_questions(page: str) -> None:
    assert re.findall(r"<h2>([^<]*)</h2>", page) == [
        "The run",
        "The longest recording of 'valid'",
        "Scores: valid",
        "Learning",
        "What truncating the gradient costs",
        "After a cold start",
        "Where the gradient goes",
        "Settings",
    ]


def test_every_figure_has_a_description_and_the_colours_of_the_page(page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(figures) == page.count('role="img"') == 3
    for figure in figures:
        assert len(re.findall(r'^<svg role="img" aria-label="([^"]{20,})"', figure)) == 1
        drawn = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", figure)) - {"stroke: #000000"}
        assert drawn
        for colour in drawn:
            assert f'[style*="{colour}"]' in page, "a colour that is the same in light and dark"


def test_the_settings_are_there_in_words_and_all_of_them(folder: RunFolder, page: str) -> None:
    config = folder.read_config()
    for words in (
        f"{config.model} with 1 layer of {config.hidden} units",
        "one of 3 classes",
        f"seed {config.seed}",
        f"truncated(stride={config.stride})",
        "class weights balanced",
    ):
        assert words in page
    for name, value in config.settings().items():
        assert value == () or f"<dt>{name}</dt>" in page


def test_measurements_scores_and_recordings_may_be_missing(
    folder: RunFolder, tmp_path: Path
) -> None:
    copy = copied(folder, tmp_path / "run", folder.read_metrics())
    config = copy.config.read_text(encoding="utf-8")
    data = re.escape(folder.read_config().data)
    copy.config.write_text(re.sub(data, str(tmp_path / "gone"), config), encoding="utf-8")
    page = page_of(copy)
    assert "What truncating the gradient costs" not in page
    assert "Scores:" not in page
    assert "can no longer be read" in page
    assert "Learning" in page


def test_weights_that_no_validation_chose_are_not_called_the_best(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data", (40, 40, 40))
    page = page_of(finish(settings(data, tmp_path / "run", updates=2, valid_every=0)))
    assert "of update 2, the last" in page


def test_the_recording_is_played_whole_with_the_state_carried(folder: RunFolder) -> None:
    trained = load_run(folder.path)
    (recording,) = trained.recordings()
    panels, errors = play(trained, recording)
    shares = np.stack([*panels["predicted probability"].values()], axis=1)
    outputs, _ = tt.predict(trained.net, recording)
    assert np.allclose(shares, outputs.double().softmax(dim=1).numpy(), atol=1e-6)
    second = {"inputs": recording.read(150, len(recording)).inputs}
    cold, _ = tt.predict(trained.net, second)  # the mutant: a state that is not carried
    assert not np.allclose(shares[150:], cold.double().softmax(dim=1).numpy(), atol=1e-6)
    labels = recording.read(0, len(recording)).targets
    assert np.array_equal(errors, shares.argmax(axis=1) != labels)


def test_errors_of_labels_are_of_answers_not_of_probabilities(folder: RunFolder) -> None:
    trained = load_run(folder.path)
    (recording,) = trained.recordings()
    steps = recording.read(0, len(recording))
    labels = tt.recording(
        {"inputs": steps.inputs, "targets": np.asarray(steps.targets) % 2}, targets="targets"
    )
    layout = replace(trained.spec.layout, task="multilabel")
    panels, errors = play(
        replace(trained, spec=replace(trained.spec, layout=layout, classes=())), labels
    )
    shown = next(lines for title, lines in panels.items() if title.endswith("predicted"))
    assert set(errors) == {0.0, 1.0}
    assert np.array_equal(errors, (shown["predicted"] > 0.5) != shown["target"])


def test_the_worst_stretch_has_the_most_errors() -> None:
    errors = (np.random.default_rng(0).random(2_000) < 0.1).astype(float)
    errors[700:1_000] = 1.0
    ((_, span),) = report._worst(errors)
    sums = [errors[i : i + 500].sum() for i in range(len(errors) - 499)]
    assert span.stop - span.start == 500
    assert sums[span.start] == max(sums)
    assert errors[:500].sum() < max(sums)  # the mutant: the first stretch
    assert report._worst(np.zeros(2_000)) == []
    assert report._worst(np.ones(60)) == []


def test_scores_of_a_class_are_those_of_all_pairs() -> None:
    """By brute force: AUROC over all pairs of steps, AUPRC over all thresholds."""
    torch.manual_seed(0)
    targets = torch.randint(3, (400,))
    outputs = torch.randn(400, 3, dtype=torch.float64)
    outputs[torch.arange(400), targets] += 1.0
    scores = ClassScores(["a", "b", "c"])
    for part in (slice(0, 150), slice(150, 400)):
        scores.add(outputs[part], targets[part])
    shares, named = outputs.softmax(dim=1), outputs.argmax(dim=1)
    found = scores.compute()
    for i, name in enumerate("abc"):
        own, others = shares[targets == i, i], shares[targets != i, i]
        pairs = (own[:, None] > others).double() + 0.5 * (own[:, None] == others).double()
        ranked = (targets == i)[shares[:, i].argsort(descending=True)].double()
        precision = ranked.cumsum(0) / torch.arange(1, 401)
        average = (precision * ranked).sum().item() / len(own)
        assert found[f"auroc[{name}]"] == pytest.approx(pairs.mean().item(), abs=2e-3)
        assert found[f"auprc[{name}]"] == pytest.approx(average, abs=5e-3)
        hits = int(((named == i) & (targets == i)).sum())
        assert found[f"precision[{name}]"] == pytest.approx(hits / int((named == i).sum()))
        assert found[f"recall[{name}]"] == pytest.approx(hits / len(own))
    shuffled = ClassScores(["a", "b", "c"])  # the mutant: outputs beside the labels of others
    shuffled.add(outputs, targets[torch.randperm(400)])
    assert abs(shuffled.compute()["auroc[a]"] - 0.5) < 0.1 < found["auroc[a]"] - 0.5


def test_certain_outputs_and_absent_classes_have_scores() -> None:
    scores = ClassScores(["a", "b", "c"])
    scores.add(torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]]), torch.tensor([0, 1]))
    found = scores.compute()
    assert found["auroc[a]"] == found["auprc[b]"] == 1.0
    assert math.isnan(found["auroc[c]"])
    assert scores.total.confusion.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_numbers_have_four_digits() -> None:
    values = (0.98123, 1234.5, 1e-9, math.nan, -0.5, math.inf, 0.0, 12_000)
    texts = ["0.9812", "1234", "1e-09", "\u2013", "-0.5", "\u2013", "0", "12,000"]
    assert [*map(number_text, values)] == texts


ODD = '<b>$x_1$ & 中文 \ud800\x07 "q"'


def test_any_name_can_be_drawn() -> None:
    lines = {ODD: ("-", [1, 2], [1.0, math.inf]), "other": ("o", [1, 2], [0.0, math.nan])}
    drawn = chart({ODD: lines, "b": lines}, ODD, "x")
    assert ET.fromstring(drawn).attrib["aria-label"].startswith("<b>$x_1$ & 中文")
    assert "$x_1$" in "".join(ET.fromstring(drawn).itertext())
    assert not re.search(r"\bnan\b", drawn)


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, math.inf])
def test_values_that_no_axis_has_are_gaps(value: float) -> None:
    drawn = chart({"u": {"u": ("-", [1, 2, 3], [1.0, value, 2.0])}}, "u", "x")
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert drawn == chart({"u": {"u": ("-", [1, 2, 3], [1.0, math.nan, 2.0])}}, "u", "x")
