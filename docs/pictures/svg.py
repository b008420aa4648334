"""SVG primitives of the pictures: coordinates as text, lines, blocks, colours of the page."""

from dataclasses import dataclass
from html import escape

PALETTE = ("#2350c4", "#cf3a0a", "#0c694c", "#620b82", "#776e21", "#177b9e", "#850125", "#444956")


def clean(text: str) -> str:
    """The text as XML."""
    return escape(text)


@dataclass(frozen=True)
class Scale:
    """A map from the values of an axis, `low` to `high`, to coordinates, `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def short(value: float) -> str:
    """A coordinate as text."""
    return f"{value:.1f}".removesuffix(".0")


def rule(path: str, attributes: str = 'stroke-opacity=".13"') -> str:
    """A line in the colour of the text."""
    return f'<path d="{path}" stroke="currentColor" {attributes}/>'


def vertical(x: float, top: float, bottom: float) -> str:
    """The path of a vertical line."""
    return f"M{short(x)} {short(top)}V{short(bottom)}"


def horizontal(y: float, left: float, right: float) -> str:
    """The path of a horizontal line."""
    return f"M{short(left)} {short(y)}H{short(right)}"


def rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    """A rectangle, never too narrow to show."""
    return (
        f'<rect x="{short(x)}" y="{short(y)}" width="{max(width, 0.8):.2f}"'
        f' height="{short(height)}" {attributes}/>'
    )


def colour(i: int) -> str:
    """The colour of series or class `i`; below 0, that of the text."""
    i_colour = i % len(PALETTE)
    return f"var(--series-{i_colour + 1},{PALETTE[i_colour]})" if i >= 0 else "currentColor"
