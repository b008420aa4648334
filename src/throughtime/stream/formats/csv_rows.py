"""CSV on its side: each line is a signal, and time runs along the line."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats import csv
from throughtime.stream.formats._csv_cache import CsvBlocks
from throughtime.stream.formats.table import Array, TableFile

STEP = 4096  # fields of a block of a line
PIECE = 2**20
LINES = 65_536  # at most: a file of more has its signals in columns


class CsvRowsFile(TableFile):
    """A file whose lines are signals of equal length, all numbers, without a header.

    The columns are called `0`, `1`, ... from the first line; `-1`, `-2`, ... count from the last
    line and can be read too, though `columns` does not list them twice. Blank lines are ignored; an
    empty field is NaN.

    Raises:
        DataError: lines of different lengths, quotes, text at the start, or more than 65,536 lines.

    Cost: one pass, in which a line may be longer than memory. A file of more than 256 kB is
    converted to a cache file (see `CsvFile`); otherwise reading parses 4096 fields at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks = CsvBlocks(path, "rows", _RowScan, csv.PIECE)
        metadata = self._blocks.metadata
        self._lines = LineNames(map(str, range(metadata["lines"])))
        self._step: int = metadata["step"]
        self._faults: dict[str, str] = metadata["faults"]  # by line: why it cannot be read
        self.columns, self.length = self._lines, metadata["length"]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        per_line = -(-self.length // self._step)
        first, end = start // self._step, -(-stop // self._step)
        skipped = first * self._step
        signals: list[Array] = []
        for name in map(self._lines.forward, columns):
            if name in self._faults:
                raise DataError(f"{self.path}: {self._faults[name]}")
            line = self._lines.index(name) * per_line
            parts = [self._blocks[line + block].column(0).to_numpy() for block in range(first, end)]
            signals.append(np.concatenate(parts)[start - skipped : stop - skipped])
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


class _RowScan:
    """Counts the fields of each line, from pieces of the file that need not hold a whole line.

    `places` are the offsets at which every `STEP`th field of each line begins.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        import pyarrow as pa

        self.path = path
        self.places: list[array[int]] = []
        self.length = -1
        self.faults: dict[str, str] = {}
        self.schema = pa.schema([("values", pa.float64())])
        self._line = 1
        self._run(file)

    def batches(self) -> Iterator[Any]:
        """The record batches of all blocks, line by line; the faults of lines are noted."""
        for block in range(len(self.places) * self._per_line):
            yield self.reparse(block)

    def metadata(self) -> dict[str, Any]:
        """What was learnt in the pass."""
        return {
            "lines": len(self.places),
            "length": self.length,
            "step": STEP,
            "faults": self.faults,
        }

    @property
    def _per_line(self) -> int:
        return -(-self.length // STEP)

    def reparse(self, block: int) -> Any:
        """The numbers of a block of a line, as a record batch; NaN where one is no number."""
        import pyarrow as pa

        line, index = divmod(block, self._per_line)
        begin, end = self.places[line][index : index + 2]
        size = min(STEP, self.length - index * STEP)
        with self.path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin - 1).rstrip(b"\r")
        values = parse_numbers(data.replace(b",", b"\n"))
        if values is None or len(values) != size:
            fields = data.decode(errors="replace").split(",")
            filled = [(i, f) for i, f in enumerate(fields) if f.strip()]
            wrong = next(((i, f) for i, f in filled if not csv.is_number(f)), None)
            values = np.full(size, np.nan)
            if wrong is None:
                values[[i for i, _ in filled]] = [float(f) for _, f in filled]
            else:
                self.faults.setdefault(
                    str(line),
                    f"signal {line}, field {index * STEP + wrong[0] + 1} holds"
                    f" {wrong[1][:40]!r}, expected a number",
                )
        return pa.record_batch([pa.array(values)], ["values"])

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
