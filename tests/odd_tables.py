"""Odd but legal Parquet, Arrow and Feather files, and what pyarrow reads in them."""

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from odd_files import Reference, Register

TABLES = Register()
COUNTS = [1, 2, 3, 4, 5]
VALUES = [0.5, -1.25, 3e8, 0.1, -0.0]
UTC = dt.UTC
DAYS = [dt.datetime(2020, 1, day) for day in range(1, 6)]  # noqa: DTZ001
MOMENTS = [dt.datetime(2020, 1, 1, 10, 0, second) for second in range(5)]  # noqa: DTZ001


def numbers(column: Any) -> list[Any]:
    """The values of an Arrow column, exactly; NaN where one is null."""
    values = column.to_pylist()
    nested = any(isinstance(value, list) for value in values)
    return values if nested else [_number(value) for value in values]


def _number(value: Any) -> Any:
    if value is None:
        return float("nan")
    return float(value) if isinstance(value, Decimal) else value


def reference(table: pa.Table, **others: Any) -> Reference:
    """The columns u and v as numbers, as far as the table has them; others by keyword."""
    return Reference({"u": numbers(table["u"]), "v": numbers(table["v"])}, **others)


def parquet(path: Path, v: Any, **options: Any) -> pa.Table:
    """Write the column v between two others, and read it again."""
    pyarrow.parquet.write_table(pa.table({"u": pa.array(COUNTS), "v": v}), path, **options)
    return pyarrow.parquet.ParquetFile(path).read()


def arrow(path: Path, v: Any, **options: Any) -> pa.Table:
    """Write the column v beside another as an Arrow file, and read it again."""
    pyarrow.feather.write_feather(pa.table({"u": pa.array(COUNTS), "v": v}), str(path), **options)
    return pyarrow.feather.read_table(str(path))


def labelled(table: pa.Table) -> Reference:
    """The column v holds text."""
    return Reference({"u": numbers(table["u"])}, {"v": table["v"].to_pylist()})


def timed(table: pa.Table) -> Reference:
    """The column v holds time stamps."""
    times = table["v"].cast(pa.timestamp(getattr(table["v"].type, "unit", "s")))
    return Reference({"u": numbers(table["u"])}, times=times.to_numpy(), refused=["v"])


@TABLES.common(".parquet")
def parquet_plain(path: Path) -> Reference:
    return reference(parquet(path, pa.array(VALUES)))


@TABLES.common(".parquet")
def parquet_dictionary(path: Path) -> Reference:
    return labelled(parquet(path, pa.array(["N", "V", "N", None, "A"]).dictionary_encode()))


@TABLES.common(".parquet")
def parquet_text_in_row_groups(path: Path) -> Reference:
    return labelled(parquet(path, pa.array(["N", "V", "N", "ä", None]), row_group_size=2))


@TABLES.odd(".parquet")
def parquet_dictionary_of_numbers(path: Path) -> Reference:
    return reference(parquet(path, pa.array([7, 9, 7, None, 8]).dictionary_encode()))


@TABLES.common(".parquet")
def parquet_decimals(path: Path) -> Reference:
    values = [Decimal("1.50"), Decimal("-2.25"), None, Decimal("0.01"), Decimal("12345678.90")]
    return reference(parquet(path, pa.array(values, pa.decimal128(12, 2))))


@TABLES.odd(".parquet")
def parquet_decimals_256(path: Path) -> Reference:
    values = [Decimal(10**40), Decimal(1), None, Decimal(2), Decimal(3)]
    return reference(parquet(path, pa.array(values, pa.decimal256(50, 3))))


@TABLES.common(".parquet")
def parquet_nulls_in_integers(path: Path) -> Reference:
    return reference(parquet(path, pa.array([1, None, 3, None, 5], pa.int32())))


@TABLES.odd(".parquet")
def parquet_nulls_in_large_integers(path: Path) -> Reference:
    return reference(parquet(path, pa.array([2**53 + 1, None, 3, 4, 5], pa.int64())))


@TABLES.odd(".parquet")
def parquet_large_integers(path: Path) -> Reference:
    return reference(parquet(path, pa.array([2**53 + 1, 2**53, 2**63 - 1, -(2**63), 0])))


@TABLES.odd(".parquet")
def parquet_uint64(path: Path) -> Reference:
    return reference(parquet(path, pa.array([2**64 - 1, 2**63, 1, 2, 3], pa.uint64())))


@TABLES.common(".parquet")
def parquet_small_integers(path: Path) -> Reference:
    return reference(parquet(path, pa.array([-128, 127, 0, 1, 2], pa.int8())))


@TABLES.common(".parquet")
def parquet_booleans(path: Path) -> Reference:
    return reference(parquet(path, pa.array([True, False, True, True, False])))


@TABLES.odd(".parquet")
def parquet_booleans_with_nulls(path: Path) -> Reference:
    return reference(parquet(path, pa.array([True, None, True, True, False])))


@TABLES.common(".parquet")
def parquet_nulls_and_nan(path: Path) -> Reference:
    return reference(parquet(path, pa.array([1.5, None, float("nan"), 4.5, float("inf")])))


@TABLES.odd(".parquet")
def parquet_float16(path: Path) -> Reference:
    return reference(parquet(path, pa.array(np.array([0.1, 1, 2, 3, 65504], np.float16))))


@TABLES.common(".parquet")
def parquet_float32(path: Path) -> Reference:
    return reference(parquet(path, pa.array(np.array([0.1, 1e-45, 3.4e38, 1, 2], np.float32))))


@TABLES.common(".parquet")
def parquet_row_groups_of_one_row(path: Path) -> Reference:
    return reference(parquet(path, pa.array(VALUES), row_group_size=1))


@TABLES.common(".parquet")
def parquet_zstd(path: Path) -> Reference:
    return reference(parquet(path, pa.array(VALUES), compression="zstd"))


@TABLES.common(".parquet")
def parquet_gzip_pages_2(path: Path) -> Reference:
    return reference(
        parquet(path, pa.array(VALUES), compression="gzip", data_page_version="2.0", version="2.6")
    )


@TABLES.odd(".parquet")
def parquet_byte_stream_split(path: Path) -> Reference:
    return reference(
        parquet(path, pa.array(VALUES), use_dictionary=False, use_byte_stream_split=True)
    )


@TABLES.common(".parquet")
def parquet_times_with_zone(path: Path) -> Reference:
    moments = [moment.replace(tzinfo=UTC) for moment in MOMENTS]
    return timed(parquet(path, pa.array(moments, pa.timestamp("us", "Europe/Berlin"))))


@TABLES.common(".parquet")
def parquet_times_in_milliseconds(path: Path) -> Reference:
    return timed(parquet(path, pa.array(MOMENTS, pa.timestamp("ms"))))


@TABLES.odd(".parquet")
def parquet_times_int96(path: Path) -> Reference:
    v = pa.array(MOMENTS, pa.timestamp("ns"))
    return timed(parquet(path, v, use_deprecated_int96_timestamps=True))


@TABLES.common(".parquet")
def parquet_dates(path: Path) -> Reference:
    return timed(parquet(path, pa.array(DAYS, pa.date32())))


@TABLES.odd(".parquet")
def parquet_times_missing(path: Path) -> Reference:
    return timed(parquet(path, pa.array([*MOMENTS[:2], None, *MOMENTS[3:]], pa.timestamp("us"))))


@TABLES.odd(".parquet")
def parquet_times_of_day(path: Path) -> Reference:
    table = parquet(path, pa.array([moment.time() for moment in MOMENTS], pa.time64("us")))
    micros = np.array(table["v"].cast(pa.int64()).to_pylist())
    return Reference(
        {"u": numbers(table["u"])}, times=micros.astype("datetime64[us]"), refused=["v"]
    )


@TABLES.odd(".parquet")
def parquet_durations(path: Path) -> Reference:
    table = parquet(path, pa.array(COUNTS, pa.duration("ms")))
    return Reference({"u": numbers(table["u"])}, refused=["v"])


@TABLES.odd(".parquet")
def parquet_lists(path: Path) -> Reference:
    table = parquet(path, pa.array([[1.0], [2.0, 3.0], None, [], [4.0]]))
    return Reference({"u": numbers(table["u"])}, refused=["v"])


@TABLES.odd(".parquet")
def parquet_lists_of_fixed_size(path: Path) -> Reference:
    table = parquet(path, pa.array([[i, i + 0.5] for i in range(5)], pa.list_(pa.float64(), 2)))
    return reference(table)


@TABLES.odd(".parquet")
def parquet_structs(path: Path) -> Reference:
    table = parquet(path, pa.array([{"a": 1, "b": 2.5}] * 5))
    return Reference({"u": numbers(table["u"])}, refused=["v"])


@TABLES.odd(".parquet")
def parquet_bytes(path: Path) -> Reference:
    table = parquet(path, pa.array([b"1", b"2", b"\xff", b"", None]))
    return Reference({"u": numbers(table["u"])}, refused=["v"])


@TABLES.odd(".parquet")
def parquet_nulls_alone(path: Path) -> Reference:
    return reference(parquet(path, pa.nulls(5)))


@TABLES.common(".parquet")
def parquet_of_pandas(path: Path) -> Reference:
    frame = pd.DataFrame({"u": COUNTS, "v": VALUES}, index=range(10, 15))
    frame.to_parquet(path)
    frame = pd.read_parquet(path)
    return Reference({str(name): column.tolist() for name, column in frame.items()})


@TABLES.common(".parquet")
def parquet_of_pandas_by_time(path: Path) -> Reference:
    pd.DataFrame({"u": COUNTS, "v": VALUES}, index=pd.DatetimeIndex(MOMENTS)).to_parquet(path)
    frame = pd.read_parquet(path)
    return Reference(
        {str(name): column.tolist() for name, column in frame.items()}, times=frame.index.to_numpy()
    )


@TABLES.odd(".parquet")
def parquet_of_pandas_filtered(path: Path) -> Reference:
    frame = pd.DataFrame({"u": COUNTS, "v": VALUES})
    frame[frame["v"] > 0].to_parquet(path)
    frame = pd.read_parquet(path)
    return Reference({str(name): column.tolist() for name, column in frame.items()})


@TABLES.common(".parquet")
def parquet_names_not_ascii(path: Path) -> Reference:
    pyarrow.parquet.write_table(pa.table({"Größe 1": COUNTS, "温.度": VALUES}), path)
    table = pyarrow.parquet.ParquetFile(path).read()
    return Reference({name: numbers(table[name]) for name in table.column_names})


@TABLES.common(".parquet")
def parquet_columns_400(path: Path) -> Reference:
    columns = {f"c{i}": [float(i + step) for step in range(3)] for i in range(400)}
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=2)
    table = pyarrow.parquet.ParquetFile(path).read()
    return Reference({name: numbers(table[name]) for name in table.column_names})


@TABLES.common(".feather")
def feather_lz4(path: Path) -> Reference:
    return reference(arrow(path, pa.array(VALUES), compression="lz4"))


@TABLES.common(".arrow")
def arrow_uncompressed(path: Path) -> Reference:
    return reference(arrow(path, pa.array(VALUES), compression="uncompressed"))


@TABLES.common(".arrow")
def arrow_batches_of_two(path: Path) -> Reference:
    return reference(arrow(path, pa.array([1.5, None, 2.5, None, 3.5]), chunksize=2))


@TABLES.common(".arrow")
def arrow_dictionary(path: Path) -> Reference:
    return labelled(arrow(path, pa.array(["N", "V", "N", None, "A"]).dictionary_encode()))


@TABLES.odd(".arrow")
def arrow_dictionaries_that_differ(path: Path) -> Reference:
    chunks = [pa.array(["N", "V"]).dictionary_encode(), pa.array(["V", "A"]).dictionary_encode()]
    table = pa.table({"u": pa.chunked_array([[1, 2], [3, 4]]), "v": pa.chunked_array(chunks)})
    table = table.unify_dictionaries()
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return labelled(pa.ipc.open_file(path).read_all())


@TABLES.odd(".arrow")
def arrow_stream(path: Path) -> Reference:
    table = pa.table({"u": COUNTS, "v": VALUES})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return reference(pa.ipc.open_stream(path).read_all())


@TABLES.odd(".arrow")
def arrow_empty_batches(path: Path) -> Reference:
    table = pa.table({"u": COUNTS, "v": VALUES})
    with pa.ipc.new_file(path, table.schema) as writer:
        for part in (table[:0], table[:2], table[2:2], table[2:]):
            for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]:
                writer.write_batch(batch)
    return reference(pa.ipc.open_file(path).read_all())


@TABLES.common(".arrow")
def arrow_large_text(path: Path) -> Reference:
    return labelled(arrow(path, pa.array(["N", "V", "N", None, "A"], pa.large_string())))


@TABLES.odd(".arrow")
def arrow_text_views(path: Path) -> Reference:
    table = pa.table({"u": COUNTS, "v": pa.array(["N", "V", "N", None, "A"], pa.string_view())})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return labelled(pa.ipc.open_file(path).read_all())


@TABLES.odd(".arrow")
def arrow_runs(path: Path) -> Reference:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array([1.5, 2.5]))
    table = pa.table({"u": COUNTS, "v": runs})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return reference(pa.ipc.open_file(path).read_all())


@TABLES.common(".arrow")
def arrow_times_in_seconds(path: Path) -> Reference:
    return timed(arrow(path, pa.array(MOMENTS, pa.timestamp("s"))))


@TABLES.odd(".arrow")
def arrow_times_in_nanoseconds_with_zone(path: Path) -> Reference:
    moments = [moment.replace(tzinfo=UTC) for moment in MOMENTS]
    return timed(arrow(path, pa.array(moments, pa.timestamp("ns", "+05:30"))))


@TABLES.odd(".arrow")
def arrow_float16(path: Path) -> Reference:
    return reference(arrow(path, pa.array(np.array([0.1, 1, 2, 3, 65504], np.float16))))


@TABLES.odd(".arrow")
def arrow_uint64(path: Path) -> Reference:
    return reference(arrow(path, pa.array([2**64 - 1, 2**63, 1, 2, 3], pa.uint64())))


@TABLES.odd(".arrow")
def arrow_decimals_32(path: Path) -> Reference:
    values = [Decimal("1.50"), Decimal("-2.25"), None, Decimal("0.01"), Decimal("9.90")]
    return reference(arrow(path, pa.array(values, pa.decimal32(5, 2))))
