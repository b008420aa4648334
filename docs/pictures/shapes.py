"""Four kinds of pictures: bars of figures, boxes with arrows, spans of steps, curves."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.pictures.frame import ARROW_HEAD, MARGIN, WIDTH, arrow, label, picture
from docs.pictures.svg import Scale, colour, horizontal, rect, rule, short, vertical

DOCS = Path(__file__).parents[1]
SOFT, MIDDLE, BOLD = 'class="soft"', 'text-anchor="middle"', 'class="bold"'
LINE, GAP = 22, 34
ROOM = WIDTH - 2 * MARGIN

Box = tuple[float, float, str]  # column, row, lines of text
Span = tuple[float, float, float, str]  # first and last step, opacity, text


def figures(page: str, column: str, first: str | None = None) -> dict[str, float]:
    """A column of the table of a page that has it, by the names in the first column.

    Where several tables have it, `first` is the header of the first column.
    """
    lines = (DOCS / page).read_text(encoding="utf-8").split("\n")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    start = next(i for i, row in enumerate(cells) if column in row and first in {None, row[0]})
    value = cells[start].index(column)
    result = dict[str, float]()
    for row in cells[start + 2 :]:
        if len(row) <= value:
            return result
        if number := re.match(r"-?[\d.]+", row[value]):
            result[row[0].replace("`", "")] = float(number[0])
    return result


def bars(
    title: str,
    description: str,
    rows: Sequence[tuple[str, float, str]],
    *,
    note: str = "",
    ours: Sequence[int] = (),
    logarithmic: bool = False,
) -> str:
    """A bar for each name, value and text; those at the places `ours` have a colour."""
    length = [math.log1p(value) if logarithmic else value for _, value, _ in rows]
    body, top = list[str](), 66
    for i, ((name, _, text), share) in enumerate(zip(rows, length, strict=True)):
        y, width = top + 52 * i, (ROOM - 110) * share / max(length)
        fill = f'style="fill:{colour(0 if i in ours else 7)}" fill-opacity=".75" rx="3"'
        body += [
            label(MARGIN, y, name, SOFT),
            rect(MARGIN, y + 8, width, 20, fill),
            label(MARGIN + max(width, 0.8) + 8, y + 24, text, BOLD),
        ]
    bottom = top + 52 * len(rows)
    body += [label(MARGIN, bottom + 4, note, SOFT)] * bool(note)
    return picture(bottom + (22 if note else -6), title, description, body)


def boxes(
    title: str,
    description: str,
    parts: Mapping[str, Box],
    arrows: str,
    *,
    ours: str = "",
    columns: int = 3,
    note: str = "",
) -> str:
    """Boxes on a grid with arrows `start>stop`; those whose names are in `ours` have a colour."""
    pitch = (ROOM + GAP) / columns
    texts = {name: text.split("\n") for name, (_, _, text) in parts.items()}
    height = 16 + LINE * max(len(lines) for lines in texts.values())
    body, middles = [f"<defs>{ARROW_HEAD}</defs>"], dict[str, tuple[float, float]]()
    for name, (column, row, _) in parts.items():
        left, top = MARGIN + pitch * column, 56 + row * (height + 28)
        middles[name] = left + (pitch - GAP) / 2, top + height / 2
        series = 0 if name in ours.split() else 7
        style = f'rx="6" style="fill:{colour(series)};stroke:{colour(series)}" fill-opacity=".12"'
        body.append(rect(left, top, pitch - GAP, height, style))
        first = middles[name][1] + 6 - LINE * (len(texts[name]) - 1) / 2
        for i, line in enumerate(texts[name]):
            body.append(label(middles[name][0], first + LINE * i, line, MIDDLE))
    for start, stop in (pair.split(">") for pair in arrows.split()):
        (x, y), (u, v) = middles[start], middles[stop]
        across = abs(u - x) > 1
        half = (pitch - GAP) / 2 if across else height / 2
        sign = math.copysign(1, u - x if across else v - y)
        ends = (x + sign * (half + 3), y, u - sign * (half + 5), v)
        if not across:
            ends = (x, y + sign * (half + 3), u, v - sign * (half + 5))
        a, b, c, d = map(short, ends)
        body.append(arrow(f"M{a} {b}L{c} {d}", "currentColor"))
    bottom = 56 + (max(row for _, row, _ in parts.values()) + 1) * (height + 28)
    body += [label(MARGIN, bottom + 4, note, SOFT)] * bool(note)
    return picture(bottom + (22 if note else -8), title, description, body)


def spans(
    title: str,
    description: str,
    steps: float,
    rows: Sequence[tuple[str, Sequence[Span]]],
    *,
    back: Sequence[tuple[int, float, float]] = (),
    marks: Sequence[tuple[int, float]] = (),
    notes: Sequence[str] = (),
) -> str:
    """Rows of blocks of steps, arrows `back` in time in a row, and bars at the resets of a row."""
    unit, body = ROOM / steps, [f"<defs>{ARROW_HEAD}</defs>"]
    for i, (name, blocks) in enumerate(rows):
        y = 66 + 72 * i
        body.append(label(MARGIN, y, name, SOFT))
        for start, stop, opacity, text in blocks:
            left, width = MARGIN + unit * start, unit * (stop - start)
            fill = f'style="fill:{colour(0)}" fill-opacity="{opacity}" rx="3"'
            body.append(rect(left + 1, y + 10, width - 2, 30, fill))
            body += [label(left + width / 2, y + 31, text, MIDDLE)] * bool(text)
        for row, start, stop in back:
            if row == i:
                ends = short(MARGIN + unit * start - 4), short(MARGIN + unit * stop + 4)
                body.append(arrow(f"M{ends[0]} {y + 25}H{ends[1]}", colour(1)))
        body += [
            rect(MARGIN + unit * step - 1, y + 6, 5, 38, f'style="fill:{colour(1)}"')
            for row, step in marks
            if row == i
        ]
    bottom = 66 + 72 * len(rows)
    body += [label(MARGIN, bottom + 25 * i, note, SOFT) for i, note in enumerate(notes)]
    return picture(bottom + 25 * len(notes) - 4, title, description, body)


def curves(
    title: str,
    description: str,
    lines: Sequence[tuple[str, Sequence[float]]],
    *,
    axis: str,
    note: str = "",
) -> str:
    """Values from 0 to 1 at even places, each line with its name at its end."""
    left, right, base, top = MARGIN, WIDTH - 170, 250, 64
    body = [rule(horizontal(base, left, right)), rule(vertical(left, top, base))]
    for i, (name, values) in enumerate(lines):
        x, y = Scale(0, len(values) - 1, left, right), Scale(0, 1, base, top)
        path = "L".join(f"{short(x(k))} {short(y(value))}" for k, value in enumerate(values))
        style = f'fill="none" style="stroke:{colour(i)}" stroke-width="2.5"'
        body += [f'<path d="M{path}" {style}/>', label(right + 10, y(values[-1]) + 5, name, BOLD)]
    body += [label(left, base + 26, axis, SOFT), label(left, base + 52, note, SOFT)]
    return picture(base + (70 if note else 44), title, description, body)
