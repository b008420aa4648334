"""One self-contained HTML page: text, facts, tables and figures, and how it writes names, numbers,
axes and colours.

No script and no request to anywhere, which its content security policy also says to the browser. It
follows the reader's choice of light or dark, fits a phone (what is wider scrolls within its own
frame) and prints. It is well-formed XML, too.

The colours of the charts are custom properties, so that one picture serves both themes; each has a
contrast of at least 4.5 to the page, and any two stay apart under protanopia, deuteranopia and
tritanopia (found by a search in OKLab, with Machado et al.'s 2009 model of colour blindness).
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from throughtime._svg import PALETTE, clean, numbers
from throughtime.errors import ConfigError, DataError

Cell: TypeAlias = str | float

_MINUS, _NONE, _ARROW = "\u2212", "\u2013", "\u2192"

_DARK = ("#4a9dff", "#e8762a", "#60c761", "#b98ac6", "#f0d02c", "#1dccfc", "#fa96be", "#dedede")


@dataclass(frozen=True)
class Text:
    """Paragraphs, with an empty line between two; nothing in them is markup."""

    paragraphs: str


@dataclass(frozen=True)
class Facts:
    """What one wants to see at a glance: pairs of a name and a value, such as `("peak memory", "212 MB")`."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers; the first column names the row.

    Args:
        columns: their headings.
        rows: as many cells each; numbers of one column get the same number of decimals.
        caption: what the table shows.
        numeric: the columns to align to the right, counted from 0; default those without text.
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


@dataclass(frozen=True)
class Figure:
    """A chart of `throughtime.app.report.charts`, and what to see in it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Code:
    """Lines of a file, one of them pointed at.

    Args:
        lines: as they stand there.
        first: the number of the first.
        marked: the number of the one to look at.
        caption: where they are from.
    """

    lines: Sequence[str]
    first: int
    marked: int
    caption: str


@dataclass(frozen=True)
class Link:
    """A line that leads elsewhere when it is followed; nothing is asked for before."""

    text: str
    address: str

    def __post_init__(self) -> None:
        if not self.address.startswith("https://"):
            raise ConfigError(f"address={self.address!r}: expected one that begins with https://")


Part: TypeAlias = Text | Facts | Table | Figure | Code | Link


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A title, a lead of a sentence or two, and sections."""

    title: str
    lead: str
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as one HTML document; the same page gives the same text.

    Example:
        >>> from throughtime.app.report import Page, Section, Text, render
        >>> html = render(Page("Run 7", "An LSTM on 48 recordings.", [Section("Data", [Text("R & D")])]))
        >>> "<p>R &amp; D</p>" in html
        True
    """
    counts: Counter[type[Part]] = Counter()
    body: list[str] = []
    for i, section in enumerate(page.sections, 1):
        body.append(f'<section aria-labelledby="s{i}"><h2 id="s{i}">{clean(section.heading)}</h2>')
        for part in section.parts:
            counts[type(part)] += 1
            body.append(_part(part, counts[type(part)]))
        body.append("</section>")
    main = "\n".join(body)
    lead = f'<p class="lead">{clean(page.lead)}</p>' if page.lead else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<meta'
        ' http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
        ' \'unsafe-inline\'"/>\n<meta name="viewport" content="width=device-width,'
        ' initial-scale=1"/>\n<meta name="color-scheme" content="light'
        f' dark"/>\n<title>{clean(page.title)}</title>\n<style>\n{_theme()}{_STYLE}</style>\n</head>\n<body>\n<a'
        ' class="skip" href="#content">Skip to the'
        f" content</a>\n<header><h1>{clean(page.title)}</h1>{lead}{_contents(page)}</header>\n<main"
        f' id="content" tabindex="-1">\n{main}\n</main>\n</body>\n</html>\n'
    )


def _contents(page: Page) -> str:
    if len(page.sections) < 3:
        return ""
    links = "".join(
        f'<li><a href="#s{i}">{clean(section.heading)}</a></li>'
        for i, section in enumerate(page.sections, 1)
    )
    return f'<nav aria-label="Contents"><ol>{links}</ol></nav>'


def _part(part: Part, number: int) -> str:
    match part:
        case Text():
            return "".join(
                f"<p>{clean(text)}</p>"
                for text in re.split(r"\n\s*\n", part.paragraphs)
                if text.strip()
            )
        case Facts():
            cards = "".join(
                f"<div><dt>{clean(name)}</dt><dd>{clean(value)}</dd></div>"
                for name, value in part.pairs
            )
            return f'<dl class="facts">{cards}</dl>' if cards else ""
        case Table():
            return _table(part, number)
        case Code():
            return _code(part, number)
        case Link():
            return f'<p><a href="{clean(part.address)}">{clean(part.text)}</a></p>'
        case Figure():
            frame = (
                '<div class="frame" tabindex="0" role="group" aria-label="Figure'
                f' {number}">{_numbered(part.svg, number)}</div>'
            )
            return (
                f"<figure>{frame}<figcaption><b>Figure {number}</b>"
                f" {clean(part.caption)}</figcaption></figure>"
            )


def _numbered(svg: str, number: int) -> str:
    """The chart with ids of its own: one page may show it twice."""
    found = re.search(r'aria-labelledby="(chart-[0-9a-f]{10})-title', svg)
    return svg.replace(found[1], f"{found[1]}-{number}") if found else svg


def _code(code: Code, number: int) -> str:
    """The lines with their numbers.

    An arrow points at the one to look at, which is not told by colour alone.
    """
    wide = len(str(code.first + len(code.lines)))
    rows: list[str] = []
    for at, line in enumerate(code.lines, code.first):
        pointer = _ARROW if at == code.marked else " "
        row = f"{pointer} {at:>{wide}}  {clean(line.expandtabs(4).rstrip())}"
        rows.append(f"<mark>{row}</mark>" if at == code.marked else row)
    told = "\n".join(rows)
    return (
        f'<div class="code"><p class="caption" id="c{number}">{clean(code.caption)}</p><div'
        ' class="frame" tabindex="0" role="region"'
        f' aria-labelledby="c{number}"><pre><code>{told}</code></pre></div></div>'
    )


def _table(table: Table, number: int) -> str:
    columns = [_column([row[i] for row in table.rows]) for i in range(len(table.columns))]
    numeric = (
        [i for i, (_, plain) in enumerate(columns) if plain]
        if table.numeric is None
        else table.numeric
    )
    kind = [' class="n"' if i in numeric else "" for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{k}>{clean(name)}</th>'
        for k, name in zip(kind, table.columns, strict=True)
    )
    rows: list[str] = []
    for row in zip(*(cells for cells, _ in columns), strict=True):
        first, *rest = (clean(cell) for cell in row)
        cells = "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kind[1:], rest, strict=True))
        rows.append(f'<tr><th scope="row"{kind[0]}>{first}</th>{cells}</tr>')
    return (
        f'<div class="table"><p class="caption" id="t{number}"><b>Table {number}</b>'
        f" {clean(table.caption)}</p>"
        f'<div class="frame" tabindex="0" role="region" aria-labelledby="t{number}"><table'
        f' aria-labelledby="t{number}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _column(cells: Sequence[Cell]) -> tuple[list[str], bool]:
    """The cells as text, and whether all of them are numbers."""
    texts = iter(numbers([cell for cell in cells if not isinstance(cell, str)]))
    shown = [cell if isinstance(cell, str) else next(texts) for cell in cells]
    return shown, bool(cells) and not any(isinstance(cell, str) for cell in cells)


def _theme() -> str:
    """The colours, light and dark; paper is always light."""
    light = "--paper:#fff;--ink:#191c20;--soft:#59616b;--line:#dfe1e4;--wash:#f5f6f7;--link:#1d48b5;--on-series:#fff;--alarm:#b3121f"
    dark = "--paper:#121519;--ink:#e8eaed;--soft:#a5adb8;--line:#30363d;--wash:#1a1e24;--link:#86b4ff;--on-series:#121519;--alarm:#ff7b72"
    series = [
        ";".join(f"--series-{i}:{colour}" for i, colour in enumerate(palette, 1))
        for palette in (PALETTE, _DARK)
    ]
    return (
        f":root{{color-scheme:light;{light};{series[0]}}}\n@media screen and"
        f" (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark};{series[1]}}}}}\n"
    )


_STYLE = """\
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;scroll-behavior:smooth;background:var(--paper)}
body{margin:0 auto;max-width:900px;padding:72px 32px 96px;background:var(--paper);color:var(--ink);
 font:17px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-kerning:normal;overflow-wrap:break-word}
h1{margin:0;font-size:40px;line-height:1.12;font-weight:680;letter-spacing:-.024em;text-wrap:balance}
h2{margin:0 0 20px;font-size:24px;line-height:1.25;font-weight:650;letter-spacing:-.014em;text-wrap:balance;scroll-margin-top:24px}
p{margin:0 0 16px;max-width:68ch;text-wrap:pretty}
a{color:var(--link);text-decoration-thickness:1px;text-underline-offset:3px}
a:hover{text-decoration-thickness:2px}
:focus-visible{outline:3px solid var(--link);outline-offset:3px;border-radius:3px}
main:focus{outline:none}
.skip{position:absolute;left:16px;top:-80px;padding:10px 16px;background:var(--ink);color:var(--paper);border-radius:6px;z-index:1}
.skip:focus{top:16px}
.lead{margin:18px 0 0;font-size:20px;line-height:1.5;color:var(--soft);max-width:60ch}
nav ol{display:flex;flex-wrap:wrap;gap:4px 24px;margin:28px 0 0;padding:0;list-style:none;font-size:15px}
nav a{display:inline-block;padding:4px 0;text-decoration:none}
nav a:hover{text-decoration:underline}
section{margin-top:48px;padding-top:32px;border-top:1px solid var(--line)}
section>:last-child{margin-bottom:0}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:22px 24px;margin:0 0 32px}
.facts div{border-top:2px solid var(--ink);padding-top:9px}
.facts dt{font-size:14px;line-height:1.4;color:var(--soft)}
.facts dd{margin:2px 0 0;font-size:23px;line-height:1.25;font-weight:600;letter-spacing:-.015em;
 font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
figure,.table{margin:28px 0 36px}
.code{margin:24px 0}
pre{margin:0;padding:14px 18px;width:max-content;min-width:100%;background:var(--wash);border:1px solid var(--line);border-radius:6px;
 font:14px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre code{font:inherit}
mark{display:inline-block;min-width:100%;background:none;color:var(--alarm);font-weight:600}
figcaption,.caption{margin:14px 0 0;font-size:15px;line-height:1.5;color:var(--soft);max-width:76ch}
.caption{margin:0 0 10px}
figcaption b,.caption b{margin-right:.5em;color:var(--ink);font-weight:600}
.frame{overflow-x:auto;-webkit-overflow-scrolling:touch}
figure .frame{padding:2px 0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-variant-numeric:tabular-nums}
table{border-collapse:collapse;min-width:60%;font-size:15px;line-height:1.4}
th,td{padding:8px 20px 8px 0;text-align:left;vertical-align:baseline;border-bottom:1px solid var(--line)}
th:last-child,td:last-child{padding-right:2px}
thead th{font-weight:600;color:var(--soft);border-bottom:1.5px solid var(--ink);white-space:nowrap;vertical-align:bottom}
td:not(.n){min-width:9ch}
tbody th{font-weight:500}
.n+td:not(.n),.n+th:not(.n){padding-left:20px}
tbody tr:hover{background:var(--wash)}
.n{text-align:right;font-variant-numeric:tabular-nums lining-nums;white-space:nowrap}
@media (max-width:640px){
 body{padding:40px 18px 64px;font-size:16px}
 h1{font-size:30px}
 h2{font-size:21px}
 .lead{font-size:18px}
 .facts{grid-template-columns:repeat(auto-fill,minmax(132px,1fr));gap:18px}
 .facts dd{font-size:21px}
 table{min-width:100%}
 thead th,thead .n{white-space:normal}
 figure .frame{margin-right:-18px;padding-right:18px}
 figure svg{width:680px}
}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
@media print{
 body{max-width:none;padding:0;font-size:11pt}
 .skip,nav{display:none}
 .frame{overflow:visible}
 section{margin-top:24pt;padding-top:14pt}
 h2{break-after:avoid}
 figure,.facts div,tr{break-inside:avoid}
 svg,tr *{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""
