"""One self-contained HTML page of text, facts, tables, figures and code.

The page holds no script and sends no request; its content security policy forbids both. It follows
the reader's choice of light or dark, fits a phone (wide content scrolls in its own frame), prints,
and is well-formed XML. The templates are in `templates/`; jinja2 escapes every value.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from throughtime._svg import numbers, printable
from throughtime.errors import ConfigError, DataError

Cell: TypeAlias = str | float


@dataclass(frozen=True)
class Paragraphs:
    """Plain text; empty lines separate its paragraphs."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Key figures shown large: pairs of a name and a value, such as `("peak memory", "212 MB")`."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class DataTable:
    """Rows of text and numbers; the first cell of a row is its heading.

    Args:
        columns: the column headings.
        rows: one cell per column; the numbers of a column get the same number of decimals.
        caption: what the table shows.
        numeric: indices of the columns to align right; default: the columns without text.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str
    numeric: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise DataError(
                    f"row {i} of table {self.caption!r} has {len(row)} cells, expected one for each"
                    f" of {list(self.columns)}"
                )

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        columns = [_formatted([row[i] for row in self.rows]) for i in range(len(self.columns))]
        return list(zip(*columns, strict=True))

    @property
    def numeric_columns(self) -> Sequence[int]:
        """Indices of the columns aligned right."""
        if self.numeric is not None or not self.rows:
            return self.numeric or ()
        columns = range(len(self.columns))
        return [i for i in columns if not any(isinstance(row[i], str) for row in self.rows)]


@dataclass(frozen=True)
class Figure:
    """A chart of `throughtime.app.report.charts` with its caption."""

    svg: str
    caption: str

    def numbered_svg(self, number: int) -> str:
        """The chart with ids that are unique on the page, which may show it twice."""
        ids = re.search(r'aria-labelledby="(chart-[0-9a-f]{10})-title', self.svg)
        return self.svg.replace(ids[1], f"{ids[1]}-{number}") if ids else self.svg


@dataclass(frozen=True)
class Code:
    """An excerpt of a source file with one marked line.

    Args:
        lines: the lines of the excerpt.
        first: the line number of the first.
        marked: the line number to mark.
        caption: the file and line.
    """

    lines: Sequence[str]
    first: int
    marked: int
    caption: str

    @property
    def numbered_lines(self) -> list[tuple[str, bool]]:
        """Each line with its number, and whether it is marked; an arrow marks it without colour."""
        digits = len(str(self.first + len(self.lines)))
        return [
            (
                f"{'→' if i == self.marked else ' '} {i:>{digits}}  {line.expandtabs(4).rstrip()}",
                i == self.marked,
            )
            for i, line in enumerate(self.lines, self.first)
        ]


@dataclass(frozen=True)
class WebLink:
    """A link to a web page, on a line of its own."""

    text: str
    address: str

    def __post_init__(self) -> None:
        if not self.address.startswith("https://"):
            raise ConfigError(f"address={self.address!r}: expected one that begins with https://")


Part: TypeAlias = Paragraphs | Facts | DataTable | Figure | Code | WebLink


@dataclass(frozen=True)
class Section:
    """A heading and the parts below it."""

    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A title, a lead of one or two sentences, and sections."""

    title: str
    lead: str
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as one HTML document; the same page gives the same text.

    Example:
        >>> from throughtime.app.report.page import Page, Section, Paragraphs, render
        >>> html = render(Page("Run 7", "An LSTM.", [Section("Data", [Paragraphs("R & D")])]))
        >>> "<p>R &amp; D</p>" in html
        True
    """
    counts: Counter[str] = Counter()

    def numbered(part: Part) -> tuple[str, int, Part]:
        kind = type(part).__name__
        counts[kind] += 1
        return kind, counts[kind], part

    sections = [(section, [numbered(part) for part in section.parts]) for section in page.sections]
    return _template().render(page=page, sections=sections)


@cache
def _template() -> Template:
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    css = (folder / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2", globals={"css": css})


def _finalize(value: Any) -> Any:
    """Text without the characters that UTF-8 or XML forbid; jinja2 escapes it afterwards."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _formatted(cells: Sequence[Cell]) -> list[str]:
    """One column as text, its numbers with equally many decimals."""
    texts = iter(numbers([cell for cell in cells if not isinstance(cell, str)]))
    return [cell if isinstance(cell, str) else next(texts) for cell in cells]
