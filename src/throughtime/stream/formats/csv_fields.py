"""Fields of CSV: whole blocks of numbers at once where there is no quote, else field by field as the csv module reads them."""

import csv
import io
import re
from collections.abc import Callable, Iterator

import numpy as np

from throughtime.stream.formats.table import Array

_NUMERIC = b"0123456789+-.eE,naifNAIF"  # what numbers, nan and inf are written with
_GAP = re.compile(r"(?<=,)(?=,)")


def is_number(text: str) -> bool:
    """Whether a field holds a number; `1_000` is a label, though Python reads it as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def plain(data: bytes, width: int) -> str | None:
    r"""Records without quotes as text: `\n` between them, none at the end, no blank lines unless
    there is a single column.

    `None` if the csv module must read them: quotes, or lines that end in `\r`.
    """
    if b'"' in data:
        return None
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        if b"\r" in data:
            return None
    text = data.decode()
    if width > 1 and ("\n\n" in text or text[:1] == "\n"):
        text = "\n".join(filter(None, text.split("\n")))
    return text[:-1] if text[-1:] == "\n" else text


def column_values(joined: str, count: int) -> Array | None:
    """The numbers of `count` fields joined by commas; `None` unless all are plainly written."""
    if joined.encode().translate(None, _NUMERIC):
        return None
    if ",," in joined or joined[:1] == "," or joined[-1:] == ",":
        joined = _GAP.sub("nan", f",{joined},")[1:-1]
    try:
        values = np.fromstring(
            joined, sep=","
        )  # text, not the deprecated bytes: it rounds as float() does
    except (ValueError, DeprecationWarning):
        return None
    return values if len(values) == count else None


class _Feed:
    """Lines for the csv module, and more of them where a record goes on."""

    def __init__(self, data: bytes, more: Callable[[], bytes]) -> None:
        self.data, self.taken = data, 0
        self._more = more
        self._lines = _lines(data)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.empty:
            extra = self._more()
            if not extra:
                raise StopIteration
            self.data += extra
            self._lines += _lines(extra)
        self.taken += 1
        return self._lines[self.taken - 1]

    @property
    def empty(self) -> bool:
        return self.taken == len(self._lines)

    def consumed(self) -> int:
        return sum(len(line.encode()) for line in self._lines[: self.taken])


class Records:
    """Records as the csv module reads them, from bytes that hold whole lines; one that goes on
    beyond them takes more.

    Args:
        data: whole lines.
        more: gives the next line of the file, empty at its end.
    """

    def __init__(self, data: bytes, more: Callable[[], bytes] = bytes) -> None:
        self._feed = _Feed(data, more)  # an object of its own: no cycle keeps the lines in memory
        self._reader = csv.reader(self._feed, strict=True)

    @property
    def data(self) -> bytes:
        """The bytes given, and those taken besides."""
        return self._feed.data

    @property
    def line(self) -> int:
        """Lines read so far."""
        return self._reader.line_num

    def take(self) -> list[str] | None:
        """The fields of the next record, none for a blank line; `None` when the bytes are read."""
        return None if self._feed.empty else next(self._reader)

    def consumed(self) -> int:
        """Bytes of the records taken so far."""
        return self._feed.consumed()


def _lines(data: bytes) -> list[str]:
    return io.StringIO(data.decode(), newline="").readlines()


def rows_of(data: bytes, width: int) -> list[str]:
    """The fields of all records, one after another.

    A blank line is a missing value of a single column, else nothing.
    """
    records = Records(data)
    fields: list[str] = []
    while (record := records.take()) is not None:
        fields += record or ([""] if width == 1 else [])
    return fields
