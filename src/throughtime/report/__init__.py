"""A run as one self-contained HTML page: charts from plain numbers, and the page around them."""

from throughtime.report.page import Cell, Facts, Figure, Page, Part, Range, Section, Table, Text, clean, numbers, render, tick_labels, ticks
from throughtime.report.svg import Band, Mark, Series, bars, envelope, heat, lines, runs, strip

__all__ = [
    "Band",
    "Cell",
    "Facts",
    "Figure",
    "Mark",
    "Page",
    "Part",
    "Range",
    "Section",
    "Series",
    "Table",
    "Text",
    "bars",
    "clean",
    "envelope",
    "heat",
    "lines",
    "numbers",
    "render",
    "runs",
    "strip",
    "tick_labels",
    "ticks",
]
