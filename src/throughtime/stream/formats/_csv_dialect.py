"""The dialect of a CSV file: its delimiter and its decimal mark, detected in its first lines.

The delimiter is the one that splits the header and the lines after it into the same number of
fields; of several, the one whose fields are numbers and time stamps. A mark that the lines leave
open (is `1,234` a decimal, or a thousand?) is an error that names the setting.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from throughtime.errors import ConfigError, DataError
from throughtime.stream.formats.table import is_number
from throughtime.stream.formats.times import is_time

SAMPLE = 2**16  # bytes from the start of the file
DELIMITERS = (",", ";", "\t", "|", " ")
DECIMALS = (".", ",")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")  # values, as in pandas
_NAMES = {"tab": "\t", "\\t": "\t", "space": " "}
_RECORDS = 200  # of the sample, which show the delimiter
_MOST = 0.5  # share of the lines that have as many fields as the header
_WITH_COMMA = re.compile(r"\s*[+-]?(\d+,\d*|,\d+)([eE][+-]?\d+)?\s*")
_WITH_POINT = re.compile(r"\s*[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?\s*")
_MAYBE_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2}[.,]\d{3}\s*")
_THOUSANDS = re.compile(r"\s*[+-]?\d{1,3}([.,'\u2019 \u00a0\u202f])\d{3}(\1\d{3})*([.,]\d+)?\s*")
_COMMENTS = ("#", "%", "//")
_SPACES = re.compile(r'("[^"\r\n]*")|[ \t]+')
_EDGES = re.compile(r"(?m)^ | (?=[\r\n]|\Z)")


class Dialect(NamedTuple):
    """How the fields of a file are written.

    Attributes:
        delimiter: a character; a space stands for any run of spaces and tabs.
        decimal: the mark before the decimals of a number.
    """

    delimiter: str = ","
    decimal: str = "."

    @property
    def word(self) -> str:
        """A name for the dialect, of letters and digits."""
        return f"{ord(self.delimiter):x}d{ord(self.decimal):x}"

    @property
    def is_plain(self) -> bool:
        """Whether lines need no `clean`."""
        return self.delimiter != " "

    def clean(self, text: str) -> str:
        """Whole lines with a single delimiter between two fields, no spaces at their ends."""
        if self.is_plain:
            return text
        return _EDGES.sub("", _SPACES.sub(lambda match: match[1] or " ", text))

    def is_number(self, field: str) -> bool:
        """Whether a field holds a number."""
        if self.decimal == ".":
            return is_number(field)
        return "." not in field and is_number(field.replace(self.decimal, "."))

    def number(self, field: str) -> float:
        """The number of a field."""
        return float(field.replace(self.decimal, "."))

    def explain(self, field: str) -> str:
        """Why a field is no number, if its marks show it; else empty."""
        other = DECIMALS[self.decimal == "."]
        option = f"--decimal {other} (decimal='{other}' in Python)"
        is_decimal = self._replace(decimal=other).is_number(field)
        if _THOUSANDS.fullmatch(field):
            what = "does it separate thousands? Write it without"
            return f"{what}; if its mark is that of decimals: {option}" if is_decimal else what
        return f"is '{other}' its decimal mark? {option}" if is_decimal else ""


def check_dialect(delimiter: str | None, decimal: str | None) -> None:
    """Refuse settings that no file can have.

    Raises:
        ConfigError: the delimiter is no single character or one of a number or a name, or the
            decimal mark is unknown.
    """
    if delimiter is not None and (
        len(delimiter) != 1
        or delimiter.isalnum()
        or delimiter in "\"'\n\r\0.-+_"
        or delimiter > "~"
    ):
        raise ConfigError(
            f"delimiter={delimiter!r}: expected one character between fields, such as ',' ';' '|',"
            " or tab, space"
        )
    if decimal is not None and decimal not in DECIMALS:
        raise ConfigError(f"decimal={decimal!r}: expected '.' or ','")


class _Sample(NamedTuple):
    """The records of the first lines, as one delimiter splits them."""

    dialect: Dialect
    header: list[str]
    rows: list[list[str]]

    @property
    def share(self) -> float:
        """The share of records with as many fields as the header, if it has several."""
        expected = len(self.header)
        equal = sum(len(row) == expected for row in self.rows)
        return (equal / len(self.rows) if self.rows else 1.0) * (expected > 1)

    @property
    def quality(self) -> float:
        """The share of filled fields that are numbers or time stamps."""
        fields = [field for row in self.rows or [self.header] for field in row if field.strip()]
        comma = self.dialect._replace(decimal=",")
        good = [is_number(f) or comma.is_number(f) or is_time(f) for f in fields]
        return sum(good) / len(good) if good else 0.0


def detect_dialect(
    path: Path, file: BinaryIO, delimiter: str | None = None, decimal: str | None = None
) -> Dialect:
    """The dialect of an open file, whose position is kept.

    Args:
        path: of the file, for messages.
        file: at the start of its first line.
        delimiter: that of the file, if it is known; also "tab" or "space".
        decimal: its decimal mark, if it is known.

    Raises:
        ConfigError: see `check_dialect`.
        DataError: numbers with both decimal marks, or only such as `1,234`.
    """
    delimiter = None if delimiter is None else _NAMES.get(delimiter, delimiter)
    check_dialect(delimiter, decimal)
    lines = _first_lines(file)
    candidates = DELIMITERS if delimiter is None else (delimiter,)
    samples = [_sample(lines, candidate) for candidate in candidates]
    sample = max(samples, key=_fit)
    if not _fit(sample)[0]:
        _check_first_line(path, [s for s in samples if s.dialect.delimiter != decimal])
    if delimiter is None and len(sample.header) < 2:
        # a single column; with decimal commas its fields are split by none of the marks
        sample = _sample(lines, "," if decimal != "," else ";")
    if decimal is None:
        decimal = _decimal(path, sample)
    return sample.dialect._replace(decimal=decimal)


def header_delimiter(line: str) -> str:
    """The delimiter that splits a header into the most fields; spaces are part of names."""
    return max(DELIMITERS[:-1], key=lambda mark: len(_sample([line], mark).header))


def _fit(sample: _Sample) -> tuple[object, ...]:
    """A key to compare samples by: the larger one is the likelier dialect."""
    spaces = sample.dialect.delimiter == " "
    quality = sample.quality if sample.share > _MOST else 0.0
    splits = sample.share > _MOST and not (spaces and quality == 0)
    return splits, quality, not spaces, len(sample.header)


def _check_first_line(path: Path, samples: Sequence[_Sample]) -> None:
    """Refuse a comment, and a line of one field before lines of several: no header is like that.

    Raises:
        DataError: the first line is likely one of them.
    """
    for sample in samples:
        first = sample.header[0].lstrip() if sample.header else ""
        widths = Counter(map(len, sample.rows)).most_common(1)
        width, count = widths[0] if widths else (0, 0)
        comment = first.startswith(_COMMENTS)
        title = len(sample.header) == 1 and sample.dialect.delimiter != " "
        if width > 1 and count > _MOST * len(sample.rows) and (comment or title):
            decimals = sample.dialect.delimiter == "," and title and width == 2
            raise DataError(
                f"{path}: the first line is {first[:40]!r}, most lines after it have {width} fields"
                f" (separated by {sample.dialect.delimiter!r}); it must name each column: delete"
                f" {'the comments' if comment else 'lines before the header'}, or add names"
                + "; with decimal commas write --decimal , (decimal= in Python)"
                * decimals
            )


def _first_lines(file: BinaryIO) -> list[str]:
    begin = file.tell()
    data = file.read(SAMPLE)
    cut = len(data) == SAMPLE and b"\n" in data
    file.seek(begin)
    data = data[: data.rindex(b"\n") + 1] if cut else data
    return io.StringIO(data.decode(errors="replace"), newline="").readlines()


def _sample(lines: Iterable[str], delimiter: str) -> _Sample:
    dialect = Dialect(delimiter)
    records = list(_records(lines, dialect))
    header, rows = (records[0], records[1:]) if records else ([], [])
    return _Sample(dialect, header, rows[:_RECORDS])


def _records(lines: Iterable[str], dialect: Dialect) -> Iterator[list[str]]:
    """The records that the csv module can read; what it refuses is reported by the scan."""
    reader = csv.reader(map(dialect.clean, lines), delimiter=dialect.delimiter)
    try:
        yield from filter(None, reader)
    except csv.Error:
        return


def _decimal(path: Path, sample: _Sample) -> str:
    """The decimal mark; the point where fields are separated by commas.

    Raises:
        DataError: both are used, or the numbers leave it open.
    """
    if sample.dialect.delimiter == ",":
        return "."
    fields = [(field, row) for row in sample.rows or [sample.header] for field in row]
    commas = [field for field, _ in fields if _WITH_COMMA.fullmatch(field)]
    if not commas:
        return "."
    points = [field for field, _ in fields if _WITH_POINT.fullmatch(field)]
    comma = next((f for f in commas if not _MAYBE_THOUSANDS.fullmatch(f)), None)
    point = next((f for f in points if not _MAYBE_THOUSANDS.fullmatch(f)), None)
    if comma is not None and point is None:
        return ","
    if comma is None and point is not None:
        return "."
    what = (
        f"{commas[0]!r} may have decimals, or thousands"
        if comma is None
        else f"{comma!r} and {point!r} have two decimal marks"
    )
    raise DataError(
        f"{path}: {what}; write --decimal , or --decimal . (in Python decimal=',' or '.')"
    )


def column_names(path: Path, fields: list[str]) -> list[str]:
    """The fields of a header line, checked."""
    names = [name.strip() for name in fields]
    if not names:
        raise DataError(f"{path}: the file is empty, expected a header line with column names")
    if "" in names or len(set(names)) < len(names):
        index = "; an index of pandas? to_csv(path, index=False)" if names[0] == "" else ""
        if names[-1] == "":
            index = (
                "; delete a line 'sep=;'. With a delimiter at the end of each line, pass the frame"
                " pandas.read_csv(...).iloc[:, :-1]"
            )
        raise DataError(f"{path}: the first line is {names}, expected distinct column names{index}")
    return names
