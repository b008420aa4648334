"""Own cells and loops, states of every shape, subclasses, writes in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

D = 3


class NormLSTMCell(nn.LSTMCell):
    """Layer-normalised LSTM style: a subclass of nn.LSTMCell with its own forward."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.norm_x = nn.LayerNorm(4 * hidden_size)
        self.norm_h = nn.LayerNorm(4 * hidden_size)
        self.norm_c = nn.LayerNorm(hidden_size)

    def forward(self, input: Tensor, hx):  # type: ignore[override]
        h, c = hx
        gates = self.norm_x(F.linear(input, self.weight_ih, self.bias_ih))
        gates = gates + self.norm_h(F.linear(h, self.weight_hh, self.bias_hh))
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.norm_c(c)), c


class NormLSTMLocal(nn.Module):
    """The same cell in a loop whose state starts from zeros and never comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = NormLSTMCell(D, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 6)
        c = torch.zeros(x.size(0), 6)
        outputs = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.out(h))
        return torch.stack(outputs, dim=1)


def _norm_local_step(m: NormLSTMLocal, x: Tensor, state):
    if state is None:
        state = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6))
    state = m.cell(x, state)
    return m.out(state[0]), state


class InlineParameters(nn.Module):
    """From-scratch style with bare parameters and a matrix product per step, state local."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.Wx = nn.Parameter(torch.randn(D, hidden) * 0.4)
        self.Wh = nn.Parameter(torch.randn(hidden, hidden) * 0.4)
        self.Wy = nn.Parameter(torch.randn(hidden, 2) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], self.Wh.shape[0])
        ys = []
        for x_t in x:
            h = torch.relu(x_t @ self.Wx + h @ self.Wh)
            ys.append(h @ self.Wy)
        return torch.stack(ys)


class DroppedStateLocal(nn.Module):
    """Recurrent-dropout style, state local: the cell is given what dropout made of its state."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(D, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(1), self.hidden)
        outputs = []
        for x_t in x:
            h = F.dropout(self.cell(x_t, h), 0.3, self.training)
            outputs.append(self.out(h))
        return torch.stack(outputs)


def _cell_step(m, x: Tensor, h):
    h = m.cell(x, x.new_zeros(len(x), m.hidden) if h is None else h)
    return m.out(h), h


class ResidualStack(nn.Module):
    """Residual-stack style: y += x after every LSTM, states in a list, plain names."""

    def __init__(self, size: int = 5, layers: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(D, size)
        self.layers = nn.ModuleList(nn.LSTM(size, size) for _ in range(layers))
        self.out = nn.Linear(size, 2)

    def forward(self, x: Tensor, states=None):
        x = self.inp(x)
        new_states = []
        for i, layer in enumerate(self.layers):
            y, state = layer(x, None if states is None else states[i])
            y += x
            x = y
            new_states.append(state)
        return self.out(x), new_states


class Memory(NamedTuple):
    """The state of the net below."""

    hidden: Tensor
    cell: Tensor
    trace: Tensor


class NamedState(nn.Module):
    """NamedTuple style: fields with names, initial_state(batch) to begin with."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(D, hidden)
        self.out = nn.Linear(hidden + D, 2)

    def initial_state(self, batch_size: int) -> Memory:
        zeros = torch.zeros(batch_size, self.hidden)
        return Memory(zeros, zeros.clone(), torch.zeros(batch_size, D))

    def forward(self, x: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        h, c = self.cell(x, (state.hidden, state.cell))
        trace = 0.9 * state.trace + 0.1 * x
        return self.out(torch.cat([h, trace], -1)), Memory(h, c, trace)


@dataclass
class CellState:
    """The state of the net below."""

    h: Tensor
    c: Tensor


class DataclassState(nn.Module):
    """Dataclass style: the state is an object with two tensors."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(D, hidden)
        self.out = nn.Linear(hidden, 2)

    def init_state(self, batch_size: int) -> CellState:
        zeros = torch.zeros(batch_size, self.hidden)
        return CellState(h=zeros, c=zeros.clone())

    def forward(self, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        h, c = self.cell(x, (state.h, state.c))
        return self.out(h), CellState(h=h, c=c)


class InputAttention(nn.Module):
    """Attention-over-features style: (y, attention, state) come back, one step per call."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.score = nn.Linear(D + hidden, D)
        self.cell = nn.GRUCell(D, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor):
        attention = torch.softmax(self.score(torch.cat([x, h], -1)), -1)
        h = self.cell(attention * x, h)
        return self.out(h), attention, h


def _attention_step(m: InputAttention, x: Tensor, h: Tensor):
    y, _, h = m(x, h)
    return y, h


class StateBefore(nn.Module):
    """State-first return style: (state, y) come back in this order."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def init_hidden(self, batch_size: int) -> Tensor:
        return torch.zeros(1, batch_size, self.gru.hidden_size)

    def forward(self, hidden: Tensor, x: Tensor):
        out, hidden = self.gru(x, hidden)
        return hidden, self.fc(out)


def _before_step(m: StateBefore, x: Tensor, state):
    state, y = m(state, x)
    return y, state


class MixedLayers(nn.Module):
    """Mixed style: an LSTM, then a GRU with a skip, both without explicit states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 5, batch_first=True)
        self.gru = nn.GRU(5 + D, 4, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        a, _ = self.lstm(x)
        b, _ = self.gru(torch.cat([a, x], -1))
        return self.head(b)


def _mixed_step(m: MixedLayers, x: Tensor, state):
    one, two = state if state is not None else (None, None)
    a, one = m.lstm(swap(x), one)
    b, two = m.gru(torch.cat([a, swap(x)], -1), two)
    return swap(m.head(b)), (one, two)


class SharedLayer(nn.Module):
    """Weight-sharing style: one GRU is called twice in every forward."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.inp = nn.Linear(D, size)
        self.gru = nn.GRU(size, size, batch_first=True)
        self.fc = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, _ = self.gru(self.inp(x))
        b, _ = self.gru(a)
        return self.fc(b)


def _shared_step(m: SharedLayer, x: Tensor, state):
    one, two = state if state is not None else (None, None)
    a, one = m.gru(m.inp(swap(x)), one)
    b, two = m.gru(a, two)
    return swap(m.fc(b)), (one, two)


CASES = [
    # State in locals, by data flow through an nn.LSTMCell subclass.
    Case(
        "norm_lstm_local",
        NormLSTMLocal,
        floats(D),
        "carry",
        oracle=stepped(_norm_local_step),
    ),
    Case(
        "residual_in_place",
        ResidualStack,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
    ),
    Case(
        "named_tuple_state",
        NamedState,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.initial_state(x.size(1))),
    ),
    # An object as the state: may be refused for want of a tree.
    Case(
        "dataclass_state",
        DataclassState,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.init_state(x.size(1))),
    ),
    # State first in the arguments and in what comes back.
    Case(
        "state_comes_first",
        StateBefore,
        floats(D),
        "keyword",
        keywords={"call": lambda m, x, s: m(s, x)[::-1]},
        oracle=chunked(_before_step, lambda m, x: m.init_hidden(x.size(1))),
    ),
    Case(
        "two_layers_skip",
        MixedLayers,
        floats(D),
        "carry",
        oracle=chunked(_mixed_step),
    ),
    # One layer, two states: one for each call of a forward.
    Case(
        "shared_layer_twice",
        SharedLayer,
        floats(D),
        "carry",
        oracle=chunked(_shared_step),
    ),
    # Attention over the features of a step, not over steps.
    Case(
        "features_attention_tuple",
        InputAttention,
        floats(D),
        "keyword",
        keywords={"output": 0},
        oracle=stepped(_attention_step, lambda m, x: x.new_zeros(x.size(1), 6)),
    ),
    Case(
        "inline_parameters",
        InlineParameters,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("no_state",),
    ),
    # In evaluation mode the cell's own state is right, in training mode the dropped one.
    Case(
        "dropped_state_local",
        DroppedStateLocal,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("random", "other"),
        either=True,
        oracle=stepped(_cell_step),
    ),
]
