"""A run as one self-contained HTML page: charts from plain numbers, and the page around them."""

from throughtime.app.report.charts import (
    Band,
    Mark,
    Series,
    bars,
    envelope,
    heat,
    lines,
    runs,
    strip,
)
from throughtime.app.report.page import (
    Cell,
    Code,
    Facts,
    Figure,
    Link,
    Page,
    Part,
    Section,
    Table,
    Text,
    render,
)

__all__ = [
    "Band",
    "Cell",
    "Code",
    "Facts",
    "Figure",
    "Link",
    "Mark",
    "Page",
    "Part",
    "Section",
    "Series",
    "Table",
    "Text",
    "bars",
    "envelope",
    "heat",
    "lines",
    "render",
    "runs",
    "strip",
]
