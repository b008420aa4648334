"""CSV files of other programs: delimiters, decimal marks, encodings, lines that are no records."""

import csv
import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats import open_table, times

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "spaces": "   "}


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@given(
    rows=st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(-1, 1), st.integers(0, 9)),
        min_size=1,
        max_size=20,
    ),
    separator=st.sampled_from([",", ";", "\t", "|"]),
    comma=st.booleans(),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    header=st.booleans(),
)
def test_numbers_are_the_same_in_every_dialect(
    rows: list[tuple[float, float, int]],
    separator: str,
    comma: bool,
    quoting: Literal[0, 1, 2],
    end: str,
    mark: bool,
    header: bool,
) -> None:
    from tempfile import TemporaryDirectory

    decimal = "," if comma and separator != "," else "."
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator, lineterminator=end, quoting=quoting)
    if header:
        writer.writerow(["Time [s]", "a b", "c"])
    for x, y, n in rows:
        texts = [f"{x:.4f}".replace(".", decimal), f"{y:.2f}".replace(".", decimal), str(n)]
        writer.writerow(texts)
    with TemporaryDirectory() as folder:
        content = ("\ufeff" * mark + file.getvalue()).encode()
        table = open_table(written(Path(folder) / "r.csv", content))
        assert table.columns == (("Time [s]", "a b", "c") if header else ("0", "1", "2"))
        expected = [(float(f"{x:.4f}"), float(f"{y:.2f}"), n) for x, y, n in rows]
        np.testing.assert_array_equal(table.read(0, len(rows), table.columns), expected)


@pytest.mark.parametrize("separator", SEPARATORS.values(), ids=list(SEPARATORS))
def test_a_separator_within_quotes_is_no_separator(separator: str, tmp_path: Path) -> None:
    text = f'"n;ame,|"{separator}x\n"a;b, c|"{separator}1\n"d"{separator}2\n'
    table = open_table(written(tmp_path / "r.csv", text))
    assert table.columns == ("n;ame,|", "x")
    assert table.read(0, 2, ["n;ame,|"])[:, 0].tolist() == ["a;b, c|", "d"]
    assert table.read(0, 2, ["x"])[:, 0].tolist() == [1, 2]


def test_runs_of_spaces_and_tabs_at_any_place_are_one_separator(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", "  a \t b\n 1.5   2 \n\n\t3 4\n"))
    np.testing.assert_array_equal(table.read(0, 2, ["a", "b"]), [[1.5, 2], [3, 4]])


TEXTS = {
    "words": "name\nJohn Smith\nAnna Lee\n",
    "words-in-the-name": "heart rate\n60\n70\n",
    "times": "datetime\n2020-03-09 10:14:33\n2020-03-09 10:14:34\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_spaces_within_the_fields_of_one_column_do_not_split_it(text: str, tmp_path: Path) -> None:
    assert len(open_table(written(tmp_path / "r.csv", text)).columns) == 1


REFUSED = {
    "mixed": ("a;b\n1,5;2.5\n", "'1,5' and '2.5' have two decimal marks; write --decimal"),
    "open": ("a;b\n1,234;2\n1,500;3\n", "'1,234' may have decimals, or thousands; write --decimal"),
    "sep": ("sep=;\na;b\n1;2\n3;4\n", "delete a line 'sep=;'"),
    "trailing": (
        "a;b;\n1;2;\n3;4;\n",
        "a delimiter at the end of each line, pass the frame pandas.read_csv",
    ),
    "comment": (
        "# sensor 1\n# V\na;b\n1;2\n3;4\n5;6\n",
        "the first line is '# sensor 1', most .* delete the comments",
    ),
    "comment-spaces": (
        "% a b c\n1 2 3\n3 4 5\n",
        "the first line is '%', most lines after it have 3 fields",
    ),
    "title": (
        "Export\n\na;b\n1;2\n3;4\n",
        "the first line is 'Export', most lines after it have 2 fields .* before the header",
    ),
    "name-lacks": ("a,b\n1,2,3\n4,5,6\n", "line 2 has 3 fields, the header has 2"),
    "decimals": ("x\n1,5\n2,5\n", "with decimal commas write --decimal ,"),
    "cp1252": ("Größe;x\n1;2\n".encode("cp1252"), "is it WINDOWS-1252, .* iconv -f WINDOWS-1252"),
    "late-cp1252": ("n;x\n" + "a;1\n" * 9 + "°C;1\n", "line 11: is it WINDOWS-1252"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_a_file_leaves_open_is_refused_with_what_to_do(
    text: str | bytes, reason: str, tmp_path: Path
) -> None:
    content = text.encode("cp1252") if isinstance(text, str) else text
    with pytest.raises(DataError, match=reason):
        open_table(written(tmp_path / "r.csv", content))


def test_thousands_are_refused_by_line_and_column_where_they_are_read(tmp_path: Path) -> None:
    table = open_table(written(tmp_path / "r.csv", "a;b;c\n1.234,5;2;1 234,0\n1,5;3;2,5\n"))
    assert table.read(0, 2, ["b"])[:, 0].tolist() == [2, 3]
    for column, text in (("a", "1.234,5"), ("c", "1 234,0")):
        with pytest.raises(
            DataError,
            match=rf"line 2, column '{column}' holds '{text}'.* does it separate thousands",
        ):
            table.read(0, 2, [column])


def test_settings_win_over_what_is_detected(tmp_path: Path) -> None:
    path = written(tmp_path / "r.csv", "a;b\n1,234;2\n1,500;3\n")
    assert open_table(path, decimal=",").read(0, 1, ["a"])[0, 0] == 1.234
    with pytest.raises(DataError, match="thousands"):
        open_table(path, decimal=".").read(0, 1, ["a"])
    for name, mark in (("tab", "\t"), ("\\t", "\t"), ("space", "  ")):
        path = written(tmp_path / "v.csv", f"a,b{mark}c\n1,5{mark}2\n")
        assert open_table(path, delimiter=name).columns == ("a,b", "c")
    path = written(tmp_path / "s.csv", "a:b\n1:2\n")
    assert open_table(path).columns == ("a:b",)
    assert open_table(path, delimiter=":").read(0, 1, ["b"])[0, 0] == 2
    path = written(tmp_path / "t.csv", 'a,b\n"1,5","2,5"\n')
    assert open_table(path, decimal=",").read(0, 1, ["a", "b"]).tolist() == [[1.5, 2.5]]
    path = written(tmp_path / "u.csv", "x\n1,5\n2,5\n")
    assert open_table(path, decimal=",").read(0, 2, ["x"])[:, 0].tolist() == [1.5, 2.5]
    for wrong in ("", "ab", "1", '"', "\n", "é"):
        with pytest.raises(ConfigError, match="expected one character between fields"):
            open_table(path, delimiter=wrong)


def test_the_cache_of_one_dialect_is_not_read_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant whose cache file is named without the dialect returns the text of the first one."""
    monkeypatch.setenv("THROUGHTIME_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path / "r.csv", "a;b\n" + "1,234;2\n" * 40_000)
    assert open_table(path, decimal=",").read(0, 1, ["a"])[0, 0] == 1.234
    assert open_table(path, delimiter="|").columns == ("a;b",)
    with pytest.raises(DataError, match="thousands"):
        open_table(path, decimal=".").read(0, 1, ["a"])
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 3
    written(path, "a;b\n" + "5,5;2\n" * 60_000)
    assert open_table(path).read(0, 1, ["a"])[0, 0] == 5.5
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1  # those of the old file are gone


def test_lines_as_signals_have_a_dialect_too(tmp_path: Path) -> None:
    for text in ("1,5;2,5;3\n4;5,5;6\n", "1.5\t2.5\t3\n4\t5.5\t6\n"):
        table = open_table(written(tmp_path / "r.csv", text), rows=True)
        assert table.read(0, 3, ["0", "1"]).T.tolist() == [[1.5, 2.5, 3], [4, 5.5, 6]]
    mixed = open_table(written(tmp_path / "r.csv", "1;2\n3;4,5\n"), rows=True, decimal=".")
    with pytest.raises(DataError, match="signal 1, field 2 holds"):
        mixed.read(0, 2, ["1"])
    with pytest.raises(DataError, match="separated by spaces"):
        open_table(written(tmp_path / "r.csv", "1 2\n3 4\n"), rows=True)


def test_blocks_of_any_size_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{i},5;  ;'{i}';2020-01-0{i % 9 + 1}" for i in range(50)]
    lines.sort(key=lambda line: line.split(";")[3])
    path = written(tmp_path / "r.csv", "x;y;label;date\r\n" + "\r\n\r\n".join(lines))
    whole = open_table(path)
    for block in (1, 7, 64):
        monkeypatch.setattr("throughtime.stream.formats.csv.BLOCK", block)
        table = open_table(path)
        assert table.columns == ("x", "y", "label", "date")
        assert table.times == ("date",)
        for name in table.columns:
            np.testing.assert_array_equal(table.read(0, 50, [name]), whole.read(0, 50, [name]))


def test_the_delimiter_is_detected_without_parsing_each_time_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing each field of the sample by itself took seconds for every file."""
    calls: list[int] = []
    parse = times.parse_times

    def counted(texts: Any, form: str) -> Any:
        calls.append(len(texts))
        return parse(texts, form)

    monkeypatch.setattr(times, "parse_times", counted)
    lines = [f"2020-01-{day:02d};{day},5;word;3" for day in range(1, 29)]
    open_table(written(tmp_path / "r.csv", "\n".join(["date;x;text;n", *lines])))
    assert len(calls) <= 12  # the forms of one column, twice
    assert min(calls) >= len(lines)
