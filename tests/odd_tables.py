"""Odd but legal Parquet, Arrow and Feather files, and what pyarrow reads in them."""

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from odd_files import Reference, Writer, cases

COUNTS = [1, 2, 3, 4, 5]
VALUES = [0.5, -1.25, 3e8, 0.1, -0.0]
HALVES = pa.array(np.array([0.1, 1, 2, 3, 65504], np.float16))
LARGE = pa.array([2**64 - 1, 2**63, 1, 2, 3], pa.uint64())
LABELS = ["N", "V", "N", None, "A"]
MOMENTS = [dt.datetime(2020, 1, 1, 10, 0, second) for second in range(5)]  # noqa: DTZ001
ZONED = [moment.replace(tzinfo=dt.UTC) for moment in MOMENTS]
DAYS = [dt.date(2020, 1, day) for day in range(1, 6)]
PRICES = [Decimal("1.50"), Decimal("-2.25"), None, Decimal("0.01"), Decimal("9.90")]


def numbers(column: Any) -> list[Any]:
    """The values of an Arrow column, exactly; NaN where one is null."""
    values = column.to_pylist()
    nested = any(isinstance(value, list) for value in values)
    return values if nested else [_number(value) for value in values]


def _number(value: Any) -> Any:
    if value is None:
        return float("nan")
    return float(value) if isinstance(value, Decimal) else value


Kind = Callable[[pa.Table], Reference]


def values(table: pa.Table) -> Reference:
    """All columns hold numbers."""
    return Reference({name: numbers(table[name]) for name in table.column_names})


def labelled(table: pa.Table) -> Reference:
    """The column v holds text."""
    return Reference({"u": numbers(table["u"])}, {"v": table["v"].to_pylist()})


def timed(table: pa.Table) -> Reference:
    """The column v holds time stamps."""
    times = table["v"].cast(pa.timestamp(getattr(table["v"].type, "unit", "s")))
    return Reference({"u": numbers(table["u"])}, times=times.to_numpy(), refused=["v"])


def timed_by_day(table: pa.Table) -> Reference:
    """The column v holds times of a day in microseconds."""
    micros = np.array(table["v"].cast(pa.int64()).to_pylist()).astype("datetime64[us]")
    return Reference({"u": numbers(table["u"])}, times=micros, refused=["v"])


def refused(table: pa.Table) -> Reference:
    """The column v is no input."""
    return Reference({"u": numbers(table["u"])}, refused=["v"])


def table_of(v: Any) -> pa.Table:
    return pa.table({"u": pa.array(COUNTS), "v": v})


def parquet(content: Any, kind: Kind = values, **options: Any) -> Writer:
    """A table, or the column v beside another, by pyarrow."""

    def write(path: Path) -> Reference:
        table = content if isinstance(content, pa.Table) else table_of(content)
        pyarrow.parquet.write_table(table, path, **options)
        return kind(pyarrow.parquet.ParquetFile(path).read())

    return write


def arrow(v: Any, kind: Kind = values, **options: Any) -> Writer:
    def write(path: Path) -> Reference:
        pyarrow.feather.write_feather(table_of(v), str(path), **options)
        return kind(pyarrow.feather.read_table(str(path)))

    return write


def batches(*tables: pa.Table, kind: Kind = values) -> Writer:
    """An Arrow file of these batches, one of which may be empty."""

    def write(path: Path) -> Reference:
        with pa.ipc.new_file(path, tables[0].schema) as writer:
            for part in tables:
                for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], part.schema)]:
                    writer.write_batch(batch)
        return kind(pa.ipc.open_file(path).read_all())

    return write


def arrow_stream(path: Path) -> Reference:
    table = table_of(VALUES)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return values(pa.ipc.open_stream(path).read_all())


def pandas(frame: pd.DataFrame, times: Any = None) -> Writer:
    def write(path: Path) -> Reference:
        frame.to_parquet(path)
        columns = pd.read_parquet(path).items()
        return Reference({str(name): column.tolist() for name, column in columns}, times=times)

    return write


FRAME = pd.DataFrame({"u": COUNTS, "v": VALUES})
PLAIN = table_of(VALUES)
WIDE = pa.table({f"c{i}": [float(i + step) for step in range(3)] for i in range(400)})
DIFFERENT = [pa.array(words).dictionary_encode() for words in (["N", "V"], ["V", "A"])]
DICTIONARIES = pa.table({"u": [1, 2, 3, 4], "v": pa.chunked_array(DIFFERENT)}).unify_dictionaries()
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array([1.5, 2.5]))

COMMON: dict[str, Writer] = {
    "parquet_dictionary.parquet": parquet(pa.array(LABELS).dictionary_encode(), labelled),
    "parquet_text_in_row_groups.parquet": parquet(
        pa.array(["N", "V", "N", "ä", None]), labelled, row_group_size=2
    ),
    "parquet_decimals.parquet": parquet(pa.array(PRICES, pa.decimal128(12, 2))),
    "parquet_nulls_in_integers.parquet": parquet(pa.array([1, None, 3, None, 5], pa.int32())),
    "parquet_small_integers.parquet": parquet(pa.array([-128, 127, 0, 1, 2], pa.int8())),
    "parquet_booleans.parquet": parquet(pa.array([True, False, True, True, False])),
    "parquet_nulls_and_nan.parquet": parquet(pa.array([1.5, None, np.nan, 4.5, np.inf])),
    "parquet_float32.parquet": parquet(pa.array(np.array([0.1, 1e-45, 3.4e38, 1, 2], np.float32))),
    "parquet_row_groups_of_one_row.parquet": parquet(VALUES, row_group_size=1),
    "parquet_times_with_zone.parquet": parquet(
        pa.array(ZONED, pa.timestamp("us", "Europe/Berlin")), timed
    ),
    "parquet_times_in_milliseconds.parquet": parquet(pa.array(MOMENTS, pa.timestamp("ms")), timed),
    "parquet_dates.parquet": parquet(pa.array(DAYS), timed),
    "parquet_of_pandas.parquet": pandas(FRAME.set_axis(range(10, 15))),
    "parquet_of_pandas_by_time.parquet": pandas(
        FRAME.set_axis(pd.DatetimeIndex(MOMENTS)), np.array(MOMENTS, "M8[us]")
    ),
    "parquet_names_not_ascii.parquet": parquet(pa.table({"Größe 1": COUNTS, "温.度": VALUES})),
    "parquet_columns_400.parquet": parquet(WIDE, row_group_size=2),
    "feather_lz4.feather": arrow(VALUES, compression="lz4"),
    "arrow_uncompressed.arrow": arrow(VALUES, compression="uncompressed"),
    "arrow_batches_of_two.arrow": arrow(pa.array([1.5, None, 2.5, None, 3.5]), chunksize=2),
    "arrow_dictionary.arrow": arrow(pa.array(LABELS).dictionary_encode(), labelled),
    "arrow_large_text.arrow": arrow(pa.array(LABELS, pa.large_string()), labelled),
    "arrow_times_in_seconds.arrow": arrow(pa.array(MOMENTS, pa.timestamp("s")), timed),
}
ODD: dict[str, Writer] = {
    "parquet_dictionary_of_numbers.parquet": parquet(
        pa.array([7, 9, 7, None, 8]).dictionary_encode()
    ),
    "parquet_decimals_256.parquet": parquet(
        pa.array([Decimal(10**40), *PRICES[1:]], pa.decimal256(50, 3))
    ),
    "parquet_nulls_in_large_integers.parquet": parquet(pa.array([2**53 + 1, None, 3, 4, 5])),
    "parquet_large_integers.parquet": parquet(pa.array([2**53 + 1, 2**53, 2**63 - 1, -(2**63), 0])),
    "parquet_uint64.parquet": parquet(LARGE),
    "parquet_booleans_with_nulls.parquet": parquet(pa.array([True, None, True, True, False])),
    "parquet_float16.parquet": parquet(HALVES),
    "parquet_times_int96.parquet": parquet(
        pa.array(MOMENTS, pa.timestamp("ns")), timed, use_deprecated_int96_timestamps=True
    ),
    "parquet_times_missing.parquet": parquet(
        pa.array([*MOMENTS[:2], None, *MOMENTS[3:]], pa.timestamp("us")), timed
    ),
    "parquet_times_of_day.parquet": parquet(
        pa.array([moment.time() for moment in MOMENTS], pa.time64("us")), timed_by_day
    ),
    "parquet_durations.parquet": parquet(pa.array(COUNTS, pa.duration("ms")), refused),
    "parquet_lists.parquet": parquet(pa.array([[1.0], [2.0, 3.0], None, [], [4.0]]), refused),
    "parquet_lists_of_fixed_size.parquet": parquet(
        pa.array([[i, i + 0.5] for i in range(5)], pa.list_(pa.float64(), 2))
    ),
    "parquet_structs.parquet": parquet(pa.array([{"a": 1, "b": 2.5}] * 5), refused),
    "parquet_bytes.parquet": parquet(pa.array([b"1", b"2", b"\xff", b"", None]), refused),
    "parquet_nulls_alone.parquet": parquet(pa.nulls(5)),
    "parquet_of_pandas_filtered.parquet": pandas(FRAME.query("v > 0")),
    "arrow_dictionaries_that_differ.arrow": batches(DICTIONARIES, kind=labelled),
    "arrow_stream.arrow": arrow_stream,
    "arrow_empty_batches.arrow": batches(PLAIN[:0], PLAIN[:2], PLAIN[2:2], PLAIN[2:]),
    "arrow_text_views.arrow": batches(table_of(pa.array(LABELS, pa.string_view())), kind=labelled),
    "arrow_runs.arrow": batches(table_of(RUNS)),
    "arrow_times_in_nanoseconds_with_zone.arrow": arrow(
        pa.array(ZONED, pa.timestamp("ns", "+05:30")), timed
    ),
    "arrow_float16.arrow": arrow(HALVES),
    "arrow_uint64.arrow": arrow(LARGE),
    "arrow_decimals_32.arrow": arrow(pa.array(PRICES, pa.decimal32(5, 2))),
}
TABLES = cases(COMMON, ODD)
