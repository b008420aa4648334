"""The task that fits the targets, where no setting says it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_run import finish, settings, write_recordings
from throughtime.app.data import Statistics, layout_of, task_of
from throughtime.app.settings import Config
from throughtime.stream.manifest import find_recordings
from throughtime.stream.sources import as_recording

TARGETS: dict[str, tuple[list[Any], str]] = {
    "text": (["rest", "beat"] * 30, "classify"),
    "whole numbers": ([0, 1, 2] * 20, "classify"),
    "whole numbers with a point": (["0.0", "1.0", ""] * 20, "classify"),
    "a number that is text": (["1_0", "1"] * 30, "classify"),
    "booleans": (["true", "false"] * 30, "classify"),
    "many whole numbers": (list(range(60)), "regress"),
    "fractions": ([0.5, 1.0] * 30, "regress"),
    "missing ones": (["", "", "0.25"] * 20, "regress"),
}


def table(path: Path, targets: list[Any], *, columns: int = 1) -> Path:
    names = ["u", *(f"y{i}" for i in range(columns))]
    rows = [[f"{0.1 * i:.1f}", *[str(y)] * columns] for i, y in enumerate(targets)]
    path.write_text("\n".join(map(",".join, [names, *rows])) + "\n", encoding="utf-8")
    return path


def task(data: Path, **more: Any) -> str | None:
    values = {"data": str(data), "out": str(data.parent / "run"), **more}
    config = Config(**values)
    return task_of(layout_of(config), find_recordings(data))


@pytest.mark.parametrize(("targets", "expected"), list(TARGETS.values()), ids=list(TARGETS))
def test_text_and_few_whole_numbers_are_classes(
    tmp_path: Path, targets: list[Any], expected: str
) -> None:
    data = table(tmp_path / "a.csv", targets)
    assert task(data, targets=["y0"]) == expected
    assert task(data, targets=["y0"], task="regress") == "regress"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1], "multilabel"),
        ([0.0, 1.0], "multilabel"),
        ([0, ""], "multilabel"),
        ([0, 2], "regress"),
    ],
)
def test_several_columns_are_labels_if_each_value_is_0_or_1(
    tmp_path: Path, values: list[Any], expected: str
) -> None:
    data = table(tmp_path / "a.csv", values * 30, columns=2)
    assert task(data, targets=["y0", "y1"]) == expected
    late = table(tmp_path / "b.csv", [*values * 40_000, 0.5], columns=2)  # in a later block
    assert task(late, targets=["y0", "y1"]) == "regress"


def test_every_recording_counts(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", [0, 0] * 30)
    table(tmp_path / "b.csv", [0, 1.5] * 30)
    assert task(tmp_path, targets=["y0"]) == "regress"


def test_labels_of_intervals_and_recordings(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((50, 2)))
    (tmp_path / "a.csv").write_text("start,stop,label\n3,9,beat\n", encoding="utf-8")
    manifest = tmp_path / "m.csv"
    manifest.write_text("id,inputs,targets\na,a.npy,a.csv\n", encoding="utf-8")
    assert task(manifest) == "classify"
    for label, expected in (("seven", "classify"), ("7", "classify"), ("7.5", "regress")):
        manifest.write_text(f"id,inputs,label\na,a.npy,{label}\n", encoding="utf-8")
        assert task(manifest) == expected


def test_a_run_keeps_the_task(tmp_path: Path) -> None:
    values = settings(write_recordings(tmp_path / "data"), tmp_path / "run", updates=2, task=None)
    assert finish(values).read_config().task == "classify"


def test_survey_finds_what_numpy_finds_however_the_recordings_are_cut() -> None:
    random = np.random.default_rng(0)
    parts = [random.normal(1e4, 0.1, size=(n, 2)) for n in (1, 70_000, 333)]
    found = Statistics("classify", "error")
    for i, part in enumerate(parts):
        found.add(as_recording({"inputs": part, "targets": np.zeros(len(part))}, i))
    whole = np.concatenate(parts)
    np.testing.assert_allclose(found.inputs.mean, whole.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.inputs.scale, whole.std(axis=0), rtol=1e-8)
    assert found.classes == {"0": len(whole)}
