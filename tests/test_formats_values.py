"""What the columns of a file hold: gaps, text, odd types; and two files that make one recording."""

from pathlib import Path

import edfio
import h5py
import netCDF4
import numpy as np
import pytest
import soundfile

from format_files import matrix
from throughtime.errors import DataError
from throughtime.stream.formats import open_table


def test_edf_with_gaps_in_time_is_refused(tmp_path: Path) -> None:
    notes = [edfio.EdfAnnotation(0, None, "begin")]
    edfio.Edf([edfio.EdfSignal(np.arange(300.0), 100)], annotations=notes).write(tmp_path / "r.edf")
    content = (tmp_path / "r.edf").read_bytes()
    assert len(open_table(tmp_path / "r.edf")) == 300
    (tmp_path / "r.edf").write_bytes(content.replace(b"EDF+C", b"EDF+D"))
    with pytest.raises(DataError, match=r"r\.edf: has gaps in time"):
        open_table(tmp_path / "r.edf")


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


@pytest.mark.parametrize("columns_of_time", [1, 2])
def test_classic_netcdf_with_growing_time_is_refused_where_it_is_cut_short(
    columns_of_time: int, tmp_path: Path
) -> None:
    """NetCDF-C reads zeros past the end of a file; SciPy refuses to map it."""
    path = tmp_path / "r.nc"
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
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
