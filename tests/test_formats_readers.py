"""Files of unusual form: the columns are those that each format's own library reads."""

import pickle
import struct
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import soundfile
import xarray as xr
import zarr
from pyarrow import feather, parquet

import throughtime as tt
from throughtime.errors import DataError
from throughtime.stream.formats import open_table
from throughtime.stream.rows import as_table, time_rows

Array: TypeAlias = npt.NDArray[Any]
STEPS = 120
X = np.random.default_rng(0).normal(size=(STEPS, 3))
HOURS = np.datetime64("2020-03-28T12:00:00") + np.arange(STEPS) * np.timedelta64(3600, "s")


def zarr_times(path: Path) -> Array:
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, values in (("when", HOURS.astype("M8[s]")), ("x", X)):
        array = group.create_array(name, shape=values.shape, dtype=values.dtype)
        array[...] = values
    return X


def parquet_index(path: Path) -> Array:
    """pandas stores the numbers of rows as `__index_level_0__`, which is no signal."""
    frame = pd.DataFrame({"u": X[:, 0]}, index=pd.Index(np.arange(STEPS) + 7))
    frame.to_parquet(path)
    return pd.read_parquet(path).to_numpy()


def parquet_decimals(path: Path) -> Array:
    parquet.write_table(pa.table({"price": [Decimal("1.25")] * STEPS}), path)
    return np.full(STEPS, 1.25)


def feather_dictionary(path: Path) -> Array:
    codes = pa.array([5, 7, None] * (STEPS // 3)).dictionary_encode()
    feather.write_feather(pa.table({"code": codes}), path, compression="zstd", chunksize=50)
    return feather.read_table(path)["code"].to_pandas().astype(float).to_numpy()


def wav_odd_chunks(path: Path) -> Array:
    """8 bits, with chunks of odd length before and after the data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)

    form = struct.pack("<HHIIHH", 1, 1, 8000, 8000, 1, 8)
    data = bytes(range(255))
    body = (
        chunk(b"LIST", b"abc") + chunk(b"fmt ", form) + chunk(b"data", data) + chunk(b"id3 ", b"x")
    )
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body)
    return soundfile.read(path, dtype="float32")[0]


def wfdb_segments(path: Path) -> Array:
    """Two segments, as in MIMIC, with a gap between them and a signal that one of them lacks."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        import wfdb  # pandas 3 warns of what wfdb 4.3 uses

        folder = str(path.parent)
        for name, signals in (("s0", ["a"]), ("s1", ["b", "a"])):
            wfdb.wrsamp(
                name,
                fs=100,
                units=["mV"] * len(signals),
                sig_name=signals,
                p_signal=X[:50, : len(signals)],
                fmt=["16"] * len(signals),
                write_dir=folder,
            )
        layout = "~ 0 200/mV 16 0 0 0 0 a\n~ 0 200/mV 16 0 0 0 0 b\n"
        (path.parent / "layout.hea").write_text(f"layout 2 100 0\n{layout}")
        path.write_text("r/4 2 100 110\nlayout 0\ns0 50\n~ 10\ns1 50\n")
        record: Any = wfdb.rdrecord(str(path.with_suffix("")))
        return record.p_signal


FILES: dict[str, tuple[str, Callable[[Path], Array]]] = {
    "zarr times": ("r.zarr", zarr_times),
    "parquet index": ("r.parquet", parquet_index),
    "parquet decimals": ("r.parquet", parquet_decimals),
    "feather dictionary": ("r.feather", feather_dictionary),
    "wav odd chunks": ("r.wav", wav_odd_chunks),
    "wfdb segments": ("r.hea", wfdb_segments),
}


@pytest.mark.parametrize("kind", list(FILES))
def test_columns_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    name, make = FILES[kind]
    expected = make(tmp_path / name)
    table = open_table(tmp_path / name)
    columns = [column for column in table.columns if column not in table.times]
    expected = expected.reshape(len(expected), -1)
    np.testing.assert_allclose(table.read(0, len(table), columns), expected, rtol=1e-6)
    np.testing.assert_allclose(table.read(31, 77, columns), expected[31:77], rtol=1e-6)


def test_integers_of_parquet_without_statistics_have_one_type(tmp_path: Path) -> None:
    """Whether a column has gaps is then unknown until it is read to the end."""
    values = [None if i == 100 else i for i in range(STEPS)]
    path = tmp_path / "r.parquet"
    options: dict[str, Any] = {"row_group_size": 64, "write_statistics": False}
    parquet.write_table(pa.table({"i": pa.array(values, pa.int32())}), path, **options)
    table = open_table(path)
    assert {table.read(a, a + 10, ("i",)).dtype for a in (0, 95)} == {np.dtype(np.float64)}


def test_a_time_that_nanoseconds_cannot_hold_is_refused(tmp_path: Path) -> None:
    """The 9999-12-31 of data bases wrapped to 1816."""
    times = pd.Series(HOURS.astype("M8[s]")).replace(HOURS[3], pd.Timestamp("9999-12-31"))
    frame = pd.DataFrame({"when": times.astype("M8[s]"), "u": X[:, 0]})
    frame.to_parquet(tmp_path / "r.parquet")
    for table in (open_table(tmp_path / "r.parquet"), as_table(frame)):
        rows = time_rows(table)
        assert rows is not None
        assert rows.read(0, 3)[2] == HOURS[2]
        with pytest.raises(DataError, match=r"'when': holds the time 9999-12-31.* from 1678 to"):
            rows.read(0, 10)


FRAMES: dict[str, tuple[Callable[[], Any], Array | None]] = {
    "decimals": (lambda: pd.DataFrame({"u": [Decimal(0), Decimal(2)] * 60}), np.arange(2.0)),
    "polars decimals": (
        lambda: pl.DataFrame({"u": [0.0, 2.0] * 60}).cast(pl.Decimal(10, 2)),
        np.arange(2.0),
    ),
    "polars categories": (
        lambda: pl.DataFrame({"u": ["0", "2"] * 60}).cast(pl.Categorical),
        None,
    ),
    "polars enum": (lambda: pl.DataFrame({"u": ["0", "2"] * 60}).cast(pl.Enum(["0", "2"])), None),
}


@pytest.mark.parametrize("kind", list(FRAMES))
def test_extension_types_of_frames_are_numbers_and_text(kind: str) -> None:
    make, numbers = FRAMES[kind]
    values = as_table(make()).read(1, 3, ("u",))[:, 0].tolist()
    assert values == (["2", "0"] if numbers is None else [2.0, 0.0])


DATES: dict[str, Callable[[Path], Any]] = {
    "pandas index": lambda _: pd.DataFrame({"u": X[:, 0]}, index=pd.DatetimeIndex(HOURS)),
    "xarray": lambda _: xr.Dataset({"u": ("time", X[:, 0])}, coords={"time": HOURS}),
}


def written_csv(path: Path, form: str) -> Path:
    times = [datetime.fromtimestamp(int(t), UTC) for t in HOURS.astype(int)]
    lines = [f"{t.strftime(form)},{u}" for t, u in zip(times, X[:, 0].tolist(), strict=True)]
    path.write_text("\n".join(["first,second,u", *lines]))
    return path


@pytest.mark.parametrize("kind", list(DATES))
def test_times_of_an_index_and_of_coordinates_are_read(kind: str, tmp_path: Path) -> None:
    recording: Any = tt.recording(DATES[kind](tmp_path))
    assert recording.input_columns == ("u",)
    np.testing.assert_array_equal(recording.times.read(0, STEPS), HOURS)
    np.testing.assert_array_equal(recording.times.read(50, 60), HOURS[50:60])


STYLES = {
    "%d.%m.%Y %H:%M": HOURS,
    "%Y-%m-%d %H:%M:%S+02": HOURS - np.timedelta64(2, "h"),
    "%Y-%m-%d %H:%M:%S UTC": HOURS,
}


@pytest.mark.parametrize("style", list(STYLES))
def test_national_styles_of_time_stamps(style: str, tmp_path: Path) -> None:
    path = written_csv(tmp_path / "r.csv", style.replace(",", ";"))
    path.write_text(path.read_text().replace(",", "|").replace(";", ",").replace("second|", ""))
    rows = time_rows(open_table(path))
    assert rows is not None
    np.testing.assert_array_equal(rows.read(0, STEPS), STYLES[style])


def test_words_for_missing_values_are_missing(tmp_path: Path) -> None:
    """They stay text among other texts: a class may be called None."""
    path = tmp_path / "r.csv"
    path.write_text("u,label,v\n" + "NA,N,1.5\n2.0,None,NULL\n, None ,N/A\n" * 40)
    table = open_table(path)
    expected = np.tile([[np.nan, 1.5], [2.0, np.nan], [np.nan, np.nan]], (40, 1))
    np.testing.assert_array_equal(table.read(0, 120, ("u", "v")), expected)
    assert table.read(0, 2, ("label",))[:, 0].tolist() == ["N", "None"]


def test_large_files_have_the_times_of_small_ones(tmp_path: Path) -> None:
    """Of a cache file: times, and words for missing values."""
    count = 20_000
    times = np.datetime64("2019-12-30") + np.arange(count) * np.timedelta64(61, "s")
    lines = [
        f"{t[8:10]}.{t[5:7]}.{t[:4]} {t[11:]};{i},5;{i if i % 7 else 'NA'}"
        for i, t in enumerate(map(str, times))
    ]
    path = tmp_path / "r.csv"
    path.write_text("\n".join(["time;u;v", *lines]))
    assert path.stat().st_size > 2**18
    for _ in range(2):  # written, then opened
        recording: Any = pickle.loads(pickle.dumps(tt.recording(path)))
        np.testing.assert_array_equal(recording.times.read(15_000, count), times[15_000:])
        steps = recording.read(14, 16).inputs
        np.testing.assert_array_equal(steps, [[14.5, np.nan], [15.5, 15]])


def test_an_index_of_pandas_that_may_be_values_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"5": [1.0, 2.0]}, index=[7, 8]).to_csv(tmp_path / "r.csv")
    with pytest.raises(DataError, match=r"an index of pandas has no name: to_csv"):
        open_table(tmp_path / "r.csv")
