"""The law of the layout: whatever object a recording comes from, its columns mean the same.

The same numbers as a frame, a file, arrays, a mapping, files side by side and the data of a run
give the same inputs, targets and series; and an input that is the target of the same step is
refused by its name and values. `MUTANTS` break the layout, and the law must see each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import throughtime as tt
from throughtime.errors import DataError
from throughtime.stream import Recording, layout, sources
from throughtime.stream.recording import TableRecording
from throughtime.stream.sources import as_recording

STEPS = 23


def frame() -> pd.DataFrame:
    draw = np.random.default_rng(3)
    columns = {name: draw.normal(size=STEPS) for name in ("u", "v", "y", "w", "fx", "fy")}
    return pd.DataFrame(columns)


CHOICE: dict[str, Any] = {
    "inputs": ["v", "u"],
    "targets": "y",
    "series": {"weight": "w", "force": ["fx", "fy"]},
}


def from_frame(_: Path) -> Recording:
    return tt.recording(frame(), **CHOICE)


def from_file(folder: Path) -> Recording:
    frame().to_parquet(folder / "a.parquet")
    return tt.recording(folder / "a.parquet", **CHOICE)


def from_arrays(_: Path) -> Recording:
    return tt.recording({name: frame()[name].to_numpy() for name in frame()}, **CHOICE)


def from_mapping(_: Path) -> Recording:
    values = frame()
    series = {"weight": values["w"].to_numpy(), "force": values[["fx", "fy"]].to_numpy()}
    return as_recording({"inputs": values[["v", "u"]], "targets": values["y"], **series})


def from_folder(folder: Path) -> Recording:
    frame().to_csv(folder / "a.csv", index=False, sep=";", decimal=",")
    splits = tt.recordings(folder, task="regress", delimiter=";", decimal=",", **CHOICE)
    return splits["train"][0]


def from_files_side_by_side(folder: Path) -> Recording:
    values = frame()
    values[["v", "y"]].to_csv(folder / "1.csv", index=False)
    values[["u", "w", "fx", "fy"]].to_csv(folder / "2.csv", index=False)
    (folder / "recordings.csv").write_text("id,inputs\na,1.csv;2.csv\n")
    return tt.recordings(folder, task="regress", **CHOICE)["train"][0]


SOURCES: list[Callable[[Path], Recording]] = [
    from_frame,
    from_file,
    from_arrays,
    from_mapping,
    from_folder,
    from_files_side_by_side,
]


def check(recording: Recording) -> None:
    """The law: every series of the frame in its role, at any cut."""
    values = frame()
    for start, stop in ((0, STEPS), (0, 1), (4, 17), (STEPS - 1, STEPS)):
        steps, rows = recording.read(start, stop), values.iloc[start:stop]
        np.testing.assert_allclose(steps.inputs, rows[["v", "u"]], rtol=1e-14)
        assert steps.targets is not None
        np.testing.assert_allclose(steps.targets.reshape(-1), rows["y"], rtol=1e-14)
        assert set(steps.series) == {"weight", "force"}
        np.testing.assert_allclose(steps.series["weight"].reshape(-1), rows["w"], rtol=1e-14)
        np.testing.assert_allclose(steps.series["force"], rows[["fx", "fy"]], rtol=1e-14)


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_every_source_lays_out_the_same(make: Callable[[Path], Recording], tmp_path: Path) -> None:
    check(make(tmp_path))


def test_series_and_excluded_columns_are_no_inputs_by_default() -> None:
    recording = tt.recording(frame(), targets="y", series={"weight": "w"}, exclude=["fx"])
    assert recording.read(0, 1).inputs.shape == (1, 3)
    assert isinstance(recording, TableRecording)
    assert recording.input_columns == ("u", "v", "fy")
    chunk = next(iter(tt.Stream(recording, lanes=1, chunk=5)))
    assert chunk["weight"].flatten().tolist() == pytest.approx(frame()["w"][:5].tolist())


def test_a_forecast_has_the_present_value_among_its_inputs(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "a.csv", index=False)
    for recording in (
        tt.recording(frame(), targets="y", ahead=2),
        tt.recordings(tmp_path, targets="y", ahead=2, task="regress")["train"][0],
    ):
        steps = recording.read(0, STEPS)
        assert steps.inputs.shape[1] == 6
        assert steps.targets is not None
        np.testing.assert_allclose(steps.targets[:-2].reshape(-1), frame()["y"][2:], rtol=1e-14)
        assert np.isnan(steps.targets[-2:]).all()


def copies_in_a_frame(_: Path) -> object:
    return tt.recording(frame(), inputs=["u", "y"], targets="y")


def copies_beside_a_frame(_: Path) -> object:
    return tt.recording(frame(), targets=frame()["y"])


def copies_in_pairs(_: Path) -> object:
    return tt.Stream((frame(), frame()[["y"]]), 1, 5)


def copies_in_linked_files(folder: Path) -> object:
    frame()[["y"]].to_csv(folder / "a.csv", index=False)
    frame()[["u"]].to_csv(folder / "b.csv", index=False)
    (folder / "c.csv").symlink_to(folder / "a.csv")
    files = [folder / "b.csv", folder / "c.csv"]
    return tt.Stream({"inputs": files, "targets": folder / "a.csv"}, 1, 5)


COPIES: list[Callable[[Path], object]] = [
    copies_in_a_frame,
    copies_beside_a_frame,
    copies_in_pairs,
    copies_in_linked_files,
]


@pytest.mark.parametrize("make", COPIES, ids=lambda make: make.__name__)
def test_an_input_that_is_the_target_of_the_same_step_is_refused(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="are inputs and targets of the same step"):
        make(tmp_path)


def test_columns_of_one_name_and_other_values_are_no_copies() -> None:
    later = frame().assign(y=frame()["y"] + 1)
    assert tt.recording(frame(), targets=later["y"])
    assert next(iter(tt.Stream((frame()[["u", "y"]], later["y"]), 1, 5))).targets is not None


def test_a_copy_is_accepted_where_it_is_meant() -> None:
    pair = {"inputs": frame()[["u", "y"]], "targets": frame()["y"]}
    for stream in (
        tt.Stream({**pair, "allow_target_as_input": True}, 1, 5),
        tt.Stream({**pair, "ahead": 1}, 1, 5),
        tt.Stream(tt.recording(frame(), targets="y", allow_target_as_input=True), 1, 5),
    ):
        assert next(iter(stream)).targets is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"series": {"weight": "wight"}}, r"series 'weight' \['wight'\] asked for, it has"),
        (
            {"series": {"weight": "w"}, "inputs": ["w"]},
            r"\['w'\] are inputs, and series or excluded",
        ),
        ({"exclude": "u", "inputs": ["u"]}, r"\['u'\] are inputs, and series or excluded"),
        ({"exclude": ["u", "ww"]}, r"exclude \['u', 'ww'\] asked for.*did you mean 'w'"),
        ({"series": {"targets": "w"}}, "a series 'targets', a name that every chunk has"),
        ({"series": ["w"]}, r"series=\['w'\]: expected the columns of each series by its name"),
    ],
    ids=["unknown", "as input", "excluded", "no such", "reserved", "list"],
)
def test_series_and_exclusions_that_make_no_sense_are_refused(
    options: dict[str, Any], reason: str
) -> None:
    choice: dict[str, Any] = {"targets": "y", **options}
    with pytest.raises(DataError, match=reason):
        list(tt.Stream(tt.recording(frame(), **choice), 1, 5))


def forget_series(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *a, **k: lay_out(*a, **{**k, "series": None})


def sort_inputs(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(name: str, inputs: Any, *rest: Any, **options: Any) -> Any:
        columns = tuple(sorted(inputs.columns))
        return lay_out(name, type(inputs)(inputs.table, columns), *rest, **options)

    return mutant


def swap_target(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(name: str, inputs: Any, how: Any, targets: Any, **options: Any) -> Any:
        return lay_out(
            name, inputs, how, type(targets)(targets.table, ("w",), flat=True), **options
        )

    return mutant


MUTANTS = [forget_series, sort_inputs, swap_target]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_law_sees_a_broken_layout(
    mutant: Callable[[Callable[..., Any]], Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sources, "lay_out", mutant(layout.lay_out))
    with pytest.raises(AssertionError):
        check(from_frame(tmp_path))


@pytest.mark.parametrize("make", COPIES, ids=lambda make: make.__name__)
def test_the_check_of_copies_is_what_refuses(
    make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout, "_refuse_copies", lambda *_: None)
    assert make(tmp_path)
