"""`net.explain()` and `print(net)` say how a module is called and which laws were measured."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt


class OneStep(nn.Module):
    """A step without a start of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.head(h), h


class Flat(nn.Module):
    """Tokens in, scores `(T*B, V)` out, with another argument that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 6, 2), nn.Linear(6, 9)

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, bsz, 6), torch.zeros(2, bsz, 6)

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        y, hidden = self.lstm(self.embed(x), hidden)
        return self.head(y).view(-1, 9), hidden


class Filtered(nn.Module):
    """A convolution over time before a GRU, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.gru = nn.Conv1d(3, 5, 4), nn.GRU(5, 7, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        past = nn.functional.pad(x.transpose(1, 2), (3, 0))
        return self.gru(self.filter(past).transpose(1, 2))[0]


class Kept(nn.Module):
    """Keeps its state in an attribute, and another one than its cell returns."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(3, 5)
        self.hidden = torch.zeros(1, 5)

    def reset_hidden(self) -> None:
        self.hidden = torch.zeros(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden.expand(len(x), 5)
        self.hidden = hidden * 0.5 + self.cell(x, hidden)
        return self.hidden


CASES: list[tuple[nn.Module, Tensor, dict[str, Any], list[str]]] = [
    (
        OneStep(),
        torch.randn(5, 2, 4),
        {},
        [
            "OneStep: called with (B, 4): one call for each step",
            "state: argument h; the next state is item [1] of the result",
            "leaves, lanes first: state (B, 8)",
            "start: zeros",
        ],
    ),
    (
        Flat(),
        torch.randint(9, (5, 2)),
        {},
        [
            "Flat: called with (T, B): one call for each chunk",
            "leaves, lanes first: 0 (B, 2, 6), 1 (B, 2, 6)",
            "start: module.init_hidden(...)",
            "outputs: item [0], (T, B, 9)",
        ],
    ),
    (
        Filtered(),
        torch.randn(5, 2, 3),
        {"context": 3},
        [
            "called with (B, T, 3): one call for each chunk, after 3 steps of the past",
            "leaves, lanes first: gru.h (B, 1, 7)",
            "outputs: (B, T, 7)",
        ],
    ),
    (
        Kept(),
        torch.randn(5, 2, 3),
        {},
        ["state: attribute hidden", "hidden (B, 5)", "start: module.reset_hidden(...)"],
    ),
]


@pytest.mark.parametrize(
    ("module", "x", "keywords", "expected"), CASES, ids=[type(case[0]).__name__ for case in CASES]
)
def test_a_module_is_explained(
    module: nn.Module, x: Tensor, keywords: dict[str, Any], expected: list[str]
) -> None:
    net = tt.carry(module, x, **keywords)
    text = net.explain()
    for line in expected:
        assert line in text
    assert all(line.strip() in str(net) for line in text.split("\n"))


def test_a_state_that_is_not_what_its_cell_returns_is_carried_as_its_author_does() -> None:
    module, x = Kept(), torch.randn(9, 2, 3)
    net = tt.carry(module, x)
    y, _ = net(x, net.initial_state(2))
    module.reset_hidden()
    torch.testing.assert_close(y, torch.stack([module(step) for step in x]))


def test_before_the_first_inputs_it_says_how_to_find_out() -> None:
    net = tt.carry(OneStep())
    assert "tt.carry(module, x) finds it at once" in net.explain()
    net.prepare(torch.randn(5, 2, 4))
    assert "one call for each step" in net.explain()


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (
            nn.LSTM(3, 8, 2, batch_first=True),
            [
                "LSTM: called with (B, T, 3): one call for each chunk",
                "  state: argument hx; the next state is item [1] of the result",
                "  leaves, lanes first: h (B, 2, 8), c (B, 2, 8)",
                "  start: zeros",
                "  outputs: item [0], (B, T, 8)",
            ],
        ),
        (
            nn.LSTM(3, 8, proj_size=2),
            [
                "LSTM: called with (T, B, 3): one call for each chunk",
                "  state: argument hx; the next state is item [1] of the result",
                "  leaves, lanes first: h (B, 1, 2), c (B, 1, 8)",
                "  start: zeros",
                "  outputs: item [0], (T, B, 2)",
            ],
        ),
        (
            nn.GRUCell(3, 8),
            [
                "GRUCell: called with (B, 3): one call for each step, without a time dimension",
                "  state: argument hx; the next state is the result",
                "  leaves, lanes first: h (B, 8)",
                "  start: zeros",
                "  outputs: (B, 8)",
            ],
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.RNN(4, 5)), nn.Linear(5, 1)),
            [
                "Sequential: each module gets the outputs (T, B, ...) of the one before",
                "  '1', Sequential: each module gets the outputs (T, B, ...) of the one before",
                "    '0', RNN: called with (T, B, 4): one call for each chunk",
                "      state: argument hx; the next state is item [1] of the result",
                "      leaves, lanes first: h (B, 1, 5)",
                "      start: zeros",
                "      outputs: item [0], (T, B, 5)",
                "  no state, one call for each chunk: '0', '2'",
            ],
        ),
    ],
    ids=["lstm", "projection", "cell", "chain"],
)
def test_layers_and_chains_are_explained(module: nn.Module, lines: list[str]) -> None:
    net = tt.carry(module)
    assert net.explain().split("\n") == lines
    assert lines[0] in str(net)
