"""The frame of a picture: a card in the colours of the reports, for light and dark pages.

Lengths are in user units: a picture is `WIDTH` wide. A phone shows it at about two thirds of that,
so no text is smaller than 16 units.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from docs.pictures.svg import clean, rect, short

import throughtime

FOLDER = Path(__file__).parent
WIDTH = 560
MARGIN = 20
_CSS = Path(throughtime.__file__).parent / "app" / "page.css"
_FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="16"'

Theme = Literal["light", "dark", "auto"]


def picture(
    height: float,
    title: str,
    description: str,
    body: Sequence[str],
    *,
    theme: Theme = "auto",
    style: str = "",
) -> str:
    """A picture as an SVG file.

    Args:
        height: of the picture.
        title: its heading, drawn at the top.
        description: what it shows, for screen readers.
        body: SVG elements.
        theme: the colours; "auto" follows the page, or else the system.
        style: more rules of CSS.
    """
    light, dark = re.findall(r":root\{\n(.*?)\}", _CSS.read_text(encoding="utf-8"), re.DOTALL)
    rules = {
        "light": f":root{{{light}}}",
        "dark": f":root{{{dark}}}",
        "auto": f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}",
    }[theme]
    rules = re.sub(r"\n\s*", "", rules) + style
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title desc"'
        f' width="{WIDTH}" height="{short(height)}" viewBox="0 0 {WIDTH} {short(height)}" {_FONT}'
        f' color="var(--ink)" fill="currentColor"><title id="title">{clean(title)}</title>'
        f'<desc id="desc">{clean(description)}</desc><style>{rules}'
        "svg{color:var(--ink)}.bold{font-weight:650}.soft{fill:var(--soft)}"
        "</style>\n"
        + rect(0, 0, WIDTH, height, 'rx="10" style="fill:var(--paper)"')
        + f'<text x="{MARGIN}" y="36" class="bold" font-size="20">{clean(title)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def label(x: float, y: float, text: str, attributes: str = "") -> str:
    """Text whose left end, or what `text-anchor` says, is at `x`."""
    return f'<text x="{short(x)}" y="{short(y)}" {attributes}>{clean(text)}</text>'


def arrow(path: str, colour: str, attributes: str = "") -> str:
    """A line with a head at its end; `arrow_head` must be among the elements."""
    return (
        f'<path d="{path}" fill="none" style="stroke:{colour};color:{colour}" stroke-width="2"'
        f' marker-end="url(#head)" {attributes}/>'
    )


ARROW_HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6"'
    ' orient="auto"><path d="M0 0 10 5 0 10z" style="fill:context-stroke"/></marker>'
)


def beats(left: float, right: float, base: float, height: float, count: int) -> str:
    """The path of an ECG of `count` beats between two coordinates."""
    width = (right - left) / count
    shape = ((0, 0), (0.3, 0), (0.36, 0.12), (0.42, 0), (0.46, -0.1), (0.5, 1), (0.54, -0.2))
    shape += ((0.58, 0), (0.7, 0.05), (0.76, 0.25), (0.82, 0))
    points = [
        f"{short(left + (beat + x) * width)} {short(base - y * height)}"
        for beat in range(count)
        for x, y in shape
    ]
    return f"M{'L'.join(points)}H{short(right)}"
