"""What does not fit among data as they come is refused with what to do about it."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from test_run import settings, write_recordings
from test_run_data import signal, write
from throughtime.app.data import open_dataset
from throughtime.app.settings import Config
from throughtime.errors import DataError
from throughtime.stream.manifest import ManifestEntry, find_recordings

IDT, IDT_AGE, IDL = (
    "id,split,inputs,targets\n",
    "id,split,inputs,targets,age\n",
    "id,split,inputs,label\n",
)


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (
            IDT + "a,train,0_x.npy,0_y.npy\nb,valid,0_x.npy,1_y.npy",
            {},
            "'a' and 'b' are the same recording, .*0_x.npy",
        ),
        (
            IDT + "a,train,0_x.npy,0_y.npy\nb,valid,../data/0_x.npy,1_y.npy",
            {},
            "are the same recording",
        ),
        (IDT + "a,train,0_x.npy,0_y.npy\na,valid,1_x.npy,1_y.npy", {}, "'a' is listed twice"),
        (IDT, {}, "lists no recording"),
        (IDT + "a,train,0_x.npy,", {}, "which columns are the targets"),
        (IDT + "a,train,0_x.npy;,0_y.npy", {}, "expected a file, or several separated by ';'"),
        (IDT + ",train,0_x.npy,0_y.npy", {}, "a recording has no id"),
        (
            IDT_AGE + "a,train,0_x.npy,0_y.npy,3",
            {},
            "a manifest has the columns .*; got .*age and static=; .*write --static",
        ),
        (
            IDT_AGE + "a,train,0_x.npy,0_y.npy,",
            {"static": ["age"]},
            "'a' has age='', and a static feature is a finite number",
        ),
        (IDT_AGE + "a,train,0_x.npy,0_y.npy,nan", {"static": ["age"]}, "'a' has age='nan'"),
        (
            IDT + "a,train,0_x.npy,0_y.npy",
            {"static": ["age"]},
            "a manifest has the columns .*; got id.* and static=age",
        ),
        (
            IDL + "a,train,0_x.npy,x",
            {"static": ["label"]},
            "under other names; got id, .* and static=label",
        ),
        (
            "id,split,inputs,targets,label\na,train,0_x.npy,0_y.npy,x",
            {},
            "'a' has targets and the label 'x', expected one of them",
        ),
        (
            IDL + "a,train,0_x.npy,x\nb,train,1_x.npy,",
            {},
            "recording 'b' has the label '', expected a class",
        ),
        (
            IDL + "a,train,0_x.npy,x\nb,train,1_x.npy,2",
            {"task": "regress"},
            "'a' has the label 'x', expected a finite number",
        ),
        (
            IDT + "a,train,0_x.npy,1_y.npy",
            {},
            "has 400 steps of .*0_x.npy and 250 of .*1_y.npy; .* give intervals of steps",
        ),
        (
            IDT + "a,train,0_x.npy;1_x.npy,0_y.npy",
            {},
            "0_x.npy has 400 rows and .*1_x.npy has 250; all inputs and series of a recording",
        ),
        (
            IDT + "a,train,0_x.npy,0_y.npy\nb,train,1_y.npy,1_x.npy",
            {},
            "'b' has the input columns 0, 'a' has 0, 1; name them",
        ),
        (
            IDT + "a,test,0_x.npy,0_y.npy",
            {},
            "no recordings in split 'train'; there are test .*write the split into",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_with_what_to_do(
    tmp_path: Path, rows: str, more: dict[str, Any], said: str
) -> None:
    data = write_recordings(tmp_path / "data")
    (data / "recordings.csv").write_text(rows, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        open_dataset(Config(**settings(data, tmp_path / "run", **more)))


def test_all_faults_of_a_manifest_are_listed_and_many_are_counted(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    rows = [
        "id,split,inputs,targets",
        *(f"{i},train,no{i}.npy,0_y.npy" for i in range(7)),
        "0,valid,0_x.npy,0_y.npy",
    ]
    (data / "recordings.csv").write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(DataError) as refused:
        open_dataset(Config(**settings(data, tmp_path / "run")))
    assert str(refused.value).count("no such file") == 5
    assert "no0.npy" in str(refused.value)
    assert "and 3 more faults" in str(refused.value)
    rows = [
        "id,split,inputs,targets",
        "a,train,0_x.npy,1_y.npy",
        "b,train,1_x.npy,2_y.npy",
        "c,valid,2_x.npy,2_y.npy",
    ]
    (data / "recordings.csv").write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(DataError, match=r"recording 'a' has 400 .*; recording 'b' has 250"):
        open_dataset(Config(**settings(data, tmp_path / "run")))


@pytest.mark.parametrize(
    ("spans", "task", "said"),
    [
        (
            "5,9,x\n2,4,y",
            "classify",
            "a.csv: number 1, 2 to 4, begins before the end of the one before it",
        ),
        (
            "2,9,x\n20,21,3",
            "regress",
            "a.csv: labels such as 'x' are no numbers; write task='classify'",
        ),
    ],
)
def test_intervals_that_do_not_fit_are_refused_with_their_file(
    tmp_path: Path, spans: str, task: str, said: str
) -> None:
    np.save(tmp_path / "a.npy", signal("a"))
    (tmp_path / "a.csv").write_text(f"start,stop,label\n{spans}\n", encoding="utf-8")
    data = write(tmp_path, "id,split,inputs,targets", ["a,train,a.npy,a.csv"])
    with pytest.raises(DataError, match=said):
        open_dataset(Config(**settings(data, tmp_path / "run", task=task)))


def test_static_features_need_a_manifest(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=signal("a"), targets=signal("a")[:, 0])
    with pytest.raises(
        DataError, match=r"static=age needs a manifest, with the columns id and inputs"
    ):
        open_dataset(
            Config(**settings(tmp_path / "a.npz", tmp_path / "run", static=["age"], task="regress"))
        )


@given(
    lines=st.lists(
        st.lists(
            st.sampled_from(
                ["a", "b", "x.npy", "x.npy;y.npy", "", " ", "0", "nan", "\0", "é" * 300, '"', ";"]
            ),
            max_size=6,
        )
    )
)
def test_any_manifest_is_read_or_refused_in_words(lines: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "recordings.csv"
        for name in ("x", "y"):
            np.save(path.with_name(f"{name}.npy"), np.zeros(3))
        path.write_text("id,inputs,label,age\n" + "\n".join(map(",".join, lines)), encoding="utf-8")
        said, found = "", list[ManifestEntry]()
        try:
            found = find_recordings(path, ["age"])
        except DataError as error:
            said = str(error)
        assert str(path) in said or len({files.name for files in found}) == len(found) > 0


@pytest.mark.parametrize("link", ["in a folder", "in a manifest"])
def test_one_file_under_two_names_is_refused(tmp_path: Path, link: str) -> None:
    """Or it would be trained on and scored on."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("u,y\n" + "1,2\n3,4\n" * 50, encoding="utf-8")
    (tmp_path / "z.csv").symlink_to("a.csv")
    if link == "in a manifest":
        rows = "id,split,inputs\n1,train,a.csv\n2,train,b.csv\n3,valid,z.csv\n"
        (tmp_path / "recordings.csv").write_text(rows, encoding="utf-8")
    names = "'1' and '3'" if link == "in a manifest" else r"'a\.csv' and 'z\.csv'"
    with pytest.raises(DataError, match=rf"{names} are the same recording, .*a\.csv, .*z\.csv"):
        find_recordings(tmp_path)
