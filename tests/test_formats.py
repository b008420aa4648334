"""Real files of every format: lazy, exact reads; truncated files are refused."""

import os
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import throughtime as tt
from format_files import FORMATS, STEPS, Format, closed_formats, every_format
from processes import elsewhere
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

    columns = {name: table.read(0, STEPS, [name]) for name in table.columns}
    for start, stop in ((0, 1), (17, 61), (STEPS - 1, STEPS + 5), (STEPS + 5, STEPS + 9), (8, 8)):
        for names in (table.columns[::-1], table.columns[:1]):
            wanted = np.concatenate([columns[name] for name in names], axis=1)[start:stop]
            assert np.array_equal(table.read(start, stop, names), wanted)
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
    assert elsewhere(code, tmp_path / "tables").code == 0  # opened none of them
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


@closed_formats
def test_file_cut_short_is_refused_by_name(form: Format, tmp_path: Path) -> None:
    path = tmp_path / f"r{form.suffix}"
    form.make(path)
    content = form.content(path)
    whole = content.read_bytes()
    list(tt.Stream(path, lanes=1, chunk=50))  # whole it serves
    for share in (0.0, 0.003, 0.1, 0.5, 0.9, 0.999):
        content.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(DataError, match=re.escape(str(path))):
            list(tt.Stream(path, lanes=1, chunk=50))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_of_another_kind_or_none_is_refused_by_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"r{suffix}"
    with pytest.raises(DataError, match=rf"r{suffix}: no such (file|folder)"):
        open_table(path)
    if suffix == ".zarr":
        path.mkdir()
    kinds = (
        b"",
        b"hello",
        b"\x89HDF\r\n\x1a\n",
        b"CDF\x01",
        b"ARROW1",
        b"OggS" + bytes(30),
        bytes(300),
    )
    for content in kinds:
        (path / "zarr.json" if suffix == ".zarr" else path).write_bytes(content)
        with pytest.raises(DataError, match=re.escape(str(path))):
            list(tt.Stream(path, lanes=1, chunk=5))


EXTRAS = {  # format, library and extra
    "h5": ("h5py", "hdf5"),
    "zarr": ("zarr", "zarr"),
    "netcdf": ("netCDF4", "netcdf"),
    "netcdf-classic": ("scipy.io", "netcdf"),
    "wav": ("soundfile", "audio"),
    "wfdb": ("wfdb", "wfdb"),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_missing_library_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"r{FORMATS[name].suffix}"
    FORMATS[name].make(path)
    library, extra = EXTRAS[name]
    open_table(path)  # it is there
    monkeypatch.setitem(sys.modules, library, None)
    said = rf"{re.escape(str(path))}: (.* )?needs {library}.*; pip install 'throughtime\[{extra}\]'"
    with pytest.raises(MissingExtraError, match=said):
        open_table(path)


def test_folder_and_unknown_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match=r"folder\.csv: .* a folder of files: tt\.Stream"):
        open_table(tmp_path / "folder.csv")
    (tmp_path / "r.txt").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"r\.txt: expected .* formats \.arrow, \.bdf, \.csv, .*"):
        open_table(tmp_path / "r.txt")
