"""The graph of one update: where its gradient flows, and where it is cut."""

from docs.pictures.frame import ARROW_HEAD, MARGIN, WIDTH, arrow, label, picture
from docs.pictures.paths import reached
from docs.pictures.svg import colour, rule, short, vertical

from throughtime import Truncated

STEPS, STRIDE = 9, 3
PITCH = (WIDTH - 2 * MARGIN) / STEPS
RADIUS, PANEL = 15, 206
LINK = PITCH - 2 * RADIUS - 5
GRADIENT = colour(1)


def draw() -> dict[str, str]:
    """The last update of nine steps, with k1 = k2 and with k2 > k1."""
    body = [f"<defs>{ARROW_HEAD}</defs>"]
    for i, (horizon, text) in enumerate(
        (
            (STRIDE, f"k1 = k2 = {STRIDE}: the state is detached every {STRIDE} steps"),
            (2 * STRIDE, f"k1 = {STRIDE}, k2 = {2 * STRIDE}: the gradient flows further back"),
        )
    ):
        body.append(_panel(58 + i * PANEL, text, horizon))
    body.append(
        f'<g transform="translate({MARGIN} {58 + 2 * PANEL})">'
        + arrow("M0 0h34", "currentColor")
        + label(44, 5.5, "forward", _SOFT)
        + arrow("M174 0h-34", GRADIENT)
        + label(184, 5.5, "gradient", _SOFT)
        + f'<path d="{vertical(300, -12, 10)}" {_CUT}/>'
        + label(312, 5.5, "cut: the value goes on", _SOFT)
        + "</g>"
    )
    return {
        "graph.svg": picture(
            80 + 2 * PANEL,
            "What an update differentiates",
            f"Nine steps of a recurrent net, unrolled, and the update of the last {STRIDE} losses."
            f" With k1 = k2 = {STRIDE} its gradient stops at the state before step 7. With k2 = 6"
            " it flows back to step 4. The values of the states go forward everywhere.",
            body,
        )
    }


_SOFT = 'class="soft"'
_CUT = f'style="stroke:{GRADIENT}" stroke-width="3" stroke-dasharray="5 3"'


def _panel(top: float, text: str, horizon: int) -> str:
    """One policy: its inputs, states and losses, and the gradient of the last losses."""
    rows = reached(Truncated(stride=STRIDE, horizon=horizon), STEPS)
    counted = range(STEPS - STRIDE, STEPS)
    first = min(step for loss in counted for step, hit in enumerate(rows[loss]) if hit)
    middle, parts = top + 100, [label(MARGIN, top + 18, text, 'class="bold"')]
    for step in range(STEPS):
        x = MARGIN + PITCH * (step + 0.5)
        is_run = step >= first
        faint = "" if is_run else 'opacity=".45"'
        parts.append(f"<g {faint}>{_node(x, middle, step, is_run)}</g>")
        passed = "" if step + 1 >= first else faint  # the value of the state crosses the cut
        if step + 1 < STEPS:
            start = f"M{short(x + RADIUS + 2)} {middle - 5}"
            parts.append(arrow(f"{start}h{short(LINK)}", "currentColor", passed))
        if step > first:
            start = f"M{short(x - RADIUS - 2)} {middle + 6}"
            parts.append(arrow(f"{start}h{short(-LINK)}", GRADIENT))
        if step in counted:
            style = f'text-anchor="middle" class="bold" style="fill:{GRADIENT}"'
            parts.append(label(x, middle - 52, f"L{step + 1}", style))
            parts.append(arrow(f"M{short(x)} {middle - 45}V{middle - RADIUS - 3}", GRADIENT))
    if first:
        x = MARGIN + PITCH * first
        parts.append(f'<path d="{vertical(x, middle - 40, middle + 44)}" {_CUT}/>')
    return "".join(parts)


def _node(x: float, y: float, step: int, is_run: bool) -> str:
    """A state and the input of its step."""
    style = f'style="fill:{colour(0)}" fill-opacity="{0.25 if is_run else 0.08}"'
    number = 'text-anchor="middle"'
    return (
        f'<circle cx="{short(x)}" cy="{short(y)}" r="{RADIUS}" {style}/>'
        + label(x, y + 5.5, f"h{step + 1}", number)
        + rule(
            f"M{short(x)} {short(y + 46)}V{short(y + RADIUS + 3)}",
            'stroke-opacity=".5" stroke-width="1.5"',
        )
        + label(x, y + 64, f"x{step + 1}", number)
    )
