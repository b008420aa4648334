"""Recordings of named columns: chosen by name from any table, one for each group of a frame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

import throughtime as tt
from test_sources import T, frame, netcdf, values, zarr_group
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array


def german(folder: Path) -> Path:
    frame().to_csv(folder / "x.csv", index=False, sep=";", decimal=",")
    return folder / "x.csv"


def netcdf_columns(folder: Path) -> Any:
    import xarray as xr

    netcdf(folder)
    return xr.open_dataset(folder / "columns.nc")


TABLES: dict[str, Callable[[Path], Any]] = {
    "pandas": lambda _: frame(),
    "semicolons and decimal commas": german,
    "zarr": lambda folder: zarr_group(folder)["columns"],
    "xarray": netcdf_columns,
}


@pytest.mark.parametrize("kind", list(TABLES))
def test_columns_are_chosen_by_name_from_any_table(kind: str, tmp_path: Path) -> None:
    source = TABLES[kind](tmp_path)
    recording = tt.recording(source, inputs=["c", "a"], targets="b", start=10, stop=60, name="it")
    steps = recording.read(3, 9)
    assert len(recording) == 50
    assert recording.name == "it[10:60]"
    assert np.array_equal(steps.inputs, values()[13:19, [2, 0]])
    assert steps.targets is not None
    assert np.array_equal(steps.targets, values()[13:19, 1])
    others = tt.recording(source, targets="b").read(0, 5)
    assert np.array_equal(others.inputs, values()[:5, [0, 2]])


def test_columns_of_arrays_are_named_by_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values())
    for source in (values(), torch.from_numpy(values()), tmp_path / "x.npy"):
        steps = tt.recording(source, inputs=["2", "0"], targets="1").read(0, T)
        assert np.array_equal(steps.inputs, values()[:, [2, 0]])
        assert steps.targets is not None
        assert np.array_equal(steps.targets, values()[:, 1])


def test_targets_of_their_own_and_static_features() -> None:
    data = frame().assign(age=71.0, stage=2)
    labels = np.arange(T)
    recording = tt.recording(data, inputs=["a"], targets=labels, static=[71.0, 2.0])
    targets = recording.read(0, T).targets
    assert targets is not None
    assert np.array_equal(targets, labels)
    for static in (np.array([71.0, 2.0]), [71.0, 2.0]):
        chunk = next(iter(tt.Stream(tt.recording(data, inputs="a", static=static), 1, chunk=5)))
        assert chunk.inputs[0, 0, 1:].tolist() == [71.0, 2.0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "target as input": (
        {"inputs": ["a", "b"], "targets": "b"},
        r"\['b'\] are inputs and targets of the same step.*allow_target_as_input=True",
    ),
    "twice": ({"inputs": ["a", "a"]}, r"inputs \['a', 'a'\] asked for, .* each once"),
    "no such column": ({"inputs": ["aa"]}, r"inputs \['aa'\] asked for, .*did you mean 'a'\?"),
    "static by name": ({"static": ["b"]}, r"static=\['b'\], expected \(S,\) finite numbers"),
    "no step": ({"start": 5, "stop": 5}, "start=5, stop=5 of 307 steps"),
    "too late": ({"stop": 999}, "start=0, stop=999 of 307 steps"),
    "too few targets": ({"targets": np.ones(5)}, "307 steps of the DataFrame and 5 of targets"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_choices_that_make_no_sense_are_refused(case: str) -> None:
    options, reason = REFUSED[case]
    with pytest.raises(DataError, match=reason):
        tt.recording(frame(), **options)


def test_classes_are_indices_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Mutants: sorted names, and 0 for a target without a name."""
    names = np.array(["V", "N", "", "S"] * 77)[:T]
    expected = np.array([1, 2, -100, 0] * 77)[:T]
    data = frame().assign(beat=names)
    data.to_csv(tmp_path / "x.csv", index=False)
    options: dict[str, Any] = {"inputs": ["a"], "targets": "beat", "classes": ["S", "V", "N"]}
    for source in (data, pl.from_pandas(data), tmp_path / "x.csv"):
        assert np.array_equal(target_values(tt.recording(source, **options)), expected)
        part = tt.recording(source, **options, start=2, stop=7, ahead=1)
        assert np.array_equal(target_values(part), [*expected[3:7], -100])
    own: dict[str, Any] = {**options, "targets": names}
    assert np.array_equal(target_values(tt.recording(frame(), **own)), expected)
    chunk = next(iter(tt.Stream(tt.recording(data, **options), lanes=1, chunk=4)))
    assert chunk.mask.flatten().tolist() == [True, True, False, True]


def target_values(recording: Any) -> Any:
    return recording.read(0, len(recording)).targets


def test_whole_numbers_are_names_of_classes_too() -> None:
    data = frame().assign(code=np.tile([300, 7], T)[:T].astype(float))
    recording = tt.recording(data, inputs=["a"], targets="code", classes=[7, 300])
    assert target_values(recording)[:3].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (np.array(["N", None, "V", np.nan], object), ["N", "V"], [0, -100, 1, -100]),
        (np.array(["None", None, 7, "NA"], object), ["None", 7, "NA"], [0, -100, 1, 2]),
        (np.array([b"N", b"V", b"", b"N"]), ["N", "V"], [0, 1, -100, 0]),
        (np.array([True, False, True, False]), [False, True], [1, 0, 1, 0]),
    ],
)
def test_names_of_classes_have_any_type(
    labels: Array, classes: list[Any], expected: list[int]
) -> None:
    inputs = np.zeros((4, 1))
    recording = tt.recording(inputs, targets=labels, classes=classes)
    assert np.asarray(recording.read(0, 4).targets).tolist() == expected


def test_text_without_classes_is_refused_with_the_classes_to_write() -> None:
    data = frame().assign(beat=np.array(["V", "N"] * T)[:T])
    with pytest.raises(DataError, match=r"such as \['N', 'V'\].* indices: classes=\[\.\.\.\]"):
        tt.recording(data, inputs=["a"], targets="beat")
    recording = tt.recording(data, inputs=["a"], targets="beat", classes=["N"])
    with pytest.raises(DataError, match="unknown class 'V' at step 0; the classes are N"):
        recording.read(0, 5)
    with pytest.raises(DataError, match="and targets that they name"):
        tt.recording(data, inputs=["a"], classes=["N", "V"])
    for classes in (["N", "N"], [], "NV", [" ", "N"]):
        with pytest.raises(DataError, match=r"expected distinct names in the order of their ind"):
            tt.recording(data, inputs=["a"], targets="beat", classes=classes)


def test_columns_of_pandas_may_be_named_by_numbers() -> None:
    recording = tt.recording(pd.DataFrame(values()), inputs=[0, 2], targets=1)
    assert np.array_equal(recording.read(0, T).inputs, values()[:, [0, 2]])
    assert np.array_equal(target_values(recording), values()[:, 1])


@pytest.mark.parametrize("role", ["inputs", "targets"])
def test_columns_of_text_are_named_when_the_recording_is_made(role: str, tmp_path: Path) -> None:
    data = frame().assign(city="Oslo")
    data.to_csv(tmp_path / "x.csv", index=False)
    options: dict[str, Any] = {"inputs": ["a"], role: ["city"]}
    for source in (data, pl.from_pandas(data), tmp_path / "x.csv"):
        with pytest.raises(DataError, match=f"column 'city' of the {role} holds text.*'Oslo'"):
            tt.recording(source, **options)
    with pytest.raises(DataError, match=r"leave it out: exclude=\['city'\]"):
        tt.recording(data)


def test_what_has_no_columns_is_refused() -> None:
    for source in ((values(), values()[:, 0]), {"a": 3}, 5):
        with pytest.raises(DataError, match=r"tt.recording got a .*expected a path, a frame"):
            tt.recording(source)
