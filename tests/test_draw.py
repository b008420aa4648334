"""The laws of tt.draw: the right chunks, the right red edges, no node lost, and nothing changed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from throughtime.diagnose.draw import Drawing, draw
from throughtime.errors import DataError

D = torch.float64


class Net(nn.Module):
    """An LSTM cell with a readout at every step, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4).to(D), nn.Linear(4, 2).to(D)

    def initial(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 4, dtype=D), torch.zeros(2, 4, dtype=D)

    def chunk(
        self, steps: int, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs = list[Tensor]()
        for x in torch.randn(steps, 2, 3, dtype=D):
            state = self.cell(x, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs).pow(2).mean(), state


def detached(state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return state[0].detach(), state[1].detach()


def two_chunks(between: Callable[..., Any], *, both: bool = False) -> Drawing:
    """The graph of the second of two chunks, or of both losses, with the state altered between."""
    net = Net()
    first, state = net.chunk(10, net.initial())
    second, _ = net.chunk(12, between(state))
    return draw(first + second if both else second, net)


def layer(kind: type[nn.LSTM], dtype: torch.dtype) -> Drawing:
    net, x = kind(3, 4, num_layers=2).to(dtype), torch.randn(7, 2, 3, dtype=dtype)
    y, state = net(x)
    y.pow(2).mean()  # a loss of its own
    return draw(net(x, state)[0].pow(2).mean(), net)


def outputs_joined() -> Drawing:
    """Chunks cut as they should be, their outputs in one loss."""
    net, state, outputs = nn.GRU(3, 4).to(D), None, list[Tensor]()
    for _ in range(3):
        y, state = net(torch.randn(9, 2, 3, dtype=D), state)
        state = state.detach()
        outputs.append(y)
    return draw(nn.Linear(4, 1).to(D)(torch.cat(outputs)).pow(2).mean(), net)


def losses_on_the_way() -> Drawing:
    """One graph, a loss every ten steps: nothing is to be cut."""
    net, loss = Net(), torch.zeros(())
    state = net.initial()
    for _ in range(4):
        part, state = net.chunk(10, state)
        loss = loss + part
    return draw(loss, net)


# The graph; the steps of its chunks; its red crossings; how many more cross.
KNOWN: dict[str, tuple[Callable[[], Drawing], list[int], list[tuple[int, int]], int]] = {
    "two chunks, not cut": (lambda: two_chunks(lambda state: state), [10, 12], [(0, 1)], 0),
    "two chunks, cut, the second loss": (lambda: two_chunks(detached), [12], [], 0),
    "two chunks, one graph, both losses": (
        lambda: two_chunks(lambda state: state, both=True),
        [10, 12],
        [],
        1,
    ),
    "LSTM layer, one node a call": (lambda: layer(nn.LSTM, torch.float32), [7, 7], [(0, 1)], 0),
    "fused LSTM": (lambda: layer(tt.nn.LSTM, D), [7, 7], [(0, 1)], 0),
    "cut chunks in one loss": (outputs_joined, [9, 9, 9], [], 0),
    "losses on the way": (losses_on_the_way, [10] * 4, [], 3),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_kernels if "fused" in name else ()) for name in KNOWN],
)
def test_the_chunks_and_red_edges_are_those_that_were_made(name: str) -> None:
    make, steps, red, more = KNOWN[name]
    graph = make()
    assert [chunk.steps for chunk in graph.chunks] == steps
    assert [(link.source, link.target) for link in graph.overdue] == red
    assert len(graph.crossings) == len(red) + more


def picture(lengths: list[int]) -> Drawing:
    net = Net()
    loss, state = torch.zeros(()), net.initial()
    for steps in lengths:
        loss, state = net.chunk(steps, state)
    return draw(loss, net)


def test_every_chunk_and_every_red_edge_is_drawn_once() -> None:
    drawing = picture([5, 5, 5, 5])
    for text, red, dashed, joined in (
        (drawing.dot, "color=red,", "style=dashed", "penwidth=2.4"),
        (drawing.mermaid, " ==x|", " -.-> ", " ==>|"),
    ):
        assert text.count(red) == text.count("should have been cut:") == 3  # not only coloured
        assert text.count(dashed) == 1
        assert text.count(joined) == 0
        assert text.count("5 steps, ") == 4
        assert sum(f"chunk {i}" in text for i in range(1, 9)) == 4


def test_dot_is_what_graphviz_accepts() -> None:
    """Statements between braces, every text quoted and without a line break inside."""
    lines = picture([5, 5]).dot.splitlines()
    assert (lines[0], lines[-1]) == ("digraph {", "}")
    for line in lines[1:-1]:
        assert re.fullmatch(r'\w+( -> \w+)?( \[(\w+=("[^"]*"|[\w.]+)(, )?)+\])?', line), line


@pytest.mark.parametrize(
    ("losses", "said"),
    [(torch.ones(()), r"got 1 loss, and no graph of \[1\]"), ([], "got 0 losses")],
    ids=["detached", "none"],
)
def test_what_has_no_graph_is_refused(losses: Tensor | list[Tensor], said: str) -> None:
    with pytest.raises(DataError, match=said):
        draw(losses)
