"""What a file or frame holds beside plain numbers: gaps, other types, times of an index."""

import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import xarray as xr
from pyarrow import feather, parquet

import throughtime as tt
from throughtime.errors import DataError
from throughtime.stream.formats import open_table
from throughtime.stream.rows import as_table, time_rows

STEPS = 120
HOURS = np.datetime64("2020-03-28T12:00:00") + np.arange(STEPS) * np.timedelta64(3600, "s")
U = np.arange(STEPS) * 0.5


def test_whole_numbers_with_gaps_are_floating_in_every_part_of_the_file(tmp_path: Path) -> None:
    """Also where there is none: a stream refuses a column whose type changes on the way."""
    table = pa.table({"n": [1, 2, 3, None], "b": [True, False, None, True], "whole": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "r.parquet", row_group_size=2)
    feather.write_feather(table, tmp_path / "r.feather", chunksize=2)
    # whether a column has gaps is unknown here until it is read to the end
    parquet.write_table(table, tmp_path / "s.parquet", row_group_size=2, write_statistics=False)
    for name in ("r.parquet", "r.feather", "s.parquet"):
        opened = open_table(tmp_path / name)
        assert opened.read(0, 1, ["n"]).dtype == np.float64
        assert name[0] == "s" or opened.read(0, 1, ["whole"]).dtype == np.int64
        expected = [[1, 1], [0, 2], [np.nan, 3], [1, np.nan]]
        np.testing.assert_array_equal(opened.read(0, 4, ["b", "n"]), expected)


def test_a_time_that_nanoseconds_cannot_hold_is_refused(tmp_path: Path) -> None:
    """The 9999-12-31 of data bases wrapped to 1816; without the column the rest is read."""
    times = pd.Series(HOURS.astype("M8[s]")).replace(HOURS[3], pd.Timestamp("9999-12-31"))
    frame = pd.DataFrame({"when": times.astype("M8[s]"), "u": U})
    frame.to_parquet(tmp_path / "r.parquet")
    for table in (open_table(tmp_path / "r.parquet"), as_table(frame)):
        rows = time_rows(table)
        assert rows is not None
        assert rows.read(0, 3)[2] == HOURS[2]
        with pytest.raises(DataError, match=r"'when': holds the time 9999-12-31.* from 1678 to"):
            rows.read(0, 10)
    with pytest.raises(DataError, match=r"'when': holds the time 9999.* exclude it"):
        tt.recording(frame, inputs="u")
    assert tt.recording(frame, exclude="when").read(0, 2).inputs[:, 0].tolist() == [0, 0.5]


FRAMES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "decimals": (lambda: pd.DataFrame({"u": [Decimal(0), Decimal(2)] * 60}), [2.0, 0.0]),
    "polars decimals": (
        lambda: pl.DataFrame({"u": [0.0, 2.0] * 60}).cast(pl.Decimal(10, 2)),
        [2.0, 0.0],
    ),
    "polars enum": (
        lambda: pl.DataFrame({"u": ["0", "2"] * 60}).cast(pl.Enum(["0", "2"])),
        ["2", "0"],
    ),
}


@pytest.mark.parametrize("kind", list(FRAMES))
def test_extension_types_of_frames_are_numbers_and_text(kind: str) -> None:
    make, expected = FRAMES[kind]
    assert as_table(make()).read(1, 3, ("u",))[:, 0].tolist() == expected


def test_times_of_an_index_and_of_coordinates_are_read() -> None:
    for data in (
        pd.DataFrame({"u": U}, index=pd.DatetimeIndex(HOURS)),
        xr.Dataset({"u": ("time", U)}, coords={"time": HOURS}),
    ):
        recording: Any = tt.recording(data)
        assert recording.input_columns == ("u",)
        np.testing.assert_array_equal(recording.times.read(0, STEPS), HOURS)
        np.testing.assert_array_equal(recording.times.read(50, 60), HOURS[50:60])


def test_words_for_missing_values_stay_text_among_other_texts(tmp_path: Path) -> None:
    """A class may be called None."""
    (tmp_path / "r.csv").write_text("u,label,v\n" + "NA,N,1.5\n2.0,None,NULL\n, None ,N/A\n" * 40)
    table = open_table(tmp_path / "r.csv")
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
