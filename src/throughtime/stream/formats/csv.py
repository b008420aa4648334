"""CSV with a header line. The file is scanned once when it is opened and its columns kept as arrays."""

import csv
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, ArrayTable


def open_csv(path: Path) -> ArrayTable:
    """Numeric columns become float64 (an empty field is NaN, a missing value); others stay text.

    Cost: memory for the whole table; large recordings belong in NPY or Parquet.

    Raises:
        DataError: as `read_columns`, and a first line of numbers.
    """
    columns = read_columns(path)
    if all(is_number(name) for name in columns):
        raise DataError(f"{path}: the first line holds numbers, expected a header line with column names; add one")
    return ArrayTable(path, {name: _values(column) for name, column in columns.items()})


def read_columns(path: Path) -> dict[str, list[str]]:
    """The fields of every column, as text.

    Raises:
        DataError: no header, duplicate column names, a line with more or fewer fields, or bytes that
            are not UTF-8; the line is named.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = _header(path, next(reader, []))
            rows: list[list[str]] = [[] for _ in header]
            blank = 0  # lines without a field: missing values of a single column, unless nothing follows
            for fields in reader:
                if not fields:
                    blank += len(header) == 1
                    continue
                if len(fields) != len(header):
                    raise DataError(f"{path}: line {reader.line_num} has {len(fields)} fields, the header has {len(header)}")
                for column, field in zip(rows, fields, strict=True):
                    column.extend([""] * blank)
                    column.append(field)
                blank = 0
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV file ({error}); expected UTF-8 text with a header line") from error
    return dict(zip(header, rows, strict=True))


def _header(path: Path, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    if not names:
        raise DataError(f"{path}: the file is empty, expected a header line with column names")
    if not names or "" in names or len(set(names)) < len(names):
        raise DataError(f"{path}: the first line is {names}, expected distinct column names")
    return names


def is_number(text: str) -> bool:
    """Whether a field holds a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _values(column: list[str]) -> Array:
    filled = [field if field.strip() else "nan" for field in column]
    try:
        return np.array(filled, dtype=np.float64)
    except ValueError:
        return np.array(column, dtype=np.str_)
