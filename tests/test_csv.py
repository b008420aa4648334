"""CSV: what a scan checks, what a field means, and that reading by blocks is reading the file."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from throughtime.errors import DataError
from throughtime.stream.formats import open_table
from throughtime.stream.formats.csv_rows import parse_numbers
from throughtime.stream.formats.table import is_number
from throughtime.stream.manifest import find_recordings
from throughtime.stream.recording import columns


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


fields = st.one_of(
    st.floats(allow_nan=True).map(repr),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(
        [
            "",
            " ",
            "1.",
            ".5",
            "+2",
            " 3 ",
            "1e5",
            "-inf",
            "NaN",
            "1_0",
            "N",
            "0x1",
            "1e",
            "--1",
            "1 2",
            "٣",
        ]
    ),
)
# not such as 1,1: test_csv_dialect asks what its comma means
texts = st.text(st.sampled_from('ab1,"\n\r é.'), max_size=6).filter(
    lambda text: "," not in text or not set(text) <= set("1,. \n\r")
)


def quoted(rows: list[list[str]], end: str) -> str:
    file = io.StringIO()
    carriage = any(
        "\r" in field or "\n" in field for row in rows for field in row
    )  # which Python before 3.13 does not quote by itself
    csv.writer(
        file, lineterminator=end, quoting=csv.QUOTE_ALL if carriage else csv.QUOTE_MINIMAL
    ).writerows(rows)
    return file.getvalue()


@given(
    rows=st.lists(st.tuples(fields, texts, fields), min_size=1, max_size=30),
    end=st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
    block=st.integers(1, 80),
    data=st.data(),
)
def test_blocks_give_what_the_csv_module_gives(
    rows: list[tuple[str, str, str]], end: str, block: int, data: Any
) -> None:
    """Wherever the blocks are cut, and whichever rows are read.

    A column that turns to text is refused by its line.
    """
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("throughtime.stream.formats.csv.BLOCK", block)
        path = written(Path(folder) / "r.csv", quoted([["x", "text", "y"], *map(list, rows)], end))
        table = open_table(path)
        assert len(table) == len(rows)
        start = data.draw(st.integers(0, len(rows)))
        stop = data.draw(st.integers(start, len(rows)))
        for column, name in enumerate(table.columns):
            check_column(table, name, [row[column] for row in rows], start, stop)


def check_column(table: Any, name: str, column: list[str], start: int, stop: int) -> None:
    first = next((f for f in column if f.strip()), "0")
    if not is_number(first):
        assert table.read(start, stop, [name])[:, 0].tolist() == column[start:stop]
        return
    wrong = [f for f in column if f.strip() and not is_number(f)]
    if wrong:
        with pytest.raises(
            DataError,
            match=rf"line \d+, column '{name}' holds .*, expected a number as in the lines before",
        ):
            table.read(0, len(column), [name])
        return
    np.testing.assert_array_equal(
        table.read(start, stop, [name])[:, 0],
        [float(f) if f.strip() else np.nan for f in column[start:stop]],
    )


@given(st.lists(fields, min_size=1, max_size=5))
def test_numbers_parsed_at_once_are_those_parsed_one_by_one(column: list[str]) -> None:
    values = parse_numbers("\n".join(column).encode())
    if values is not None:
        np.testing.assert_array_equal(values, [float(f) if f.strip() else np.nan for f in column])
        assert all(is_number(f) or not f for f in column)
    elif all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", f) for f in column):
        raise AssertionError("plain numbers are not parsed at once")


def test_what_is_a_number() -> None:
    assert all(map(is_number, ["1", "-2.5", " 3 ", "1e5", "nan", "inf"]))
    assert not any(map(is_number, ["", "N", "1_000", "0x10", "1,5", "1 2"]))


def test_a_column_of_numbers_that_turns_to_text_is_refused_by_line_column_and_text(
    tmp_path: Path,
) -> None:
    lines = ["x,y,label", *(f"{i},{i},N" for i in range(40_000))]
    lines[30_001] = "1.5.2,1,N"
    path = written(tmp_path / "r.csv", "\n".join(lines))
    table = open_table(path)
    assert table.read(0, 40_000, ["y", "label"]).shape == (
        40_000,
        2,
    )  # who does not read the column is not stopped
    with pytest.raises(
        DataError,
        match=rf"{re.escape(str(path))}: line 30002, column 'x' holds '1\.5\.2', expected a number",
    ):
        table.read(0, 40_000, ["x", "y"])


def test_a_column_of_labels_stays_text_where_labels_look_like_numbers(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", "x,label\n1,\n2,N\n3,1\n"))
    assert table.read(0, 3, ["label"])[:, 0].tolist() == ["", "N", "1"]
    assert table.read(0, 3, ["x"]).dtype == np.float64


def test_line_of_a_fault_counts_blank_and_quoted_lines(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", 'x,text\n1,"two\nlines"\n\n\n2,a\nthree,b\n'))
    assert len(table) == 3
    with pytest.raises(DataError, match="line 7, column 'x' holds 'three'"):
        table.read(0, 3, ["x"])


MALFORMED: dict[str, tuple[bytes, str]] = {
    "nul": (b"a,b\n1,2\n1,\0\n", "line 3 holds a NUL byte, expected UTF-8 text; is it UTF-16"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), r"not a readable CSV file \(line 1: "),
    "late-not-utf-8": (
        b"a,b\n" + b"1,2\n" * 100_000 + b"1,\xff\n",
        r"not a readable CSV file \(line 100002: ",
    ),
    "late-short-line": (
        b"a,b\n" + b"1,2\n" * 100_000 + b"1\n",
        "line 100002 has 1 fields, the header has 2",
    ),
    "shifted-commas": (b"a,b,c\n1,2\n1,2,3,4\n", "line 2 has 2 fields, the header has 3"),
    "short-quoted-line": (b'a,b\n"1","2"\n"1"\n', "line 3 has 1 fields, the header has 2"),
    "open-quote": (
        b'a,b\n1,2\n1,"2\n3,4\n',
        r"not a readable CSV file \(line 4: unexpected end of data",
    ),
    "text-after-quote": (b'a,b\n"1"2,3\n', r"not a readable CSV file \(line 2: "),
}


@pytest.mark.parametrize(("content", "reason"), list(MALFORMED.values()), ids=list(MALFORMED))
def test_malformed_file_is_refused_with_its_line(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "r.csv", content)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: {reason}"):
        open_table(path)


def test_a_line_without_end_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("throughtime.stream.formats.csv.LONGEST", 200_000)
    with pytest.raises(DataError, match="a line after line 1 is longer than 200000 bytes"):
        open_table(written(tmp_path / "r.csv", "a,b\n" + "1" * 600_000))


def test_a_huge_field_is_refused_with_and_without_quotes(tmp_path: Path) -> None:
    for field in ("1" * 200_000, '"' + "1" * 200_000 + '"'):
        with pytest.raises(DataError, match=r"line 2: field larger than field limit \(131072\)"):
            open_table(written(tmp_path / "r.csv", f"a,b\n1,{field}"))


def test_a_long_text_is_refused_where_it_is_read_and_only_there(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", "x,note\n1,a\n2," + "b" * 300 + "\n"))
    assert table.read(0, 2, ["x"])[:, 0].tolist() == [1, 2]
    with pytest.raises(
        DataError, match="column 'note' holds a text of 300 characters, expected labels"
    ):
        table.read(0, 2, ["note"])


def test_a_file_without_header_names_its_columns_by_number(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", "1,2.5,-3e1\n4,5,6\n"))
    assert table.columns == ("0", "1", "2")
    np.testing.assert_array_equal(table.read(0, 9, ["2", "0"]), [[-30, 1], [6, 4]])
    assert open_table(written(tmp_path / "s.csv", "1,b\n4,5\n")).columns == ("1", "b")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_are_values_of_a_single_column_only(end: str, tmp_path: Path) -> None:
    single = open_table(written(tmp_path / "a.csv", end.join(["x", "1", "", "3", "", "", ""])))
    np.testing.assert_array_equal(single.read(0, 9, ["x"])[:, 0], [1, np.nan, 3])
    double = open_table(
        written(tmp_path / "b.csv", end.join(["x,y", "", "1,2", "", "", "3,4", "", ""]))
    )
    np.testing.assert_array_equal(double.read(0, 9, ["x"])[:, 0], [1, 3])


def test_a_manifest_is_text(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        written(tmp_path / name, "x\n1\n")
    path = written(tmp_path / "r.csv", "id,inputs\n001,a.csv\n\n1,b.csv\n")
    assert [entry.name for entry in find_recordings(path)] == ["001", "1"]


@given(
    signals=st.integers(1, 4),
    steps=st.integers(1, 40),
    block=st.integers(1, 50),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    data=st.data(),
)
def test_lines_as_signals_give_their_numbers(
    signals: int, steps: int, block: int, end: str, data: Any
) -> None:
    from tempfile import TemporaryDirectory

    values = (
        np.random.default_rng(steps)
        .normal(size=(signals, steps))
        .round(data.draw(st.integers(0, 9)))
    )
    holes = [data.draw(st.integers(0, steps - 1)) for _ in range(signals)]
    values[range(signals), holes] = np.nan
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("throughtime.stream.formats.csv_rows.BLOCK", block)
        lines = [",".join("" if np.isnan(v) else repr(v) for v in row) for row in values.tolist()]
        text = end.join(line or " " for line in lines) + data.draw(st.sampled_from(["", end]))
        table = open_table(written(Path(folder) / "r.csv", text), rows=True)
        assert table.columns == tuple(map(str, range(signals)))
        assert len(table) == steps
        start = data.draw(st.integers(0, steps))
        stop = data.draw(st.integers(start, steps + 2))
        names = data.draw(st.lists(st.integers(-signals, signals - 1), min_size=1, max_size=3))
        np.testing.assert_array_equal(
            table.read(start, stop, list(map(str, names))), values[names, start:stop].T
        )


@pytest.mark.parametrize("block", range(1, 9))
def test_empty_fields_at_the_ends_of_lines_are_missing(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("throughtime.stream.formats.csv_rows.BLOCK", block)
    for end in ("", "\n", "\r\n"):
        table = open_table(written(tmp_path / "r.csv", f",1,\n\r\n2,,{end}"), rows=True)
        np.testing.assert_array_equal(
            table.read(0, 3, ["0", "1"]), [[np.nan, 2], [1, np.nan], [np.nan, np.nan]]
        )


def test_lines_are_also_named_from_the_last_one(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", "1,2\n3,4\n5,6\n"), rows=True)
    assert list(table.columns) == ["0", "1", "2"]
    assert all(name in table.columns for name in ("0", "2", "-1", "-3"))
    assert not any(name in table.columns for name in ("3", "-4", "-0", "--1", "-", "", "a", "-a"))
    stream = columns("r", table, ("0",), table, ("-1",))  # the check of every recording takes them
    steps = stream.read(0, 2)
    assert (steps.inputs.tolist(), None if steps.targets is None else steps.targets.tolist()) == (
        [[1], [2]],
        [5, 6],
    )


ROWS: dict[str, tuple[bytes, str]] = {
    "unequal": (b"1,2,3\n4,5\n", "line 2 has 2 fields, the lines before it have 3"),
    "header": (
        b"time,x\n1,2\n",
        "begins with 'time', expected lines of numbers, one for each signal, without a header",
    ),
    "quotes": (b'1,"2"\n', "holds quotes or NUL bytes in or after line 1"),
    "empty": (b"\n\n", "the file is empty, expected a line of numbers for each signal"),
    "text": (b"1,2\n3,x\n", "signal 1, field 2 holds 'x', expected a number"),
    "many": (
        b"1\n" * 70_000,
        "has more than 65536 lines, expected one for each signal; are its signals in columns",
    ),
}


@pytest.mark.parametrize(("content", "reason"), list(ROWS.values()), ids=list(ROWS))
def test_lines_that_are_no_signals_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / "r.csv", content)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: {reason}"):
        open_table(path, rows=True).read(0, 2, ["1"])
    with pytest.raises(DataError, match=r"rows=True is for \.csv"):
        open_table(tmp_path_file(tmp_path), rows=True)


def tmp_path_file(folder: Path) -> Path:
    np.save(folder / "r.npy", np.zeros(3))
    return folder / "r.npy"
