"""Time stamps: which texts are some, what they mean, whether they ascend, and their rate."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from throughtime.errors import DataError
from throughtime.stream.formats import open_table, times
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.times import (
    parse_times,
    rate_of_times,
    time_kinds,
    time_texts,
)
from throughtime.stream.layout import Layout
from throughtime.stream.recording import Part, step_times
from throughtime.stream.sources import as_recording

FORMS = {
    "ymd": ["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f", "%Y/%m/%d %H:%M", "%Y-%m-%d"],
    "dmy": ["%d.%m.%Y %H:%M", "%d.%m.%Y", "%d/%m/%Y %H:%M:%S", "%d-%m-%Y %H:%M"],
    "mdy": ["%m/%d/%Y", "%m/%d/%Y %H:%M"],
}


def form(texts: list[str]) -> str:
    return (*time_kinds(pa.array(texts)), "")[0]


moments = st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1))  # noqa: DTZ001 (without a zone)


@given(
    time=moments,
    pair=st.sampled_from([(order, form) for order, forms in FORMS.items() for form in forms]),
)
def test_a_time_means_what_python_reads(time: datetime, pair: tuple[str, str]) -> None:
    order, form = pair
    text = time.strftime(form)
    expected = np.datetime64(datetime.strptime(text, form), "ns")  # noqa: DTZ007 (without a zone)
    assert parse_times(pa.array([text]), order).to_numpy()[0] == expected


@given(
    time=moments,
    minutes=st.integers(-14 * 60, 14 * 60),
)
def test_times_with_a_zone_become_utc(time: datetime, minutes: int) -> None:
    local = time.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    assert form([local.isoformat()]) == "ymdZ"
    utc = local.astimezone(UTC).replace(tzinfo=None)
    values = parse_times(pa.array([local.isoformat()]), "ymdZ").to_numpy()
    assert values[0] == np.datetime64(utc, "ns")


def test_months_and_days_are_told_apart_by_all_stamps() -> None:
    assert form(["1/13/2020 10:00"]) == "mdy"
    assert form(["13/1/2020 10:00", "14/1/2020 10:00"]) == "dmy"
    assert form(["1/2/2020 10:00", "1/13/2020 10:00"]) == "mdy"
    for texts in (["1/1/2020 10:00", "1/2/2020 10:00"], ["1/2/2020"]):  # no order of rows decides
        assert [kind[:3] for kind in time_kinds(pa.array(texts))] == ["mdy", "dmy"]
    assert form(["01.02.2020"]) == "dmy"
    assert form(["2024-01-01T00", "2024-01-01T01"]) == "ymd"  # the hour alone


NO_TIMES = [
    "1.2.3",
    "1.2.00",
    "20200309",
    "1600000000",
    "N",
    "2020-01-01 10:00 or so",
    "10:14:33",
    "3/19/2020 1:00 PM",
    "192.168.10.1",
]


@pytest.mark.parametrize("text", NO_TIMES)
def test_other_texts_are_no_times(text: str) -> None:
    assert not form([text])


def test_a_column_of_times_is_no_input(tmp_path: Path) -> None:
    stamps = np.arange("2020-01-01", "2020-01-03", dtype="M8[h]").astype("M8[ms]")
    path = tmp_path / "r.parquet"
    data = pa.table({"when": stamps, "x": np.arange(48.0)})
    parquet.write_table(data, path, row_group_size=20)
    table = open_table(path)
    assert table.times == ("when",)
    np.testing.assert_array_equal(table.read(5, 48, ["when"])[:, 0], stamps[5:].astype("M8[ns]"))
    recording = as_recording(path, 0)
    assert recording.read(0, 48).inputs.shape == (48, 1)
    part = step_times(Part(recording, 10, 20), 1, 3)
    assert part is not None
    assert time_texts(part) == ["2020-01-01T11:00:00", "2020-01-01T12:00:00"]
    with pytest.raises(DataError, match=r"inputs .* no time stamps: when"):
        Layout(inputs=("x", "when")).input_rows(table)


def rate(values: Any, block: int = 65_536) -> float | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(times, "_BLOCK", block)
        return rate_of_times("it", "day", ArrayRows("times", values))


@pytest.mark.parametrize("block", [1, 2, 9])
def test_the_first_row_that_goes_back_is_refused(block: int) -> None:
    days = ["2020-01-01", "NaT", "2020-01-03", "2020-01-02", "2020-01-01"]
    reason = "row 3 of 'day', 2020-01-02T00:00:00, is earlier than .*, 2020-01-03T00:00:00"
    with pytest.raises(DataError, match=reason):
        rate(np.array(days, "M8[ns]"), block)


RATES: dict[str, tuple[npt.NDArray[Any], float | None]] = {
    "hours": (np.arange(50) * 3.6e12, 1 / 3600),
    "256 Hz in milliseconds": (np.round(np.arange(2000) * 1e3 / 256) * 1e6, 256.0),
    "a clock that jitters": (np.arange(500) * 1e7 + np.arange(500) % 7 * 2e4, 100.0),
    "a gap": (np.append(np.arange(50), 52) * 1e9, None),
    "months": (np.cumsum([31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] * 2) * 8.64e13, None),
    "an empty one": (np.append(np.arange(50) * 1e9, np.nan), None),
    "too few to tell": (np.arange(5) * 1e9, None),
    "2.5 s in seconds": (np.floor(np.arange(500) * 2.5) * 1e9, 0.4),
    "10 s, then 15 s": (np.cumsum([10] * 200 + [15] * 200) * 1e9, None),
    "a slower stretch": (np.cumsum([10] * 90 + [12] * 20 + [10] * 90) * 1e9, None),
}


@pytest.mark.parametrize("kind", list(RATES))
@pytest.mark.parametrize("block", [13, 4000])
def test_evenly_spaced_stamps_have_a_rate(kind: str, block: int) -> None:
    """Mutants: without `unit` rounded stamps have none; without `spacing` those with a gap do."""
    values, expected = RATES[kind]
    known = np.where(np.isnan(values), 0, values).astype(np.int64).view("M8[ns]")
    stamps = np.where(np.isnan(values), np.datetime64("NaT"), known)
    wanted = None if expected is None else pytest.approx(expected, rel=1e-3)
    assert rate(stamps, block) == wanted
