"""CSV on its side: each line is a signal, and time runs along the line."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats._handle import BLOCK_CACHE, CacheKey
from throughtime.stream.formats.csv_fields import column_values, is_number
from throughtime.stream.formats.table import Array, rows_between

STEP = 4096  # fields between two noted places of a line
PIECE = 2**20
LINES = 65_536  # at most: a file of more has its signals in columns


def open_csv_rows(path: Path) -> "CsvRows":
    """Scans a file whose lines are signals of equal length, all numbers, without a header.

    The columns are called `0`, `1`, ... from the first line; `-1`, `-2`, ... count from the last
    line and can be read too, though `columns` does not list them twice. Blank lines are nothing; an
    empty field is NaN.

    Raises:
        DataError: lines of different lengths, quotes, text at the start, or more than 65,536 lines.

    Cost: one pass; reading parses 4096 fields at a time, and a line may be longer than memory.
    """
    try:
        with path.open("rb") as file:
            scanned = _Scan(path)
            scanned.run(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return CsvRows(
        path, Names(map(str, range(len(scanned.places)))), scanned.length, tuple(scanned.places)
    )


class Names(tuple[str, ...]):
    """The names of `k` lines.

    `-1` to `-k` are `in` it as well, for they name the same lines from the end.
    """

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and name[:1] == "-" and super().__contains__(self.forward(name))
        )

    def forward(self, name: str) -> str:
        """The name that counts from the first line: `-1` of three lines is `2`."""
        return (
            str(len(self) + int(name))
            if name[:1] == "-" and name[1:].isdecimal() and name[1:] != "0"
            else name
        )


@dataclass(frozen=True)
class CsvRows:
    """Where every 4096th field of each line begins."""

    path: Path
    columns: Names
    length: int
    places: "tuple[array[int], ...]"
    cache_key: CacheKey = field(default_factory=CacheKey, repr=False)
    rate: float | None = None

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.length)
        blocks = range(start // STEP, -(-stop // STEP))
        if start == stop:
            return np.empty((0, len(columns)))
        signals: list[Array] = []
        for line in (self.columns.index(self.columns.forward(name)) for name in columns):
            parts = [
                BLOCK_CACHE.get(
                    (self.cache_key, line, block),
                    lambda line=line, block=block: self._decoded(line, block),
                )
                for block in blocks
            ]
            signals.append(
                np.concatenate(parts)[start - blocks.start * STEP : stop - blocks.start * STEP]
            )
        return np.stack(signals, axis=1)

    def _decoded(self, line: int, block: int) -> Array:
        begin, end = self.places[line][block : block + 2]
        with self.path.open("rb") as file:
            file.seek(begin)
            text = file.read(end - begin - 1).decode(errors="replace").rstrip("\r")
        count = min(STEP, self.length - block * STEP)
        values = column_values(text, count)
        if values is None:
            fields = [f if f.strip() else "nan" for f in text.split(",")]
            wrong = next((i for i, f in enumerate(fields) if not is_number(f)), None)
            if wrong is not None:
                raise DataError(
                    f"{self.path}: signal {line}, field {block * STEP + wrong + 1} holds"
                    f" {fields[wrong][:40]!r}, expected a number"
                )
            values = np.array([float(f) for f in fields])
        return values


class _Scan:
    """Counts the fields of each line, from pieces of the file that need not hold a whole line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: list[array[int]] = []
        self.length = -1
        self.line = 1
        self._begin(0)

    def _begin(self, offset: int) -> None:
        self._current, self._commas, self._offset = array("q", [offset]), 0, offset

    def run(self, file: BinaryIO) -> None:
        """Takes the whole file."""
        at = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
        file.seek(at)
        self._begin(at)
        last = b""
        while piece := file.read(PIECE):
            if b'"' in piece or b"\0" in piece:
                raise DataError(
                    f"{self.path}: holds quotes or NUL bytes in or after line {self.line}, expected"
                    " lines of numbers"
                )
            self._piece(piece, at, last)
            at += len(piece)
            last = piece[-1:]
        if self._offset < at:
            self._end(at, blank=False)
        if not self.places:
            raise DataError(
                f"{self.path}: the file is empty, expected a line of numbers for each signal"
            )
        self._refuse_text(file)

    def _piece(self, piece: bytes, at: int, last: bytes) -> None:
        codes = np.frombuffer(piece, np.uint8)
        commas = np.flatnonzero(codes == ord(","))
        begin = 0
        for end in (*np.flatnonzero(codes == ord("\n")).tolist(), None):
            low, high = np.searchsorted(commas, (begin, len(piece) if end is None else end))
            first = -(self._commas + 1) % STEP  # of these commas, the first that ends a block
            self._current.extend((commas[low + first : high : STEP] + at + 1).tolist())
            self._commas += int(high - low)
            if end is None:
                return
            before = piece[max(0, end - 1) : end] if end else last
            self._end(at + end, blank=at + end - self._offset - (before == b"\r") <= 0)
            begin = end + 1

    def _end(self, offset: int, *, blank: bool) -> None:
        if not blank:
            fields = self._commas + 1
            if self.length not in (-1, fields):
                raise DataError(
                    f"{self.path}: line {self.line} has {fields} fields, the lines before it have"
                    f" {self.length}"
                )
            if len(self.places) == LINES:
                raise DataError(
                    f"{self.path}: has more than {LINES} lines, expected one for each signal; are"
                    " its signals in columns?"
                )
            self.length = fields
            self.places.append(self._current)
            self._current.append(offset + 1)
        self.line += 1
        self._begin(offset + 1)

    def _refuse_text(self, file: BinaryIO) -> None:
        file.seek(self.places[0][0])
        first = file.read(64).split(b"\n")[0].split(b",")[0].decode(errors="replace").strip()
        if first and not is_number(first):
            raise DataError(
                f"{self.path}: begins with {first[:40]!r}, expected lines of numbers, one for each"
                " signal, without a header"
            )
