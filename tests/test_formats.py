"""Real files of every format: lazy, exact reads; truncated and malformed files are refused."""

import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from format_files import FORMATS, STEPS, Format, closed_formats, every_format
from throughtime.chunk import join
from throughtime.errors import DataError, MissingExtraError
from throughtime.stream.formats import SUFFIXES, open_table
from throughtime.stream.formats.table import Array


def test_every_suffix_is_a_row() -> None:
    assert {form.suffix for form in FORMATS.values()} == set(SUFFIXES)


@every_format
def test_file_gives_the_numbers_that_were_written(form: Format, tmp_path: Path) -> None:
    path = tmp_path / f"recording{form.suffix}"
    expected = form.make(path)
    if form.suffix != ".hea":  # whose name other files know
        path = path.rename(path.with_suffix(form.suffix.upper()))
    epoch = join(list(tt.Stream(path, lanes=1, chunk=20)))
    assert torch.equal(epoch.inputs[:, 0].double(), torch.from_numpy(expected))
    assert epoch.targets is None
    assert open_table(path).rate == form.rate


@every_format
def test_any_rows_and_columns_are_those_of_the_whole(form: Format, tmp_path: Path) -> None:
    expected = form.make(tmp_path / f"r{form.suffix}")
    table = open_table(tmp_path / f"r{form.suffix}")
    assert (table.read(0, len(table), table.columns) == expected).all()

    @given(start=st.integers(0, STEPS + 5), steps=st.integers(0, STEPS), backwards=st.booleans())
    def check(start: int, steps: int, backwards: bool) -> None:
        names = table.columns[::-1] if backwards else table.columns[:1]
        part = table.read(start, start + steps, names)
        of_column = {name: table.read(0, STEPS, [name]) for name in names}
        assert np.array_equal(
            part, np.concatenate([of_column[name] for name in names], axis=1)[start : start + steps]
        )

    check()
    assert sum(table.read(0, 1, [name]).shape[1] for name in table.columns) == 3
    with pytest.raises(DataError, match=r"rows -5 to 3 asked for"):
        table.read(-5, 3, table.columns)


def test_tables_are_read_by_spawned_and_forked_processes(tmp_path: Path) -> None:
    """Also those that this process reads at the same time, at another place."""
    tables: list[tuple[Any, Array]] = []
    for name, form in FORMATS.items():
        expected = form.make(tmp_path / f"{name}{form.suffix}")
        table = open_table(tmp_path / f"{name}{form.suffix}")
        table.read(0, 40, table.columns)
        tables.append((table, expected))
        assert len(pickle.dumps(table)) < 2000  # the place, not the numbers
    (tmp_path / "tables").write_bytes(pickle.dumps(tables))
    reads = "(t.read(40, 90, t.columns) == e[40:90]).all()"
    code = (
        f"import pickle, sys; sys.exit(not all({reads} for t, e in pickle.load(open(sys.argv[1],"
        " 'rb'))))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "tables")], check=True)
    with warnings.catch_warnings(
        action="ignore", category=DeprecationWarning
    ):  # Python 3.12 warns of threads
        child = os.fork()
    if not child:
        os._exit(0 if all((t.read(40, 90, t.columns) == e[40:90]).all() for t, e in tables) else 1)
    assert all((t.read(40, 60, t.columns) == e[40:60]).all() for t, e in tables)
    assert os.waitpid(child, 0)[1] == 0


@every_format
def test_file_that_changes_while_it_is_read_is_refused(form: Format, tmp_path: Path) -> None:
    path = tmp_path / f"r{form.suffix}"
    form.make(path)
    table = open_table(path)
    before = table.read(0, 50, table.columns)
    (tmp_path / "another").write_text("changes")
    assert np.array_equal(table.read(0, 50, table.columns), before)
    content = path / "a" / "zarr.json" if form.suffix == ".zarr" else form.content(path)
    whole = content.read_bytes()
    content.write_bytes(whole[:500])
    with pytest.raises(
        DataError,
        match=(
            rf"{re.escape(str(content))}: changed since it was opened; do not|from {len(whole)} to"
            r" 500 bytes"
        ),
    ):
        table.read(50, 60, table.columns)
    content.write_bytes(whole)
    os.utime(content, ns=(1, 1))  # as long as before, and older
    copy = pickle.loads(pickle.dumps(table))
    for reader in (table, copy):
        with pytest.raises(
            DataError,
            match=rf"{re.escape(str(content))}: changed since it was opened; do not write",
        ):
            reader.read(0, 50, table.columns)
    content.unlink()
    with pytest.raises(DataError, match="is gone since it was opened"):
        table.read(0, 50, table.columns)


@pytest.mark.parametrize("files", [0.0, 0.003, 0.1, 0.5, 0.9, 0.999])
@closed_formats
def test_file_cut_short_is_refused_by_name(files: float, form: Format, tmp_path: Path) -> None:
    path = tmp_path / f"r{form.suffix}"
    form.make(path)
    content = form.content(path)
    whole = content.read_bytes()
    list(tt.Stream(path, lanes=1, chunk=50))  # whole it serves
    content.write_bytes(whole[: int(len(whole) * files)])
    with pytest.raises(DataError, match=re.escape(str(path))):
        list(tt.Stream(path, lanes=1, chunk=50))


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"CDF\x01", b"ARROW1", b"OggS" + bytes(30), bytes(300)],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_of_another_kind_is_refused_by_name(
    suffix: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"r{suffix}"
    if suffix == ".zarr":
        path.mkdir()
        (path / "zarr.json").write_bytes(content)
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path))):
        list(tt.Stream(path, lanes=1, chunk=5))


EXTRAS = {
    ".h5": ("h5py", "hdf5"),
    ".zarr": ("zarr", "zarr"),
    ".nc": ("netCDF4", "netcdf"),
    ".wav": ("soundfile", "audio"),
    ".hea": ("wfdb", "wfdb"),
}


@pytest.mark.parametrize("suffix", EXTRAS)
def test_missing_library_is_named_with_its_extra(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(form for form in FORMATS.values() if form.suffix == suffix).make(tmp_path / f"r{suffix}")
    library, extra = EXTRAS[suffix]
    open_table(tmp_path / f"r{suffix}")  # it is there
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        MissingExtraError,
        match=rf"r\{suffix}: .* needs {library}.*; pip install 'throughtime\[{extra}\]'",
    ):
        open_table(tmp_path / f"r{suffix}")


def test_classic_netcdf_names_scipy_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMATS["netcdf-classic"].make(tmp_path / "r.nc")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(
        MissingExtraError,
        match=r"r\.nc: its format needs scipy\.io; pip install 'throughtime\[netcdf\]'",
    ):
        open_table(tmp_path / "r.nc")


def test_csv_cut_within_a_line_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    FORMATS["csv"].make(path)
    text = path.read_text().splitlines()
    path.write_text("\n".join([*text[:40], text[40].rsplit(",", 1)[0]]))
    with pytest.raises(
        DataError, match=rf"{re.escape(str(path))}: line 41 has 2 fields, the first one 3"
    ):
        open_table(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_file_is_refused(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"nowhere{suffix}: no such (file|folder)"):
        open_table(tmp_path / f"nowhere{suffix}")


def test_folder_and_unknown_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match=r"folder\.csv: .* a folder of files: tt\.Stream"):
        open_table(tmp_path / "folder.csv")
    with pytest.raises(DataError, match="no such file"):
        open_table(tmp_path / "none.csv")
    (tmp_path / "r.txt").write_text("a\n1\n")
    with pytest.raises(
        DataError,
        match=(
            r"r\.txt: expected a file of one of the formats \.arrow, \.bdf, \.csv, .*,"
            r" \.zarr; read others with their library"
        ),
    ):
        open_table(tmp_path / "r.txt")


MALFORMED: dict[str, tuple[str, bytes, str]] = {
    "csv-short-line": ("r.csv", b"a,b\n1,2\n3\n", "line 3 has 1 fields, the first one 2"),
    "csv-header-only": ("r.csv", b"a,b\n", "is empty, expected at least one step"),
    "csv-duplicate-columns": (
        "r.csv",
        b"a, a\n1,2\n",
        r"the first line is \['a', 'a'\], expected distinct",
    ),
    "csv-unnamed-column": (
        "r.csv",
        b"a,\n1,2\n",
        r"the first line is \['a', ''\], expected distinct",
    ),
    "npy-text": ("r.npy", b"hello", "not a readable .npy file"),
    "wav-text": ("r.wav", b"RIFF", "r.wav"),
    "parquet-text": ("r.parquet", b"PAR1 and nothing more", "not a readable Parquet file"),
}


@pytest.mark.parametrize(
    ("name", "content", "reason"), list(MALFORMED.values()), ids=list(MALFORMED)
)
def test_malformed_file_is_refused_with_its_position(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        DataError,
        match=(
            rf"{re.escape(str(tmp_path / name))}.*{reason}"
            if reason != name
            else re.escape(str(tmp_path))
        ),
    ):
        tt.Stream(tmp_path / name, lanes=1, chunk=4)


ARRAYS: dict[str, tuple[dict[str, Any] | Array, str]] = {
    "npy-3d": (
        np.zeros((3, 2, 2)),
        r"holds 0 float64 \(3, 2, 2\), expected .* \(steps,\) or \(steps, features\)",
    ),
    "npy-0d": (np.array(1.0), r"holds 0 float64 \(\), expected"),
    "npy-complex": (np.zeros((3, 2), complex), "holds 0 complex128 .* expected arrays of numbers"),
    "npy-objects": (np.array([None, 1], dtype=object), "not a readable .npy file"),
    "npy-no-rows": (np.zeros((0, 2)), "is empty, expected at least one step"),
    "npz-unequal": (
        {"a": np.zeros(3), "b": np.zeros(4)},
        r"holds a float64 \(3,\), b float64 \(4,\), expected arrays of numbers",
    ),
    "npz-0d": ({"a": np.zeros(3), "b": np.array(1.0)}, r"b float64 \(\), expected"),
    "npz-none": ({}, "holds no array, expected arrays of numbers"),
}


@pytest.mark.parametrize(("arrays", "reason"), list(ARRAYS.values()), ids=list(ARRAYS))
def test_arrays_that_are_no_recording_are_refused(
    arrays: dict[str, Any] | Array, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / ("r.npz" if isinstance(arrays, dict) else "r.npy")
    if isinstance(arrays, dict):
        np.savez(path, **arrays)
    else:
        np.save(path, arrays, allow_pickle=True)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}.*{reason}"):
        tt.Stream(path, lanes=1, chunk=4)
