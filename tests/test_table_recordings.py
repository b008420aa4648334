"""Recordings of named columns: chosen by name from any table, one for each group of a frame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.io
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from test_sources import QUIET, T, frame, hdf5, netcdf, raw, values, zarr_group
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array


def saved_csv(folder: Path) -> Path:
    frame().to_csv(folder / "x.csv", index=False)
    return folder / "x.csv"


def german(folder: Path) -> Path:
    frame().to_csv(folder / "x.csv", index=False, sep=";", decimal=",")
    return folder / "x.csv"


def netcdf_columns(folder: Path) -> Any:
    import xarray as xr

    netcdf(folder)
    return xr.open_dataset(folder / "columns.nc")


TABLES: dict[str, Callable[[Path], Any]] = {
    "pandas": lambda _: frame(),
    "polars": lambda _: pl.from_pandas(frame()),
    "arrow": lambda _: pa.table(frame()),
    "CSV": saved_csv,
    "semicolons and decimal commas": german,
    "h5py": lambda folder: hdf5(folder)["columns"],
    "zarr": lambda folder: zarr_group(folder)["columns"],
    "xarray": netcdf_columns,
    "MNE": raw,
    "dict": lambda _: {name: values()[:, i] for i, name in enumerate("abc")},
}


@QUIET
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
    for source in (values(), torch.from_numpy(values()), tmp_path / "x.npy", hdf5(tmp_path)["x"]):
        steps = tt.recording(source, inputs=["2", "0"], targets="1").read(0, T)
        assert np.array_equal(steps.inputs, values()[:, [2, 0]])
        assert steps.targets is not None
        assert np.array_equal(steps.targets, values()[:, 1])


def test_settings_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("u|y\n1,5|2\n2,5|3\n", encoding="utf-8")
    recording = tt.recording(tmp_path / "x.csv", targets="y", delimiter="|", decimal=",")
    assert recording.read(0, 2).inputs.tolist() == [[1.5], [2.5]]
    with pytest.raises(DataError, match="delimiter=';', decimal=None belong to a CSV file"):
        tt.recording(frame(), delimiter=";")


def test_targets_of_their_own_and_static_features() -> None:
    data = frame().assign(age=71.0, stage=2)
    labels = np.arange(T)
    recording = tt.recording(data, inputs=["a"], targets=labels, static=["age", "stage"])
    targets = recording.read(0, T).targets
    assert targets is not None
    assert np.array_equal(targets, labels)
    for static in (["age", "stage"], np.array([71.0, 2.0]), [71.0, 2.0]):
        chunk = next(iter(tt.Stream(tt.recording(data, inputs="a", static=static), 1, chunk=5)))
        assert chunk.inputs[0, 0, 1:].tolist() == [71.0, 2.0]
    # static columns are read once, beside the inputs
    inputs = tt.recording(data, static=["age", "stage"]).read(0, 1).inputs
    assert inputs.shape == (1, 5)
    assert inputs[0, 3:].tolist() == [71.0, 2.0]


def test_targets_of_later_steps_stay_within_the_part() -> None:
    recording = tt.recording(frame(), targets="b", ahead=2, start=5, stop=9)
    steps = recording.read(0, 4)
    assert np.array_equal(steps.inputs, values()[5:9])  # the value of now is an input
    assert steps.targets is not None
    assert np.array_equal(steps.targets, [*values()[7:9, 1], np.nan, np.nan], equal_nan=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "target as input": (
        {"inputs": ["a", "b"], "targets": "b"},
        r"\['b'\] are inputs and targets of the same step.*allow_target_as_input=True",
    ),
    "twice": ({"inputs": ["a", "a"]}, r"inputs name \['a'\] twice"),
    "no such column": ({"inputs": ["aa"]}, r"inputs \['aa'\] asked for, .*did you mean 'a'\?"),
    "static twice": ({"inputs": ["a"], "static": ["a"]}, r"\['a'\] are inputs and named as"),
    "static that changes": ({"inputs": ["a"], "static": ["b"]}, "static column 'b' is .* in row 0"),
    "no step": ({"start": 5, "stop": 5}, "start=5, stop=5 of 307 steps"),
    "too late": ({"stop": 999}, "start=0, stop=999 of 307 steps"),
    "too few targets": ({"targets": np.ones(5)}, "307 steps of the DataFrame and 5 of targets"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_choices_that_make_no_sense_are_refused(case: str) -> None:
    options, reason = REFUSED[case]
    with pytest.raises(DataError, match=reason):
        tt.recording(frame(), **options)


def test_an_input_may_be_the_target_where_it_is_meant() -> None:
    choice: dict[str, Any] = {"inputs": ["a", "b"], "targets": "b"}
    options: list[dict[str, Any]] = [{"allow_target_as_input": True}, {"ahead": 1}]
    for allowed in options:
        assert len(tt.recording(frame(), **choice, **allowed)) == T
    with pytest.raises(DataError, match=r"\['b'\] are inputs and targets of the same step"):
        tt.from_frame(frame(), **choice)


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
    (group,) = tt.from_frame(data, **options)
    assert np.array_equal(target_values(group), expected)
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


def test_booleans_of_a_frame_are_classes() -> None:
    frame = pd.DataFrame({"a": np.zeros(3), "on": [True, False, True]})
    recording = tt.recording(frame, targets="on", classes=[True, False])
    assert np.asarray(recording.read(0, 3).targets).tolist() == [0, 1, 0]


def test_text_without_classes_is_refused_with_the_classes_to_write() -> None:
    data = frame().assign(beat=np.array(["V", "N"] * T)[:T])
    with pytest.raises(DataError, match=r"order of their indices: classes=\['N', 'V'\]"):
        tt.recording(data, inputs=["a"], targets="beat")
    recording = tt.recording(data, inputs=["a"], targets="beat", classes=["N"])
    with pytest.raises(DataError, match="unknown class 'V' at step 0; the classes are N"):
        recording.read(0, 5)
    with pytest.raises(DataError, match="and no targets that they could name"):
        tt.recording(data, inputs=["a"], classes=["N", "V"])
    for classes in (["N", "N"], [], "NV", [" ", "N"]):
        with pytest.raises(DataError, match=r"expected distinct names in the order of their ind"):
            tt.recording(data, inputs=["a"], targets="beat", classes=classes)


def test_columns_of_pandas_may_be_named_by_numbers() -> None:
    recording = tt.recording(pd.DataFrame(values()), inputs=[0, 2], targets=1)
    assert np.array_equal(recording.read(0, T).inputs, values()[:, [0, 2]])
    assert np.array_equal(target_values(recording), values()[:, 1])


def test_a_mapping_of_matlab_has_entries_that_are_no_arrays(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "x.mat", {"x": values(), "y": values()[:, :1] + 1})
    loaded = scipy.io.loadmat(tmp_path / "x.mat")
    recording = tt.recording(loaded, inputs="x", targets="y")
    assert np.array_equal(recording.read(0, T).inputs, values())
    with pytest.raises(DataError, match=r"tt\.recording\(scipy\.io\.loadmat\(path\)"):
        tt.recording(tmp_path / "x.mat")


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
    for source in ((values(), values()[:, 0]), values()[:, 0], {"a": 3}, 5):
        with pytest.raises(DataError, match=r"tt.recording got a .*expected a path, a frame"):
            tt.recording(source)
    with pytest.raises(DataError, match="expected a data frame or an Arrow table"):
        tt.from_frame("x.csv", by="a")


ROWS = {
    "patient": ["p2", "p1", "p2", "p1", "p2"],
    "visit": [1, 1, 1, 2, 2],
    "date": pd.to_datetime(["2026-01-03", "2026-01-01", "2026-01-02", "2026-01-02", "2026-01-04"]),
    "u": [3.0, 1.0, 2.0, 2.5, 4.0],
    "y": [1, 0, 1, 0, 0],
    "age": [70, 50, 70, 50, 70],
}


@pytest.mark.parametrize(
    "make", [pd.DataFrame, pl.DataFrame, pa.table], ids=["pandas", "polars", "arrow"]
)
def test_groups_of_a_frame_are_recordings_in_order_of_time(make: Callable[[Any], Any]) -> None:
    options: dict[str, Any] = {"time": "date", "inputs": ["u"], "targets": "y", "static": ["age"]}
    recordings = tt.from_frame(make(ROWS), by="patient", **options)
    assert [r.name for r in recordings] == ["p2", "p1"]
    steps = [r.read(0, len(r)) for r in recordings]
    assert [s.inputs[:, 0].tolist() for s in steps] == [[2, 3, 4], [1, 2.5]]
    assert [s.targets.tolist() for s in steps if s.targets is not None] == [[1, 1, 0], [0, 0]]
    assert [s.inputs[:, 1].tolist() for s in steps] == [[70, 70, 70], [50, 50]]
    pairs = tt.from_frame(make(ROWS), by=["patient", "visit"], time="date", inputs="u")
    assert [(r.name, len(r)) for r in pairs] == [("p2/1", 2), ("p1/1", 1), ("p1/2", 1), ("p2/2", 1)]
    defaults = tt.from_frame(make(ROWS), by="patient", time="date", targets="y")
    assert [r.read(0, 1).inputs.shape for r in defaults] == [(1, 3)] * 2  # visit, u, age
    (whole,) = tt.from_frame(make(ROWS), inputs="u", exclude="date")
    assert whole.read(0, 5).inputs[:, 0].tolist() == ROWS["u"]
    for use in (tt.from_frame, tt.recording):
        with pytest.raises(DataError, match=r"row 1 of 'date', .* is earlier .* exclude='date'"):
            use(make(ROWS), inputs="u")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=30, unique=True)
)
def test_groups_are_those_of_pandas(rows: list[tuple[int, int]]) -> None:
    data = pd.DataFrame(rows, columns=["k", "t"]).assign(u=np.arange(float(len(rows))))
    recordings = {
        r.name: r.read(0, len(r)).inputs[:, 0]
        for r in tt.from_frame(data, by="k", time="t", inputs="u")
    }
    expected = {str(k): g.sort_values("t")["u"] for k, g in data.groupby("k", sort=False)}
    assert list(recordings) == list(expected)
    assert all(recordings[k].tolist() == expected[k].tolist() for k in expected)


def test_one_missing_integer_makes_a_column_floating_in_every_group() -> None:
    data = pl.DataFrame({"k": ["a", "a", "b"], "u": [1, None, 3]})
    stream = tt.Stream(tt.from_frame(data, by="k"), lanes=1, chunk=3, missing="mask")
    assert next(iter(stream)).inputs.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"patient": ["a", None, "a", "b", "b"]}, {}, "row 1 has no 'patient'"),
        (
            {"date": pd.to_datetime(["2026-01-01", None] + ["2026-01-02"] * 3)},
            {},
            "row 1 has no time",
        ),
        ({"date": [1, 2, 1, 4, 5]}, {}, r"rows 0 and 2 have the same 'date', 1"),
        (
            {"date": ["1", "2", "3", "4", "5"]},
            {},
            r"holds <U1.*pandas.to_datetime\(frame\['date'\]\)",
        ),
        ({}, {"by": "patients"}, "did you mean 'patient'"),
        ({}, {"inputs": ["u", "visit"], "by": "visit"}, r"\['visit'\] are inputs and named as by"),
    ],
    ids=["no group", "no time", "same time", "time as text", "no such column", "group as input"],
)
def test_frames_without_an_order_are_refused(
    change: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    setting: dict[str, Any] = {"by": "patient", "time": "date", "inputs": "u"} | options
    with pytest.raises(DataError, match=reason):
        tt.from_frame(pd.DataFrame(ROWS | change), **setting)


def test_only_the_chosen_columns_of_a_group_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["u"], file["broken"] = np.arange(5.0), np.arange(5.0)
        recording = tt.recording(file, inputs="u")
        del file["broken"]
        assert recording.read(1, 3).inputs[:, 0].tolist() == [1, 2]
