"""One pass over a CSV file: every line is checked, and where the rows are is noted."""

import csv
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.csv_fields import Records, is_number, plain

PIECE = 120_000  # bytes of a block, and the rest of its last record
FIELD = 131_072  # characters: the limit of the csv module
LONGEST = 16 * 2**20  # bytes of a line: beyond, the file is none
LABEL = (
    256  # characters of a label: longer ones would make every label of the block as long in memory
)


class Layout(NamedTuple):
    """What a scan finds: block `i` holds the rows `starts[i]` to before `starts[i + 1]`, in as many bytes of `offsets`."""

    columns: tuple[str, ...]
    text: tuple[bool, ...]
    rows: int
    starts: "array[int]"
    offsets: "array[int]"
    lines: "array[int]"  # before each block


def scan(path: Path) -> Layout:
    """The layout of a file.

    Raises:
        DataError: as `open_csv`.
    """
    try:
        with path.open("rb") as file:
            scanned = _Scan(path, file)
            scanned.header()
            while scanned.piece():
                pass
            return scanned.layout()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def names(path: Path, fields: list[str]) -> list[str]:
    """The fields of a header line, checked."""
    found = [name.strip() for name in fields]
    if not found:
        raise DataError(f"{path}: the file is empty, expected a header line with column names")
    if "" in found or len(set(found)) < len(found):
        raise DataError(f"{path}: the first line is {found}, expected distinct column names")
    return found


def line_of(path: Path, layout: Layout, block: int, row: int) -> int:
    """The line of a row of a block, counted from 1; for messages."""
    with path.open("rb") as file:
        file.seek(layout.offsets[block])
        records = Records(file.read(layout.offsets[block + 1] - layout.offsets[block]))
    seen = -1
    while seen < row and (record := records.take()) is not None:
        seen += bool(record) or len(layout.columns) == 1
    return layout.lines[block] + records.line


@dataclass
class _Scan:
    path: Path
    file: BinaryIO
    offset: int = 0
    line: int = 0  # lines before the offset
    rows: int = 0
    filled: int = 0  # rows up to the last line with a field

    def header(self) -> None:
        """Takes the first record as the names, unless it is all numbers."""
        if self.file.read(3) == b"\xef\xbb\xbf":
            self.offset = 3
        self.file.seek(self.offset)
        records = self._records(self._line())
        fields = self._take(records) or []
        self.named = not fields or not all(is_number(field.strip()) for field in fields)
        if not self.named:
            self.columns = [*map(str, range(len(fields)))]
        else:
            self.columns = names(self.path, fields)
            self.offset += records.consumed()
            self.line = records.line
        self.file.seek(self.offset)
        self.width = len(self.columns)
        self.text: list[bool | None] = [None] * self.width
        self.starts, self.offsets, self.lines = array("q"), array("q", [self.offset]), array("q")

    def piece(self) -> bool:
        """Takes one block; false at the end of the file."""
        data = self.file.read(PIECE)
        if not data:
            return False
        if data[-1:] != b"\n":
            data += self._line()
        self._refuse_unreadable(data)
        text = plain(data, self.width)
        if text is None:
            data, rows, lines = self._by_record(data)
        else:
            rows, lines = self._whole(data, text), data.count(b"\n")
        self.starts.append(self.rows)
        self.lines.append(self.line)
        self.rows += rows
        self.line += lines
        self.offset += len(data)
        self.offsets.append(self.offset)
        return True

    def layout(self) -> Layout:
        """Blank lines at the end of a single column are no missing values."""
        self.starts.append(self.rows)
        text = tuple(bool(t) for t in self.text)
        return Layout(tuple(self.columns), text, self.filled, self.starts, self.offsets, self.lines)

    def _line(self) -> bytes:
        line = self.file.readline(LONGEST + 1)
        if len(line) > LONGEST:
            raise DataError(
                f"{self.path}: a line after line {self.line} is longer than {LONGEST} bytes,"
                " expected lines of fields"
            )
        return line

    def _refuse_unreadable(self, data: bytes) -> None:
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
            f"{self.path}: not a readable CSV file (line {line}: {error}); expected UTF-8 text with"
            " a header line"
        ) from error

    def _records(self, data: bytes) -> Records:
        self._refuse_unreadable(data)
        return Records(data, self._next_line)

    def _next_line(self) -> bytes:
        line = self._line()
        self._refuse_unreadable(line)
        return line

    def _take(self, records: Records) -> list[str] | None:
        try:
            return records.take()
        except csv.Error as error:
            self._refuse(error, self.line + records.line)

    def _whole(self, data: bytes, text: str) -> int:
        """Checks a block without quotes: the commas of each line are counted at once."""
        if not text and self.width > 1:
            return 0
        rows = text.count("\n") + 1
        if not _uniform(text, rows, self.width):
            self._refuse_width(data)
        if len(text) > FIELD and max(map(len, text.replace("\n", ",").split(","))) > FIELD:
            raise DataError(
                f"{self.path}: a field after line {self.line} is longer than {FIELD} characters,"
                " expected numbers and labels"
            )
        if None in self.text:
            self._decide(text.replace("\n", ",").split(","))
        filled = len(text.rstrip("\n"))
        if filled:
            self.filled = self.rows + (rows if self.width > 1 else text.count("\n", 0, filled) + 1)
        return rows

    def _by_record(self, data: bytes) -> tuple[bytes, int, int]:
        records = Records(data, self._next_line)
        fields: list[str] = []
        while (record := self._take(records)) is not None:
            if record and len(record) != self.width:
                self._refuse_fields(self.line + records.line, len(record))
            fields += record or ([""] if self.width == 1 else [])
            if record:
                self.filled = self.rows + len(fields) // self.width
        if None in self.text:
            self._decide(fields)
        return records.data, len(fields) // self.width, records.line

    def _decide(self, fields: list[str]) -> None:
        """A column is text if its first filled field is."""
        for column, decided in enumerate(self.text):
            first = (
                next((f for f in fields[column :: self.width] if f.strip()), None)
                if decided is None
                else None
            )
            if first is not None:
                self.text[column] = not is_number(first)

    def _refuse_width(self, data: bytes) -> NoReturn:
        for number, line in enumerate(data.replace(b"\r\n", b"\n").split(b"\n"), self.line + 1):
            if line and line.count(b",") != self.width - 1:
                self._refuse_fields(number, line.count(b",") + 1)
        raise AssertionError("unreachable: no line differs")

    def _refuse_fields(self, line: int, fields: int) -> NoReturn:
        before = "the header has" if self.named else "the lines before it have"
        raise DataError(f"{self.path}: line {line} has {fields} fields, {before} {self.width}")


def _uniform(text: str, rows: int, width: int) -> bool:
    """Whether each of the lines has `width - 1` commas."""
    if text.count(",") != rows * (width - 1):
        return False
    if width == 1 or rows == 1:
        return True
    codes = np.frombuffer(text.encode(), np.uint8)
    commas = np.flatnonzero(codes == ord(",")).reshape(rows, width - 1)
    ends = np.flatnonzero(codes == ord("\n"))
    return bool((commas[1:, 0] > ends).all() and (commas[:-1, -1] < ends).all())
