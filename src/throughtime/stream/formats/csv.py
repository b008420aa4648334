r"""CSV: checked and parsed once, block by block, into an Arrow file in the user's cache folder.

The delimiter and the decimal mark are detected (`_csv_dialect`), and so are time stamps (`times`).
pyarrow parses the usual block. Python's csv module parses a block with quotes that pyarrow treats
more leniently, or with lines that end in `\r`, and every block that pyarrow refuses: it accepts
what Python calls a number, and gives the line and the column of a fault.
"""

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats._csv_cache import CsvScan, CsvTable
from throughtime.stream.formats._csv_dialect import (
    MISSING,
    Dialect,
    column_names,
)
from throughtime.stream.formats.table import (
    Array,
    concat_blocks,
    other_encoding,
)
from throughtime.stream.formats.times import (
    CLOCK,
    ORDERS,
    is_clock,
    is_time,
    parse_times,
    time_format,
    wrong_times,
)

BLOCK = 2**18  # bytes of a block, and the rest of its last record; a smaller file is not cached
LONGEST = 16 * 2**20  # bytes of a line: a longer one is an error
LAST = 4096  # bytes at the end of the file that are looked at before the pass
LABEL = 256  # characters: a longer label would make every label of a block as long in memory
WIDE = 1000  # columns: pyarrow takes seconds for the columns of a line of 100,000
NUMBER, TEXT = "number", "text"  # kinds of columns; any other is a form of times


class CsvFile(CsvTable):
    r"""A CSV file; every line is checked.

    A column whose first filled field is text is text, even where other fields look like numbers;
    if its first fields are time stamps or times of day, all must be (`Table.times`). Any other
    column is numbers (float64; an empty field is NaN, and so is `NA` or `NULL`), and a field of it
    that is no number is an error when the column is read. A first line of nothing but numbers is no
    header: the columns are then called `0`, `1`, ...

    Args:
        path: a file in UTF-8, its lines ended by `\n` or `\r\n`.
        delimiter: the character between fields; a space stands for any run of spaces and tabs.
            Default: detected in the first 64 kB.
        decimal: the decimal mark of numbers. Default: detected.

    Raises:
        ConfigError: a delimiter or decimal mark that no file can have.
        DataError: duplicate or empty column names, a line with more or fewer fields, an open quote,
            a NUL, or bytes that are not UTF-8; the message names the line.

    Cost: a file of more than 256 kB is converted once, at some 100 MB/s, to a cache file about as
    large, which is memory-mapped from then on. A smaller one, and any file where the cache folder
    cannot be written, is parsed block by block where it is read.
    """

    def __init__(
        self, path: Path, delimiter: str | None = None, decimal: str | None = None
    ) -> None:
        super().__init__(path, "columns", _Scan, BLOCK, delimiter, decimal)
        # by column: its index in the matrix of numbers, or -1, -2, ... for a column of its own
        self._slots: dict[str, int] = self.metadata["slots"]
        self.columns, self.length = tuple(self._slots), self._starts[-1]
        self.times = tuple(self.metadata["times"])

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        slots = [self._slots[name] for name in columns]
        batches = self.batches(columns, start, stop)
        return concat_blocks([_select(batch, first, end, slots) for batch, first, end in batches])


def _select(batch: Any, start: int, stop: int, slots: list[int]) -> Array:
    """Rows of some columns of a batch: one matrix of numbers, then columns of text and of times."""
    if min(slots) >= 0:
        numbers = batch.column(0)
        matrix: Array = numbers.values.to_numpy().reshape(len(numbers), -1)[start:stop]
        return matrix if slots == list(range(matrix.shape[1])) else matrix[:, slots]
    if len(slots) > 1:
        parts = [_select(batch, start, stop, [slot]) for slot in slots]
        return np.concatenate(parts, axis=1)
    index = batch.schema.names.index(f"column {slots[0]}")
    values = batch.column(index).slice(start, stop - start)
    if str(values.type) != "string":
        return values.to_numpy(zero_copy_only=False).reshape(-1, 1)
    return np.array(values.to_pylist(), dtype=np.str_).reshape(-1, 1)


class _Parser:
    """From blocks of records to record batches, and to the faults of columns.

    Args:
        kinds: of each column: `NUMBER`, `TEXT`, or the form of its time stamps.
        dialect: of the file.
    """

    def __init__(self, kinds: Mapping[str, str], dialect: Dialect) -> None:
        import pyarrow as pa

        self.kinds, self.dialect = kinds, dialect
        numbers, others = count(), count(-1, -1)
        slots = [next(numbers if kind == NUMBER else others) for kind in kinds.values()]
        self.slots, self.numbers = dict(zip(kinds, slots, strict=True)), next(numbers)
        self.times = {n: kind for n, kind in kinds.items() if kind not in (NUMBER, TEXT)}
        self.faults: dict[str, str] = {}
        matrix = [("numbers", pa.list_(pa.float64(), self.numbers))] if self.numbers else []
        empty = pa.array([], pa.string())
        separate = [
            (
                f"column {slot}",
                pa.array(parse_times(empty, kinds[name])).type
                if name in self.times
                else empty.type,
            )
            for name, slot in self.slots.items()
            if slot < 0
        ]
        self.schema = pa.schema(matrix + separate)

    def by_pyarrow(self, data: bytes) -> Any:
        """A batch of lines, none of which ends within a field; None where pyarrow refuses them."""
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        names = list(self.slots)
        if len(names) > WIDE or len(self.faults) == len(names):
            return None
        if not self.dialect.is_plain:
            data = self.dialect.clean(data.decode()).encode()
        types = {n: pa.string() if slot < 0 else pa.float64() for n, slot in self.slots.items()}
        try:
            table = arrow_csv.read_csv(
                pa.BufferReader(data),
                arrow_csv.ReadOptions(
                    use_threads=False, block_size=len(data) + 1, column_names=names
                ),
                arrow_csv.ParseOptions(
                    delimiter=self.dialect.delimiter, ignore_empty_lines=len(names) > 1
                ),
                arrow_csv.ConvertOptions(
                    column_types=types,
                    include_columns=[name for name in names if name not in self.faults],
                    null_values=MISSING,
                    strings_can_be_null=False,
                    decimal_point=self.dialect.decimal,
                ),
            )
        except pa.ArrowInvalid:
            return None
        values = {name: table[name].combine_chunks() for name in table.column_names}
        for name in self.times.keys() & values.keys():
            times = parse_times(values[name], self.times[name])
            if wrong_times(values[name], times).any():
                return None
            values[name] = times
        return self._batch(values, table.num_rows)

    def by_python(self, rows: list[list[str]], lines: Sequence[int]) -> Any:
        """A batch of records, each with the number of its line for the message of a fault."""
        import pyarrow as pa

        values: dict[str, Any] = {}
        dialect = self.dialect
        for index, (name, slot) in enumerate(self.slots.items()):
            fields = [row[index] for row in rows]
            wrong: Sequence[int] = ()
            if name in self.times:
                texts = pa.array(fields, pa.string())
                values[name] = parse_times(texts, self.times[name])
                wrong = np.flatnonzero(wrong_times(texts, values[name])).tolist()
            elif slot < 0:
                values[name] = pa.array(fields, pa.string())
            else:
                filled = [(i, f) for i, f in enumerate(fields) if f.strip() not in MISSING]
                wrong = [i for i, f in filled if not dialect.is_number(f)]
                if not wrong:
                    values[name] = np.full(len(fields), np.nan)
                    values[name][[i for i, _ in filled]] = [dialect.number(f) for _, f in filled]
            if wrong and name not in self.faults:
                self.faults[name] = self._fault(name, lines[wrong[0]], fields[wrong[0]])
        return self._batch(values, len(rows))

    def _fault(self, name: str, line: int, text: str) -> str:
        what = "a time stamp" if name in self.times else "a number"
        reason = self.dialect.explain(text) if what == "a number" else ""
        return (
            f"line {line}, column '{name}' holds {text[:40]!r}, expected {what} as in the lines"
            f" before it; {reason or 'correct the line, or leave the column out'}"
        )

    def _batch(self, values: dict[str, Any], rows: int) -> Any:
        """Of the values of each column; those of a column with a fault are left out."""
        import pyarrow as pa

        matrix, texts = np.full((rows, self.numbers), np.nan), list[Any]()
        for name, slot in self.slots.items():
            if name in self.times:
                kind = self.schema.field(f"column {slot}").type
                times = values.get(name) if name not in self.faults else None
                texts.append(pa.nulls(rows, kind) if times is None else pa.array(times, kind))
            elif slot < 0:
                texts.append(self._labels(name, values.get(name), rows))
            elif name in values and name not in self.faults:
                matrix[:, slot] = values[name]
        if self.numbers:
            flat = pa.array(matrix.reshape(-1))
            texts.insert(0, pa.FixedSizeListArray.from_arrays(flat, self.numbers))
        return pa.RecordBatch.from_arrays(texts, schema=self.schema)

    def _labels(self, name: str, labels: Any, rows: int) -> Any:
        """The array of a column of text; empty ones from the block on where a label is too long."""
        import pyarrow as pa
        from pyarrow import compute

        if name not in self.faults:
            lengths = compute.call_function("utf8_length", [labels])
            longest = compute.call_function("max", [lengths]).as_py() or 0
            if longest <= LABEL:
                return labels
            self.faults[name] = (
                f"column '{name}' holds a text of {longest} characters, expected labels"
            )
        return pa.array([""] * rows, pa.string())


class _Scan(CsvScan):
    """A pass over a file by columns: its header, the kinds of its columns, and its blocks.

    `line` counts the lines before `offset`, which is where the next block begins.
    """

    def __init__(self, path: Path, file: BinaryIO, dialect: Dialect) -> None:
        super().__init__(path, file)
        self.line, self.dialect = 0, dialect
        mark = re.escape(dialect.delimiter.encode())
        mark += rb"\t" if dialect.delimiter == " " else b""
        self._quoted = re.compile(rb'(?<![^%s\n])"[^"\r\n]*"(?=[%s\r\n]|\Z)' % (mark, mark))
        columns = self._header()
        self.width = len(columns)
        # Blank lines are missing values of a single column, but not those at the end.
        self.end = _content_end(file) if self.width == 1 else 2**63
        self.parser = _Parser(dict(zip(columns, self._kinds(), strict=True)), dialect)
        self.schema = self.parser.schema

    def metadata(self) -> dict[str, Any]:
        parser = self.parser
        return {
            "slots": parser.slots,
            "times": parser.times,
            "starts": self.starts.tolist(),
            "faults": parser.faults,
        }

    def _parse(self, data: bytes, start: int) -> tuple[bytes, Any]:
        del start
        batch = self.parser.by_pyarrow(data) if self._regular(data) else None
        if batch is not None:
            self.line += data.count(b"\n")
            return data, batch
        data, rows, lines, self.line = self._records(data)
        return data, self.parser.by_python(rows, lines)

    def _header(self) -> list[str]:
        """The first record as the names of the columns, unless it is all numbers."""
        feed = _LineFeed(self._next_line(), self._next_line, self.dialect)
        reader = self._reader(feed)
        fields, before = list[str](), (0, 0)
        try:
            while not fields and (record := next(reader, None)) is not None:
                fields = record
                if not record:  # a blank line
                    before = feed.consumed, reader.line_num
        except csv.Error as error:
            self._refuse(error, reader.line_num)
        self.named = not fields or not all(map(self.dialect.is_number, fields))
        if not self.named:
            self.offset, self.line = self.offset + before[0], before[1]
            return [*map(str, range(len(fields)))]
        columns = column_names(self.path, fields)
        self.offset += feed.consumed
        self.line = reader.line_num
        return columns

    def _reader(self, feed: Iterable[str]) -> Any:
        return csv.reader(feed, strict=True, delimiter=self.dialect.delimiter)

    def _kinds(self) -> list[str]:
        """The kind of each column: times by all fields of its block, others by the first filled.

        Dates beside a column of times of day have a form of their own.
        """
        begin = self.offset, self.line
        kinds: dict[int, str] = {}
        dates, words = list[int](), set[int]()
        while len(kinds) < self.width and (data := self._next_block()):
            data, rows, _, self.line = self._records(data)
            self.offset += len(data)
            for column in set(range(self.width)) - kinds.keys():
                filled = [row[column] for row in rows if row[column].strip()]
                first = next((field for field in filled if field.strip() not in MISSING), None)
                if first is None:
                    words |= {column} if filled else set()
                    continue
                number = self.dialect.is_number(first) or self.dialect.explain(first)
                fields = [row[column] for row in rows]
                form = "" if number else time_format(fields)
                if form:  # the last lines tell months from days, where the first are of one day
                    fields += [record[column] for record in self._last_records()]
                    form = time_format(fields)
                    dates += [column] * (form in ORDERS and not any(":" in f for f in fields))
                elif not number and is_time(first) and is_clock(fields):
                    form = CLOCK
                kinds[column] = NUMBER if number else form or TEXT
        self.offset, self.line = begin
        if dates and CLOCK in kinds.values():  # the time of day is in a column of its own
            kinds[min(dates)] += "+date"
        undecided = [TEXT if column in words else NUMBER for column in range(self.width)]
        return [kinds.get(column, kind) for column, kind in enumerate(undecided)]

    def _last_records(self) -> list[list[str]]:
        """Records of the last lines of the file, as far as these are whole."""
        self.file.seek(max(self.offset, self.file.seek(0, 2) - LAST))
        lines = self.file.read().decode(errors="ignore").splitlines()[1:]
        try:
            rows = list(self._reader(map(self.dialect.clean, lines)))
        except csv.Error:
            return []
        return [row for row in rows if len(row) == self.width]

    def _next_block(self) -> bytes:
        """The next lines, about `BLOCK` bytes; empty at the end."""
        self.file.seek(self.offset)
        data = self.file.read(BLOCK)
        if data and data[-1:] != b"\n":
            data += self._line()
        return data[: max(0, self.end - self.offset)]

    def _line(self) -> bytes:
        line = self.file.readline(LONGEST + 1)
        if len(line) > LONGEST:
            raise DataError(
                f"{self.path}: a line after line {self.line} is longer than {LONGEST} bytes,"
                " expected lines of fields"
            )
        return line

    def _regular(self, data: bytes) -> bool:
        """Whether pyarrow reads a block as Python's csv module does: each line is a record."""
        self._check(data)
        if data.count(b"\r") != data.count(b"\r\n") or b"n(" in data or b"N(" in data:
            return False  # pyarrow reads nan(1) as a number
        quoted = 2 * len(self._quoted.findall(data)) if b'"' in data else 0
        return data.count(b'"') == quoted and _longest_line(data) <= csv.field_size_limit()

    def _check(self, data: bytes) -> None:
        """Refuse what is not text."""
        try:
            _ = data.isascii() or data.decode()
        except UnicodeDecodeError as error:
            self._refuse(error, self.line + data.count(b"\n", 0, error.start) + 1)
        if b"\0" in data:
            line = self.line + data.count(b"\n", 0, data.index(b"\0")) + 1
            raise DataError(
                f"{self.path}: line {line} holds a NUL byte, expected UTF-8 text; is it UTF-16, or"
                " damaged?"
            )

    def _refuse(self, error: Exception, line: int) -> NoReturn:
        raise DataError(
            f"{self.path}: not a readable CSV file (line {line}:"
            f" {other_encoding(error, self.path) or error}); expected UTF-8 text with"
            " a header line"
        ) from error

    def _records(self, data: bytes) -> tuple[bytes, list[list[str]], list[int], int]:
        """Read a block with the csv module, and the lines in which its last record goes on.

        Returns:
            The bytes read, the records, the line of each, and the number of lines before the next.
        """
        self._check(data)
        feed = _LineFeed(data, self._next_line, self.dialect)
        reader = self._reader(feed)
        rows: list[list[str]] = []
        lines: list[int] = []
        while feed.lines:
            try:
                record = next(reader)
            except csv.Error as error:
                self._refuse(error, self.line + reader.line_num)
            line = self.line + reader.line_num
            if record and len(record) != self.width:
                before = "the header has" if self.named else "the lines before it have"
                raise DataError(
                    f"{self.path}: line {line} has {len(record)} fields, {before} {self.width}"
                )
            if record or self.width == 1:
                rows.append(record or [""])
                lines.append(line)
        return feed.data, rows, lines, self.line + reader.line_num

    def _next_line(self) -> bytes:
        line = self._line()
        self._check(line)
        return line


class _LineFeed:
    """Lines for the csv module, and more of them where a record goes on."""

    def __init__(self, data: bytes, more: Callable[[], bytes], dialect: Dialect) -> None:
        self.data, self.lines = data, _lines(data)
        self._more, self._dialect = more, dialect

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if not self.lines:
            extra = self._more()
            if not extra:
                raise StopIteration
            self.data += extra
            self.lines += _lines(extra)
        return self._dialect.clean(self.lines.popleft())

    @property
    def consumed(self) -> int:
        """Bytes of the lines that were taken."""
        return len(self.data) - sum(len(line.encode()) for line in self.lines)


def _lines(data: bytes) -> deque[str]:
    return deque(io.StringIO(data.decode(), newline="").readlines())


def _longest_line(data: bytes) -> int:
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    return int(np.diff(ends, prepend=-1, append=len(data)).max())


def _content_end(file: BinaryIO) -> int:
    """Where the line ends begin with which a file ends."""
    end = file.seek(0, 2)
    while end:
        begin = max(0, end - 65_536)
        file.seek(begin)
        content = file.read(end - begin).rstrip(b"\r\n")
        if content:
            return begin + len(content)
        end = begin
    return 0
