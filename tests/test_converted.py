"""Converted files: the same values, one writer, and never a damaged or an old file."""

import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from processes import begun, elsewhere
from throughtime.errors import DataError
from throughtime.stream.formats import arrow, open_table
from throughtime.stream.formats.table import Array

ROWS = 30_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THROUGHTIME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def numbers(seed: int = 0) -> Array:
    """Of all magnitudes, with every digit that a double has."""
    draw = np.random.default_rng(seed)
    return draw.normal(size=(ROWS, 3)) * 10.0 ** draw.integers(-300, 300, (ROWS, 3))


def write(path: Path, values: Array, labels: bool = False) -> Path:
    texts = [f"x {i % 7}" for i in range(ROWS)]
    columns = dict(zip("abc", values.T, strict=True)) | ({"label": texts} if labels else {})
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path, row_group_size=7000)
    elif path.suffix == ".feather":
        feather.write_feather(pa.table(columns), path, compression="zstd", chunksize=7000)
    else:
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join([",".join(columns), *lines]) + "\n", encoding="utf-8")
    return path


def cached(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.is_dir() else []


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".feather"])
def test_rows_of_a_converted_file_are_those_of_the_file(
    suffix: str, tmp_path: Path, cache: Path
) -> None:
    values = numbers()
    path = write(tmp_path / f"r{suffix}", values, labels=True)
    first, second = open_table(path), open_table(path)
    assert [file.suffix for file in cached(cache)] == [".arrow"]
    draw = np.random.default_rng(1)
    for table in (first, second):
        np.testing.assert_array_equal(table.read(0, ROWS, ["a", "b", "c"]), values)
        for start in draw.integers(0, ROWS, 20).tolist():
            stop = start + int(draw.integers(0, 9000))
            np.testing.assert_array_equal(table.read(start, stop, "cb"), values[start:stop, [2, 1]])
            texts = [f"x {index % 7}" for index in range(start, min(stop, ROWS))]
            assert table.read(start, stop, ["label"])[:, 0].tolist() == texts


def flipped(content: bytes, draw: np.random.Generator) -> bytes:
    bits = bytearray(content)
    at = int(draw.integers(len(bits)))
    bits[at] ^= 1 << int(draw.integers(8))
    return bytes(bits)


DAMAGES = {
    "another row is the first": lambda content, _: content.replace(b"], [0, ", b"], [1, ", 1),
    "a bit flips": flipped,
    "it is cut short": lambda content, draw: content[: int(draw.integers(len(content)))],
    "another file": lambda content, draw: content[::-1] if draw.random() < 0.5 else b"",
}


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_no_damage_of_a_cached_file_is_used_silently(
    damage: Any, count: int, tmp_path: Path, cache: Path
) -> None:
    """Mutants: `check` that checks nothing; the trailer without its own checksum."""
    values = numbers()
    path = write(tmp_path / "r.parquet", values, labels=True)
    open_table(path)
    draw, (file,) = np.random.default_rng(count), cached(cache)
    whole = file.read_bytes()
    for _ in range(count):
        file.unlink()
        damaged = damage(whole, draw)
        assert damaged != whole
        file.write_bytes(damaged)
        arrow._checked.clear()  # as another process
        table = open_table(path)
        try:
            numbers_read = table.read(0, ROWS, "abc")
        except DataError:  # it is written again
            numbers_read = (table := open_table(path)).read(0, ROWS, "abc")
        np.testing.assert_array_equal(numbers_read, values)
        assert table.read(ROWS - 1, ROWS, ["label"])[0, 0] == f"x {(ROWS - 1) % 7}"


def test_a_file_that_was_replaced_by_one_of_equal_size_and_time_is_converted_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: a file is known by its size and its time of modification."""
    path = write(tmp_path / "r.csv", np.round(numbers() % 1, 6))
    before = path.stat()
    assert open_table(path).read(0, 1, "a")[0, 0] != 5.5
    changed = (
        re.sub(
            rb"\n[^,]*",
            lambda found: b"\n" + b"5.5".ljust(len(found[0]) - 1, b"0"),
            path.read_bytes()[:-1],
        )
        + b"\n"
    )
    path.write_bytes(changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat()[6:9] == before[6:9]
    assert open_table(path).read(0, 1, "a")[0, 0] == 5.5
    assert len(cached(cache)) == 1
    real = arrow.fingerprint
    for parts, text, expected in (([1, 4], b"6.5", 6.5), ([0, 1], b"7.5", 6.5)):
        monkeypatch.setattr(
            arrow, "fingerprint", lambda p, parts=parts: [real(p)[i] for i in parts]
        )
        open_table(path)
        path.write_bytes(changed.replace(b"5.5", text))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = open_table(path).read(0, 1, "a")[0, 0]
        assert found == expected, "the sum of blocks decides; the mutant without it is as right"


def test_the_files_of_other_options_lie_beside_each_other(tmp_path: Path, cache: Path) -> None:
    """A mutant whose file is named without them returns the text of the first one."""
    path = tmp_path / "r.csv"
    path.write_text("a;b\n" + "1,234;2\n" * 40_000)
    assert open_table(path, decimal=",").read(0, 1, ["a"])[0, 0] == 1.234
    assert open_table(path, delimiter="|").columns == ("a;b",)
    assert len(cached(cache)) == 2
    path.write_text("a;b\n" + "5,5;2\n" * 60_000)
    assert open_table(path, decimal=",").read(0, 1, ["a"])[0, 0] == 5.5
    assert len(cached(cache)) == 2


SLOW_WRITER = """
import os, sys, time
from pathlib import Path
from throughtime.stream.formats import arrow, open_table
real = arrow._write
def slow(*arguments):
    real(*arguments)
    Path(sys.argv[2]).touch()
    Path(f"{sys.argv[2]}.{os.getpid()}").touch()
    time.sleep(float(sys.argv[3]))
arrow._write = slow
table = open_table(Path(sys.argv[1]))
print(repr(float(table.read(0, len(table), table.columns).sum())), flush=True)
"""


def of(cache: Path) -> dict[str, Any]:
    return {"THROUGHTIME_CACHE": str(cache)}


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
    process = begun(SLOW_WRITER, tmp_path, path, tmp_path / "mark", "0.5", **of(cache))
    wait_for(tmp_path / "mark")
    monkeypatch.setattr(arrow, "_write", None)  # this process would fail if it wrote
    table = open_table(path)
    process.join(120)
    sums = [float(table.read(0, ROWS, "abc").sum()), float((tmp_path / "said").read_text())]
    assert sums == pytest.approx([values.sum()] * 2)
    assert len(list(tmp_path.glob("mark.*"))) == 1
    assert [file.suffix for file in cached(cache)] == [".arrow"]


def test_a_killed_writer_leaves_no_broken_file(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "r.csv", numbers())
    process = begun(SLOW_WRITER, tmp_path, path, tmp_path / "mark", "60", **of(cache))
    wait_for(tmp_path / "mark")
    process.kill()
    process.join()
    assert sorted(file.suffix for file in cached(cache)) == [".lock", ".tmp"]
    np.testing.assert_array_equal(open_table(path).read(0, ROWS, "abc"), numbers())
    assert [file.suffix for file in cached(cache)] == [".arrow"]


def test_without_a_writable_folder_another_is_asked_for(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    path = write(tmp_path / "r.csv", numbers())
    with pytest.raises(DataError, match=r"converted in .* THROUGHTIME_CACHE sets another folder"):
        open_table(path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "r.csv", numbers())
    code = (
        "import resource, sys; from pathlib import Path;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, {resource.RLIM_INFINITY}));"
        "from throughtime.stream.formats import open_table;"
        "open_table(Path(sys.argv[1]))"
    )
    done = elsewhere(code, path, **of(cache))
    assert done.code == 1
    assert "or the disk full?" in done.errors
    assert cached(cache) == []


def test_what_cannot_be_read_is_not_cached(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "r.csv", numbers())
    lines = path.read_text().split("\n")
    lines[29_000] = "1,2"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 29001 has 2 fields, the first one 3"):
        open_table(path)
    assert cached(cache) == []
