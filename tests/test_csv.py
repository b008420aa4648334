"""CSV: what a line, a first line and a field mean, in any dialect, wherever the blocks are cut."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats import csv as reader
from throughtime.stream.formats import open_table
from throughtime.stream.formats.table import is_number


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


NUMBERS = ["", " ", "1.", ".5", "+2", " 3 ", "1e5", "-inf", "NaN", "1_0", "N", "0x1", "1e", "--1"]
fields = st.one_of(
    st.floats(allow_nan=True).map(repr),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from([*NUMBERS, "1 2", "٣"]),
)
# not such as 1,1, whose comma may be that of decimals
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
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    block=st.integers(4, 80),
    data=st.data(),
)
def test_blocks_give_what_the_csv_module_gives(
    rows: list[tuple[str, str, str]], end: str, encoding: str, block: int, data: Any
) -> None:
    """Wherever the blocks are cut, and whichever rows are read.

    A column that turns to text is refused by its name. Mutant: blocks cut within quotes.
    """
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("throughtime.stream.formats.csv.FIELDS", block)
        patch.setattr("throughtime.stream.formats.csv.MIN_ROWS", 1)
        text = quoted([["x", "text", "y"], *map(list, rows)], end)
        path = written(Path(folder) / "r.csv", text.encode(encoding))
        columns = {name: [row[i] for row in rows] for i, name in enumerate(["x", "text", "y"])}
        table = open_table(path)
        assert len(table) == len(rows)
        start = data.draw(st.integers(0, len(rows)))
        stop = data.draw(st.integers(start, len(rows)))
        for name, column in columns.items():
            check_column(table, name, column, start, stop)


def check_column(table: Any, name: str, column: list[str], start: int, stop: int) -> None:
    filled = [field for field in column if field.strip()]
    if not all(map(is_number, filled)):
        try:
            result = table.read(0, len(column), [name])[:, 0].tolist()
        except DataError as error:  # its first block had numbers, or no field
            result = str(error)
        fault = rf"line \d+, column '{name}' holds .*, expected a number"
        assert result == column or re.search(fault, str(result))
        return
    np.testing.assert_array_equal(
        table.read(start, stop, [name])[:, 0],
        [float(f) if f.strip() else np.nan for f in column[start:stop]],
    )


def test_what_is_a_number() -> None:
    assert all(map(is_number, ["1", "-2.5", " 3 ", "1e5", "nan", "inf", "+.5", "1."]))
    assert not any(map(is_number, ["", "N", "1_000", "0x10", "1,5", "1 2", "nan(1)", "٣"]))


def test_a_semicolon_in_each_line_is_no_separator_where_commas_separate_numbers(
    tmp_path: Path,
) -> None:
    rows = "".join(f"seen; well,{i}.5,{i}\n" for i in range(9))
    table = open_table(written(tmp_path / "r.csv", f"note; free,u,v\n{rows}"))
    assert table.columns == ("note; free", "u", "v")
    decimals = "".join(f"1,{i};2,{i};3,5\n" for i in range(9))  # three fields by commas, too
    assert open_table(written(tmp_path / "d.csv", decimals)).read(8, 9, ["1"]).item() == 2.8


REFUSED: dict[str, tuple[str | bytes, str]] = {  # when it is opened; others in malformed_files.py
    "the columns that pandas counts": ("0,1,2\n3,4,5\n", "'2'\\], expected distinct column names"),
    "an index": (",5\n7,1\n", r"an index of pandas has no name: to_csv\(path, index=False\)"),
    "windows-1252": (
        "Größe;x\n1;2\n".encode("cp1252"),
        "line 1 is no UTF-8; is it WINDOWS-1252, .* Save it as UTF-8",
    ),
    "a line sep=": ("sep=;\na;b\n1;2\n3;4\n", "expected distinct column names"),
    "a comment": (
        "# V\na;b\n1;2\n3;4\n5;6\n",
        "line 2 has 2 fields, the first one 1; delete lines",
    ),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_table_is_refused_with_what_to_do(
    content: str | bytes, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "r.csv", content)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: .*{reason}"):
        open_table(path)


FAULTS: dict[str, tuple[str, str]] = {  # a text, and the reason
    "a quoted line": ('x,t\n1,"two\nlines"\n\n\n2,a\nb,b\n', "line 7, column 'x' holds 'b'"),
    "quoted comma": ('a,b\n"1,5",2\n', r"a decimal comma: --decimal , "),
    "late digits": ("a,b\n" + "1,2\n" * 80_000 + "9007199254740993,2\n", "line 80002, .* merge"),
}


@pytest.mark.parametrize(("text", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_field_of_another_kind_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", text))
    for _ in range(2):  # the cached file knows it, too
        with pytest.raises(DataError, match=reason):
            table.read(0, 1, table.columns)
        table = open_table(tmp_path / "r.csv")


def test_a_column_of_two_kinds_that_nobody_reads_is_no_fault(tmp_path: Path) -> None:
    for count in (10, 60_000):  # in memory, and from the cache
        path = written(tmp_path / "r.csv", "id,x\n" + "".join(f"{i},{i}\n" for i in range(count)))
        with path.open("a") as file:
            file.write("A7,5\n")
        table = open_table(path)
        assert table.read(count, count + 1, ["x"]).tolist() == [[5]]
        with pytest.raises(DataError, match=rf"line {count + 2}, column 'id' holds 'A7'"):
            table.read(0, 1, ["id"])


def test_what_a_column_holds_shows_in_its_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels later than that, and another order of dates, are refused by their line."""
    assert reader.FIELDS == 262_144 // 8
    monkeypatch.setattr(reader, "FIELDS", 65_536 // 8)
    lines = [f"{i},,3/9/2020 10:00,1" for i in range(16_500)]
    lines += ["7,2.5,3/13/2020 10:00,+2", "8,,3/14/2020 10:00,3"]
    whole = "\n".join(["n,late,date,x", *lines])
    clear = whole.replace("3/9", "3/19")
    table = open_table(written(tmp_path / "r.csv", clear))
    assert table.read(16_500, 16_502, ["x", "n"]).tolist() == [[2, 7], [3, 8]]
    np.testing.assert_array_equal(table.read(16_499, 16_501, ["late"])[:, 0], [np.nan, 2.5])
    with pytest.raises(DataError, match=r"line 16503, column 'late' holds 'beat', .*as above it"):
        open_table(written(tmp_path / "r.csv", clear.replace("\n8,,3/14", "\n8,beat,3/14"))).read(
            0, 1, ["late"]
        )
    with pytest.raises(DataError, match=r"line 2, column 'date' .* of a clear day and month"):
        open_table(written(tmp_path / "r.csv", whole)).read(0, 1, ["date"])


@pytest.mark.parametrize(("block", "end"), [(4, "\n"), (2**20, "\r\n")])
def test_blank_lines_are_values_of_a_single_column_only(
    end: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("throughtime.stream.formats.csv.FIELDS", block)
    monkeypatch.setattr("throughtime.stream.formats.csv.MIN_ROWS", 1)
    single = open_table(written(tmp_path / "a.csv", end.join(["x", "1", "", "", "3", "", "", ""])))
    np.testing.assert_array_equal(single.read(0, 9, ["x"])[:, 0], [1, np.nan, np.nan, 3])
    double = open_table(
        written(tmp_path / "b.csv", end.join(["x,y", "", "1,2", "", "", "3,4", "", ""]))
    )
    np.testing.assert_array_equal(double.read(0, 9, ["x"])[:, 0], [1, 3])


def test_settings_win_over_what_is_detected(tmp_path: Path) -> None:
    path = written(tmp_path / "r.csv", "a;b\n1,234;2\n1,500;3\n")
    assert open_table(path, decimal=",").read(0, 1, ["a"])[0, 0] == 1.234
    with pytest.raises(DataError, match="thousands"):
        open_table(path, decimal=".").read(0, 1, ["a"])
    path = written(tmp_path / "s.csv", "a:b\n1:2\n")
    assert open_table(path).columns == ("a:b",)
    assert open_table(path, delimiter=":").read(0, 1, ["b"])[0, 0] == 2
    path = written(tmp_path / "t.csv", 'a,b\n"1,5","2,5"\n')
    assert open_table(path, delimiter=",", decimal=",").read(0, 1, ["a", "b"]).tolist() == [
        [1.5, 2.5]
    ]
    assert open_table(path, decimal=",").read(0, 1, ["a", "b"]).tolist() == [[1.5, 2.5]]
    path = written(tmp_path / "u.csv", "x\n1,5\n2,5\n")
    assert open_table(path, delimiter=";").read(0, 2, ["x"])[:, 0].tolist() == [1.5, 2.5]
    path = written(tmp_path / "v.csv", "a,b\tc\n1,5\t2\n")
    assert open_table(path, delimiter="tab").columns == ("a,b", "c")
    for wrong in ("", "ab", "1", '"', "\n", " ", "^"):
        with pytest.raises(ConfigError, match="read files with another one by pandas"):
            open_table(path, delimiter=wrong)


@pytest.mark.parametrize("quote", ["", '"'])
def test_whole_numbers_are_refused_where_float64_merges_them(quote: str, tmp_path: Path) -> None:
    """Whichever parser reads the block. Mutant: sixteen digits are too many for the csv module."""
    micros = 1577836800123456
    text = "t,note\n" + "".join(f'{quote}{micros + i}{quote},"a, ""b"""\n' for i in range(3))
    path = written(tmp_path / "r.csv", text)
    assert open_table(path).read(0, 3, ["t"])[:, 0].tolist() == [micros + i for i in range(3)]
    written(path, text.replace(str(micros), str(2**53)))
    with pytest.raises(DataError, match="line 2, column 't' holds '9007199254740992'"):
        open_table(path).read(0, 3, ["t"])


@pytest.mark.parametrize("text", ["a\n1\n2,5\n3\n", "1\n2\n3,4\n", "a\nx\ny, z\nw\n"])
def test_a_comma_in_a_single_column_is_a_long_line(text: str, tmp_path: Path) -> None:
    """`2,5` was read as 2.5, since no delimiter was detected."""
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(DataError, match="line 3 has 2 fields, the first one 1"):
        open_table(tmp_path / "r.csv")


@pytest.mark.parametrize(("blank", "header"), [(1, ""), (4, "a\n")])
def test_blank_lines_before_a_single_column_are_no_values(
    blank: int, header: str, tmp_path: Path
) -> None:
    (tmp_path / "r.csv").write_text("\n" * blank + header + "1.5\n\n2\n")
    table = open_table(tmp_path / "r.csv")
    assert table.columns == ((header.strip() or "0"),)
    np.testing.assert_array_equal(table.read(0, 9, table.columns)[:, 0], [1.5, np.nan, 2.0])


@pytest.mark.parametrize("text", ["a\n1,5\n2,5\n", "1,5\n2,5\n", '"a"\n"1,5"\n"2,5"\n'])
def test_a_decimal_comma_in_a_single_column_separates_no_fields(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(text)
    table = open_table(tmp_path / "r.csv", decimal=",")
    assert table.read(0, 9, table.columns).tolist() == [[1.5], [2.5]]


def test_an_index_without_a_name_is_no_column(tmp_path: Path) -> None:
    for names in (["u", "v"], [0, 1], [2019, 2020]):
        frame = pd.DataFrame([[1.5, 3], [2.5, 4]], columns=names)
        frame.to_csv(tmp_path / "x.csv")
        table = open_table(tmp_path / "x.csv")
        assert table.columns == tuple(map(str, names))
        assert np.array_equal(table.read(0, 2, table.columns), [[1.5, 3], [2.5, 4]])
    frame = pd.DataFrame({"u": [1.0, 2]}, index=pd.date_range("2020-01-01", periods=2))
    frame.to_csv(tmp_path / "x.csv")
    assert tt.recording(tmp_path / "x.csv").read(0, 2).inputs.shape == (2, 1)
