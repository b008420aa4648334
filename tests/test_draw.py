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


def one_chunk(steps: int = 20) -> Drawing:
    net = Net()
    return draw(net.chunk(steps, net.initial())[0], net)


def two_chunks(between: Callable[..., Any], *, both: bool = False) -> Drawing:
    """The graph of the second of two chunks, or of both losses, with the state altered between."""
    net = Net()
    first, state = net.chunk(10, net.initial())
    second, _ = net.chunk(12, between(state))
    return draw(first + second if both else second, net)


def freed() -> Drawing:
    net = Net()
    first, state = net.chunk(10, net.initial())
    first.backward()
    return draw(net.chunk(10, state)[0], net)


def stepped() -> Drawing:
    """Chunks of two steps, which only the versions of the weights tell apart."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss, state = torch.zeros(()), net.initial()
    for _ in range(4):
        loss, state = net.chunk(2, state)
        torch.autograd.backward(loss, inputs=list(net.head.parameters()), retain_graph=True)
        for weight in net.cell.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return draw(loss, net)


def layer(kind: type[nn.LSTM | nn.GRU | nn.RNN], dtype: torch.dtype, *, cut: bool) -> Drawing:
    net, x = kind(3, 4, num_layers=2).to(dtype), torch.randn(7, 2, 3, dtype=dtype)
    y, state = net(x)
    y.pow(2).mean()  # a loss of its own
    state = (
        tuple(s.detach() for s in state)
        if cut and isinstance(state, tuple)
        else state.detach()
        if cut
        else state
    )
    return draw(net(x, state)[0].pow(2).mean(), net)


def outputs_joined() -> Drawing:
    """Chunks cut as they should be, their outputs in one loss."""
    net, state, outputs = nn.GRU(3, 4).to(D), None, list[Tensor]()
    for _ in range(3):
        y, state = net(torch.randn(9, 2, 3, dtype=D), state)
        state = state.detach()
        outputs.append(y)
    return draw(nn.Linear(4, 1).to(D)(torch.cat(outputs)).pow(2).mean(), net)


def twins() -> Drawing:
    """Two inputs through one net, step by step: no chunk ends there."""
    net = nn.GRUCell(3, 4).to(D)
    a = b = torch.zeros(2, 4, dtype=D)
    for _ in range(15):
        a, b = net(torch.randn(2, 3, dtype=D), a), net(torch.randn(2, 3, dtype=D), b)
    return draw((a - b).pow(2).sum(), net)


def losses_on_the_way() -> Drawing:
    """One graph, a loss every ten steps: nothing is to be cut."""
    net, loss = Net(), torch.zeros(())
    state = net.initial()
    for _ in range(4):
        part, state = net.chunk(10, state)
        loss = loss + part
    return draw(loss, net)


def feed_forward() -> Drawing:
    return draw(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))(torch.randn(5, 3)).sum())


# The graph; the steps of its chunks; its red crossings; how many more cross.
KNOWN: dict[str, tuple[Callable[[], Drawing], list[int], list[tuple[int, int]], int]] = {
    "one chunk": (one_chunk, [20], [], 0),
    "two chunks, not cut": (lambda: two_chunks(lambda state: state), [10, 12], [(0, 1)], 0),
    "two chunks, cut, both losses": (lambda: two_chunks(detached, both=True), [10, 12], [], 0),
    "two chunks, cut, the second loss": (lambda: two_chunks(detached), [12], [], 0),
    "two chunks, one graph, both losses": (
        lambda: two_chunks(lambda state: state, both=True),
        [10, 12],
        [],
        1,
    ),
    "freed": (freed, [10, 10], [(0, 1)], 0),
    "weights changed": (stepped, [2] * 4, [(0, 1), (1, 2), (2, 3)], 0),
    "LSTM layer, one node a call": (
        lambda: layer(nn.LSTM, torch.float32, cut=False),
        [7, 7],
        [(0, 1)],
        0,
    ),
    "LSTM layer, cut": (lambda: layer(nn.LSTM, D, cut=True), [7], [], 0),
    "fused LSTM": (lambda: layer(tt.nn.LSTM, D, cut=False), [7, 7], [(0, 1)], 0),
    "fused LSTM, cut": (lambda: layer(tt.nn.LSTM, D, cut=True), [7], [], 0),
    "cut chunks in one loss": (outputs_joined, [9, 9, 9], [], 0),
    "two inputs through one net": (twins, [15], [], 0),
    "losses on the way": (losses_on_the_way, [10] * 4, [], 3),
    "nothing recurs": (feed_forward, [0], [], 0),
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


def test_short_chunks_are_told_apart_by_the_state_that_entered() -> None:
    """Chunks of one step resemble one chunk of two; the state marks where the second begins."""
    net = Net()
    _, state = net.chunk(1, net.initial())
    loss, _ = net.chunk(1, state)
    assert len(draw(loss, net).chunks) == 1
    graph = draw(loss, net, state=state)
    assert [chunk.steps for chunk in graph.chunks] == [1, 1]
    assert "state passed" in graph.overdue[0].why
    assert not draw(net.chunk(1, detached(state))[0], net, state=detached(state)).overdue


def test_drawing_changes_no_gradient() -> None:
    net = Net()
    torch.manual_seed(0)
    plain, _ = net.chunk(9, net.initial())
    torch.manual_seed(0)
    drawn, _ = net.chunk(9, net.initial())
    expected = torch.autograd.grad(plain, list(net.parameters()))
    draw(drawn, net)
    drawn.backward()
    assert all(
        torch.equal(weight.grad, grad)
        for weight, grad in zip(net.parameters(), expected, strict=True)
        if weight.grad is not None
    )
    assert all(weight.grad is not None for weight in net.parameters())


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


def test_k1_and_k2_are_marked() -> None:
    """k1: the steps of the losses; k2: how far credit flows back from them."""
    for cut, k2 in (detached, ["12 steps"]), (lambda state: state, ["22 steps"]):
        for text in (two_chunks(cut).dot, two_chunks(cut).mermaid):
            assert re.findall(r"k1 \(stride\): (\d+ steps)", text) == ["12 steps"]
            assert re.findall(r"k2 \(horizon\): (\d+ steps)", text) == k2
    both = two_chunks(lambda state: state, both=True).dot
    assert re.findall(r"k\d \(\w+\): (\d+ steps)", both) == ["10 steps", "22 steps", "22 steps"]
    halves = outputs_joined().dot
    assert re.findall(r"k2 \(horizon\): (\d+ steps)", halves) == ["9 steps"] * 3
    assert "k1 (stride): 27 steps" in halves


def test_dot_is_what_graphviz_accepts() -> None:
    """Statements between braces, every text quoted and without a line break inside."""
    lines = picture([5, 5]).dot.splitlines()
    assert (lines[0], lines[-1]) == ("digraph {", "}")
    for line in lines[1:-1]:
        assert re.fullmatch(r'\w+( -> \w+)?( \[(\w+=("[^"]*"|[\w.]+)(, )?)+\])?', line), line


def test_names_of_the_user_are_escaped() -> None:
    net = nn.ModuleDict({'<b>&"': nn.GRUCell(2, 2)})
    drawing = draw(net['<b>&"'](torch.ones(1, 2)).sum(), net)
    for text in (drawing.dot, drawing.mermaid):
        assert "<b>" not in text
        assert "&lt;b&gt;&amp;&quot;.weight_ih" in text


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (torch.ones(()), r"got 1 loss, and no graph of \[1\]"),
        (
            [torch.ones(2, requires_grad=True).sum(), torch.ones(())],
            r"got 2 losses, and no graph of \[2\]",
        ),
        ([], "got 0 losses"),
    ],
    ids=["detached", "the second detached", "none"],
)
def test_what_has_no_graph_is_refused(losses: Tensor | list[Tensor], said: str) -> None:
    with pytest.raises(DataError, match=said):
        draw(losses)


def test_what_is_deep_is_held_level_by_level() -> None:
    """Torch frees a graph by recursion; one level at a time keeps it off the stack."""
    weight, h = nn.Parameter(torch.ones(2)), torch.zeros(2)
    for _ in range(1_500):
        h = h * weight
    loss = h.sum()
    draw(loss)
    node, depth, held = loss.grad_fn, 0, dict[int, list[Any]]()
    while node is not None and node.name() != "torch::autograd::AccumulateGrad":
        metadata: Any = node.metadata  # torch's stubs call it a method
        if "throughtime.held" in metadata:
            held[depth] = metadata["throughtime.held"]
        node, depth = node.next_functions[0][0], depth + 1
    assert list(held) == [0, 500, 1000]
    assert all(len(nodes) == 1 for nodes in held.values())
