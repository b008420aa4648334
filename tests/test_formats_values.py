"""What the columns of a file hold: gaps, text, odd types; and two files that make one recording."""

from pathlib import Path
from typing import Any

import edfio
import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from pyarrow import feather

from format_files import FORMATS, matrix
from throughtime.errors import DataError
from throughtime.stream.formats import open_table
from throughtime.stream.formats.table import Array


def test_an_npz_cut_short_is_refused_and_closed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros(1000))
    whole = (tmp_path / "a.npz").read_bytes()
    for share in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "b.npz").write_bytes(whole[:share])
        with pytest.raises(DataError, match=r"b\.npz: not a readable"):
            open_table(tmp_path / "b.npz")


def test_whole_numbers_with_gaps_are_floating_in_every_part_of_the_file(tmp_path: Path) -> None:
    """Also where there is none: a stream refuses a column whose type changes on the way."""
    table = pa.table({"n": [1, 2, 3, None], "b": [True, False, None, True], "whole": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "r.parquet", row_group_size=2)
    feather.write_feather(table, tmp_path / "r.feather", chunksize=2)
    for suffix in (".parquet", ".feather"):
        opened = open_table(tmp_path / f"r{suffix}")
        assert opened.read(0, 1, ["n"]).dtype == np.float64
        assert opened.read(0, 1, ["whole"]).dtype == np.int64
        np.testing.assert_array_equal(
            opened.read(0, 4, ["b", "n"]), [[1, 1], [0, 2], [np.nan, 3], [1, np.nan]]
        )


def test_sound_that_cannot_be_read_from_the_middle_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "r.wav", matrix(1), 8000, subtype="GSM610")
    with pytest.raises(
        DataError, match=r"r\.wav: GSM 6\.10 cannot be read from the middle; convert it to FLAC"
    ):
        open_table(tmp_path / "r.wav")


def test_edf_signals_of_another_rate_are_refused_together(tmp_path: Path) -> None:
    signals = [
        edfio.EdfSignal(np.arange(rate * 3.0), rate, label=f"at{rate}") for rate in (100, 50, 100)
    ]
    edfio.Edf(signals).write(tmp_path / "r.edf")
    table = open_table(tmp_path / "r.edf")
    assert table.columns == ("at100", "at50", "at100 (2)")
    assert len(table) == 300
    assert table.read(10, 20, ("at100", "at100 (2)")).shape == (10, 2)
    with pytest.raises(
        DataError,
        match=(
            r"r\.edf: 100 samples per second have \['at100', 'at100 \(2\)'\], not all of"
            r" \['at100', 'at50', 'at100 \(2\)'\]; choose columns of one rate"
        ),
    ):
        table.read(0, 10, table.columns)


@pytest.mark.parametrize("rates", [(100, 100, 100, 1, 1, 1, 1), (1, 100), (1, 100, 100)])
def test_edf_steps_are_those_of_most_samples(tmp_path: Path, rates: tuple[int, ...]) -> None:
    """As in sleep recordings: few signals of 100 Hz and more of 1 Hz. Mutant: counted by signal."""
    signals = [
        edfio.EdfSignal(np.arange(rate * 3.0), rate, label=f"s{i}") for i, rate in enumerate(rates)
    ]
    edfio.Edf(signals).write(tmp_path / "r.edf")
    table = open_table(tmp_path / "r.edf")
    fast = tuple(f"s{i}" for i, rate in enumerate(rates) if rate == 100)
    assert (table.rate, len(table)) == (100, 300)
    assert table.read(10, 20, fast).shape == (10, len(fast))
    with pytest.raises(DataError, match=r"100 samples per second have .*; choose columns"):
        table.read(0, 10, table.columns)


def bdf_bytes(integers: Array, per_record: int) -> bytes:
    """A BDF file by its specification: two signals of 24-bit integers and one of annotations."""
    steps, count = len(integers) // per_record, 3

    def field(texts: list[str], width: int) -> bytes:
        return "".join(text.ljust(width) for text in texts).encode("latin-1")

    header = b"\xffBIOSEMI" + b" " * 160 + b"01.01.2001.02.03"
    header += field([str(256 * (count + 1))], 8) + field(["BDF+C"], 44)
    header += field([str(steps), "0.5"], 8) + field([str(count)], 4)
    header += field(["Fp1 \u00b5V", "Status", "BDF Annotations"], 16) + b" " * 80 * count
    header += field(["uV"] * count, 8) + field(["-262144", "-8388608", "-1"], 8)
    header += field(["262143", "8388607", "1"], 8) + field(["-8388608"] * count, 8)
    header += field(["8388607"] * count, 8) + b" " * 80 * count
    header += field([str(per_record)] * 2 + ["4"], 8) + b" " * 32 * count
    records = b""
    for record in range(steps):
        rows = integers[record * per_record : (record + 1) * per_record]
        for column in rows.T.tolist():
            records += b"".join(int(v).to_bytes(3, "little", signed=True) for v in column)
        records += b"+0\x14\x14\0\0" + b"\0" * 6
    return header + records


def test_bdf_integers_of_24_bits_are_those_of_its_specification(tmp_path: Path) -> None:
    integers = np.random.default_rng(0).integers(-(2**23), 2**23, size=(40, 2))
    integers[:3] = [[-(2**23), -(2**23)], [2**23 - 1, 2**23 - 1], [-1, 0]]
    (tmp_path / "r.bdf").write_bytes(bdf_bytes(integers, 8))
    table = open_table(tmp_path / "r.bdf")
    assert (table.columns, len(table), table.rate) == (("Fp1 \u00b5V", "Status"), 40, 16.0)
    np.testing.assert_array_equal(table.read(0, 40, ["Status"])[:, 0], integers[:, 1])
    span = 2**19 - 1
    expected = (integers[:, 0] + 2**23) / (2**24 - 1) * span - 2**18
    np.testing.assert_allclose(table.read(3, 37, ["Fp1 \u00b5V"])[:, 0], expected[3:37], rtol=1e-12)
    content = (tmp_path / "r.bdf").read_bytes()
    (tmp_path / "cut.bdf").write_bytes(content[:-10])
    with pytest.raises(
        DataError, match=r"cut\.bdf: .*its header promises 5 data records of 60 bytes"
    ):
        open_table(tmp_path / "cut.bdf")
    (tmp_path / "gaps.bdf").write_bytes(content.replace(b"BDF+C", b"BDF+D"))
    with pytest.raises(DataError, match=r"gaps\.bdf: has gaps in time"):
        open_table(tmp_path / "gaps.bdf")


def test_columns_of_hdf5_are_the_longest_datasets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["u"], file["short"], file["cube"], file["scalar"] = (
            np.arange(9),
            np.arange(3),
            np.zeros((9, 2, 2)),
            1.0,
        )
        file["in/y"] = np.arange(18, dtype=">i2").reshape(9, 2)
        file["in/text"] = ["a"] * 9
    table = open_table(tmp_path / "r.h5")
    assert table.columns == ("in/text", "in/y", "u")
    np.testing.assert_array_equal(table.read(4, 6, ["u", "in/y"]), [[4, 8, 9], [5, 10, 11]])
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file["cube"] = np.zeros((9, 2, 2))
    with pytest.raises(
        DataError, match=r"none\.h5: holds cube float64 \(9, 2, 2\), expected arrays of numbers"
    ):
        open_table(tmp_path / "none.h5")


def test_more_files_are_read_than_handles_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of thousands of files does not use up what the system allows."""
    monkeypatch.setattr("throughtime.stream.formats.table.MAX_OPEN_FILES", 4)
    tables = []
    for index in range(12):
        soundfile.write(tmp_path / f"{index}.wav", np.full(100, index / 16), 8000, subtype="FLOAT")
        tables.append(open_table(tmp_path / f"{index}.wav"))
    for start in range(0, 100, 10):
        assert [float(table.read(start, start + 10, ["0"])[0, 0]) for table in tables] == [
            index / 16 for index in range(12)
        ]
    assert sum(table._file is not None for table in tables) == 4


def test_wfdb_signal_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    FORMATS["wfdb"].make(tmp_path / "r.hea")
    (tmp_path / "r.dat").unlink()
    with pytest.raises(
        DataError,
        match=r"r\.hea: not a readable WFDB record .*is a file missing or cut short",
    ):
        open_table(tmp_path / "r.hea")


@pytest.mark.parametrize("form", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET"])
@pytest.mark.parametrize("columns_of_time", [1, 2])
def test_classic_netcdf_with_growing_time_is_refused_where_it_is_cut_short(
    columns_of_time: int, form: Any, tmp_path: Path
) -> None:
    """NetCDF-C reads zeros past the end of a file; SciPy refuses to map it."""
    path = tmp_path / "r.nc"
    with netCDF4.Dataset(path, "w", format=form) as file:
        file.title = "odd"
        file.createDimension("time", None)
        file.createDimension("site", 3)
        for index in range(columns_of_time):
            file.createVariable(f"v{index}", "i2", ("time", "site"))[:] = np.arange(21).reshape(
                7, 3
            )
    table = open_table(path)
    np.testing.assert_array_equal(table.read(2, 4, ["v0"]), [[6, 7, 8], [9, 10, 11]])
    whole = path.read_bytes()
    for row in (len(whole) - 4, len(whole) - 30, 60, 20):
        path.write_bytes(whole[:row])
        with pytest.raises(DataError, match=r"r\.nc: .*cut short"):
            open_table(path)


def test_classic_netcdf_of_the_type_cdf_5_is_refused_with_the_line_that_converts_it(
    tmp_path: Path,
) -> None:
    """Nothing but NetCDF-C reads it, which cannot tell a file that is cut short."""
    path = tmp_path / "r.nc"
    with netCDF4.Dataset(path, "w", format="NETCDF3_64BIT_DATA") as file:
        file.createDimension("time", 4)
        file.createVariable("a", "f8", ("time",))[:] = np.arange(4.0)
    with pytest.raises(DataError, match=r"r\.nc: .*CDF-5: nccopy -k nc4 FILE COPY"):
        open_table(path)
