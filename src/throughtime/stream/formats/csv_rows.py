"""CSV on its side: each line is a signal, and time runs along the line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import csv
from throughtime.stream.formats._csv_cache import CsvScan, CsvTable
from throughtime.stream.formats._csv_dialect import MISSING, Dialect
from throughtime.stream.formats.table import (
    Array,
    concat_blocks,
    is_number,
)

BLOCK = 2**16  # bytes of a block, at most, unless a single field has more
LINES = 65_536  # at most: a file of more has its signals in columns


class CsvRowsFile(CsvTable):
    """A file whose lines are signals of equal length, all numbers, without a header.

    The columns are called `0`, `1`, ... from the first line; `-1`, `-2`, ... count from the last
    line and can be read too, though `columns` does not list them twice. Blank lines are ignored; an
    empty field is NaN. The delimiter and the decimal mark are detected, or set as for `CsvFile`.

    Raises:
        DataError: lines of different lengths, quotes, text at the start, fields separated by
            spaces, or more than 65,536 lines.

    Cost: one pass, in which a line may be longer than memory. A file of more than 256 kB is
    converted to a cache file (see `CsvFile`); otherwise reading parses 64 kB at a time.
    """

    def __init__(
        self, path: Path, delimiter: str | None = None, decimal: str | None = None
    ) -> None:
        super().__init__(path, "rows", _RowScan, csv.BLOCK, delimiter, decimal)
        self._lines = LineNames(map(str, range(self.metadata["lines"])))
        self.columns, self.length = self._lines, self.metadata["length"]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        signals: list[Array] = []
        for name in map(self._lines.forward, columns):
            line = self._lines.index(name) * self.length
            batches = self.batches((name,), line + start, line + stop)
            parts = [batch.column(0).to_numpy()[first:end] for batch, first, end in batches]
            signals.append(concat_blocks(parts))
        return np.stack(signals, axis=1)


class LineNames(tuple[str, ...]):
    """The names of `k` lines.

    `-1` to `-k` are `in` it as well: they name the same lines from the end.
    """

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and name[:1] == "-" and super().__contains__(self.forward(name))
        )

    def forward(self, name: str) -> str:
        """The name that counts from the first line: `-1` of three lines is `2`."""
        from_end = name[:1] == "-" and name[1:].isdecimal() and name[1:] != "0"
        return str(len(self) + int(name)) if from_end else name


class _RowScan(CsvScan):
    """A pass over a file by lines: all numbers in one sequence, line after line.

    A block may hold several lines, or a part of one.
    """

    def __init__(self, path: Path, file: BinaryIO, dialect: Dialect) -> None:
        import pyarrow as pa

        super().__init__(path, file)
        if dialect.delimiter == " ":
            raise DataError(
                f"{path}: its fields are separated by spaces, expected a character between the"
                " numbers of a line, such as ',' or tab"
            )
        # As commas and points, byte by byte, so that positions in the file stay as they are. What
        # was a comma or a point before, and is neither, becomes part of no number.
        marks = f"{dialect.delimiter}{dialect.decimal}"
        others = "".join(mark for mark in ",." if mark not in marks)
        self._plain = bytes.maketrans((marks + others).encode(), b",." + b"'" * len(others))
        self.schema = pa.schema([("values", pa.float64())])
        self.length = 0  # of the first line, once it has ended
        self.lines = 0
        self.faults: dict[str, str] = {}
        self._line = 1  # in the file
        self._fields = 0  # of that line, so far

    def metadata(self) -> dict[str, Any]:
        if not self.lines:
            raise DataError(
                f"{self.path}: the file is empty, expected a line of numbers for each signal"
            )
        return {
            "lines": self.lines,
            "length": self.length,
            "starts": self.starts.tolist(),
            "faults": self.faults,
        }

    def _next_block(self) -> bytes:
        """About `BLOCK` bytes, up to the end of a field; a last line without its end gets one."""
        self.file.seek(self.offset)
        data = b""
        while piece := self.file.read(BLOCK):
            data += piece.translate(self._plain)
            if end := max(data.rfind(b","), data.rfind(b"\n")) + 1:
                data = data[:end]
                break
        else:
            data += b"\n" if data or self._fields else b""  # an empty last field may be left
        self._check(data)
        return data

    def _check(self, data: bytes) -> None:
        """Count lines and their fields, and refuse what is no line of numbers."""
        if b'"' in data or b"\0" in data:
            raise DataError(
                f"{self.path}: holds quotes or NUL bytes in or after line {self._line},"
                " expected lines of numbers"
            )
        lines = _split(data, inside=self._fields > 0)
        if lines and not self.starts[-1]:
            first = lines[0][1].split(b",")[0].decode(errors="replace").strip()
            if first not in MISSING and not is_number(first):
                raise DataError(
                    f"{self.path}: begins with {first[:40]!r}, expected lines of numbers, one for"
                    " each signal, without a header"
                )
        complete = len(lines) - data.endswith(b",")
        for number, (index, line) in enumerate(lines):
            self._fields += line.count(b",") + 1
            if number < complete:
                self._end_line(self._line + index)
        self._line += data.count(b"\n")

    def _end_line(self, number: int) -> None:
        self.length = self.length or self._fields
        if self._fields != self.length:
            raise DataError(
                f"{self.path}: line {number} has {self._fields} fields, the lines before it have"
                f" {self.length}"
            )
        if self.lines == LINES:
            raise DataError(
                f"{self.path}: has more than {LINES} lines, expected one for each signal; are"
                " its signals in columns?"
            )
        self.lines += 1
        self._fields = 0

    def reparse(self, block: int) -> Any:
        return self._parse(self._read(block).translate(self._plain), self.starts[block])[1]

    def _parse(self, data: bytes, start: int) -> tuple[bytes, Any]:
        import pyarrow as pa

        lines = _split(data, inside=start % (self.length or start + 1) > 0)
        fields = b",".join(line for _, line in lines)
        values = parse_numbers(fields.replace(b",", b"\n")) if lines else np.empty(0)
        if values is None or len(values) != fields.count(b",") + bool(lines):
            values = self._by_python(fields.decode(errors="replace").split(","), start)
        return data, pa.record_batch([pa.array(values)], schema=self.schema)

    def _by_python(self, fields: list[str], start: int) -> Array:
        """The numbers of fields; NaN where one is no number, and a fault of its line."""
        values = np.full(len(fields), np.nan)
        for i, field in enumerate(fields):
            if is_number(field):
                values[i] = float(field)
            elif field.strip() not in MISSING:
                line, step = divmod(start + i, self.length or start + i + 1)
                self.faults.setdefault(
                    str(line),
                    f"signal {line}, field {step + 1} holds {field[:40]!r}, expected a number",
                )
        return values


def _split(data: bytes, *, inside: bool) -> list[tuple[int, bytes]]:
    """The lines of a block, each after its index; blank ones are left out.

    `inside` says that the block begins within a line, whose last field may be all that is left.
    """
    lines = data.replace(b"\r\n", b"\n")[:-1].split(b"\n")
    partial = len(lines) - 1 if data.endswith(b",") else -1
    return [
        (i, line) for i, line in enumerate(lines) if line or i == partial or (i == 0 and inside)
    ]


def parse_numbers(data: bytes) -> Array | None:
    """The numbers of lines with one each, an empty one NaN; None unless pyarrow accepts them."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    if b"(" in data:  # pyarrow reads nan(1) as a number
        return None
    try:
        return arrow_csv.read_csv(
            pa.BufferReader(data + b"\n"),
            arrow_csv.ReadOptions(
                use_threads=False, block_size=len(data) + 2, column_names=["number"]
            ),
            arrow_csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            arrow_csv.ConvertOptions(column_types={"number": pa.float64()}, null_values=MISSING),
        )["number"].to_numpy()
    except pa.ArrowInvalid:
        return None
