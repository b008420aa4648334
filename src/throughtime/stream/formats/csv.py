"""CSV: lines and quotes by Python's csv module, values by pyarrow, each line and field checked.

The begin shows the delimiter, the decimal mark and the names; the first rows show what columns
hold. A file with a field of another kind cannot be read.
"""

import codecs
import contextlib
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats.arrow import Batches, converted
from throughtime.stream.formats.table import Table, is_number
from throughtime.stream.formats.times import is_time, parse_times, time_kinds

compute: Any = import_module("pyarrow.compute")

FIELDS = 2**15  # of a block; more of them are slower, since they leave the cache
MIN_ROWS = 64  # of a block of many columns, at least
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")  # values, as in pandas
_EXPECTED = {  # of others a time stamp
    "number": "a number as above it, below 2^53 (float64 merges others); a decimal comma: --decimal"
    " , (decimal=',' in Python); thousands without a mark",
    "boolean": "true or false",
}
_SAMPLE, _RECORDS = 2**17, 200  # characters and records at most that show the dialect
_MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")


def open_csv(path: Path, delimiter: str | None = None, decimal: str | None = None) -> Table:
    r"""A CSV file, converted once, see `converted`; every line is checked.

    A column whose first filled field is a number is float64; an empty field is missing, and so is
    `NA` or `NULL`. One whose first field is a time stamp is times; whether 3/9
    is March or September is decided by the first 262,144 fields. One of `true` and `false` is 0
    and 1. All else is text. A field of another kind is an error. A first line of values like those
    of the second is no header: the columns are then called `0`, `1`, ... One whose first field
    alone is empty is of a frame of pandas: the index below it is no column, but for time stamps.

    Args:
        path: a file in UTF-8, or in UTF-16 with its byte order mark.
        delimiter: the character between fields. Default: detected, one of `,` `;` `|` and tab.
        decimal: the decimal mark of numbers, "." or ",". Default: detected.

    Raises:
        ConfigError: a delimiter or decimal mark that no file can have.
        DataError: duplicate or empty column names, a first line that may be names or values, a line
            with more or fewer fields, an open quote, a NUL, or bytes of another encoding; the
            message names the line.
    """
    delimiter = "\t" if delimiter == "tab" else delimiter
    if delimiter not in (None, *",;\t|:") or decimal not in (None, *".,"):
        raise ConfigError(
            f"delimiter {delimiter!r}, decimal mark {decimal!r}: expected , ; : | or tab, and a"
            " point or a comma; read files with another one by pandas: tt.recording(frame, ...)"
        )
    return converted(
        path, lambda: CsvFile(path, delimiter, decimal).values(), f"{delimiter}{decimal}"
    )


class CsvFile:
    """A CSV file: its dialect and its names.

    Attributes:
        names: of the columns.
        delimiter: the character between fields.
        decimal: the decimal mark.

    Raises:
        DataError: see `open_csv`.
    """

    def __init__(
        self, path: Path, delimiter: str | None = None, decimal: str | None = None
    ) -> None:
        self.path, lines, size = path, list[str](), 0
        for line in self._lines():
            lines.append(line)
            size += len(line)
            if size > _SAMPLE and len(lines) > 2:
                break
        # a decimal comma separates fields only where numbers with it are in quotes
        marks = delimiter or ";\t|" * (decimal == "," and '"' not in "".join(lines))
        self.delimiter, rows = _detect_delimiter(lines, marks)
        self.decimal = decimal or ("." if self.delimiter == "," else _decimal_mark(rows))
        if not rows:
            raise DataError(f"{path}: the file is empty, expected a header line with column names")
        names = self._header(rows)
        self.names = names or tuple(map(str, range(len(rows[0]))))
        self._skipped = bool(names)

    def _header(self, rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The names in the first record; none if it holds values.

        Raises:
            DataError: names are missing or double, or the record may be either.
        """
        top, below = (*rows[:2], rows[0])[:2]
        first, second = ([*map(self._kind_of, row)] for row in (top, below))
        like = all(a == b or "missed" in (a, b) for a, b in zip(first, second, strict=False))
        values, names = {*first} - {"missed"}, tuple(map(str.strip, top))
        index = not names[0] and all(names[1:])  # of pandas, without a name
        distinct = "" not in names[index:] and len({*names}) == len(names)
        # as pandas names columns, years above decimals, or decimals above whole numbers
        counts = len(names) > 2 and names == tuple(map(str, range(len(names))))
        decimals = like and not any(field.strip().lstrip("+-").isdecimal() for field in below)
        years = all(map(str.isdecimal, names)) and (counts or decimals)
        [own, *others] = ([self.decimal in f for f in row] for row in (names, below, *rows[2:]))
        waves = len(own) > 1 and all(own) and not any(map(any, others))
        is_text = "text" in values
        unlike = index or (distinct and (years or waves))
        if values and not (is_text or unlike) and (like or values == {"number"}):
            return ()
        is_header = is_text and not (len(rows) > 1 and like and values - {"text"})
        if not distinct or not (is_header or (index and rows[-1][0] == str(len(rows) - 2))):
            raise self._fault(
                f"the first line is {[*names]}, expected distinct column names with letters, or"
                " values as below; an index of pandas has no name: to_csv(path, index=False)"
            )
        return ("__index_level_0__", *names[1:]) if index else names

    def _kind_of(self, field: str) -> str:
        """What a field holds, roughly."""
        if field.strip() in MISSING:
            return "missed"
        return "number" if is_number(field, self.decimal) else "time" if is_time(field) else "text"

    def _lines(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        line = 0
        with self.path.open(encoding="utf-16" if marked else "utf-8-sig", newline="") as file:
            try:
                for line, text in enumerate(file, 1):
                    if "\0" in text:
                        raise self._fault(f"line {line} holds a NUL byte; save it as UTF-8")
                    yield text
            except UnicodeDecodeError as error:
                line += 1 + error.object[: error.start].count(b"\n")
                raise self._fault(
                    f"line {line} is no {error.encoding.upper()}; is it WINDOWS-1252, as Excel"
                    " writes? Save it as UTF-8"
                ) from error

    def _fault(self, text: str) -> DataError:
        return DataError(
            f"{self.path}: {text}; mend it, or read it with pandas or polars and pass the frame:"
            " tt.recording(frame, ...)"
        )

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The records, each with its last line; a blank line is a value of a single column."""
        reader = csv.reader(self._lines(), delimiter=self.delimiter, strict=True)
        line, width, begun, blank = 0, len(self.names), False, list[Any]()
        try:
            for record in reader:
                if len(record) == width:
                    begun = True
                    yield from blank
                    yield reader.line_num, record
                    blank.clear()
                elif record:
                    raise self._fault(
                        f"line {reader.line_num} has {len(record)} fields, the first one {width}"
                        f"{'; delete lines before the header' * (width == 1)}"
                    )
                elif width == 1 and begun:
                    blank.append((reader.line_num, [""]))  # values only if another one follows
                line = reader.line_num
        except csv.Error as error:
            raise self._fault(
                f"line {line + 1}: {error}; is a quote open, or text beside one?"
            ) from error

    def texts(self) -> Iterator[Any]:
        """All fields as text, in record batches.

        Raises:
            DataError: a line has more or fewer fields than the first; the message names it.
        """
        records = islice(self._records(), self._skipped, None)
        count = max(MIN_ROWS, FIELDS // len(self.names))
        while rows := [row for _, row in islice(records, count)]:
            columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, [*self.names])

    def values(self) -> Batches:
        """The schema, and the values in record batches.

        Raises:
            DataError: also while they are read: a field of another kind than those above it.
        """
        none = pa.array([], pa.string())
        first = pa.Table.from_batches(
            islice(self.texts(), 8), pa.schema(dict.fromkeys(self.names, none.type))
        )
        columns = zip(self.names, first.columns, strict=True)
        kinds = {name: self._kind(column.combine_chunks()) for name, column in columns}
        types = {kind: self._values(none, kind).type for kind in {*kinds.values()}}
        schema = pa.schema({name: types[kind] for name, kind in kinds.items()})

        faults = dict[str, str]()

        def batches() -> Iterator[Any]:
            row = self._skipped
            for texts in self.texts():
                columns = list[Any]()
                for name, kind in kinds.items():
                    values = pa.nulls(len(texts), types[kind])
                    try:
                        values = values if name in faults else self._values(texts[name], kind)
                    except pa.ArrowInvalid:
                        faults[name] = str(self._column_fault(texts[name], name, kind, row))
                    columns.append(values)
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
                row += len(texts)

        return schema, batches(), faults

    def _kind(self, texts: Any) -> str:
        """What a column holds, by its first fields."""
        fields = (text.as_py() for text in texts)
        first = next((field for field in fields if field.strip() not in MISSING), "0")
        if is_number(first) or is_number(first, ","):
            return "number"
        filled = _filled(texts).drop_null()
        if {*compute.unique(compute.utf8_lower(filled)).to_pylist()} <= {"true", "false"}:
            return "boolean"
        return " ".join(time_kinds(filled)) or "text"

    def _values(self, texts: Any, kind: str) -> Any:
        """The values of a column.

        Raises:
            pyarrow.ArrowInvalid: a field is of another kind.
        """
        if kind == "number":
            return self._numbers(texts)
        if kind == "text":
            return texts
        if kind == "boolean":
            return _filled(texts).cast(pa.bool_())
        first, *other = kind.split()
        if other and len(texts):
            raise pa.ArrowInvalid
        return parse_times(_filled(texts), first)

    def _numbers(self, texts: Any) -> Any:
        values = None
        if self.decimal == ".":
            with contextlib.suppress(pa.ArrowInvalid):  # without spaces, signs and missing values
                values = texts.cast("float64")
        if values is None:
            filled = _filled(texts)
            if self.decimal != ".":
                filled = compute.replace_substring(filled, ".", "no decimal mark")
                filled = compute.replace_substring(filled, self.decimal, ".")
            values = compute.replace_substring_regex(filled, r"^\+([\d.])", r"\1").cast("float64")
        large = texts.filter(compute.greater_equal(compute.abs(values), 2.0**53))
        if compute.any(compute.match_substring_regex(large, r"^\s*[+-]?\d{16,}\s*$")).as_py():
            raise pa.ArrowInvalid  # float64 would merge it with others
        return values

    def _column_fault(self, texts: Any, name: str, kind: str, row: int) -> DataError:
        """Why a column cannot be read: the first field of another kind, and its line."""
        index = 0
        with contextlib.suppress(pa.ArrowInvalid):
            for index in range(len(texts)):
                self._values(texts[index : index + 1], kind)
        return self._fault(
            f"line {next(islice(self._records(), row + index, None))[0]}, column '{name}' holds"
            f" {texts[index].as_py().strip()[:40]!r}, expected"
            f" {_EXPECTED.get(kind, 'a time stamp of a clear day and month, as 2020-03-09')};"
            " or leave the column out"
        )


def _filled(texts: Any) -> Any:
    """An Arrow array of text without spaces at the ends, null where a value is missing."""
    plain = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(plain, pa.array(MISSING))
    return compute.if_else(missing, None, plain)


def _detect_delimiter(lines: Sequence[str], marks: str) -> tuple[str, list[Any]]:
    """The delimiter of a file by its first lines, and the first records.

    It is that by which most records have the same number of fields, above one; of several, that by
    which more fields are numbers, then the comma last. A single column is read with a comma, so
    that a line with one is too long.
    """
    results = list[Any]()
    for mark in marks or ";\t|,":
        rows = list[Any]()
        with contextlib.suppress(csv.Error):  # which the conversion reports
            rows.extend(islice(filter(None, csv.reader(lines, delimiter=mark)), _RECORDS))
        [(width, count), *_] = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        share = count / len(rows) if width > 1 else -(mark != ",")
        fields = [is_number(f) or is_number(f, ",") for row in rows for f in row]
        results.append(((share, sum(fields) / max(1, len(fields))), mark, rows))
    return max(results, key=itemgetter(0))[1:]


def _decimal_mark(rows: Sequence[Sequence[str]]) -> str:
    """The decimal mark of the fields of records: a comma, unless it may be something else."""
    fields = [field.strip() for row in rows for field in row]
    commas = [field for field in fields if "," in field and is_number(field, ",")]
    points = any("." in field and is_number(field) for field in fields)
    is_comma = commas and not points and not all(map(_MAYBE_THOUSANDS.fullmatch, commas))
    return "," if is_comma else "."
