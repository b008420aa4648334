"""Malformed files: each is refused by an error that names the file, and its line and column."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import soundfile

import odd_arrays
import odd_signals
from odd_files import Writer

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


def malformed(name: str, write: Callable[[Path], Any]) -> None:
    """Add a binary file that the function writes."""
    MALFORMED.append(MalformedFile(name, write))


def changed(name: str, write: Writer, change: Callable[[Path], object]) -> None:
    """Add a file that is whole before the change."""

    def both(path: Path) -> None:
        write(path)
        change(path)

    malformed(name, both)


def saved(name: str, array: Any) -> None:
    """Add an array by NumPy."""
    malformed(name, lambda path: np.save(path, array, allow_pickle=True))


MANY = "".join(
    f"{number},{number % 7}.5\n" for number in range(50_000)
)  # beyond the sample, and cached
FEW = "1,2.5\n2,3.5\n"

# Lines, quotes and separators
text("short_line", "u,v\n1,2\n3\n4,5\n", line=3)
text("long_line", "u,v\n1,2\n3,4,5\n6,7\n", line=3)
text("short_last_line", "u,v\n1,2\n3,4\n5", line=4)
text("short_line_late", f"u,v\n{MANY}1\n{FEW}", line=50_002)
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
text("nul_bytes_at_the_end", b"u,v\n1,2\n3,4\n" + bytes(512), line=4)
text("not_utf8", b"u,label\n1,N\n2,\xe4\n", line=3)
text("not_utf8_late", f"u,v\n{MANY}".encode() + b"1,\xe4\n", line=50_002)
text("not_utf8_name", b"u,Gr\xf6\xdfe\n1,2\n", line=1)
text("utf16_odd_byte", "u,v\n1,2\n3,4\n".encode("utf-16")[:-1])
text("utf8_then_utf16", b"u,v\n1,2\n" + "3,4\n".encode("utf-16-le"), line=3)

# Numbers
text("text_in_numbers", "u,v\n1,2\n3,abc\n5,6\n", line=3, column="v")
text("text_in_numbers_late", f"u,v\n{MANY}1,abc\n{FEW}", line=50_002, column="v")
text("two_points", "u,v\n1,2.5\n3,1.2.5\n", line=3, column="v")
text("thousands_or_decimals", "u;v\n1;1,234\n2;2.5\n3;3,345\n", column="v")
text("comma_among_points", "u;v\n1;2.5\n2;3.5\n3;1,5\n", line=4, column="v")
text("comma_among_points_quoted", 'u,v\n1,2.5\n2,"3,5"\n', line=3, column="v")
text("comma_late", "u;v\n" + MANY.replace(",", ";") + "1;1,5\n", line=50_002, column="v")
text("points_and_commas", "u;v\n1;1.234,5\n2;2.5\n", column="v")
text("boolean_among_numbers", "u,v\n1,2\n2,True\n3,4\n", line=3, column="v")

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
text("time_cut_late", "u,time\n" + "1,2020-01-01 10:00\n" * 20_000 + "2,2020-01-\n", line=20_002)

# First lines and names
text("no_header_first_text", "1,N\n2,V\n3,N\n", line=1)
text("decimals_over_whole_numbers", "400.5,410.5\n1,2\n3,4\n")
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


def written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def parquet(columns: Any, names: list[str]) -> Callable[[Path], None]:
    return lambda path: pyarrow.parquet.write_table(pa.table(columns, names=names), path)


malformed("gzip_as_csv.csv", written(gzip.compress(b"u,v\n1,2\n3,4\n")))
malformed("parquet_as_csv.csv", parquet([[1.0, 2.0]], ["u"]))
SUFFIXES = ("parquet", "arrow", "feather", "h5", "nc", "npy", "npz", "wav", "flac", "edf", "hea")
for ending in SUFFIXES:
    malformed(f"empty_{ending}.{ending}", written(b""))
    malformed(f"csv_as_{ending}.{ending}", written(b"u,v\n1,2\n3,4\n" * 40))


# Files of other faults


def chunk_cut(path: Path) -> None:
    chunk = path / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:7])


def unknown_format(path: Path) -> None:
    path.write_text(path.read_text().replace("dat 16 ", "dat 17 "))


def hdf5_complex(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["u"] = np.arange(5) + 1j


ZARR = odd_arrays.COMMON["zarr_matrix.zarr"]
EDF = odd_signals.COMMON["edf_two_signals.edf"]
WFDB = odd_signals.COMMON["wfdb_16.hea"]
changed("zarr_without_metadata.zarr", ZARR, lambda path: (path / "zarr.json").unlink())
changed("zarr_with_a_chunk_cut.zarr", ZARR, chunk_cut)
changed("edf_letters.edf", EDF, lambda path: odd_signals.changed(path, 464, b"-1,5e+02"))
changed("wfdb_of_an_unknown_format.hea", WFDB, unknown_format)
changed("wfdb_without_signals.hea", WFDB, lambda path: path.with_suffix(".dat").unlink())
malformed("parquet_names_twice.parquet", parquet([[1, 2], [3, 4]], ["u", "u"]))
malformed("parquet_without_rows.parquet", parquet([pa.array([], pa.float64())], ["u"]))
malformed("hdf5_complex.h5", hdf5_complex)
malformed("netcdf_without_variables.nc", lambda path: netCDF4.Dataset(path, "w").close())
saved("npy_objects.npy", np.array([1, "a", None], object))
saved("npy_complex.npy", np.arange(5) + 1j)
saved("npy_scalar.npy", np.float64(1))
saved("npy_3d.npy", np.zeros((3, 2, 2)))
saved("npy_without_rows.npy", np.zeros((0, 2)))
malformed("npz_unequal_lengths.npz", lambda path: np.savez(path, u=np.ones(5), v=np.ones(6)))
malformed("npz_empty.npz", np.savez)
malformed("wav_without_samples.wav", lambda path: soundfile.write(path, np.zeros(0), 8000))
