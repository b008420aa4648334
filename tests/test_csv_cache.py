"""CSV files converted to the cache: the same values, one writer, never a broken or an old file."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from throughtime.errors import DataError
from throughtime.stream.formats import _csv_cache, open_table
from throughtime.stream.formats.table import Array

ROWS = 30_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THROUGHTIME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def numbers(rows: int = ROWS, seed: int = 0) -> Array:
    """Of all magnitudes, with every digit that a double has."""
    draw = np.random.default_rng(seed)
    return draw.normal(size=(rows, 3)) * 10.0 ** draw.integers(-300, 300, (rows, 3))


def write(path: Path, values: Array, labels: bool = False) -> Path:
    lines = ["a,b,c" + ",label" * labels]
    for index, row in enumerate(values.tolist()):
        lines.append(",".join(map(repr, row)) + (f',"x {index % 7}"' if labels else ""))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def cached(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.is_dir() else []


@pytest.mark.parametrize("labels", [False, True])
def test_rows_from_the_cache_are_those_of_python(labels: bool, tmp_path: Path, cache: Path) -> None:
    values = numbers()
    path = write(tmp_path / "r.csv", values, labels)
    first, second = open_table(path), open_table(path)
    assert [file.suffix for file in cached(cache)] == [".arrow"]
    draw = np.random.default_rng(1)
    for table in (first, second):
        np.testing.assert_array_equal(table.read(0, ROWS, ["a", "b", "c"]), values)
        for start in draw.integers(0, ROWS, 50).tolist():
            stop = start + int(draw.integers(0, 9000))
            np.testing.assert_array_equal(table.read(start, stop, "cb"), values[start:stop, [2, 1]])
            if labels:
                texts = [f"x {index % 7}" for index in range(start, min(stop, ROWS))]
                assert table.read(start, stop, ["label"])[:, 0].tolist() == texts


@given(
    rows=st.lists(
        st.tuples(
            st.floats(width=64).map(repr), st.sampled_from(["", "1", " 2", "  ", "nan", '"3"'])
        ),
        min_size=1,
        max_size=40,
    ),
    block=st.integers(1, 60),
    data=st.data(),
)
def test_random_access_is_the_plain_parse(
    rows: list[tuple[str, str]], block: int, data: Any
) -> None:
    """Wherever the blocks are cut, from the cache and without one."""
    from tempfile import TemporaryDirectory

    expected = np.array(
        [[float(a), float(b.strip('" ') or "nan")] for a, b in rows], dtype=np.float64
    )
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("throughtime.stream.formats.csv.BLOCK", block)
        path = Path(folder) / "r.csv"
        path.write_text("x,y\n" + "".join(f"{a},{b}\n" for a, b in rows))
        for line_number in (folder, os.devnull):
            patch.setenv("THROUGHTIME_CACHE", str(Path(line_number) / "cache"))
            with warnings.catch_warnings(action="ignore"):
                table = open_table(path)
            start = data.draw(st.integers(0, len(rows)))
            stop = data.draw(st.integers(start, len(rows)))
            np.testing.assert_array_equal(table.read(start, stop, "xy"), expected[start:stop])
        assert len(cached(Path(folder) / "cache")) == (path.stat().st_size > block)


def test_a_changed_file_is_converted_again_and_its_old_cache_removed(
    tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "r.csv", numbers())
    open_table(path)
    before = cached(cache)
    write(path, numbers(seed=2))
    np.testing.assert_array_equal(open_table(path).read(0, ROWS, "abc"), numbers(seed=2))
    assert len(cached(cache)) == 1
    assert cached(cache) != before
    os.utime(path, ns=(1, 1))
    open_table(path)
    assert len(cached(cache)) == 1
    open_table(write(tmp_path / "other.csv", numbers()))
    assert len(cached(cache)) == 2


def test_a_cache_that_ignores_the_time_of_its_source_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the law above."""
    path = write(tmp_path / "r.csv", numbers())
    size = path.stat().st_size
    open_table(path)
    changed = path.read_bytes().replace(b"0", b"1")
    path.write_bytes(changed)
    assert len(changed) == size
    stamp = _csv_cache.FileStamp
    real = stamp.of
    monkeypatch.setattr(stamp, "of", staticmethod(lambda path: real(path)._replace(modified=0)))
    open_table(path)
    os.utime(path, ns=(1, 1))
    path.write_bytes(changed.replace(b"1", b"2"))
    mutant = open_table(path).read(0, ROWS, "abc")
    monkeypatch.undo()
    assert not np.array_equal(mutant, open_table(path).read(0, ROWS, "abc"))


SLOW_WRITER = """
import sys, time
from pathlib import Path
from throughtime.stream.formats import _csv_cache, open_table
real = _csv_cache.write_batches
def slow(path, scan):
    batches = scan.batches()
    def delayed():
        for batch in batches:
            Path(sys.argv[2]).touch()
            time.sleep(float(sys.argv[3]))
            yield batch
    scan.batches = delayed
    Path(sys.argv[2] + f".{__import__('os').getpid()}").touch()
    real(path, scan)
_csv_cache.write_batches = slow
table = open_table(Path(sys.argv[1]))
print(repr(float(table.read(0, len(table), table.columns).sum())))
"""


def writer(path: Path, mark: Path, delay: float) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", SLOW_WRITER, str(path), str(mark), str(delay)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def wait_for(mark: Path) -> None:
    for _ in range(2000):
        if mark.exists():
            return
        time.sleep(0.02)
    raise AssertionError("the writer has not begun")


def test_two_processes_read_the_file_and_one_writes_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.round(np.random.default_rng(0).normal(size=(ROWS, 3)), 3)
    path = write(tmp_path / "r.csv", values)
    process = writer(path, tmp_path / "mark", 0.05)
    wait_for(tmp_path / "mark")
    monkeypatch.setattr(_csv_cache, "write_batches", None)  # this process would fail if it wrote
    table = open_table(path)
    sums = [float(table.read(0, ROWS, "abc").sum()), float(process.communicate(timeout=120)[0])]
    assert sums == pytest.approx([values.sum()] * 2)
    assert len(list(tmp_path.glob("mark.*"))) == 1
    assert [file.suffix for file in cached(cache)] == [".arrow"]


def test_a_killed_writer_leaves_no_broken_cache(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "r.csv", numbers())
    process = writer(path, tmp_path / "mark", 60)
    wait_for(tmp_path / "mark")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert sorted(file.suffix for file in cached(cache)) == [".lock", ".tmp"]
    np.testing.assert_array_equal(open_table(path).read(0, ROWS, "abc"), numbers())
    assert [file.suffix for file in cached(cache)] == [".arrow"]


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_damaged_cache_is_written_again(share: float, tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "r.csv", numbers())
    open_table(path)
    file = cached(cache)[0]
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    np.testing.assert_array_equal(open_table(path).read(0, ROWS, "abc"), numbers())


def test_without_a_writable_cache_a_file_is_read_directly_with_one_warning(
    tmp_path: Path, cache: Path
) -> None:
    cache.write_text("a file where the folder would be")
    path = write(tmp_path / "r.csv", numbers(), labels=True)
    with pytest.warns(UserWarning, match=rf"{re.escape(str(cache))}: cannot hold .*r\.csv \("):
        table = open_table(path)
    open_table(write(tmp_path / "other.csv", numbers()))  # a second warning would be an error
    np.testing.assert_array_equal(table.read(7, 20_000, "ca"), numbers()[7:20_000, [2, 0]])
    assert table.read(9, 10, ["label"]).tolist() == [["x 2"]]


def test_a_full_disk_leaves_nothing_and_the_file_is_read_directly(
    tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "r.csv", numbers())
    code = (
        "import resource, sys; from pathlib import Path;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, {resource.RLIM_INFINITY}));"
        "from throughtime.stream.formats import open_table;"
        "table = open_table(Path(sys.argv[1]));"
        "print(repr(float(table.read(0, len(table), ['a']).max())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == numbers()[:, 0].max()
    assert done.stderr.count("cannot hold the converted values") == 1
    assert cached(cache) == []


@pytest.mark.parametrize("line_number", [1_000, 29_000])
def test_a_fault_is_named_by_line_and_column_from_the_cache_too(
    line_number: int, tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "r.csv", numbers())
    lines = path.read_text().split("\n")
    lines[line_number] = lines[line_number].replace(",", ",oops ", 1)
    path.write_text("\n".join(lines))
    for _ in range(2):
        table = open_table(path)
        assert table.read(0, ROWS, "ac").shape == (ROWS, 2)
        with pytest.raises(
            DataError, match=rf"r\.csv: line {line_number + 1}, column 'b' holds 'oops "
        ):
            table.read(0, 10, "ab")
    assert len(cached(cache)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('1,2,"3', r"not a readable CSV file \(line \d+: unexpected end of data"),
        ("1,2", "line 29001 has 2 fields, the header has 3"),
        ('1,2,"3"4', r"not a readable CSV file \(line 29001: "),
        ("1,2,\0", "line 29001 holds a NUL byte"),
    ],
)
def test_a_line_that_is_no_record_is_refused_and_nothing_is_cached(
    line: str, reason: str, tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "r.csv", numbers())
    lines = path.read_text().split("\n")
    lines[29_000] = line
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=reason):
        open_table(path)
    assert cached(cache) == []


def test_lines_as_signals_are_cached_and_named(tmp_path: Path, cache: Path) -> None:
    values = numbers().T
    path = tmp_path / "r.csv"
    lines = [",".join(map(repr, row)) for row in values.tolist()]
    path.write_text("\n".join([*lines, lines[0].replace(",", ",x", 1)]))
    for _ in range(2):
        table = open_table(path, rows=True)
        np.testing.assert_array_equal(table.read(0, ROWS, "012"), values.T)
        names = ["-2", "0"]
        np.testing.assert_array_equal(table.read(4000, 9000, names), values.T[4000:9000, [2, 0]])
        with pytest.raises(DataError, match=r"signal 3, field 2 holds 'x.*', expected a number"):
            table.read(0, 3, ["-1"])
    assert len(cached(cache)) == 1
    with pytest.raises(DataError, match="line 4, column '1' holds 'x"):  # as columns, another cache
        open_table(path).read(0, 1, "1")


def test_many_columns_in_few_lines_are_read_in_seconds(tmp_path: Path) -> None:
    """pyarrow alone takes ten seconds for three lines of 100,000 columns."""
    values = np.random.default_rng(0).integers(-99, 99, (3, 100_000)) / 128
    path = tmp_path / "r.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in values.tolist()) + "\n")
    began = time.process_time()
    for rows in (True, False):
        table = open_table(path, rows=rows)
        np.testing.assert_array_equal(
            table.read(0, len(table), table.columns), values.T if rows else values
        )
    assert time.process_time() - began < 5
