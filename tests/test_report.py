"""Charts and pages of the reports: what a chart shows, and what a page may contain."""

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from throughtime._svg import numbers, tick_labels, ticks
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
    Code,
    DataTable,
    Facts,
    Figure,
    Page,
    Paragraphs,
    Part,
    Section,
    render,
)
from throughtime.errors import ConfigError, DataError

NASTY = "<b>&\"'</title>\x00\udcff.csv"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta"}
any_number = st.floats(-1e9, 1e9, allow_nan=False)


def curve(*y: float, **more: Any) -> str:
    return lines(
        [Series("s", range(len(y)), y)],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
        **more,
    )


def warm(rows: list[tuple[str, list[float]]], **more: Any) -> str:
    return heat(rows, [1, 2, 4], title="t", description="d", x_label="x", **more)


CHARTS = {
    "lines": curve(1, 2, 3, x_marks=[Mark(1, NASTY), Mark(1.1, NASTY)], y_marks=[Mark(2.5, NASTY)]),
    "lines cut": curve(1, 2, 1e250, y_range=(0, 2)),
    "lines log": curve(1, 2, 3, log_x=True),
    "lines log both": curve(
        1e-9, 0, 1e3, log_x=True, log_y=True, y_marks=[Mark(1e-3, NASTY), Mark(-1, NASTY)]
    ),
    "lines log hardly moving": curve(3, 3, log_y=True),
    "lines log nothing": curve(0, -1, math.nan, log_y=True),
    "lines log cut": curve(1e-30, 1, 1e-3, log_y=True, y_range=(1e-4, 1)),
    "lines dots": curve(1, 2, math.nan, 1e250, y_range=(0, 2), dots=True),
    "lines empty": lines([], title="t", description="d", x_label="x", y_label="y"),
    "lines of nothing": curve(math.nan, math.inf),
    "lines one point": curve(5),
    "lines constant": curve(-2, -2, -2),
    "lines huge": curve(-1e299, 1e299, -math.inf),
    "lines zero": curve(0, 0),
    "lines hardly moving": curve(1e9, 1e9 + 1e-7),
    "strip": strip(
        [1, 2],
        [Band(NASTY, [0, 9])],
        title=NASTY,
        description=NASTY,
        x_label=NASTY,
        y_label=NASTY,
        classes=[NASTY] * 10,
    ),
    "strip empty": strip([], [], title="t", description="d", x_label="x", y_label="y"),
    "strip one step": strip(
        [math.nan],
        [Band("b", [-1])],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
        classes=["c"],
    ),
    "heat": warm(
        [(NASTY, [1, math.nan]), ("b", [0, 1e-30])],
        marks=[Mark(2, NASTY), Mark(-1, NASTY)],
    ),
    "heat log": warm([("a", [1, 2])], log_x=True),
    "heat cut": warm(
        [("a", [1, 2])],
        cuts=(NASTY, [2, 3.5, 9]),
        above=Series(NASTY, [1, 2, 3], [0, math.nan, 1e250]),
    ),
    "heat below nothing": warm(
        [("a", [1, 2])],
        log_x=True,
        cuts=("c", []),
        above=Series("s", [1, -1], [math.inf, math.nan]),
    ),
    "heat empty": heat([], [1, 2], title="t", description="d", x_label="x"),
    "heat of nothing": warm([("a", [math.nan, -1])]),
    "bars": bars(
        [(NASTY, 1), ("b", math.nan), ("c", -3), ("d", -math.inf)],
        title="t",
        description="d",
        x_label="x",
    ),
    "bars empty": bars([], title="t", description="d", x_label="x"),
    "bars range": bars(
        [("a", 3), ("b", -3)], title="t", description="d", x_label="x", x_range=(0, 1)
    ),
}


def page(*parts: Part) -> str:
    return render(Page(NASTY, NASTY, [Section(NASTY, parts), Section("b", []), Section("c", [])]))


WHOLE = page(
    Paragraphs(f"one\n\n{NASTY}"),
    Facts([(NASTY, NASTY)]),
    DataTable([NASTY, "n"], [[NASTY, 1.5], ["b", math.nan]], NASTY),
    *(Figure(svg, NASTY) for svg in CHARTS.values()),
    Figure(CHARTS["lines"], "the same chart again"),
    Code([NASTY, "two"], 1, 1, NASTY),
    Code([], 1, 1, ""),
)

STYLE = WHOLE.partition("<style>")[2].partition("</style>")[0]


class Balance(HTMLParser):
    """A parser that fails on unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def drawing(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in drawing(svg).iter(f"{SVG}text")]


def curves(svg: str) -> list[str]:
    """The paths drawn in the style of a series, without those of the legend."""
    return [
        e.attrib["d"]
        for e in drawing(svg).iter(f"{SVG}path")
        if "style" in e.attrib and e.attrib["d"] != "M0 0h22"
    ]


def points(d: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


def test_page_sends_no_request() -> None:
    rest = WHOLE.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(
        r"https?:|//[a-z]|<script|<link|<iframe|<img|@import|\bsrc=|\bon\w+=", rest
    )
    assert set(re.findall(r"url\(([^)]*)\)", rest)) == set(
        re.findall(r"url\((#chart-[\w-]+)\)", rest)
    )


def test_page_is_balanced_html_and_well_formed_xml() -> None:
    parser = Balance()
    parser.feed(WHOLE)
    parser.close()
    assert not parser.open
    assert ET.fromstring(WHOLE).tag == "html"


def test_page_headings_go_down_one_level_at_a_time() -> None:
    parser = Balance()
    parser.feed(WHOLE)
    assert [tag for tag in parser.tags if re.fullmatch(r"h\d", tag)] == ["h1", "h2", "h2", "h2"]


def test_ids_are_unique_and_every_reference_has_a_target() -> None:
    ids = re.findall(r'\sid="([^"]*)"', WHOLE)
    assert len(ids) == len(set(ids))
    named = [
        name for names in re.findall(r'aria-labelledby="([^"]*)"', WHOLE) for name in names.split()
    ]
    assert {*named, *re.findall(r'(?:url\(|href=")#([^)"]*)', WHOLE)} <= set(ids)


def test_page_of_the_same_content_is_the_same_text() -> None:
    assert page(Figure(curve(1, 2), "c")) == page(Figure(curve(1, 2), "c"))


def test_page_can_be_written_as_utf8() -> None:
    assert "\x00" not in WHOLE.encode().decode()


@pytest.mark.parametrize("svg", CHARTS.values(), ids=CHARTS.keys())
def test_chart_has_a_title_and_a_description(svg: str) -> None:
    root = drawing(svg)
    title, desc = root[0], root[1]
    assert (root.tag, root.attrib["role"], title.tag, desc.tag) == (
        f"{SVG}svg",
        "img",
        f"{SVG}title",
        f"{SVG}desc",
    )
    assert title.text
    assert desc.text
    assert root.attrib["aria-labelledby"].split() == [title.attrib["id"], desc.attrib["id"]]


@pytest.mark.parametrize("svg", CHARTS.values(), ids=CHARTS.keys())
def test_chart_contains_finite_numbers_only(svg: str) -> None:
    shown = " ".join(
        v
        for e in drawing(svg).iter()
        for k, v in e.attrib.items()
        if k in {"d", "x", "y", "width", "height", "cx", "cy", "viewBox"}
    )
    assert not re.search(r"nan|inf|e[+-]?\d", shown)
    assert not re.search(r"\bnan\b|\binf\b", " ".join(texts(svg)))


@pytest.mark.parametrize("svg", CHARTS.values(), ids=CHARTS.keys())
def test_chart_stays_within_its_width(svg: str) -> None:
    for text in drawing(svg).iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= 760


def test_text_of_the_user_is_escaped() -> None:
    assert "<b>&" not in WHOLE
    assert "&lt;b&gt;&amp;&quot;" in WHOLE
    everywhere = [
        CHARTS["heat"],
        CHARTS["lines"],
        CHARTS["strip"],
        CHARTS["bars"],
    ]
    assert all(any("<b>&\"'</title>" in text for text in texts(svg)) for svg in everywhere)


def test_nan_breaks_the_line() -> None:
    (d,) = curves(curve(1, 2, math.nan, 3, 4))
    assert d.count("M") == 2
    assert len(points(d)) == 4
    (whole,) = curves(curve(1, 2, 2.5, 3, 4))
    assert whole.count("M") == 1


def test_nan_breaks_the_envelope() -> None:
    (d,) = curves(curve(*[1.0] * 5000, math.nan, *[2.0] * 5000))
    assert d.count("M") == 2


def test_a_decade_is_as_high_as_any_other_on_a_logarithmic_axis() -> None:
    (d,) = curves(curve(1e-4, 1e-3, 1e-2, 1e-1, log_y=True))
    heights = [y for _, y in points(d)]
    assert [round(a - b, 1) for a, b in pairwise(heights)] == [80.0] * 3
    (linear,) = curves(curve(1e-4, 1e-3, 1e-2, 1e-1))
    assert heights != [y for _, y in points(linear)]


def test_a_zero_is_a_gap_on_a_logarithmic_axis_however_many_points_there_are() -> None:
    assert curves(curve(1, 0, 2, 3, log_y=True))[0].count("M") == 2
    (d,) = curves(curve(*[1.0] * 5000, 0.0, *[2.0] * 5000, log_y=True))
    assert d.count("M") == 2


def test_dots_mark_every_point_once() -> None:
    def circles(svg: str) -> list[tuple[str, str]]:
        return [(e.attrib["cx"], e.attrib["cy"]) for e in drawing(svg).iter(f"{SVG}circle")]

    assert len(circles(curve(1, 2, 3))) == 1
    dotted = circles(curve(1, 2, math.nan, 3, dots=True))
    assert len(dotted) == len(set(dotted)) == 3


def test_point_between_two_gaps_is_a_dot() -> None:
    (d,) = curves(curve(math.nan, 1, math.nan))
    assert d.endswith("h0")


def decimated(columns: list[int], y: list[float]) -> list[int]:
    """The mutant: every nth point."""
    return list(range(0, len(y), max(1, len(y) // (2 * len(set(columns))))))


def keeps_extremes(columns: list[int], y: list[float], kept: list[int]) -> bool:
    def span(where: list[int], column: int) -> tuple[float, float]:
        here = [y[i] for i in where if columns[i] == column]
        return min(here, default=math.nan), max(here, default=math.nan)

    return all(span(kept, column) == span(list(range(len(y))), column) for column in set(columns))


@given(st.lists(any_number, min_size=1, max_size=300), st.integers(1, 40))
def test_envelope_keeps_the_extremes_and_ends_of_each_column(y: list[float], per: int) -> None:
    columns = [i // per for i in range(len(y))]
    kept = envelope(columns, y)
    assert kept == sorted(set(kept))
    assert keeps_extremes(columns, y, kept)
    assert len(kept) <= 5 * len(set(columns))
    assert {0, len(y) - 1} <= set(kept)


def test_decimation_would_lose_the_spike() -> None:
    y = [0.0] * 1000
    y[333] = 9.0
    columns = [i // 100 for i in range(1000)]
    assert keeps_extremes(columns, y, envelope(columns, y))
    assert not keeps_extremes(columns, y, decimated(columns, y))


@pytest.mark.parametrize("where", [1, 4_321, 99_998])
def test_spike_of_one_step_is_drawn_to_its_height(where: int) -> None:
    y = [math.sin(i / 50) for i in range(100_000)]
    y[where] = 40.0
    svg = strip(y, [], title="t", description="d", x_label="x", y_label="y")
    (d,) = curves(svg)
    heights = sorted(at for _, at in points(d))
    assert heights[0] < heights[1] - 100
    assert len(points(d)) < 5 * 760


@given(any_number, any_number)
def test_ticks_are_round_evenly_spaced_and_cover_the_range(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    values = ticks(low, high)
    assert 2 <= len(values) <= 8
    step = values[1] - values[0]
    assert values[0] <= low + 1e-8 * step
    assert values[-1] >= high - 1e-8 * step
    decade = 10.0 ** math.floor(math.log10(step) + 1e-6)
    lead = min((1, 2, 5), key=lambda r: abs(step / decade - r))
    assert abs(step / decade - lead) < 1e-3
    spaces = [
        t / (lead * decade) for t in values
    ]  # by the round step: that of two ticks is as inexact as they are large beside it
    assert all(abs(s - round(s)) < 1e-3 for s in spaces)


@given(st.lists(st.floats(-1e6, 1e6).map(lambda v: round(v, 3)), min_size=2, max_size=5))
def test_ends_of_the_y_axis_are_ticks_and_hold_the_line(y: list[float]) -> None:
    svg = curve(*y)
    horizontal = [
        e.attrib["d"]
        for e in drawing(svg).iter(f"{SVG}path")
        if re.fullmatch(r"M\S+ \S+H\S+", e.attrib["d"])
    ]
    rows = [float(d.split()[1].split("H")[0]) for d in horizontal]
    assert all(min(rows) - 0.2 <= at <= max(rows) + 0.2 for d in curves(svg) for _, at in points(d))


@given(st.lists(st.integers(-1, 3), max_size=60))
def test_runs_cover_each_step_once(classes: list[int]) -> None:
    assert [c for start, stop, c in runs(classes) for _ in range(start, stop)] == classes
    bounds = [(start, stop) for start, stop, _ in runs(classes)]
    assert all(before[1] == after[0] for before, after in pairwise(bounds))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_band_covers_each_step_once(classes: list[int]) -> None:
    svg = strip(
        [],
        [Band("b", classes)],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
        classes=["a", "b", "c"],
    )
    blocks = [e.attrib for e in drawing(svg).iter(f"{SVG}rect") if e.attrib["height"] == "22"]
    assert len(blocks) == len(list(runs(classes)))
    for before, after in pairwise(blocks):
        assert float(before["x"]) + float(before["width"]) == pytest.approx(
            float(after["x"]), abs=0.11
        )
    assert sum(float(b["width"]) for b in blocks) == pytest.approx(
        760 - 24 - float(blocks[0]["x"]), abs=0.1 * len(blocks)
    )


def cells(svg: str) -> list[tuple[float, float, float]]:
    """Position, width and opacity of each cell, without those of the legend."""
    rects = [e.attrib for e in drawing(svg).iter(f"{SVG}rect") if e.attrib["height"] == "28"]
    return [(float(c["x"]), float(c["width"]), float(c["fill-opacity"])) for c in rects]


def test_cell_opacity_is_the_logarithm_of_its_value() -> None:
    fills = [fill for *_, fill in cells(warm([("a", [1, 1e-3]), ("b", [1e-5, 1e-7])]))]
    assert fills == [1.0, 0.5, 0.17]  # by decades of six; what is smaller than all of them is empty
    assert [
        fill for *_, fill in cells(warm([("a", [1e9, 1e6]), ("b", [1e4, 1e2])]))
    ] == fills  # a matter of ratios


def test_cells_lie_side_by_side_between_their_edges() -> None:
    for log_x in (False, True):
        (a, wide, _), (b, other, _) = cells(warm([("a", [1, 2])], log_x=log_x))
        assert a + wide == pytest.approx(b, abs=0.11)
        assert other / wide == pytest.approx(1 if log_x else 2, abs=0.01)  # from 1 to 2, and to 4


def test_missing_value_has_no_cell() -> None:
    assert len(cells(warm([("a", [1, math.nan]), ("b", [0, 1])]))) == 2


def test_equal_neighbouring_cells_are_merged() -> None:
    assert [(x, fill) for x, _, fill in cells(warm([("a", [2, 2])]))] == [
        (cells(warm([("a", [1, 2])]))[0][0], 1.0)
    ]


def test_cut_beyond_the_cells_is_omitted() -> None:
    def cut(svg: str) -> int:
        return sum(e.attrib.get("stroke-width") == "1.4" for e in drawing(svg).iter(f"{SVG}path"))

    assert [
        cut(warm([("a", [1, 2])], cuts=("c", positions)))
        for positions in ([], [2.0], [0.5, 2.0, 3.0, 4.5])
    ] == [0, 2, 3]  # one is the key


def test_many_cuts_do_not_hide_the_cells() -> None:
    def lengths(count: int) -> set[float]:
        svg = warm([("a", [1, 2])], cuts=("c", [1 + 3 * i / count for i in range(count)]))
        paths = [
            e.attrib["d"]
            for e in drawing(svg).iter(f"{SVG}path")
            if e.attrib.get("stroke-width") == "1.4"
        ]
        return {
            round(float(b) - float(a))
            for a, b in (re.findall(r"M[\d.]+ (-?[\d.]+)V(-?[\d.]+)", d)[0] for d in paths[1:])
        }

    assert lengths(16) == {40}  # 32 of the row, 6 above, 2 below
    assert lengths(17) == {6}


def test_the_largest_of_each_row_is_written_not_only_coloured() -> None:
    labels = texts(warm([("a", [0.5, 0.25]), ("b", [0.125, math.nan])]))
    assert {"0.50", "0.12"} <= set(labels)


def test_step_without_a_class_has_no_block() -> None:
    svg = strip(
        [],
        [Band("b", [0, -1, 7, 0])],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
        classes=["a"],
    )
    assert sum(e.attrib["height"] == "22" for e in drawing(svg).iter(f"{SVG}rect")) == 2


def test_classes_beyond_the_colours_are_hatched() -> None:
    names = [str(i) for i in range(9)]
    svg = strip(
        [], [Band("b", [0, 8])], title="t", description="d", x_label="x", y_label="y", classes=names
    )
    assert (
        len(re.findall(r'fill="url\(#chart-\w+-hatch\)"', svg)) == 2
    )  # in the legend and in the row


def test_lines_differ_in_dashes_not_only_in_colour() -> None:
    svg = lines(
        [Series(str(i), [0, 1], [i, i]) for i in range(6)],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
    )
    dashes = {
        re.findall(r"stroke-dasharray:([^;]*)", e.attrib["style"])[0]
        for e in drawing(svg).iter(f"{SVG}path")
        if "style" in e.attrib
    }
    assert len(dashes) == 6


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return sum(
        w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
        for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
    )


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_text_colour_has_enough_contrast(theme: int) -> None:
    colours = {
        name: c * 2 if len(c) == 3 else c
        for name, c in re.findall(r"--([\w-]+):#(\w+)", STYLE.split("@media")[theme])
    }
    paper = luminance("#" + colours["paper"])
    for name in ("ink", "soft", "link", "alarm", *(f"series-{i}" for i in range(1, 9))):
        low, high = sorted((paper, luminance("#" + colours[name])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
    assert colours["on-series"] == colours["paper"]


def test_end_labels_do_not_overlap() -> None:
    svg = lines(
        [Series(str(i), [0, 1], [0, 1 + i / 1e4]) for i in range(6)],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
    )
    heights = sorted(
        float(e.attrib["y"])
        for e in drawing(svg).iter(f"{SVG}text")
        if "--series" in e.attrib.get("style", "")
    )
    assert len(heights) == 6
    assert all(b - a > 15 for a, b in pairwise(heights))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.98123, 0.5], ["0.9812", "0.5000"]),
        ([math.nan, -1.5], ["\u2013", "\u22121.5"]),
        ([1204312, 3], ["1,204,312", "3"]),
        ([0.00002, 0.0], ["2e\u22125", "0"]),
        ([10.0, 0.0003], ["10", "3e\u22124"]),
        ([], []),
    ],
)
def test_numbers_of_a_column_line_up(values: list[float], expected: list[str]) -> None:
    assert numbers(values) == expected


def test_tick_labels_are_abbreviated_only_where_exact() -> None:
    assert tick_labels([0, 2e6, 4e6]) == ["0", "2M", "4M"]
    assert tick_labels([129600, 129650]) == ["129,600", "129,650"]


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    html = page(DataTable(["a", "b"], [["x", 1.5], ["y", 2]], "c"))
    assert '<td class="n">2.0</td>' in html
    assert '<td class="n">' not in page(DataTable(["a", "b"], [["x", 1.5]], "c", numeric=()))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Series("s", [1], []), DataError),
        (lambda: DataTable(["a"], [["x", 1]], "c"), DataError),
        (lambda: warm([("a", [1.0])]), DataError),
        (lambda: curve(1, y_range=(1, 1)), ConfigError),
        (lambda: curve(1, y_range=(0, math.nan)), ConfigError),
        (lambda: curve(1, y_range=(0, 1), log_y=True), ConfigError),
        (
            lambda: strip(
                [], [Band("b", [0])], title="t", description="d", x_label="x", y_label="y"
            ),
            ConfigError,
        ),
    ],
    ids=[
        "series of two lengths",
        "ragged table",
        "ragged heat",
        "empty range",
        "range of NaN",
        "logarithmic range from zero",
        "bands without classes",
    ],
)
def test_invalid_chart_data_is_an_error(make: object, error: type[Exception]) -> None:
    assert callable(make)
    with pytest.raises(error):
        make()
