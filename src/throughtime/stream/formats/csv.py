"""CSV: from a file to record batches, checked line by line.

The first block shows the delimiter, the decimal mark, the names and what each column holds: a list
of kinds that fit, the likeliest first. pyarrow parses the usual block. Python's csv module reads,
strictly, each block with a quote within a field and each that pyarrow or a kind refuses: it knows
the line of a fault. A field that contradicts a kind begins the conversion again with the next kind
of its column; if there is none, the column cannot be read.
"""

import codecs
import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats.arrow import Blocks, RestartError, converted
from throughtime.stream.formats.table import Table, is_number
from throughtime.stream.formats.times import (
    CLOCK,
    count_converted,
    is_time,
    parse_times,
    time_forms,
)

BLOCK = 2**20  # bytes of a block, and the rest of its last record
LONGEST = 2**24  # characters without the end of a record: more are an error
DELIMITERS = (",", ";", "\t", "|")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")  # values, as in pandas
UNKNOWN, NUMBER, BOOLEAN, TEXT = "unknown", "number", "boolean", "text"  # or a form of times
_RECORDS = 200  # of the first block, which show the delimiter
_UNDECIDED = "\1"  # the decimal mark of numbers that may have decimals, or thousands
_MAYBE_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,'\u2019 \u00a0\u202f])\d{3}(\1\d{3})*([.,]\d+)?")
_EXACT = 2.0**53  # up to which float64 holds every whole number
_BOOLEANS = ("true", "false")
_DIGITS = r"^[+-]?\d{16,}$"
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
            f"delimiter={delimiter!r}: expected ',' ';' ':' '|' or tab; of other files read a frame"
            " by pandas, and pass it: tt.recording(frame, ...)"
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
        self.delimiter, self.decimal, rows = _detect_dialect(first, delimiter, decimal)
        line, _ = next(self._records(first, 0), (0, []))
        if not rows:
            raise DataError(f"{path}: the file is empty, expected a header line with column names")
        names = self._header(rows)
        self.names = tuple(names or map(str, range(len(rows[0]))))
        self._skipped = line if names else 0  # lines of the header
        mark = re.escape(self.delimiter)
        self._quoted = re.compile(rf'(?<![^{mark}\n])"[^"\r\n]*"(?=[{mark}\r\n]|\Z)')
        self.faults = dict[str, str]()
        texts = next((self._texts(*block)[0] for block in self._blocks()), {})
        self.kinds = {n: self._kinds(texts[n]) if texts else [UNKNOWN] for n in self.names}

    def _header(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """The names in the first record; none if it holds values.

        Raises:
            DataError: names are missing or double, or the record may be either.
        """
        first, second = ([*map(self._kind_of, row)] for row in (*rows[:2], rows[0])[:2])
        like = all(a == b or UNKNOWN in (a, b) for a, b in zip(first, second, strict=False))
        if TEXT not in first and {*first} != {UNKNOWN} and (like or {*first} == {NUMBER}):
            return []
        if len(rows) > 1 and like and {*first} - {TEXT, UNKNOWN}:
            raise DataError(
                f"{self.path}: the first line, {self.delimiter.join(rows[0])[:60]!r}, may be names"
                " or values like those below; read it with pandas.read_csv(path, header=0) or"
                " header=None, and pass the frame"
            )
        names = [name.strip() for name in rows[0]]
        if "" in names or len(set(names)) < len(names):
            index = "an index of pandas? to_csv(path, index=False)"
            hint = index if not names[0] else f"mend it, {_PANDAS}"
            raise DataError(
                f"{self.path}: the first line is {names}, expected distinct column names; {hint}"
            )
        return names

    def _kind_of(self, field: str) -> str:
        """What a field holds, roughly."""
        if field.strip() in MISSING:
            return UNKNOWN
        return NUMBER if is_number(field, self.decimal) else CLOCK if is_time(field) else TEXT

    def blocks(self) -> Blocks:
        """Its batches, from the first on."""
        import pyarrow as pa

        empty = pa.array([], pa.string())
        self.schema = pa.schema(
            {n: self._converted(empty, k).type for n, (k, *_) in self.kinds.items()}
        )
        self.faults.clear()
        return Blocks(self.schema, self._batches, self.faults)

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa

        for block, line in self._blocks():
            try:
                yield self._batch(self._parsed(block))
            except pa.ArrowInvalid:
                yield self._batch(*self._texts(block, line))
        for name in (name for name, kinds in self.kinds.items() if len(kinds) > 1):
            self.faults[name] = (
                f"column '{name}' holds times whose day and month cannot be told apart; write them"
                f" as 2020-03-09, leave the column out, {_PANDAS}"
            )

    def _blocks(self) -> Iterator[tuple[str, int]]:
        """The blocks without the header, and the lines before each."""
        skipped = self._skipped
        for block, line in _read_blocks(self.path):
            yield block.split("\n", skipped)[-1], line + skipped
            skipped = 0

    def _parsed(self, block: str) -> dict[str, Any]:
        """The columns of a block by pyarrow, where it reads it as the csv module does.

        Raises:
            pyarrow.ArrowInvalid: it does not.
        """
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        quotes = block.count('"')
        if block.count("\r") != block.count("\r\n") or (
            quotes and quotes != 2 * len(self._quoted.findall(block))
        ):
            raise pa.ArrowInvalid("not as the csv module")
        data = block.encode()
        numbers = [n for n, kinds in self.kinds.items() if NUMBER in kinds and n not in self.faults]
        table = arrow_csv.read_csv(
            pa.BufferReader(data),
            arrow_csv.ReadOptions(
                use_threads=False, block_size=len(data) + 1, column_names=self.names
            ),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter, ignore_empty_lines=len(self.names) > 1
            ),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(self.names, pa.string())
                | dict.fromkeys(numbers, pa.float64()),
                null_values=MISSING,
                strings_can_be_null=False,
                decimal_point=self.decimal,
            ),
        )
        return {name: table[name].combine_chunks() for name in self.names}

    def _texts(self, block: str, line: int) -> tuple[dict[str, Any], list[int]]:
        """The columns of a block as text, by the csv module, and the line of each row.

        Raises:
            DataError: a line is no record of so many fields.
        """
        import pyarrow as pa

        rows, lines, width = list[list[str]](), list[int](), len(self.names)
        for number, record in self._records(block, line):
            if not record and width > 1:
                continue
            rows.append(record or [""])
            lines.append(number)
            if len(rows[-1]) != width:
                repair = "mend it" if width > 1 else "delete lines before the header"
                before = "header has" if self._skipped else "lines before it have"
                raise DataError(
                    f"{self.path}: line {number} has {len(record)} fields, the {before} {width};"
                    f" {repair}, {_PANDAS}"
                )
        columns = zip(*rows, strict=True) if rows else [()] * width
        arrays = [pa.array(column, pa.string()) for column in columns]
        return dict(zip(self.names, arrays, strict=True)), lines

    def _records(self, block: str, line: int) -> Iterator[tuple[int, list[str]]]:
        """The records of a block, each with the number of its last line, by the csv module."""
        first, lines = line + 1, io.StringIO(block, newline="\n")
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        try:
            for record in reader:
                yield line + reader.line_num, record
                first = line + reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{self.path}: line {first}: {error}; is a quote open? Mend it, {_PANDAS}"
            ) from error

    def _batch(self, columns: Mapping[str, Any], lines: Sequence[int] = ()) -> Any:
        """The record batch of the columns of a block; with lines, a fault in it is recorded.

        Raises:
            pyarrow.ArrowInvalid: a field is of another kind than its column, and there are no
                lines to name.
            RestartError: a column is of another kind.
        """
        import pyarrow as pa

        arrays: list[Any] = []
        for name, texts in columns.items():
            field = self.schema.field(name)
            values = pa.nulls(len(texts), field.type)
            if name not in self.faults:
                try:
                    values = self._converted(texts, self.kinds[name][0])
                except pa.ArrowInvalid:
                    if not lines:
                        raise
                    self._contradict(name, texts, lines)
                if self.kinds[name] == [UNKNOWN] and values.null_count < len(values):
                    self.kinds[name] = [NUMBER]
            arrays.append(values.cast(field.type))
        return pa.record_batch(arrays, schema=self.schema)

    def _converted(self, texts: Any, kind: str) -> Any:
        """The values of a column.

        Raises:
            pyarrow.ArrowInvalid: a field is of another kind.
        """
        import pyarrow as pa

        compute: Any = import_module("pyarrow.compute")
        if kind == TEXT:
            return texts
        if str(texts.type) == "double":
            values, whole = texts, compute.is_finite(texts)
        else:
            filled = _filled(texts)
            if kind == BOOLEAN:
                lower = compute.utf8_lower(filled)
                if {*compute.unique(lower).to_pylist()} - {*_BOOLEANS, None}:
                    raise pa.ArrowInvalid("no boolean")
                return compute.equal(lower, "true")
            if kind not in (NUMBER, UNKNOWN):
                return parse_times(filled, kind)
            whole = compute.match_substring_regex(filled, _DIGITS)
            if self.decimal != ".":
                filled = compute.replace_substring(filled, ".", "no decimal mark")
                filled = compute.replace_substring(filled, self.decimal, ".")
            filled = compute.replace_substring_regex(filled, r"^\+([\d.])", r"\1")
            values = filled.cast("float64")
        large = compute.greater_equal(compute.abs(values), _EXACT)
        if compute.any(compute.and_(large, whole)).as_py():
            raise pa.ArrowInvalid("a whole number that float64 may not hold")
        return values

    def _contradict(self, name: str, texts: Any, lines: Sequence[int]) -> None:
        """Record why a column cannot be read.

        Raises:
            RestartError: it can, as a column of another kind.
        """
        kind, *others = self.kinds[name]
        if kind == UNKNOWN:
            others = self._kinds(texts)
        if others:
            self.kinds[name] = others
            raise RestartError
        row = count_converted(texts, partial(self._converted, kind=kind))
        field = texts[row].as_py()
        if kind == NUMBER and re.fullmatch(_DIGITS, field.strip()):
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
        marks = [m for m in ".," if m != self.decimal and is_number(field, m)]
        option = " or ".join(f"--decimal {m} (decimal='{m}' in Python)" for m in marks)
        if _THOUSANDS.fullmatch(field):
            what = "does it separate thousands? Write it without"
            return f"{what}; if its mark is that of decimals: {option}" if marks else what
        return f"is {marks[0]!r} its decimal mark? {option}" if marks else ""

    def _kinds(self, texts: Any) -> list[str]:
        """What a column may hold, by the fields of a block."""
        compute: Any = import_module("pyarrow.compute")
        filled = _filled(texts).drop_null()
        if not len(filled):
            return [UNKNOWN]
        first = filled[0].as_py()
        if is_number(first, self.decimal) or self._reason(first):
            return [NUMBER]
        if {*compute.unique(compute.utf8_lower(filled)).to_pylist()} <= {*_BOOLEANS}:
            return [BOOLEAN]
        return time_forms(filled) or [TEXT]


def _filled(texts: Any) -> Any:
    """An Arrow array of text without spaces at the ends, null where a value is missing."""
    compute: Any = import_module("pyarrow.compute")
    plain = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(plain, import_module("pyarrow").array(MISSING))
    return compute.if_else(missing, None, plain)


def _read_blocks(path: Path) -> Iterator[tuple[str, int]]:
    """The text of a file in blocks of whole records, and the number of lines before each.

    Blank lines at the begin and the end of the file are left out.

    Raises:
        DataError: it is not UTF-8, nor UTF-16 with its mark, or holds a NUL, or a record without an
            end.
    """
    rest, line, begun = "", 0, False
    with path.open("rb") as file:
        mark = file.read(2)
        encoding = _MARKS.get(mark, "utf-8")
        decoder = codecs.getincrementaldecoder(encoding)()
        if encoding == "utf-8":
            file.seek(3 if mark + file.read(1) == codecs.BOM_UTF8 else 0)
        data = mark
        while data:
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
            if not begun:
                filled = rest.lstrip("\r\n")
                line, rest = line + rest.count("\n") - filled.count("\n"), filled
            if not data:
                rest = rest.rstrip("\r\n") + "\n"
            end = _record_end(rest) if data else len(rest)
            if end > 1:
                yield rest[:end], line
                line, rest, begun = line + rest.count("\n", 0, end), rest[end:], True
            if len(rest) > LONGEST:
                raise DataError(
                    f"{path}: no record ends in {LONGEST} characters after line {line}; is a quote"
                    " open there, or do lines end with CR alone? Save the file with LF"
                )


def _record_end(text: str) -> int:
    """Where the last whole record of a text ends: a line end in no quotes, after a filled line."""
    end = text.rfind("\n") + 1
    if '"' in text:
        codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        outside = np.cumsum(codes == ord('"')) % 2 == 0
        end = int(np.flatnonzero((codes == ord("\n")) & outside).max(initial=-1)) + 1
    filled = len(text[:end].rstrip("\r\n"))
    return text.find("\n", filled) + 1 if filled else 0


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
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter)
    with contextlib.suppress(csv.Error):
        rows.extend(islice(filter(None, reader), _RECORDS))
    return rows


def _detect_dialect(
    text: str, delimiter: str | None, decimal: str | None
) -> tuple[str, str, list[list[str]]]:
    """The delimiter and the decimal mark of a file by its first block, and the first records.

    The delimiter is that by which most records have the same number of fields; of several, the one
    whose fields are numbers and times.
    """
    default = ";" if decimal == "," else ","  # of a single column
    samples = {
        m: _first_records(text, m) for m in delimiter or DELIMITERS if m != decimal or delimiter
    }

    def fit(mark: str) -> tuple[bool, float, float, int]:
        rows = samples[mark]
        (width, count), *_ = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        fields = [field for row in rows[1:] or rows for field in row if field.strip()]
        good = sum(is_number(f) or is_number(f, ",") or is_time(f) for f in fields)
        share = count / max(1, len(rows))
        return width > 1 and share > 0.5, share, good / max(1, len(fields)), width

    best = max(samples, key=fit)
    if not fit(best)[0]:
        best = delimiter or default
    rows = samples[best]
    return best, decimal or ("." if best == "," else _decimal(rows)), rows


def _decimal(rows: Sequence[Sequence[str]]) -> str:
    """The decimal mark of the fields of records; undecided if numbers leave it open."""
    marks = [(m, f.strip()) for row in rows for f in row for m in ".," if m in f]
    numbers = [(mark, field) for mark, field in marks if is_number(field, mark)]
    sure = next((mark for mark, field in numbers if not _MAYBE_THOUSANDS.fullmatch(field)), None)
    return sure or (_UNDECIDED if any(mark == "," for mark, _ in numbers) else ".")


def header_of(path: Path) -> tuple[list[str], str]:
    """The names in the first line of a CSV file and what separates them; none in other files."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return [], ","
    with path.open("rb") as file:  # which may be one long line
        first = file.readline(65_536).decode("utf-8-sig", errors="replace")
    mark = max(DELIMITERS, key=first.count)
    names = next(iter(_first_records(first, mark)), [])
    return [name.strip() for name in names], mark
