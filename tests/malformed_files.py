"""MalformedFile files: each is refused by an error that names the file, and its line and column."""

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import edfio
import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import soundfile

import odd_arrays
import odd_netcdf
import odd_signals

MALFORMED: list["MalformedFile"] = []


class MalformedFile(NamedTuple):
    """A case: the function that writes the file, and the line and column of the fault."""

    file: str
    write: Callable[[Path], None]
    line: int | None = None
    column: str | None = None

    def __str__(self) -> str:
        return self.file


def text(
    name: str, content: str | bytes, *, line: int | None = None, column: str | None = None
) -> None:
    """Add a CSV file with the place of its fault."""
    raw = content if isinstance(content, bytes) else content.encode()

    def write(path: Path) -> None:
        path.write_bytes(raw)

    MALFORMED.append(MalformedFile(f"{name}.csv", write, line, column))


def malformed(suffix: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Add a binary file that the function writes."""

    def add(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
        MALFORMED.append(MalformedFile(f"{write.__name__}{suffix}", write))
        return write

    return add


def truncated(suffix: str, write: Callable[[Path], Any], share: float, part: str = "") -> None:
    """Add a file that ends after a share of its bytes; or another file of its recording does."""

    def cut(path: Path) -> None:
        write(path)
        victim = path.with_suffix(part) if part else path
        content = victim.read_bytes()
        victim.write_bytes(content[: int(len(content) * share)])

    MALFORMED.append(
        MalformedFile(f"cut_at_{share:.0%}_{write.__name__}{suffix}".replace("%", ""), cut)
    )


MANY = "".join(f"{number},{number % 7}.5\n" for number in range(300_000))  # more than 2 MB
FEW = "1,2.5\n2,3.5\n"

# Lines, quotes and separators
text("short_line", "u,v\n1,2\n3\n4,5\n", line=3)
text("long_line", "u,v\n1,2\n3,4,5\n6,7\n", line=3)
text("short_last_line", "u,v\n1,2\n3,4\n5", line=4)
text("short_line_no_header", "1,2\n3,4\n5\n", line=3)
text("short_line_late", f"u,v\n{MANY}1\n{FEW}", line=300_002)
text("long_line_late", f"u,v\n{MANY}1,2,3\n{FEW}", line=300_002)
text("short_line_after_quoted_line_break", 'u,label\n1,"a\nb"\n2\n', line=4)
text("long_line_after_blank_lines", "u,v\n1,2\n\n\n3,4,5\n", line=5)
text("long_first_line", "u,v\n1,2,3\n4,5,6\n", line=2)
text("open_quote", 'u,label\n1,"a\n2,b\n3,c\n', line=2)
text("open_quote_at_the_end", 'u,label\n1,a\n2,"b', line=3)
text("text_after_quote", 'u,label\n1,"a"b\n2,c\n', line=2)
text("quotes_by_backslashes", 'u,label\n1,"a \\"b\\" c"\n2,d\n', line=2)
text("mixed_separators", "u,v\n1,2\n3;4\n5,6\n", line=3)
text("mixed_tabs", "u\tv\n1\t2\n3 4\n", line=3)
text("header_by_other_separator", "u;v\n1,2\n3,4\n")
text("two_tabs", "u\tv\tw\n1\t2\t3\n4\t\t5\t6\n", line=3)
text("two_tabs_in_header", "u\t\tv\n1\t2\n3\t4\n", line=1)

# Bytes
text("nul_byte", b"u,v\n1,2\n3,\x004\n5,6\n", line=3)
text("nul_byte_in_text", b"u,label\n1,N\n2,a\x00b\n", line=3)
text("nul_bytes_at_the_end", b"u,v\n1,2\n3,4\n" + bytes(512), line=4)
text("not_utf8", b"u,label\n1,N\n2,\xe4\n", line=3)
text("not_utf8_late", f"u,v\n{MANY}".encode() + b"1,\xe4\n", line=300_002)
text("not_utf8_name", b"u,Gr\xf6\xdfe\n1,2\n", line=1)
text("utf16_odd_byte", "u,v\n1,2\n3,4\n".encode("utf-16")[:-1])
text("utf8_then_utf16", b"u,v\n1,2\n" + "3,4\n".encode("utf-16-le"), line=3)

# Numbers
text("text_in_numbers", "u,v\n1,2\n3,abc\n5,6\n", line=3, column="v")
text("text_in_numbers_late", f"u,v\n{MANY}1,abc\n{FEW}", line=300_002, column="v")
text("text_in_first_column_late", f"u,v\n{MANY}x,1\n{FEW}", line=300_002, column="u")
text("missing_mark_late", f"u,v\n{MANY}1,-\n{FEW}", line=300_002, column="v")
text("date_in_numbers_late", f"u,v\n{MANY}1,2020-01-01\n{FEW}", line=300_002, column="v")
text("two_points", "u,v\n1,2.5\n3,1.2.5\n", line=3, column="v")
text("thousands_or_decimals", "u;v\n1;1,234\n2;2.5\n3;3,345\n", column="v")
text("comma_among_points", "u;v\n1;2.5\n2;3.5\n3;1,5\n", line=4, column="v")
text("comma_among_points_quoted", 'u,v\n1,2.5\n2,"3,5"\n', line=3, column="v")
text("comma_late", "u;v\n" + MANY.replace(",", ";") + "1;1,5\n", line=300_002, column="v")
text("points_and_commas", "u;v\n1;1.234,5\n2;2.5\n", column="v")
text("unit_behind_number", "u,v\n1,2.5\n2,3.5 m\n", line=3, column="v")
text("boolean_among_numbers", "u,v\n1,2\n2,True\n3,4\n", line=3, column="v")
text("two_minus_signs", "u,v\n1,2\n2,--3\n", line=3, column="v")

# Time stamps
text("version_as_date", "u,time\n1,1.2.00\n2,1.3.00\n", column="time")
text(
    "text_in_times",
    "u,time\n1,2020-01-01 10:00\n2,soon\n3,2020-01-01 10:02\n",
    line=3,
    column="time",
)
text("number_in_times", "u,time\n1,2020-01-01\n2,20200102\n3,7\n", column="time")
text("month_13", "u,time\n1,2020-12-01\n2,2020-13-01\n", line=3, column="time")
text("february_30", "u,time\n1,28.02.2020\n2,30.02.2020\n", line=3, column="time")
text("hour_25", "u,time\n1,2020-01-01 23:00\n2,2020-01-01 25:00\n", line=3, column="time")
text("second_61", "u,time\n1,2020-01-01 10:00:00\n2,2020-01-01 10:00:61\n", line=3, column="time")
text("two_forms_of_dates", "u,time\n1,2020-01-01\n2,02.01.2020\n", line=3, column="time")
text("day_and_month_contradict", "u,time\n1,13/01/2020\n2,01/14/2020\n", line=3, column="time")
text("day_or_month", "u,time\n1,01/02/2020\n2,01/03/2020\n3,01/05/2020\n", column="time")
text("day_or_month_or_year", "u,time\n1,10/11/12\n2,10/11/13\n", column="time")
text("zone_of_25_hours", "u,time\n1,2020-01-01T10:00+25:00\n2,2020-01-01T10:01+25:00\n", line=2)
text(
    "zone_sometimes",
    "u,time\n1,2020-01-01T10:00:00Z\n2,2020-01-01T10:00:01\n",
    line=3,
    column="time",
)
text("time_cut_late", "u,time\n" + "1,2020-01-01 10:00\n" * 120_000 + "2,2020-01-\n", line=120_002)

# First lines and names
text("no_header_first_text", "1,N\n2,V\n3,N\n", line=1)
text("names_twice", "u,v,u\n1,2,3\n4,5,6\n", line=1)
text("name_empty", "u,,w\n1,2,3\n4,5,6\n", line=1)
text("header_alone", "u,v\n")
text("header_twice", "u,v\n1,2\nu,v\n3,4\n", line=3, column="u")
text("empty", b"")
text("blank", "\n\n\n")
text("bom_alone", b"\xef\xbb\xbf")

# Text files that are no tables, and tables that are no text
text("json", '{"u": [1, 2, 3],\n "v": [4, 5, 6]}\n')
text("html", "<!DOCTYPE html>\n<html><body>404, not found</body></html>\n")


@malformed(".csv")
def gzip_as_csv(path: Path) -> None:
    path.write_bytes(gzip.compress(b"u,v\n1,2\n3,4\n"))


@malformed(".csv")
def parquet_as_csv(path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"u": [1.0, 2.0]}), path)


@malformed(".csv")
def xlsx_as_csv(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("xl/worksheets/sheet1.xml", "<worksheet/>")


def _content(suffix: str, content: bytes, name: str) -> None:
    def write(path: Path) -> None:
        path.write_bytes(content)

    MALFORMED.append(MalformedFile(f"{name}{suffix}", write))


SUFFIXES = ("parquet", "arrow", "feather", "h5", "nc", "npy", "npz", "wav", "flac", "edf", "hea")
for ending in SUFFIXES:
    _content(f".{ending}", b"", f"empty_{ending}")
    _content(f".{ending}", b"u,v\n1,2\n3,4\n" * 40, f"csv_as_{ending}")


# Files of other faults


@malformed(".zarr")
def zarr_without_metadata(path: Path) -> None:
    odd_arrays.zarr_matrix(path)
    (path / "zarr.json").unlink()


@malformed(".zarr")
def zarr_with_a_chunk_cut(path: Path) -> None:
    odd_arrays.zarr_matrix(path)
    chunk = path / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:7])


@malformed(".edf")
def edf_letters_in_header(path: Path) -> None:
    odd_signals.edf_two_signals(path)
    content = bytearray(path.read_bytes())
    content[464:472] = b"-1,5e+02"
    path.write_bytes(content)


@malformed(".hea")
def wfdb_of_an_unknown_format(path: Path) -> None:
    odd_signals.wfdb_16(path)
    path.write_text(path.read_text().replace("dat 16 ", "dat 17 "))


@malformed(".parquet")
def parquet_names_twice(path: Path) -> None:
    pyarrow.parquet.write_table(pa.table([[1, 2], [3, 4]], names=["u", "u"]), path)


@malformed(".parquet")
def parquet_without_rows(path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"u": pa.array([], pa.float64())}), path)


@malformed(".h5")
def hdf5_complex(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["u"] = np.arange(5) + 1j


@malformed(".nc")
def netcdf_without_variables(path: Path) -> None:
    netCDF4.Dataset(path, "w").close()


@malformed(".npy")
def npy_objects(path: Path) -> None:
    np.save(path, np.array([1, "a", None], object), allow_pickle=True)


@malformed(".npy")
def npy_complex(path: Path) -> None:
    np.save(path, np.arange(5) + 1j)


@malformed(".npy")
def npy_scalar(path: Path) -> None:
    np.save(path, np.float64(1))


@malformed(".npz")
def npz_unequal_lengths(path: Path) -> None:
    np.savez(path, u=np.arange(5.0), v=np.arange(6.0))


@malformed(".edf")
def edf_two_rates(path: Path) -> None:
    signals = (edfio.EdfSignal(np.arange(200.0), 100), edfio.EdfSignal(np.arange(100.0), 50))
    edfio.Edf(signals).write(path)


@malformed(".wav")
def wav_without_samples(path: Path) -> None:
    soundfile.write(path, np.zeros(0), 8000)


@malformed(".hea")
def wfdb_without_signals(path: Path) -> None:
    odd_signals.wfdb_16(path)
    path.with_suffix(".dat").unlink()


def parquet(path: Path) -> None:
    rows = np.arange(2_000.0)
    pyarrow.parquet.write_table(pa.table({"u": rows, "v": rows / 7}), path)


def arrow(path: Path) -> None:
    rows = np.arange(2_000.0)
    table = pa.table({"u": rows, "v": rows / 7})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


for fraction in (0.5, 0.97):
    truncated(".parquet", parquet, fraction)
    truncated(".arrow", arrow, fraction)
    truncated(".h5", odd_arrays.hdf5_columns, fraction)
    truncated(".nc", odd_netcdf.netcdf_classic, fraction)
    truncated(".nc", odd_netcdf.netcdf_4, fraction)
    truncated(".npy", odd_arrays.npy_fortran, fraction)
    truncated(".npz", odd_arrays.npz_compressed, fraction)
    truncated(".wav", odd_signals.wav_pcm_16, fraction)
    truncated(".flac", odd_signals.flac_16, fraction)
    truncated(".edf", odd_signals.edf_two_signals, fraction)
    truncated(".hea", odd_signals.wfdb_16, fraction, ".dat")
