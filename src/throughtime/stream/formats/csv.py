"""CSV by pyarrow, each byte, line and field checked.

The bytes are checked on the way to pyarrow: encoding, NUL, quotes. All fields are read as text. The
begin shows the delimiter, the decimal mark and the names; the first megabyte what columns hold. A
column with a field of another kind cannot be read. Python's csv module finds the line of a fault.
"""

import codecs
import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats.arrow import Blocks, converted
from throughtime.stream.formats.table import Table, is_number
from throughtime.stream.formats.times import is_time, parse_times, time_kinds

BLOCK = 2**18  # bytes of a block, at least
_MIXED = "a carriage return ends a line, and other lines end with a newline"
_FIRST = 4  # blocks that show what columns hold
DELIMITERS = (",", ";", "\t", "|")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")  # values, as in pandas
UNKNOWN, NUMBER, BOOLEAN, TEXT, TIME = "unknown", "number", "boolean", "text", "time"
_EXPECTED = {NUMBER: "a number", BOOLEAN: "true or false"}  # of others a time stamp
_SAMPLE, _RECORDS = 2**17, 200  # bytes and records at most that show the dialect
_UNDECIDED = "\1"  # the decimal mark of numbers that may have decimals, or thousands
_MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,'\u2019 \u00a0\u202f])\d{3}(\1\d{3})*([.,]\d+)?")
_EXACT = 2.0**53  # up to which float64 holds every whole number
_DIGITS = r"^\s*[+-]?\d{16,}\s*$"
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_PANDAS = "or read it with pandas or polars and pass the frame: tt.recording(frame, ...)"


def open_csv(path: Path, delimiter: str | None = None, decimal: str | None = None) -> Table:
    r"""A CSV file, converted once, see `converted`; every line is checked.

    A column whose first filled field is a number is float64; an empty field is missing, and so is
    `NA` or `NULL`. One whose first field is a time stamp, or a time of day, is times; whether 3/9
    is March or September is decided by all of its first megabyte. One of `true` and `false` is 0
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
    if delimiter not in (None, ":", *DELIMITERS):
        raise ConfigError(
            f"delimiter {delimiter!r}: expected , ; : | or tab; read files with another one by"
            " pandas in Python, and pass the frame: tt.recording(frame, ...)"
        )
    if decimal not in (None, ".", ","):
        raise ConfigError(f"decimal mark {decimal!r}: expected a point or a comma")
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
        self.path, sample = path, b""
        for block in _checked_bytes(path):
            sample += block
            if len(sample) >= _SAMPLE and sample.count(10) > 2:
                break
        text = sample.decode(errors="ignore")
        self.delimiter, rows = _detect_delimiter(text, delimiter, decimal)
        self.decimal = decimal or ("." if self.delimiter == "," else _decimal_mark(rows))
        if not rows:
            raise DataError(f"{path}: the file is empty, expected a header line with column names")
        names = self._header(rows)
        self.names = names or tuple(map(str, range(len(rows[0]))))
        self._skipped = int(bool(names))
        self._block = max(BLOCK, *(64 + 8 * sum(map(len, row)) for row in rows))

    def _header(self, rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The names in the first record; none if it holds values.

        Raises:
            DataError: names are missing or double, or the record may be either.
        """
        kinds = [[self._kind_of(field) for field in row] for row in (*rows[:2], rows[0])[:2]]
        values = {*kinds[0]} - {UNKNOWN}
        like = all(a == b or UNKNOWN in (a, b) for a, b in zip(*kinds, strict=False))
        if TEXT not in values and values and (like or {*kinds[0]} == {NUMBER}):
            return ()
        names, fault = tuple(name.strip() for name in rows[0]), ""
        if len(rows) > 1 and like and values - {TEXT}:
            fault = "which may be names or values like those below; is it a header? Add one, "
        elif "" in names or len({*names}) < len(names):
            fault = "expected distinct column names; " + (
                "mend it, " if names[0] else "is it an index of pandas? to_csv(path, index=False), "
            )
        if fault:
            raise DataError(f"{self.path}: the first line is {[*names]}, {fault}{_PANDAS}")
        return names

    def _kind_of(self, field: str) -> str:
        """What a field holds, roughly."""
        if field.strip() in MISSING:
            return UNKNOWN
        return NUMBER if is_number(field, self.decimal) else TIME if is_time(field) else TEXT

    def texts(self) -> Iterator[Any]:
        """All fields as text, in record batches.

        Raises:
            DataError: a line has more or fewer fields than the first; the message names it.
        """
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        width = len(self.names)
        read = arrow_csv.ReadOptions(
            use_threads=False,
            block_size=self._block,
            column_names=self.names,
            skip_rows_after_names=self._skipped,
        )
        parse = arrow_csv.ParseOptions(
            delimiter=self.delimiter, newlines_in_values=True, ignore_empty_lines=width > 1
        )
        convert = arrow_csv.ConvertOptions(column_types=dict.fromkeys(self.names, pa.string()))
        try:
            yield from filter(len, arrow_csv.open_csv(self._open(), read, parse, convert))
        except pa.ArrowInvalid as error:
            lines = ((i, len(row)) for i, row in self._records() if len(row) != width)
            line, count = next(lines, (0, 0))
            repair = "mend it" if width > 1 else "delete lines before the header"
            fault = f"line {line} has {count} fields, the first one {width}" if line else error
            raise DataError(f"{self.path}: {fault}; {repair}, {_PANDAS}") from error

    def _open(self) -> io.BufferedReader:
        return io.BufferedReader(_ByteStream(_checked_bytes(self.path, self.delimiter)))

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The records from the first line on by the csv module, each with its last line."""
        with self.path.open("rb") as file:
            before = next((i for i, line in enumerate(file) if line.strip(b"\xef\xbb\xbf\r\n")), 0)
        csv.field_size_limit(2**31 - 1)
        lines = io.TextIOWrapper(self._open(), "utf-8", newline="")
        reader = csv.reader(lines, delimiter=self.delimiter)
        for record in reader:
            if record or len(self.names) == 1:
                yield before + reader.line_num, record or [""]

    def blocks(self) -> Blocks:
        """The values in record batches, and the faults of columns."""
        import pyarrow as pa

        none = pa.array([], pa.string())
        first = pa.Table.from_batches(
            islice(self.texts(), _FIRST), pa.schema(dict.fromkeys(self.names, none.type))
        )
        kinds = {name: self._kind(first[name].combine_chunks()) for name in self.names}
        types = {name: self._values(none, kind).type for name, kind in kinds.items()}
        faults = dict[str, str]()

        def batches() -> Iterator[Any]:
            row = self._skipped
            for texts in self.texts():
                columns = dict[str, Any]()
                for name, kind in kinds.items():
                    if name not in faults and not self._fits(texts[name], kind):
                        faults[name] = self._fault(texts[name], name, kind, row)
                    columns[name] = (
                        pa.nulls(len(texts), types[name])
                        if name in faults
                        else self._values(texts[name], kind)
                    )
                yield pa.RecordBatch.from_pydict(columns)
                row += len(texts)

        return Blocks(pa.schema(types), batches, faults)

    def _kind(self, texts: Any) -> str:
        """What a column holds, by the fields of its first batch."""
        compute: Any = import_module("pyarrow.compute")
        filled = _filled(texts).drop_null()
        if not len(filled):
            return UNKNOWN
        first = filled[0].as_py()
        if is_number(first, self.decimal) or self._mark_of(first):
            return NUMBER
        if {*compute.unique(compute.utf8_lower(filled)).to_pylist()} <= {"true", "false"}:
            return BOOLEAN
        return " ".join(time_kinds(filled)) or TEXT

    def _values(self, texts: Any, kind: str) -> Any:
        """The values of a column.

        Raises:
            pyarrow.ArrowInvalid: a field is of another kind.
        """
        import pyarrow as pa

        compute: Any = import_module("pyarrow.compute")
        if kind in (NUMBER, UNKNOWN):
            return self._numbers(texts)
        if kind == TEXT:
            return texts
        filled = _filled(texts)
        if kind == BOOLEAN:
            values = compute.index_in(compute.utf8_lower(filled), pa.array(["false", "true"]))
            if values.null_count > filled.null_count:
                raise pa.ArrowInvalid
            return values.cast(pa.bool_())
        if len(kind.split()) > 1 and len(texts):
            raise pa.ArrowInvalid  # of two kinds
        return parse_times(filled, kind)

    def _numbers(self, texts: Any) -> Any:
        import pyarrow as pa

        compute: Any = import_module("pyarrow.compute")
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
        large = compute.greater_equal(compute.abs(values), _EXACT)
        if compute.any(large).as_py():
            whole = compute.match_substring_regex(texts, _DIGITS)
            if compute.any(compute.and_(large, whole)).as_py():
                raise pa.ArrowInvalid
        return values

    def _fits(self, texts: Any, kind: str) -> bool:
        import pyarrow as pa

        with contextlib.suppress(pa.ArrowInvalid):
            self._values(texts, kind)
            return True
        return False

    def _fault(self, texts: Any, name: str, kind: str, row: int) -> str:
        """Why a column cannot be read: the first field of another kind, and its line."""
        index, end = 0, len(texts)
        while end - index > 1:  # the first fault is in texts[index:end]
            middle = (index + end) // 2
            index, end = (middle, end) if self._fits(texts[index:middle], kind) else (index, middle)
        field = texts[index].as_py().strip()
        line, _ = next(islice(self._records(), row + index, None))
        expected, hint = _EXPECTED.get(kind, "a time stamp"), ""
        if kind == UNKNOWN:
            expected = "a number, since the first megabyte has none"
        elif kind == NUMBER and re.fullmatch(_DIGITS, field):
            expected = "at most 16 digits, since float64 would merge it with others"
        elif len(kind.split()) > 1:
            hint = "day and month cannot be told apart: write 2020-03-09; "
        elif kind == NUMBER:
            hint = self._mark_of(field)
        return (
            f"line {line}, column '{name}' holds {field[:40]!r}, expected {expected}; {hint}mend"
            f" it, leave the column out, {_PANDAS}"
        )

    def _mark_of(self, field: str) -> str:
        """What the marks in a field may be; empty if it holds no number in any dialect."""
        marks = [m for m in ".," if m != self.decimal and is_number(field, m)]
        hint = "does it separate thousands? Write it without; " * bool(_THOUSANDS.fullmatch(field))
        return hint + "".join(
            f"is {m!r} its decimal mark? --decimal {m} (decimal='{m}' in Python); " for m in marks
        )


def _carriage_returns(codes: Any, quotes: Any, opened: bool) -> Any:
    """Where a carriage return outside quotes has no newline after it."""
    lone = np.flatnonzero((codes[:-1] == 13) & (codes[1:] != 10))
    return lone[(np.searchsorted(quotes, lone) + opened) % 2 == 0]


def _checked_bytes(path: Path, delimiter: str = "") -> Iterator[bytes]:
    """The bytes of a file in UTF-8, without blank lines at its begin and its end.

    Quotes are checked where the delimiter is known: each begins or ends a field, or is doubled.

    Raises:
        DataError: it is not UTF-8, nor UTF-16 with its mark, or holds a NUL, text beside a quote,
            or an open quote; the message names the line.
    """
    line, opened, last, held, data = 1, 0, b"", b"", b"-"
    has_newline, mixed = False, None  # the error for a lone \r outside quotes, raised beside \n
    beside = np.frombuffer(f'{delimiter}\r\n"'.encode(), np.uint8)

    def fault(before: bytes, what: str) -> DataError:
        return DataError(f"{path}: line {line + before.count(10)}: {what}; mend it, {_PANDAS}")

    with path.open("rb") as file:
        mark = file.read(3)
        encoding = _MARKS.get(mark[:2], "utf-8")
        file.seek(3 if mark == codecs.BOM_UTF8 else 2 if encoding != "utf-8" else 0)
        decoder = codecs.getincrementaldecoder(encoding)()
        while data:
            data = file.read(BLOCK)
            try:
                whole = held + decoder.decode(data, final=not data).encode()
            except UnicodeDecodeError as error:
                raise fault(held + error.object[: error.start], encoding_hint(error)) from error
            block = whole if last else whole.lstrip(b"\r\n")
            line += whole.count(10) - block.count(10)
            whole, block = block, block.rstrip(b'\r\n"' if data else b"\r\n")
            held = whole[len(block) :]
            block += b"" if data else b"\n"
            if 0 in block:
                what = "holds a NUL byte; if it is UTF-16 without its mark, save it as UTF-8"
                raise fault(block[: block.index(0)], what)
            codes = np.frombuffer((last or b"\n") + block, np.uint8)
            quotes = np.flatnonzero(codes == ord('"'))
            has_newline |= 10 in whole
            at = _carriage_returns(codes, quotes, bool(opened)) if delimiter else codes[:0]
            mixed = mixed or (fault(block[: at[0]], _MIXED) if len(at) else None)
            if mixed and has_newline:
                raise mixed
            if delimiter and len(quotes):
                opens = (np.arange(len(quotes)) + bool(opened)) % 2 == 0
                wrong = ~np.isin(codes[np.where(opens, quotes - 1, quotes + 1)], beside)
                if wrong.any():
                    raise fault(block[: quotes[wrong.argmax()]], "text beside a quote")
                opened = line + block[: quotes[-1]].count(10) if opens[-1] else 0
            if opened and not data:
                line = opened
                raise fault(b"", "a quote is open")
            line, last = line + block.count(10), block[-1:] or last
            if block:
                yield block


class _ByteStream(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._rest = self._rest or memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _filled(texts: Any) -> Any:
    """An Arrow array of text without spaces at the ends, null where a value is missing."""
    compute: Any = import_module("pyarrow.compute")
    plain = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(plain, import_module("pyarrow").array(MISSING))
    return compute.if_else(missing, None, plain)


def encoding_hint(error: UnicodeDecodeError) -> str:
    """What to do with a text of another encoding; a byte of Windows-1252 is likely."""
    byte = error.object[error.start : error.start + 1]
    letter = byte.decode("windows-1252", errors="ignore")
    guess = f"; is it WINDOWS-1252, as Excel saves it (byte 0x{byte.hex().upper()}: {letter})?"
    return f"is no {error.encoding.upper()}{guess if letter else ''}: save it as UTF-8"


def _detect_delimiter(
    text: str, delimiter: str | None, decimal: str | None
) -> tuple[str, list[list[str]]]:
    """The delimiter of a file by the begin of its text, and the first records.

    It is that by which most records have the same number of fields; of several, the one whose
    fields are numbers and times.
    """
    ranks = dict[tuple[Any, ...], tuple[str, list[list[str]]]]()
    for mark in delimiter or (";,\t|" if decimal == "," else ",;\t|"):
        rows = list[list[str]]()
        with contextlib.suppress(csv.Error):  # which the conversion reports
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
            rows.extend(islice(filter(None, reader), _RECORDS))
        [(width, count), *_] = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        fields = [field for row in rows[1:] or rows for field in row if field.strip()]
        good = sum(is_number(f) or is_number(f, ",") or is_time(f) for f in fields)
        if (width > 1 and 2 * count > len(rows) and (mark != decimal or delimiter)) or not ranks:
            rank = width > 1, count / max(1, len(rows)), good / max(1, len(fields)), width
            ranks.setdefault(rank, (mark, rows))
    return ranks[max(ranks)]


def _decimal_mark(rows: Sequence[Sequence[str]]) -> str:
    """The decimal mark of the fields of records; undecided if numbers leave it open."""
    marks = [(m, f.strip()) for row in rows for f in row for m in ".," if m in f]
    numbers = [(mark, field) for mark, field in marks if is_number(field, mark)]
    sure = next((mark for mark, field in numbers if not _MAYBE_THOUSANDS.fullmatch(field)), None)
    return sure or (_UNDECIDED if any(mark == "," for mark, _ in numbers) else ".")
