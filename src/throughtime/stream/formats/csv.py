"""CSV: from a file to record batches, checked line by line.

The first block shows the delimiter, the decimal mark, the names and what each column holds. pyarrow
parses the usual block. Python's csv module reads, strictly, the first block, each with a quote
within a field, and each that pyarrow refuses: it tells the line of a fault.
"""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats.arrow import Blocks, RestartError
from throughtime.stream.formats.converted import converted
from throughtime.stream.formats.table import Array, TableFile, is_number, number_pattern
from throughtime.stream.formats.times import CLOCK, is_time, parse_times, time_forms, wrong_times

BLOCK = 2**20  # bytes of a block, and the rest of its last record
LONGEST = 2**24  # characters without the end of a record: more are an error
WIDEST = 10_000  # columns
LABEL = 256  # characters: a longer label would make every label of a block as long in memory
DELIMITERS = ",;\t|"
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")  # values, as in pandas
NUMBER, BOOLEAN, TEXT = "number", "boolean", "text"  # columns; any other is a form of times
_RECORDS = 200  # of the first block, which show the delimiter
_MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,'\u2019 \u00a0\u202f])\d{3}(\1\d{3})*([.,]\d+)?")
_EXACT = 2**53  # up to which float64 holds every whole number
_DIGITS = r"[+-]?\d{16,}"
_BOOLEANS = ("true", "false")
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_PANDAS = "or read it with pandas or polars and pass the frame: tt.recording(frame, ...)"


class Dialect(NamedTuple):
    """How the fields of a file are written."""

    delimiter: str = ","
    decimal: str = "."

    def is_number(self, field: str) -> bool:
        """Whether a field holds a number."""
        return is_number(field, self.decimal)

    def kind_of(self, field: str) -> str:
        """What a field holds, roughly: "number", "time", "text", or "" if it is missing."""
        if field.strip() in MISSING:
            return ""
        return NUMBER if self.is_number(field) else "time" if is_time(field) else TEXT


def open_csv(path: Path, delimiter: str | None = None, decimal: str | None = None) -> TableFile:
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
    if delimiter is not None and (
        len(delimiter) != 1
        or delimiter in "\"'\n\r\0.-+_ "
        or delimiter.isalnum()
        or delimiter > "~"
    ):
        raise ConfigError(
            f"delimiter={delimiter!r}: expected one character between fields, such as ',' ';' '|'"
            " or tab"
        )
    if decimal not in (None, ".", ","):
        raise ConfigError(f"decimal={decimal!r}: expected '.' or ','")
    source = cache(partial(_Source, path, delimiter, decimal))  # it learns from block to block
    return converted(path, lambda: source().blocks(), f"{delimiter}{decimal}")


class _Source:
    """A file as record batches, and what is known of its columns so far."""

    def __init__(self, path: Path, delimiter: str | None, decimal: str | None) -> None:
        self.path = path
        first, _ = next(_read_blocks(path), ("", 0))
        self.dialect, rows = _detect_dialect(path, first, delimiter, decimal)
        names, mark = _names(path, rows, self.dialect), self.dialect.delimiter
        self.names = tuple(names or map(str, range(len(rows[0]))))
        if len(self.names) > WIDEST:
            raise DataError(
                f"{path}: has {len(self.names)} columns, expected at most {WIDEST}; if time runs"
                " along its lines, pass the array numpy.loadtxt(path, delimiter=',').T"
            )
        self.width, self._named = len(self.names), bool(names)
        blank = first[: len(first) - len(first.lstrip("\r\n"))]
        self._header = 0  # lines before the first values
        for line, record in self._records(first if names else blank, 0):
            self._header = line
            if record:
                break
        self.faults: dict[str, str] = {}
        mark = re.escape(mark)
        self._quoted = re.compile(rf'(?<![^{mark}\n])"[^"\r\n]*"(?=[{mark}\r\n]|\Z)')
        texts = next((self._texts(*block)[0] for block in self._data_blocks()), {})
        self._ambiguous: dict[str, str] = {}  # columns whose dates may be several
        self._seen = {name: [texts[name]] if texts else [] for name in self.names}
        self.kinds = {name: self._kind(name) for name in self.names}
        self._undecided = {*self.names}  # columns of which no filled field was seen

    def blocks(self) -> Blocks:
        """Its batches, from the first on."""
        import pyarrow as pa

        types = {NUMBER: pa.float64(), BOOLEAN: pa.bool_(), TEXT: pa.string()}
        types[CLOCK] = pa.time64("ns")
        dates = {True: pa.date32(), False: pa.timestamp("ns")}
        self.schema = pa.schema(
            {n: types.get(kind, dates[kind.endswith("+date")]) for n, kind in self.kinds.items()}
        )
        self.faults.clear()
        self.faults.update(self._ambiguous)
        return Blocks(self.schema, self._batches, self.faults)

    def _batches(self) -> Iterator[Any]:
        for block, line in self._data_blocks():
            texts, lines = self._parsed(block), None
            batch = None if texts is None else self._batch(texts, None)
            if batch is None:
                texts, lines = self._texts(block, line)
                batch = self._batch(texts, lines)
            yield batch

    def _data_blocks(self) -> Iterator[tuple[str, int]]:
        """The blocks without the header; without blank lines at the end if these may be values."""
        pending, start = "", 0
        for i, (block, line) in enumerate(_read_blocks(self.path)):
            if not i and self._header:
                lines = io.StringIO(block, newline="").readlines()
                block, line = "".join(lines[self._header :]), self._header  # noqa: PLW2901
            if self.width > 1:
                yield block, line
                continue
            start = line if not pending else start
            pending += block
            body = pending.rstrip("\r\n")
            end = len(body) + len(re.match(r"\r?\n?", pending[len(body) :])[0])  # pyright: ignore[reportOptionalSubscript]
            if body:
                yield pending[:end], start
                start, pending = start + pending.count("\n", 0, end), pending[end:]

    def _parsed(self, block: str) -> dict[str, Any] | None:
        """The columns of a block by pyarrow; None unless it reads it as the csv module does."""
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        quotes = block.count('"')
        lenient = "n(" in block or "N(" in block  # nan(1) is a number to pyarrow
        if lenient or block.count("\r") != block.count("\r\n"):
            return None
        if quotes and quotes != 2 * len(self._quoted.findall(block)):
            return None
        data = block.encode()
        numbers = [n for n, kind in self.kinds.items() if kind == NUMBER and n not in self.faults]
        try:
            table = arrow_csv.read_csv(
                pa.BufferReader(data),
                arrow_csv.ReadOptions(
                    use_threads=False, block_size=len(data) + 1, column_names=self.names
                ),
                arrow_csv.ParseOptions(
                    delimiter=self.dialect.delimiter, ignore_empty_lines=self.width > 1
                ),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, pa.string())
                    | dict.fromkeys(numbers, pa.float64()),
                    null_values=MISSING,
                    strings_can_be_null=False,
                    decimal_point=self.dialect.decimal,
                ),
            )
        except pa.ArrowInvalid:
            return None
        return {name: table[name].combine_chunks() for name in self.names}

    def _texts(self, block: str, line: int) -> tuple[dict[str, Any], list[int]]:
        """The columns of a block as text, by the csv module, and the line of each row.

        Raises:
            DataError: a line is no record of so many fields.
        """
        import pyarrow as pa

        rows, lines = list[list[str]](), list[int]()
        for number, record in self._records(block, line):
            if record and len(record) != self.width:
                before = "the header has" if self._named else "the lines before it have"
                raise DataError(
                    f"{self.path}: line {number} has {len(record)} fields, {before} {self.width};"
                    f" mend it, {_PANDAS}"
                )
            if record or self.width == 1:
                rows.append(record or [""])
                lines.append(number)
        columns = zip(*rows, strict=True) if rows else [()] * self.width
        arrays = [pa.array(column, pa.string()) for column in columns]
        return dict(zip(self.names, arrays, strict=True)), lines

    def _records(self, block: str, line: int) -> Iterator[tuple[int, list[str]]]:
        """The records of a block, each with the number of its last line, by the csv module."""
        lines, first = io.StringIO(block, newline=""), line + 1
        reader = csv.reader(lines, delimiter=self.dialect.delimiter, strict=True)
        try:
            for record in reader:
                yield line + reader.line_num, record
                first = line + reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{self.path}: line {first}: {error}; is a quote open? Mend it, {_PANDAS}"
            ) from error

    def _batch(self, columns: Mapping[str, Any], lines: Sequence[int] | None) -> Any:
        """The record batch of the columns of a block.

        A field of another kind than that of its column is a fault; without lines to name, the
        result is then None.
        """
        import pyarrow as pa

        arrays: list[Any] = []
        for name, texts in columns.items():
            kind = self.schema.field(name).type
            if name not in self.faults:
                values, wrong = self._converted(texts, self.kinds[name])
                if not wrong.any():
                    values = pa.array(values)
                    if values.null_count < len(values):
                        self._undecided.discard(name)
                    is_clock = self.kinds[name] == CLOCK
                    arrays.append((values.cast("int64") if is_clock else values).cast(kind))
                    continue
                if lines is None:
                    return None
                self._add_fault(name, texts, lines, int(wrong.argmax()))
            arrays.append(pa.nulls(len(texts), kind))
        return pa.record_batch(arrays, schema=self.schema)

    def _converted(self, texts: Any, kind: str) -> tuple[Any, Array]:
        """The values of a column, and which of its fields are of another kind."""
        compute: Any = import_module("pyarrow.compute")
        if str(texts.type) == "double":
            large = compute.greater_equal(compute.abs(texts), float(_EXACT)).fill_null(False)
            infinite = compute.is_inf(texts).fill_null(False)
            return texts, _flags(compute.and_not(large, infinite))
        if kind == TEXT:
            return texts, _flags(compute.greater(compute.utf8_length(texts), LABEL))
        plain = compute.utf8_trim_whitespace(texts)
        missing = compute.is_in(plain, import_module("pyarrow").array(MISSING))
        plain = compute.if_else(missing, None, plain)
        if kind == BOOLEAN:
            lower = compute.utf8_lower(plain)
            good = compute.is_in(lower, import_module("pyarrow").array(_BOOLEANS))
            wrong = compute.and_not(compute.is_valid(plain), good)
            return compute.if_else(good, compute.equal(lower, "true"), None), _flags(wrong)
        if kind != NUMBER:
            values = parse_times(plain, kind)
            return values, wrong_times(plain, values)
        good = compute.match_substring_regex(plain, f"^({number_pattern(self.dialect.decimal)})$")
        good = compute.and_not(good, compute.match_substring_regex(plain, f"^{_DIGITS}$"))
        point = compute.replace_substring(plain, self.dialect.decimal, ".")
        point = compute.replace_substring_regex(point, r"^\+", "")
        values = compute.if_else(good, point, None).cast("float64")
        return values, _flags(compute.invert(good))

    def _add_fault(self, name: str, texts: Any, lines: Sequence[int], row: int) -> None:
        """Say why a column cannot be read.

        Raises:
            RestartError: it can, as a column of another kind.
        """
        field, kind, is_open = texts[row].as_py(), self.kinds[name], name in self._undecided
        if is_open or "+" in kind:
            self._seen[name].append(texts)
            other = self._kind(name)
            if other != kind and (is_open or other != TEXT):
                self.kinds[name] = other
                raise RestartError
        if kind == TEXT:
            fault = f"holds a text of {len(field)} characters, expected labels; leave it out"
        elif kind == NUMBER and re.fullmatch(_DIGITS, field.strip()):
            fault = (
                f"holds {field.strip()}, a whole number of so many digits that float64 would merge"
                f" it with others; leave the column out, {_PANDAS}"
            )
        else:
            expected = {NUMBER: "a number", BOOLEAN: "true or false"}.get(kind, "a time stamp")
            reason = self._reason(field.strip()) if kind == NUMBER else ""
            fault = (
                f"holds {field[:40]!r}, expected {expected} as in the lines before it;"
                f" {reason or f'mend it, leave the column out, {_PANDAS}'}"
            )
        self.faults[name] = f"line {lines[row]}, column '{name}' {fault}"

    def _reason(self, field: str) -> str:
        """Why a field is no number, if its marks show it."""
        other = ".,"[self.dialect.decimal == "."]
        option = f"--decimal {other} (decimal='{other}' in Python)"
        is_decimal = self.dialect._replace(decimal=other).is_number(field)
        if _THOUSANDS.fullmatch(field):
            what = "does it separate thousands? Write it without"
            return f"{what}; if its mark is that of decimals: {option}" if is_decimal else what
        return f"is '{other}' its decimal mark? {option}" if is_decimal else ""

    def _kind(self, name: str) -> str:
        """What a column holds, by the fields that were seen."""
        import pyarrow as pa

        texts = [text for array in self._seen[name] for text in array.to_pylist()]
        filled = [text for text in texts if text.strip() not in MISSING]
        if not filled or self.dialect.is_number(filled[0]) or self._reason(filled[0].strip()):
            return NUMBER
        if {text.strip().lower() for text in filled} <= {*_BOOLEANS}:
            return BOOLEAN
        forms = time_forms(pa.array(filled))
        if len(forms) > 1:
            self._ambiguous[name] = (
                f"column '{name}' holds {filled[0]!r}, whose day and month cannot be told apart;"
                f" write it as 2020-03-09, leave the column out, {_PANDAS}"
            )
        return [*forms, TEXT][0]


def _flags(values: Any) -> Array:
    """An Arrow array of booleans as a mask; a missing one is false."""
    return values.fill_null(fill_value=False).to_numpy(zero_copy_only=False)


def _read_blocks(path: Path) -> Iterator[tuple[str, int]]:
    """The text of a file in blocks of whole records, and the number of lines before each.

    Raises:
        DataError: it is not UTF-8, nor UTF-16 with its mark, or holds a NUL, or a record without an
            end.
    """
    rest, line = "", 0
    with path.open("rb") as file:
        mark = file.read(2)
        encoding = _MARKS.get(mark, "utf-8")
        decoder = codecs.getincrementaldecoder(encoding)()
        if encoding == "utf-8":
            file.seek(3 if mark + file.read(1) == codecs.BOM_UTF8 else 0)
        while True:
            data = file.read(BLOCK)
            try:
                rest += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = line + rest.count("\n") + error.object.count(b"\n", 0, error.start) + 1
                raise DataError(f"{path}: line {at}: {encoding_hint(error, path)}") from error
            if "\0" in rest:
                at = line + rest.count("\n", 0, rest.index("\0")) + 1
                raise DataError(
                    f"{path}: line {at} holds a NUL byte, expected text; if it is UTF-16 without a"
                    " byte order mark, save it as UTF-8"
                )
            end = _record_end(rest) if data else len(rest)
            if end:
                yield rest[:end], line
                line, rest = line + rest.count("\n", 0, end), rest[end:]
            if len(rest) > LONGEST:
                raise DataError(
                    f"{path}: no record ends in {LONGEST} characters after line {line}; is a quote"
                    " open there?"
                )
            if not data:
                return


def _record_end(text: str) -> int:
    """Where the last whole record of a text ends: a line end that is in no quotes."""
    if '"' not in text:
        return text.rfind("\n") + 1
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    outside = np.cumsum(codes == ord('"')) % 2 == 0
    ends = np.flatnonzero((codes == ord("\n")) & outside)
    return int(ends[-1]) + 1 if len(ends) else 0


def encoding_hint(error: UnicodeDecodeError, path: Path) -> str:
    """What to do with a text of another encoding; a byte of Windows-1252 is likely."""
    byte = error.object[error.start : error.start + 1]
    letter = byte.decode("windows-1252", errors="ignore")
    guess = f"is it WINDOWS-1252, as Excel saves it (byte 0x{byte.hex().upper()}: {letter})? "
    return (
        f"is no {error.encoding.upper()} ({error.reason}); {guess if letter else ''}save it as"
        f" UTF-8, or convert it: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8-{path.name}"
    )


def _first_records(text: str, delimiter: str) -> list[list[str]]:
    """The first records of a text; fewer where one is none, which the conversion reports."""
    rows = list[list[str]]()
    try:
        rows += islice(
            filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)), _RECORDS
        )
    except csv.Error:
        return rows
    return rows


def _detect_dialect(
    path: Path, text: str, delimiter: str | None, decimal: str | None
) -> tuple[Dialect, list[list[str]]]:
    """The dialect of a file by its first block, and the first records.

    The delimiter is that by which most records have as many fields as the first; of several, the
    one whose fields are numbers and times.

    Raises:
        DataError: the file is empty, begins with a title or a comment, or has numbers with both
            decimal marks, or only such as `1,234`.
    """
    samples = {mark: _first_records(text, mark) for mark in delimiter or DELIMITERS}

    def fit(mark: str) -> tuple[float, float, int]:
        rows, either = samples[mark], [Dialect(mark, "."), Dialect(mark, ",")]
        width = len(rows[0]) if rows else 0
        share = sum(len(row) == width for row in rows) / max(1, len(rows)) * (width > 1)
        fields = [f for row in rows[1:] or rows for f in row if f.strip()]
        good = sum(any(d.kind_of(f) in (NUMBER, "time") for d in either) for f in fields)
        return share > 0.5, good / max(1, len(fields)) * (share > 0.5), width

    best = max(samples, key=fit)
    rows = samples[best]
    if not rows:
        raise DataError(f"{path}: the file is empty, expected a header line with column names")
    if not fit(best)[0]:
        best = delimiter or (";" if decimal == "," else ",")  # of a single column
        for mark in [m for m in samples if m != decimal]:
            if mark != best or len(samples[mark][0]) == 1:
                _check_first_line(path, samples[mark], mark)
        rows = _first_records(text, best)
    if decimal is None:
        decimal = "." if best == "," else _decimal(path, rows, text, best)
    return Dialect(best, decimal), rows


def _check_first_line(path: Path, rows: list[list[str]], mark: str) -> None:
    """Refuse a line of one field before lines of several: no header is like that."""
    (width, count), *_ = Counter(map(len, rows[1:])).most_common(1) or [(0, 0)]
    if len(rows) > 2 and width > 1 and 2 * count > len(rows) - 1:
        raise DataError(
            f"{path}: the first line is {mark.join(rows[0])[:40]!r}, most lines after it have"
            f" {width} fields separated by {mark!r}; it must name each column: delete lines before"
            f" the header, {_PANDAS}. With decimal commas write --decimal , (decimal= in Python)"
        )


def _decimal(path: Path, rows: list[list[str]], text: str, delimiter: str) -> str:
    """The decimal mark of the fields of records.

    Raises:
        DataError: both are used, or the numbers leave it open.
    """
    fields = [field for row in rows for field in row]
    marked = {
        mark: [f.strip() for f in fields if mark in f and Dialect(decimal=mark).is_number(f)]
        for mark in ",."
    }
    sure = {
        mark: next((f for f in numbers if not _MAYBE_THOUSANDS.fullmatch(f)), None)
        for mark, numbers in marked.items()
    }
    if not marked[","] or (sure["."] and not sure[","]):
        return "."
    if sure[","] and not sure["."]:
        return ","
    what = (
        f"{sure[',']!r} and {sure['.']!r} have two decimal marks"
        if sure[","]
        else f"{marked[','][0]!r} may have decimals, or thousands"
    )
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    comma = sure[","] or marked[","][0]
    column = next(i for row in reader for i, field in enumerate(row) if field.strip() == comma)
    raise DataError(
        f"{path}: line {reader.line_num}, column '{rows[0][column]}': {what}; write --decimal , or"
        " --decimal . (in Python decimal=',' or '.')"
    )


def _names(path: Path, rows: list[list[str]], dialect: Dialect) -> list[str]:
    """The names in the first record; none if it holds values.

    Raises:
        DataError: names are missing or double, or the record may be either.
    """
    first, second = ([*map(dialect.kind_of, row)] for row in (rows * 2)[:2])
    like = all(a == b or "" in (a, b) for a, b in zip(first, second, strict=False))
    if TEXT not in first and any(first) and (like or {*first} == {NUMBER}):
        return []
    if len(rows) > 1 and like and {NUMBER, "time"} & {*first}:
        raise DataError(
            f"{path}: the first line, {dialect.delimiter.join(rows[0])[:60]!r}, may be names"
            " or values like those below; read it with pandas.read_csv(path, header=0) or"
            " header=None, and pass the frame"
        )
    names = [name.strip() for name in rows[0]]
    if "" in names or len(set(names)) < len(names):
        index = "an index of pandas? to_csv(path, index=False)"
        hint = index if not names[0] else f"mend it, {_PANDAS}"
        raise DataError(
            f"{path}: the first line is {names}, expected distinct column names; {hint}"
        )
    return names


def header_of(path: Path) -> tuple[list[str], str]:
    """The names in the first line of a CSV file and what separates them; none in other files."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return [], ","
    with path.open("rb") as file:  # which may be one long line
        first = file.readline(65_536).decode("utf-8-sig", errors="replace")
    rows = {mark: (*_first_records(first, mark), [])[0] for mark in DELIMITERS}
    mark = max(rows, key=lambda mark: len(rows[mark]))
    return [field.strip() for field in rows[mark]], mark
