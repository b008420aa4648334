"""CSV on its side: each line is a signal, and time runs along the line."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import csv
from throughtime.stream.formats._csv_cache import CacheFile, open_cached, write_batches
from throughtime.stream.formats.table import (
    BLOCK_CACHE,
    Array,
    CacheKey,
    FileStamp,
    Handle,
    rows_between,
)

STEP = 4096  # fields of a block of a line
PIECE = 2**20
LINES = 65_536  # at most: a file of more has its signals in columns


def open_csv_rows(path: Path) -> "CsvRowsTable":
    """A file whose lines are signals of equal length, all numbers, without a header.

    The columns are called `0`, `1`, ... from the first line; `-1`, `-2`, ... count from the last
    line and can be read too, though `columns` does not list them twice. Blank lines are ignored; an
    empty field is NaN.

    Raises:
        DataError: lines of different lengths, quotes, text at the start, or more than 65,536 lines.

    Cost: one pass, in which a line may be longer than memory. A file of more than 256 kB is
    converted to a cache file (see `open_csv`); otherwise reading parses 4096 fields at a time.
    """
    handle = Handle(path, _opened)
    file = handle.get()
    return CsvRowsTable(path, handle, LineNames(map(str, range(file.lines))), file.length)


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


class CsvRowsFile(NamedTuple):
    """An open file of lines, converted or not."""

    lines: int
    length: int
    step: int
    faults: dict[str, str]  # by line: why it cannot be read
    block: Callable[[int, int], Array]  # of a line
    cache: CacheFile | None


@dataclass(frozen=True)
class CsvRowsTable:
    """Fields of the lines of an open file."""

    path: Path
    handle: Handle[CsvRowsFile]
    columns: LineNames
    length: int
    rate: float | None = None
    cache_key: CacheKey = field(default_factory=CacheKey, repr=False)

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.length)
        if start == stop:
            return np.empty((0, len(columns)))
        file = self.handle.get()
        blocks = range(start // file.step, -(-stop // file.step))
        first = blocks.start * file.step
        signals: list[Array] = []
        for line in (self.columns.index(self.columns.forward(name)) for name in columns):
            if str(line) in file.faults:
                raise DataError(f"{self.path}: {file.faults[str(line)]}")
            parts = [self._block(file, line, block) for block in blocks]
            signals.append(np.concatenate(parts)[start - first : stop - first])
        return np.stack(signals, axis=1)

    def _block(self, file: CsvRowsFile, line: int, block: int) -> Array:
        if file.cache is None:
            key = (self.cache_key, line, block)
            return BLOCK_CACHE.get(key, lambda: file.block(line, block))
        values = file.block(line, block)
        file.cache.file.count_read(values.nbytes)
        return values


def _opened(path: Path) -> CsvRowsFile:
    try:
        stamp = FileStamp.of(path)
        if stamp.size > csv.PIECE:
            cache = open_cached(stamp, "rows", partial(_convert, path))
            if cache is not None:
                blocks = -(-cache.metadata["length"] // cache.metadata["step"])

                def cached(line: int, block: int) -> Array:
                    return cache.batch(line * blocks + block).column(0).to_numpy()

                return CsvRowsFile(block=cached, cache=cache, **cache.metadata)
        scan = _RowScan(path)
        return CsvRowsFile(len(scan.places), scan.length, STEP, {}, scan.block, None)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _convert(path: Path, target: Path) -> None:
    import pyarrow as pa

    scan = _RowScan(path)
    faults: dict[str, str] = {}

    def batches() -> Iterator[Any]:
        for line in range(len(scan.places)):
            for block in range(-(-scan.length // STEP)):
                try:
                    values = scan.block(line, block)
                except DataError as error:
                    faults.setdefault(str(line), str(error).removeprefix(f"{path}: "))
                    values = np.full(scan.count(block), np.nan)
                yield pa.record_batch([pa.array(values)], ["values"])

    write_batches(
        target,
        pa.schema([("values", pa.float64())]),
        batches(),
        lambda: {
            "lines": len(scan.places),
            "length": scan.length,
            "step": STEP,
            "faults": faults,
        },
    )


class _RowScan:
    """Counts the fields of each line, from pieces of the file that need not hold a whole line.

    `places` are the offsets at which every `STEP`th field of each line begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: list[array[int]] = []
        self.length = -1
        self._line = 1
        with path.open("rb") as file:
            self._run(file)

    def count(self, block: int) -> int:
        """The number of fields in a block."""
        return min(STEP, self.length - block * STEP)

    def block(self, line: int, block: int) -> Array:
        """The numbers of a block of a line."""
        begin, end = self.places[line][block : block + 2]
        with self.path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin - 1).rstrip(b"\r")
        values = parse_numbers(data.replace(b",", b"\n"))
        if values is not None and len(values) == self.count(block):
            return values
        fields = data.decode(errors="replace").split(",")
        wrong = next((i for i, f in enumerate(fields) if f.strip() and not csv.is_number(f)), None)
        if wrong is not None:
            raise DataError(
                f"{self.path}: signal {line}, field {block * STEP + wrong + 1} holds"
                f" {fields[wrong][:40]!r}, expected a number"
            )
        return np.array([float(f) if f.strip() else np.nan for f in fields])

    def _begin(self, offset: int) -> None:
        self._current, self._commas, self._offset = array("q", [offset]), 0, offset

    def _run(self, file: BinaryIO) -> None:
        offset = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
        file.seek(offset)
        self._begin(offset)
        last = b""
        while piece := file.read(PIECE):
            if b'"' in piece or b"\0" in piece:
                raise DataError(
                    f"{self.path}: holds quotes or NUL bytes in or after line {self._line},"
                    " expected lines of numbers"
                )
            self._piece(piece, offset, last)
            offset += len(piece)
            last = piece[-1:]
        if self._offset < offset:
            self._end(offset, blank=False)
        if not self.places:
            raise DataError(
                f"{self.path}: the file is empty, expected a line of numbers for each signal"
            )
        self._refuse_text(file)

    def _piece(self, piece: bytes, offset: int, last: bytes) -> None:
        codes = np.frombuffer(piece, np.uint8)
        commas = np.flatnonzero(codes == ord(","))
        begin = 0
        for end in (*np.flatnonzero(codes == ord("\n")).tolist(), None):
            low, high = np.searchsorted(commas, (begin, len(piece) if end is None else end))
            first = -(self._commas + 1) % STEP  # of these commas, the first that ends a block
            self._current.extend((commas[low + first : high : STEP] + offset + 1).tolist())
            self._commas += int(high - low)
            if end is None:
                return
            before = piece[max(0, end - 1) : end] if end else last
            self._end(offset + end, blank=offset + end - self._offset - (before == b"\r") <= 0)
            begin = end + 1

    def _end(self, offset: int, *, blank: bool) -> None:
        if not blank:
            fields = self._commas + 1
            if self.length not in (-1, fields):
                raise DataError(
                    f"{self.path}: line {self._line} has {fields} fields, the lines before it have"
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
        self._line += 1
        self._begin(offset + 1)

    def _refuse_text(self, file: BinaryIO) -> None:
        file.seek(self.places[0][0])
        first = file.read(64).split(b"\n")[0].split(b",")[0].decode(errors="replace").strip()
        if first and not csv.is_number(first):
            raise DataError(
                f"{self.path}: begins with {first[:40]!r}, expected lines of numbers, one for each"
                " signal, without a header"
            )


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
            arrow_csv.ConvertOptions(column_types={"number": pa.float64()}, null_values=[""]),
        )["number"].to_numpy()
    except pa.ArrowInvalid:
        return None
