"""A picture of the autograd graph behind a loss: chunks, and the states between them."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from throughtime._files import write_atomically
from throughtime._svg import (
    END,
    HALO,
    MIDDLE,
    WIDTH,
    chart,
    faint_text_at,
    heading,
    rule,
    short,
    shorten,
    text_at,
)
from throughtime.diagnose._graph import Crossing, Graph, GraphLeaf, Span, walk
from throughtime.errors import ConfigError
from throughtime.state import State

_MOST, _ENDS, _LEAVES = (
    9,
    4,
    14,
)  # chunks drawn one by one; of more, so many at either end; leaves named
_LEFT, _BOX, _WIDE, _RAIL = 244.0, 276.0, 232.0, 746.0
_ALARM = "var(--alarm,#b3121f)"
_LINE = {
    "cut": 'stroke-dasharray="5 4"',
    "joined": 'stroke-width="2.4"',
    "overdue": f'style="stroke:{_ALARM}" stroke-width="3"',
}
_BOLD = 'font-weight="600"'
_OPEN = 'style="fill:var(--paper,#fff)" stroke="currentColor"'
_THIN = 'fill="none" stroke-opacity=".45"'
_ENTERS = {
    "none": "the state enters without a graph: it is initial, or was cut",
    "leaf": "the state enters as a leaf: gradients end there",
    "computed": "the state is computed from nodes before the first step",
}
_REST = {
    "none": "the rest of the state enters without a graph",
    "leaf": "the rest of the state enters as a leaf",
    "computed": "the rest of the state is computed from nodes before the first step",
}


@dataclass(frozen=True)
class Drawing:
    """A picture of a graph; a notebook shows it.

    Attributes:
        svg: the picture, self-contained.
        graph: the same in numbers.
    """

    svg: str = field(repr=False)
    graph: Graph

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file, atomically.

        Raises:
            ConfigError: the name does not end in `.svg`.
        """
        target = Path(path)
        if target.suffix.lower() != ".svg":
            raise ConfigError(
                f"{target}: the picture is SVG, got '{target.suffix}'. Write"
                f" drawing.save('{target.with_suffix('.svg')}')"
            )
        write_atomically(target, self.svg.encode())
        return target

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return str(self.graph)


def draw(
    losses: Tensor | Iterable[Tensor], module: nn.Module | None = None, *, state: State = None
) -> Drawing:
    """Draw the graph behind a loss: chunks, states that connect them, weights; overdue cuts in red.

    Call it before `loss.backward()` in any PyTorch loop. It needs no recording and changes no
    result. Losses of `tt.updates` need no picture: no graph outlives an update. `tt.audit` measures
    what a cut costs.

    Certain are: a state, or a part of it, that enters without a graph; a graph that an earlier
    backward pass has freed; weights changed in place since; the state you pass. All other ends of
    chunks are guessed from autograd's sequence numbers: more nodes were made between two steps than
    between their neighbours. Such a crossing is red if these nodes do not belong to the losses
    drawn and the steps before do not contribute to them. So pass `state` if chunks have one or two
    steps, or if steps differ in length.

    Three cases look alike: a state that was cut and an initial one; where a net runs again on its
    own outputs, these and a state that was cut in part; and a memory without recurrence, as a
    Transformer's, is one chunk.

    Args:
        losses: a tensor with a graph, or several with one graph.
        module: names the weights by their attribute paths.
        state: the state that entered the chunk of the loss, if available: any nested tensors.

    Returns:
        The picture, of bounded size: if there are more than nine chunks, those in the middle are
        drawn as one.

    Raises:
        DataError: a loss without a graph.

    Cost: about 12 microseconds for each node of the graph, on one CPU core, without recursion.
        Saved tensors are unpacked, which recomputes checkpointed activations.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.diagnose.draw import draw
        >>> net = torch.nn.LSTM(3, 8)
        >>> outputs, state = net(torch.randn(20, 1, 3))
        >>> outputs.sum().backward()
        >>> outputs, _ = net(torch.randn(20, 1, 3), state)  # not detached
        >>> drawing = draw(outputs.sum(), net)
        >>> drawing.graph.overdue[0].why
        'the graph before was freed by an earlier backward, so this loss cannot go back through it'
    """
    graph = walk(losses, module, state=state)
    return Drawing(_picture(graph), graph)


@dataclass(frozen=True)
class _Row:
    """A box with its position: one chunk, or several from the first to the last.

    Attributes:
        words: the text beside the arrows from above, line by line, and whether it is red.
        lines: the text in the box below its name.
    """

    first: int
    last: int
    top: float
    height: float
    words: list[tuple[str, bool]]
    lines: list[str]

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def _picture(graph: Graph) -> str:
    keys = [
        (_arrow(11, -9, 8, "cut"), "enters without a graph"),
        (_arrow(11, -9, 8, "joined"), "crosses, one graph"),
        (_arrow(11, -9, 8, "overdue"), "should have been cut"),
    ]
    head, top = heading(
        (
            "The graph behind the loss"
            if graph.losses == 1
            else f"The graph behind {graph.losses} losses"
        ),
        keys,
    )
    rows, bottom = _rows(graph, top + 8)
    body = [part for row in rows for part in (*_into(graph, row), _box(row))]
    leaves, floor = _leaves(graph, rows, top + 8)
    loss, end = _loss(graph, rows, bottom)
    height = max(floor, end) + 8
    paper = (
        f'<rect width="{short(WIDTH)}" height="{short(height)}" style="fill:var(--paper,#fff)"/>'
    )
    # The picture sets its own colours, since a notebook or viewer may be dark.
    inside = ['<g style="color:var(--ink,#191c20)">', paper, head, *leaves, *loss, *body, "</g>"]
    return chart(height, "The graph behind the loss", _description(graph), inside)


def _description(graph: Graph) -> str:
    """The picture as text."""
    spans = [f"chunk {i}: {_size(span)}" for i, span in enumerate(graph.chunks[:_MOST], 1)]
    more = [f"and {len(graph.chunks) - _MOST} more"] if len(graph.chunks) > _MOST else []
    crossings = [
        f"From chunk {x.source + 1} to {x.target + 1}{', red' if x.overdue else ''}: {x.why}."
        for x in graph.links[:_MOST]
    ]
    return (
        f"{str(graph).splitlines()[0]}. {'; '.join([*spans, *more])}. {' '.join(crossings)}".strip()
    )


def _size(span: Span) -> str:
    steps = f"{span.steps:,} step{'' if span.steps == 1 else 's'}, " if span.steps else ""
    return f"{steps}{span.nodes:,} node{'' if span.nodes == 1 else 's'}"


def _rows(graph: Graph, top: float) -> tuple[list[_Row], float]:
    """The position of each box, and the end of the last one."""
    count = len(graph.chunks)
    ranges = [(i, i) for i in range(count)]
    if count > _MOST:
        ranges[_ENDS:-_ENDS] = [(_ENDS, count - _ENDS - 1)]
    rows: list[_Row] = []
    for first, last in ranges:
        words, lines = _words(graph, first), _lines(graph, first, last)
        top += 16 + 18 * max(1, len(words))
        rows.append(_Row(first, last, top, 34 + 18 * len(lines), words, lines))
        top += rows[-1].height
    return rows, top


def _lines(graph: Graph, first: int, last: int) -> list[str]:
    """The lines in a box below its name."""
    spans = graph.chunks[first : last + 1]
    if first == last:
        notes = [
            *(["freed by an earlier backward"] if spans[0].freed else []),
            *(["weights changed since"] if spans[0].stale else []),
        ]
        return [_size(spans[0]), *notes]
    inside = [link for link in graph.links if first <= link.source and link.target <= last]
    red = sum(link.overdue for link in inside)
    return [
        f"{sum(s.steps for s in spans):,} steps, {sum(s.nodes for s in spans):,} nodes",
        f"{len(inside):,} crossings, {red:,} red",
    ]


def _box(row: _Row) -> str:
    many = row.first != row.last
    name = f"chunks {row.first + 1:,} to {row.last + 1:,}" if many else f"chunk {row.first + 1}"
    frame = (
        f'<rect x="{short(_BOX)}" y="{short(row.top)}" width="{short(_WIDE)}"'
        f' height="{short(row.height)}" rx="6" style="fill:var(--wash,#f5f6f7)"'
        f' stroke="currentColor" {_LINE["cut"] * many}/>'
    )
    texts = [
        faint_text_at(_BOX + 14, row.top + 40 + 18 * i, line) for i, line in enumerate(row.lines)
    ]
    title = text_at(_BOX + 14, row.top + 22, name, _BOLD)
    return f'<g class="chunk">{frame}{title}{"".join(texts)}</g>'


def _entering(graph: Graph, target: int) -> tuple[Crossing | None, list[Crossing]]:
    """The crossing from the chunk before, and those from further back."""
    links = [link for link in graph.links if link.target == target]
    near = next((link for link in links if link.source == target - 1), None)
    return near, [link for link in links if link.source < target - 1]


def _words(graph: Graph, target: int) -> list[tuple[str, bool]]:
    """The text beside the arrows into a chunk, line by line, and whether it is red."""
    near, far = _entering(graph, target)
    notes: list[tuple[str, bool]] = []
    if near is not None:
        notes.append(("should have been cut: " * near.overdue + near.why, near.overdue))
    if far:
        names = ", ".join(str(link.source + 1) for link in far[:4])
        others = " and others" if len(far) > 4 else ""
        red = any(link.overdue for link in far)
        notes.append((f"from chunk {names}{others}: {far[-1].why}", red))
    entry = graph.chunks[target].enters
    if entry in _ENTERS:
        notes.append(((_REST if notes else _ENTERS)[entry], False))
    return [(line, red) for text, red in notes for line in textwrap.wrap(text, 44)]


def _into(graph: Graph, row: _Row) -> list[str]:
    """The arrows into a chunk from above, with their text."""
    links = [link for link in graph.links if link.target == row.first]
    start, parts = row.top - 10 - 18 * max(1, len(row.words)), list[str]()
    if links:
        kind = "overdue" if any(link.overdue for link in links) else "joined"
        parts.append(_arrow(_BOX + 40, start - 6, row.top, kind))
    if graph.chunks[row.first].enters in _ENTERS:
        parts += [
            _arrow(_BOX + 14, start + 10, row.top, "cut"),
            f'<circle cx="{short(_BOX + 14)}" cy="{short(start + 6)}" r="4" {_OPEN}/>',
        ]
    lines = enumerate(row.words)
    texts = [_text_line(_BOX + 58, start + 12 + 18 * i, line, red) for i, (line, red) in lines]
    return parts + texts


def _text_line(x: float, y: float, line: str, red: bool) -> str:
    halo = HALO.replace('style="', f'style="fill:{_ALARM};') if red else HALO
    return text_at(x, y, line, halo)


def _arrow(x: float, start: float, stop: float, kind: str) -> str:
    """An arrow downwards; one that should have been cut has a bar across as well."""
    tip = (
        f"M{short(x - 4)} {short(stop - 7)}L{short(x)} {short(stop)}L{short(x + 4)}"
        f" {short(stop - 7)}"
    )
    middle = (start + stop) / 2
    bar = (
        f"M{short(x - 6)} {short(middle + 4)}L{short(x + 6)} {short(middle - 4)}"
        if kind == "overdue"
        else ""
    )
    line = f"M{short(x)} {short(start)}V{short(stop)}"
    # the line of a cut is dashed, its tip is not
    head = f'<path d="{tip}" fill="none" stroke="currentColor"/>' if kind == "cut" else ""
    drawn = line if kind == "cut" else line + tip + bar
    return (
        f'<path class="{kind}" d="{drawn}" fill="none" stroke="currentColor" {_LINE[kind]}/>{head}'
    )


def _leaves(graph: Graph, rows: Sequence[_Row], top: float) -> tuple[list[str], float]:
    """The weights and other leaves on the left, with a line to every chunk that uses one."""
    y, parts = top + 24, list[str]()
    groups = [
        ("weights", [x for x in graph.leaves if x.parameter]),
        ("other leaves", [x for x in graph.leaves if not x.parameter]),
    ]
    for title, leaves in groups:
        if leaves:
            parts.append(text_at(0, y, f"{title}, and how often used", _BOLD))
            parts += [_leaf(leaf, y + 22 + 18 * i) for i, leaf in enumerate(leaves[:_LEAVES])]
            more = len(leaves) - _LEAVES
            parts.append(
                faint_text_at(0, y + 22 + 18 * _LEAVES, f"and {more:,} more") if more > 0 else ""
            )
            y += 58 + 18 * min(len(leaves), _LEAVES + 1)
    used = {chunk for leaf in graph.leaves for chunk in leaf.chunks}
    using = [row for row in rows if any(c in used for c in range(row.first, row.last + 1))]
    if using:
        parts.append(rule(f"M{short(_LEFT)} {short(top + 12)}V{short(using[-1].middle)}", _THIN))
        parts += [
            rule(f"M{short(_LEFT)} {short(row.middle)}H{short(_BOX)}", _THIN) for row in using
        ]
    return parts, y


def _leaf(leaf: GraphLeaf, y: float) -> str:
    return text_at(0, y, shorten(leaf.name, 24)) + faint_text_at(
        _LEFT - 12, y, f"{leaf.uses:,}", END
    )


def _loss(graph: Graph, rows: Sequence[_Row], bottom: float) -> tuple[list[str], float]:
    """The loss at the lower right, with a line from every chunk whose outputs contribute to it."""
    name = "loss" if graph.losses == 1 else f"{graph.losses} losses"
    y = bottom + 28
    using = [row for row in rows if any(s.to_loss for s in graph.chunks[row.first : row.last + 1])]
    parts = [
        rule(f"M{short(_BOX + _WIDE)} {short(row.middle)}H{short(_RAIL)}", _THIN) for row in using
    ]
    if using:
        parts.append(rule(f"M{short(_RAIL)} {short(using[0].middle)}V{short(y)}", _THIN))
    pill = (
        f'<rect x="{short(WIDTH - 110)}" y="{short(y)}" width="109" height="30" rx="15" {_OPEN}/>'
    )
    return [*parts, pill, text_at(WIDTH - 55, y + 20, name, f"{MIDDLE} {_BOLD}")], y + 32
