"""Real files of every format: read lazily, to the number; cut short or malformed, refused by name."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from throughtime.chunk import join
from throughtime.errors import DataError
from throughtime.stream.formats import SUFFIXES, open_table
from throughtime.stream.formats.npy import MappedTable
from throughtime.stream.formats.parquet import ParquetTable
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import columns

STEPS = 103


def matrix(width: int = 3) -> Array:
    """Numbers that float32 and the text of a CSV both hold exactly, within the range of audio."""
    return np.random.default_rng(0).integers(-127, 128, size=(STEPS, width)) / 128


def write_npy(path: Path) -> Array:
    np.save(path, matrix())
    return matrix()


def write_npz(path: Path) -> Array:
    np.savez(path, a=matrix()[:, 0], b=matrix()[:, 1:])
    return matrix()


def write_compressed_npz(path: Path) -> Array:
    np.savez_compressed(path, a=matrix()[:, :2], b=matrix()[:, 2])
    return matrix()


def write_csv(path: Path) -> Array:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c"])
        writer.writerows(matrix().tolist())
    return matrix()


def write_parquet(path: Path) -> Array:
    pq.write_table(pa.table({name: matrix()[:, i] for i, name in enumerate("abc")}), path, row_group_size=10)
    return matrix()


def write_wav(path: Path) -> Array:
    soundfile.write(path, matrix(), 8000, subtype="FLOAT")
    return matrix()


FORMATS: dict[str, tuple[str, Callable[[Path], Array]]] = {
    "npy": (".npy", write_npy),
    "npz": (".npz", write_npz),
    "npz-compressed": (".npz", write_compressed_npz),
    "csv": (".csv", write_csv),
    "parquet": (".parquet", write_parquet),
    "wav": (".wav", write_wav),
}
every_format = pytest.mark.parametrize(("suffix", "write"), list(FORMATS.values()), ids=list(FORMATS))
lazy_formats = pytest.mark.parametrize(("suffix", "write"), [FORMATS[n] for n in ("npy", "parquet", "wav")], ids=["npy", "parquet", "wav"])


def test_every_suffix_is_a_row() -> None:
    assert {suffix for suffix, _ in FORMATS.values()} == set(SUFFIXES)


@every_format
def test_file_gives_the_numbers_that_were_written(suffix: str, write: Callable[[Path], Array], tmp_path: Path) -> None:
    path = tmp_path / f"recording{suffix.upper()}"
    expected = write(tmp_path / f"recording{suffix}")
    (tmp_path / f"recording{suffix}").rename(path)
    epoch = join(list(tt.Stream(path, lanes=1, chunk=20)))
    assert torch.equal(epoch.inputs[:, 0].double(), torch.from_numpy(expected))
    assert epoch.targets is None


@every_format
def test_any_rows_and_columns_are_those_of_the_whole(suffix: str, write: Callable[[Path], Array], tmp_path: Path) -> None:
    expected = write(tmp_path / f"r{suffix}")
    table = open_table(tmp_path / f"r{suffix}")
    whole = table.read(0, len(table), table.columns)
    assert (whole == expected).all()

    @given(start=st.integers(0, STEPS - 1), steps=st.integers(1, STEPS), backwards=st.booleans())
    def check(start: int, steps: int, backwards: bool) -> None:
        stop = min(start + steps, STEPS)
        names = table.columns[::-1] if backwards else table.columns[:1]
        part = table.read(start, stop, names)
        of_column = {name: table.read(0, STEPS, [name]) for name in names}
        assert (part == np.concatenate([of_column[name] for name in names], axis=1)[start:stop]).all()

    check()
    assert sum(table.read(0, 1, [name]).shape[1] for name in table.columns) == 3


@lazy_formats
def test_file_is_read_only_where_it_is_played(suffix: str, write: Callable[[Path], Array], tmp_path: Path) -> None:
    """Nothing but the header is read when a file is opened: what comes after it is not looked at."""
    path = tmp_path / f"r{suffix}"
    write(path)
    table = open_table(path)
    if isinstance(table, ParquetTable):
        groups: list[int] = []
        read = table.file.read_row_group
        table.file = type(
            "Spy", (), {"read_row_group": lambda _, group, columns: (groups.append(group), read(group, columns=columns))[1]}
        )()
        table.read(35, 36, ("a",))
        table.read(36, 42, ("a",))
        table.read(42, 50, ("a",))
        assert groups == [3, 4]  # each group once
    elif isinstance(table, MappedTable):
        assert isinstance(table.array, np.memmap)
    else:
        asked: list[int] = []
        file: Any = vars(table)["file"]
        spy = type("Spy", (), {"tell": file.tell, "seek": file.seek, "read": lambda _, n, **kw: (asked.append(n), file.read(n, **kw))[1]})()
        vars(table)["file"] = spy
        stream = tt.Stream([columns("r", table, table.columns)], lanes=1, chunk=7)
        assert asked == []
        stream.read(50, 57)
        stream.read(57, 60)
        assert asked == [7, 3]


cut_formats = pytest.mark.parametrize(("suffix", "write"), [FORMATS[n] for n in ("npy", "parquet", "wav")], ids=["npy", "parquet", "wav"])


@pytest.mark.parametrize("kept", [0.0, 0.003, 0.1, 0.5, 0.9, 0.999])
@cut_formats
def test_file_cut_short_is_refused_by_name(kept: float, suffix: str, write: Callable[[Path], Array], tmp_path: Path) -> None:
    path = tmp_path / f"r{suffix}"
    write(path)
    whole = path.read_bytes()
    list(tt.Stream(path, lanes=1, chunk=50))  # whole it serves
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(DataError, match=re.escape(str(path))):
        list(tt.Stream(path, lanes=1, chunk=50))


def test_csv_cut_within_a_line_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write_csv(path)
    text = path.read_text().splitlines()
    path.write_text("\n".join([*text[:40], text[40].rsplit(",", 1)[0]]))
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: line 41 has 2 fields, the header has 3"):
        open_table(path)


def test_wav_that_shrinks_while_it_is_played_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.wav"
    write_wav(path)
    stream = tt.Stream(path, lanes=1, chunk=10)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: ends at sample .*the file is cut short"):
        stream.read(90, 103)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_file_is_refused(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"nowhere{suffix}: no such file"):
        open_table(tmp_path / f"nowhere{suffix}")


def test_folder_and_unknown_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="is a folder, expected one file"):
        open_table(tmp_path / "folder.csv")
    (tmp_path / "r.txt").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"r\.txt: the format '\.txt' is unknown, expected one of \.csv, \.npy, \.npz, \.parquet, \.wav"):
        open_table(tmp_path / "r.txt")


MALFORMED: dict[str, tuple[str, bytes, str]] = {
    "csv-short-line": ("r.csv", b"a,b\n1,2\n3\n", "line 3 has 1 fields, the header has 2"),
    "csv-long-line": ("r.csv", b"a,b\n1,2,3\n", "line 2 has 3 fields, the header has 2"),
    "csv-no-header": ("r.csv", b"1,2\n3,4\n", "the first line holds numbers, expected a header line"),
    "csv-empty": ("r.csv", b"", r"the file is empty"),
    "csv-header-only": ("r.csv", b"a,b\n", "the recording is empty"),
    "csv-duplicate-columns": ("r.csv", b"a, a\n1,2\n", r"the first line is \['a', 'a'\], expected distinct"),
    "csv-unnamed-column": ("r.csv", b"a,\n1,2\n", r"the first line is \['a', ''\], expected distinct"),
    "csv-not-utf-8": ("r.csv", b"a,b\n1,\xff\n", "not a readable CSV file .*expected UTF-8 text"),
    "csv-open-quote": ("r.csv", b'a,b\n1,"2\n', "not a readable CSV file"),
    "npy-text": ("r.npy", b"hello", "not a readable .npy file"),
    "wav-text": ("r.wav", b"RIFF", "r.wav"),
    "parquet-text": ("r.parquet", b"PAR1 and nothing more", "not a readable Parquet file"),
}


@pytest.mark.parametrize(("name", "content", "reason"), list(MALFORMED.values()), ids=list(MALFORMED))
def test_malformed_file_is_refused_with_the_place(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path / name))}.*{reason}" if reason != name else re.escape(str(tmp_path))):
        tt.Stream(tmp_path / name, lanes=1, chunk=4)


ARRAYS: dict[str, tuple[dict[str, Any] | Array, str]] = {
    "npy-3d": (np.zeros((3, 2, 2)), r"has shape \(3, 2, 2\), expected \(steps,\) or \(steps, features\)"),
    "npy-0d": (np.array(1.0), r"has shape \(\)"),
    "npy-complex": (np.zeros((3, 2), complex), "type complex128, expected numbers or labels"),
    "npy-objects": (np.array([None, 1], dtype=object), "not a readable .npy file"),
    "npy-no-rows": (np.zeros((0, 2)), "the recording is empty"),
    "npz-unequal": ({"a": np.zeros(3), "b": np.zeros(4)}, r"arrays of different lengths, \{'a': 3, 'b': 4\}"),
    "npz-0d": ({"a": np.zeros(3), "b": np.array(1.0)}, r"array 'b' has shape \(\)"),
    "npz-none": ({}, r"inputs \[\] asked for"),
}


@pytest.mark.parametrize(("arrays", "reason"), list(ARRAYS.values()), ids=list(ARRAYS))
def test_arrays_that_are_no_recording_are_refused(arrays: dict[str, Any] | Array, reason: str, tmp_path: Path) -> None:
    path = tmp_path / ("r.npz" if isinstance(arrays, dict) else "r.npy")
    if isinstance(arrays, dict):
        np.savez(path, **arrays)
    else:
        np.save(path, arrays, allow_pickle=True)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: .*{reason}"):
        tt.Stream(path, lanes=1, chunk=4)


def test_csv_gap_is_a_missing_value(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("\ufeffa,b\n1,2\n\n,4\n", encoding="utf-8")
    table = open_table(path)
    assert table.columns == ("a", "b")
    assert np.isnan(table.read(1, 2, ["a"])).all()
    with pytest.raises(DataError, match=r"'r\.csv' has 1 inputs that are NaN .* first at step 1, column 0"):
        list(tt.Stream(path, lanes=1, chunk=4))
    masked = tt.Stream(path, lanes=1, chunk=4, missing="mask").take(4)
    assert masked is not None
    assert masked.inputs[:, 0].tolist() == [[1, 2], [0, 0]]


def test_parquet_gap_is_a_missing_number_and_an_empty_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2, None], "s": ["a", None, "c"], "l": [[1.0]] * 3}), tmp_path / "r.parquet")
    table = open_table(tmp_path / "r.parquet")
    assert np.isnan(table.read(0, 3, ["n"])).flatten().tolist() == [False, False, True]
    assert table.read(0, 3, ["s"]).flatten().tolist() == ["a", "", "c"]
    with pytest.raises(DataError, match="column 'l' has the type list"):
        table.read(0, 3, ["l"])


def test_text_columns_stay_text(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text('a,label\n1,rest\n2,"beat, late"\n')
    pq.write_table(pa.table({"a": [1.0, 2.0], "label": ["rest", "beat, late"]}), tmp_path / "r.parquet")
    np.savez(tmp_path / "r.npz", a=np.ones(2), label=np.array(["rest", "beat, late"]))
    for suffix in (".csv", ".parquet", ".npz"):
        labels = open_table(tmp_path / f"r{suffix}").read(0, 2, ["label"])
        assert labels.dtype.kind == "U"
        assert labels.flatten().tolist() == ["rest", "beat, late"]


def test_inputs_and_targets_are_found_by_name(tmp_path: Path) -> None:
    values = matrix()
    np.savez(tmp_path / "r.npz", inputs=values, targets=np.arange(STEPS))
    (tmp_path / "r.csv").write_text("targets,inputs\n" + "".join(f"{t},{v}\n" for t, v in enumerate(values[:, 0])))
    from_npz = join(list(tt.Stream(tmp_path / "r.npz", lanes=1, chunk=50)))
    assert torch.equal(from_npz.inputs[:, 0], torch.from_numpy(values))
    assert from_npz.targets is not None
    assert from_npz.targets.dtype == torch.int64
    assert from_npz.targets.flatten().tolist() == list(range(STEPS))
    from_csv = join(list(tt.Stream(tmp_path / "r.csv", lanes=1, chunk=50)))
    assert from_csv.inputs.shape == (STEPS, 1, 1)
    assert from_csv.targets is not None
    assert from_csv.targets.flatten().tolist() == list(range(STEPS))


def test_two_files_make_one_recording_if_they_agree(tmp_path: Path) -> None:
    write_wav(tmp_path / "r.wav")
    pq.write_table(pa.table({"state": np.arange(STEPS), "x": np.zeros(STEPS)}), tmp_path / "r.parquet")
    audio, labels = open_table(tmp_path / "r.wav"), open_table(tmp_path / "r.parquet")
    recording = columns("r", audio, audio.columns, labels, ("state",))
    epoch = join(list(tt.Stream([recording], lanes=3, chunk=10)))
    assert epoch.targets is not None
    assert epoch.inputs.shape[2] == 3
    busy = epoch.recording >= 0
    assert torch.equal(epoch.targets[busy], epoch.position[busy])
    with pytest.raises(DataError, match=r"r\.parquet: targets \['gone'\] asked for, the file has \['state', 'x'\]"):
        columns("r", audio, audio.columns, labels, ("gone",))
    np.save(tmp_path / "short.npy", np.zeros(5))
    short = open_table(tmp_path / "short.npy")
    with pytest.raises(DataError, match=rf"r\.wav has {STEPS} steps and .*short\.npy has 5"):
        columns("r", audio, audio.columns, short, short.columns)


def test_gaps_of_a_single_column_are_missing_values_but_not_blank_lines_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n\n3\n\n\n", encoding="utf-8")
    table = open_table(tmp_path / "a.csv")
    np.testing.assert_array_equal(table.read(0, 9, ["x"])[:, 0], [1, np.nan, 3])


def test_an_npz_cut_short_is_refused_and_closed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros(1000))
    whole = (tmp_path / "a.npz").read_bytes()
    for share in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "b.npz").write_bytes(whole[:share])
        with pytest.raises(DataError, match=r"b\.npz: not a readable"):
            open_table(tmp_path / "b.npz")


def test_rows_stay_valid_after_their_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("throughtime.stream.formats.npy.RELEASE_AFTER", 4096)
    values = np.arange(100_000, dtype=np.int16).reshape(-1, 2)
    np.save(tmp_path / "a.npy", values)
    table = open_table(tmp_path / "a.npy")
    rows = [table.read(start, start + 1000, ("1", "0")) for start in range(0, 50_000, 1000)]
    np.testing.assert_array_equal(np.concatenate(rows), values[:, ::-1])
    first = table.read(0, 5000, table.columns)
    table.read(5000, 10_000, table.columns)
    np.testing.assert_array_equal(first, values[:5000])
