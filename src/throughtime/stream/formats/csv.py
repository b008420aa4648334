"""CSV: lines and quotes by Python's csv module, values by pyarrow, each line and field checked.

The begin shows the delimiter, the decimal mark and the names; the first rows show what columns
hold. A column with a field of another kind cannot be read.
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
from throughtime.stream.formats.arrow import Blocks, converted
from throughtime.stream.formats.table import Table, is_number
from throughtime.stream.formats.times import is_time, parse_times, time_kinds

compute: Any = import_module("pyarrow.compute")

FIELDS = 2**15  # of a block; more of them are slower, since they leave the cache
MIN_ROWS = 64  # of a block of many columns, at least
_FIRST = 8  # blocks that show what columns hold
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")  # values, as in pandas
MISSED, NUMBER, BOOLEAN, TEXT, TIME = "missed", "number", "boolean", "text", "time"
_EXPECTED = {  # of others a time stamp
    NUMBER: "a number, since its first rows have no text (float64 merges ones above 2^53)",
    BOOLEAN: "true or false",
}
_SAMPLE, _RECORDS = 2**17, 200  # characters and records at most that show the dialect
_UNDECIDED = "\1"  # the decimal mark of numbers that may have decimals, or thousands
_MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_EXACT = 2.0**53  # up to which float64 holds every whole number
_PANDAS = "or read it with pandas or polars and pass the frame: tt.recording(frame, ...)"


def open_csv(path: Path, delimiter: str | None = None, decimal: str | None = None) -> Table:
    r"""A CSV file, converted once, see `converted`; every line is checked.

    A column whose first filled field is a number is float64; an empty field is missing, and so is
    `NA` or `NULL`. One whose first field is a time stamp, or a time of day, is times; whether 3/9
    is March or September is decided by the first 262,144 fields. One of `true` and `false` is 0
    and 1. All else is text. A field of another kind is an error when its column is read. A first
    line of values like those of the second is no header: the columns are then called `0`, `1`, ...

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
    delimiter = "\t" if delimiter in ("tab", "\\t") else delimiter
    if delimiter not in (None, *",;\t|:") or decimal not in (None, *".,"):
        raise ConfigError(
            f"delimiter {delimiter!r}, decimal mark {decimal!r}: expected , ; : | or tab, and a"
            " point or a comma; read files with another one by pandas in Python, and pass the"
            " frame: tt.recording(frame, ...)"
        )
    return converted(
        path, lambda: CsvFile(path, delimiter, decimal).blocks(), f"{delimiter}{decimal}"
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
        self.delimiter, rows = _detect_delimiter(lines, delimiter, decimal)
        self.decimal = decimal or ("." if self.delimiter == "," else _decimal_mark(rows))
        if not rows:
            raise DataError(f"{path}: the file is empty, expected a header line with column names")
        names = self._header(rows)
        self.names = names or tuple(map(str, range(len(rows[0]))))
        self._skipped = int(bool(names))

    def _header(self, rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The names in the first record; none if it holds values.

        Raises:
            DataError: names are missing or double, or the record may be either.
        """
        first, second = ([*map(self._kind_of, row)] for row in (*rows[:2], rows[0])[:2])
        like = all(a == b or MISSED in (a, b) for a, b in zip(first, second, strict=False))
        values, names = {*first} - {MISSED}, tuple(name.strip() for name in rows[0])
        distinct = "" not in names and len({*names}) == len(names)
        # as pandas names columns, or years above decimals
        counts = len(names) > 2 and [*map(str, range(len(names)))] == [*names]
        below = (*rows[1:2], rows[0])[0]
        decimals = like and not any(field.strip().lstrip("+-").isdecimal() for field in below)
        whole = distinct and all(map(str.isdecimal, names)) and (counts or decimals)
        if TEXT not in values and values and (like or values == {NUMBER}) and not whole:
            return ()
        if distinct and not whole and not (len(rows) > 1 and like and values - {TEXT}):
            return names
        fault = "which may be names or values like those below: write a header with letters, "
        if not distinct:
            index = "is it an index of pandas? to_csv(path, index=False), "
            fault = (
                f"expected distinct column names; {'mend it, ' if rows[0][0].strip() else index}"
            )
        raise DataError(f"{self.path}: the first line is {[*names]}, {fault}{_PANDAS}")

    def _kind_of(self, field: str) -> str:
        """What a field holds, roughly."""
        if field.strip() in MISSING:
            return MISSED
        return NUMBER if is_number(field, self.decimal) else TIME if is_time(field) else TEXT

    def _lines(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        line = 0
        with self.path.open(encoding="utf-16" if marked else "utf-8-sig", newline="") as file:
            try:
                for line, text in enumerate(file, 1):
                    if "\0" in text:
                        hint = "if it is UTF-16 without its mark, save it as UTF-8"
                        raise self._fault(f"line {line}: holds a NUL byte; {hint}")
                    yield text
            except UnicodeDecodeError as error:
                line += 1 + error.object[: error.start].count(b"\n")
                hint = "as Excel does? Save it as UTF-8"
                raise self._fault(
                    f"line {line} is no {error.encoding.upper()}; is it WINDOWS-1252, {hint}"
                ) from error

    def _fault(self, text: str) -> DataError:
        return DataError(f"{self.path}: {text}; mend it, {_PANDAS}")

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The records, each with its last line; a blank line is a value of a single column."""
        reader = csv.reader(self._lines(), delimiter=self.delimiter, strict=True)
        line, width, blank = 0, len(self.names), list[tuple[int, list[str]]]()
        try:
            for record in reader:
                if len(record) == width:
                    yield from blank
                    yield reader.line_num, record
                    blank.clear()
                elif record:
                    raise self._fault(
                        f"line {reader.line_num} has {len(record)} fields, the first one {width}"
                        f"{'; delete lines before the header' * (width == 1)}"
                    )
                elif width == 1 and reader.line_num > 1:
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

    def blocks(self) -> Blocks:
        """The values in record batches, and the faults of columns."""
        none = pa.array([], pa.string())
        first = pa.Table.from_batches(
            islice(self.texts(), _FIRST), pa.schema(dict.fromkeys(self.names, none.type))
        )
        columns = zip(self.names, first.columns, strict=True)
        kinds = {name: self._kind(column.combine_chunks()) for name, column in columns}
        types = {kind: self._values(none, kind).type for kind in {*kinds.values()}}
        schema = pa.schema({name: types[kind] for name, kind in kinds.items()})
        faults = dict[str, str]()

        def batches() -> Iterator[Any]:
            row = self._skipped
            for texts in self.texts():
                count, columns = len(texts), dict[str, Any]()
                numbers = [n for n in self.names if kinds[n] == NUMBER and n not in faults]
                with contextlib.suppress(pa.ArrowInvalid):  # of all columns at once
                    values = self._numbers(pa.concat_arrays([none, *map(texts.column, numbers)]))
                    columns = {n: values[i * count :][:count] for i, n in enumerate(numbers)}
                for name in kinds.keys() - columns.keys() - faults.keys():
                    try:
                        columns[name] = self._values(texts[name], kinds[name])
                    except pa.ArrowInvalid:
                        faults[name] = self._column_fault(texts[name], name, kinds[name], row)
                columns |= {n: pa.nulls(count, types[kinds[n]]) for n in faults}
                yield pa.RecordBatch.from_arrays([*map(columns.get, kinds)], schema=schema)
                row += count

        return Blocks(schema, batches(), faults)

    def _kind(self, texts: Any) -> str:
        """What a column holds, by its first fields."""
        fields = (text.as_py() for text in texts)
        first = next((field for field in fields if field.strip() not in MISSING), "0")
        if any(is_number(first, mark) for mark in (self.decimal, ".", ",")):
            return NUMBER
        filled = _filled(texts).drop_null()
        if {*compute.unique(compute.utf8_lower(filled)).to_pylist()} <= {"true", "false"}:
            return BOOLEAN
        return " ".join(time_kinds(filled)) or TEXT

    def _values(self, texts: Any, kind: str) -> Any:
        """The values of a column.

        Raises:
            pyarrow.ArrowInvalid: a field is of another kind.
        """
        if kind == NUMBER:
            return self._numbers(texts)
        if kind == TEXT:
            return texts
        if kind == BOOLEAN:
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
        large = texts.filter(compute.greater_equal(compute.abs(values), _EXACT))
        if compute.any(compute.match_substring_regex(large, r"^\s*[+-]?\d{16,}\s*$")).as_py():
            raise pa.ArrowInvalid  # float64 would merge it with others
        return values

    def _column_fault(self, texts: Any, name: str, kind: str, row: int) -> str:
        """Why a column cannot be read: the first field of another kind, and its line."""
        index, hint = 0, ""
        with contextlib.suppress(pa.ArrowInvalid):
            for index in range(len(texts)):
                self._values(texts[index : index + 1], kind)
        field = texts[index].as_py().strip()
        line, _ = next(islice(self._records(), row + index, None))
        if " " in kind:
            hint = "day and month cannot be told apart: write 2020-03-09; "
        elif kind == NUMBER and re.search("[.,]", field):
            mark = "." if self.decimal == "," else ","
            hint = f"is {mark!r} its decimal mark? --decimal {mark} (decimal='{mark}' in Python);"
            hint += " or does it separate thousands? Write them without; "
        return (
            f"line {line}, column '{name}' holds {field[:40]!r}, expected"
            f" {_EXPECTED.get(kind, 'a time stamp')}; {hint}mend it, leave the column out,"
            f" {_PANDAS}"
        )


def _filled(texts: Any) -> Any:
    """An Arrow array of text without spaces at the ends, null where a value is missing."""
    plain = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(plain, pa.array(MISSING))
    return compute.if_else(missing, None, plain)


def _detect_delimiter(
    lines: Sequence[str], delimiter: str | None, decimal: str | None
) -> tuple[str, list[list[str]]]:
    """The delimiter of a file by its first lines, and the first records.

    It is that by which most records have the same number of fields; of several, the one whose
    fields are numbers and times.
    """
    best: tuple[tuple[float, ...], str, list[list[str]]] = (), ",", []
    for mark in delimiter or (";,\t|" if decimal == "," else ",;\t|"):
        rows = list[list[str]]()
        with contextlib.suppress(csv.Error):  # which the conversion reports
            rows.extend(islice(filter(None, csv.reader(lines, delimiter=mark)), _RECORDS))
        [(width, count), *_] = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        fields = [field for row in rows[1:] or rows for field in row if field.strip()]
        good = sum(is_number(f) or is_number(f, ",") or is_time(f) for f in fields)
        # a decimal mark separates fields where numbers with it are in quotes
        quoted = any(mark in f and is_number(f, mark) for f in fields)
        fits = width > 1 and 2 * count > len(rows) and (mark != decimal or delimiter or quoted)
        rank = (count / len(rows), good / max(1, len(fields)), width) if fits else (0.0,)
        best = max(best, (rank, mark, rows), key=itemgetter(0))  # the first of equal ones
    return best[1:]


def _decimal_mark(rows: Sequence[Sequence[str]]) -> str:
    """The decimal mark of the fields of records; undecided if numbers leave it open."""
    marks = [(m, f.strip()) for row in rows for f in row for m in ".," if m in f]
    numbers = [(mark, field) for mark, field in marks if is_number(field, mark)]
    sure = next((mark for mark, field in numbers if not _MAYBE_THOUSANDS.fullmatch(field)), None)
    return sure or (_UNDECIDED if any(mark == "," for mark, _ in numbers) else ".")
