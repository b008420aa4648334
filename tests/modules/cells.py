"""Own cells and loops, states of every shape, subclasses, writes in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, prefixes, stepped, swap

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


class NormLSTM(nn.Module):
    """Layer-normalised LSTM style: a loop over time, (h, c) handed in and back."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = NormLSTMCell(D, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor, state=None):
        if state is None:
            zeros = x.new_zeros(x.size(1), 6)
            state = (zeros, zeros)
        outputs = []
        for x_t in torch.unbind(x, 0):
            state = self.cell(x_t, state)
            outputs.append(state[0])
        return self.out(torch.stack(outputs)), state


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


class GateCell(nn.Module):
    """LSTM from scratch style: Linear of the input plus Linear of the hidden state."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.x2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 4 * hidden_size)

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor]):
        h, c = hx
        i, f, g, o = (self.x2h(x) + self.h2h(h)).chunk(4, 1)
        c = c * torch.sigmoid(f) + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class StackedScratch(nn.Module):
    """LSTM from scratch style: stacked cells, lists of states, batch first."""

    def __init__(self, hidden: int = 6, layers: int = 2) -> None:
        super().__init__()
        sizes = [D] + [hidden] * (layers - 1)
        self.cells = nn.ModuleList(GateCell(size, hidden) for size in sizes)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, hidden=None):
        if hidden is None:
            hidden = [
                (x.new_zeros(x.size(0), c.hidden_size), x.new_zeros(x.size(0), c.hidden_size))
                for c in self.cells
            ]
        hidden = list(hidden)
        outs = []
        for t in range(x.size(1)):
            inp = x[:, t, :]
            for layer, cell in enumerate(self.cells):
                hidden[layer] = cell(inp, hidden[layer])
                inp = hidden[layer][0]
            outs.append(inp)
        return self.fc(torch.stack(outs, dim=1)), hidden


class StackedLast(nn.Module):
    """LSTM from scratch style: stacked cells with zeros inside, the last step's output only."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.hidden = units
        self.cells = nn.ModuleList([GateCell(D, units), GateCell(units, units)])
        self.fc = nn.Linear(units, 2)

    def forward(self, window: Tensor) -> Tensor:
        zeros = torch.zeros(len(self.cells), window.size(0), self.hidden)
        states = [(zeros[i], zeros[i]) for i in range(len(self.cells))]
        for step in window.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(step, states[i])
                step = states[i][0]
        return self.fc(step)


def _stacked_last_step(m: StackedLast, x: Tensor, state):
    if state is None:
        zeros = x.new_zeros(len(x), m.hidden)
        state = [(zeros, zeros), (zeros, zeros)]
    one = m.cells[0](x, state[0])
    two = m.cells[1](one[0], state[1])
    return m.fc(two[0]), [one, two]


class InlineLoop(nn.Module):
    """From-scratch style without a cell: two Linears and tanh in forward's loop, state local."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.W, self.U = nn.Linear(D, hidden), nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), self.hidden, device=x.device)
        outputs = []
        for t in range(x.size(1)):
            h = torch.tanh(self.W(x[:, t]) + self.U(h))
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)


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


class DroppedState(nn.Module):
    """Recurrent-dropout style: the new hidden state is dropped, then handed on and back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(D, hidden)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        if h is None:
            h = x.new_zeros(x.size(0), self.hidden)
        outputs = []
        for t in range(x.size(1)):
            h = self.drop(self.cell(x[:, t], h))
            outputs.append(self.out(h))
        return torch.stack(outputs, 1), h


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


class NormedState(nn.Module):
    """LayerNorm between the cell's steps, state local: the cell gets another tensor back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(D, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(1), self.hidden)
        outputs = []
        for x_t in x:
            h = self.norm(self.cell(x_t, h))
            outputs.append(self.out(h))
        return torch.stack(outputs)


def _normed_step(m: NormedState, x: Tensor, h):
    h = m.norm(m.cell(x, x.new_zeros(len(x), m.hidden) if h is None else h))
    return m.out(h), h


class ScaledState(nn.Module):
    """Leaky cell style, state local: half the old state is mixed in outside the cell."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(D, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(1), self.hidden)
        outputs = []
        for x_t in x:
            h = 0.5 * h + 0.5 * self.cell(x_t, h)
            outputs.append(self.out(h))
        return torch.stack(outputs)


def _scaled_step(m: ScaledState, x: Tensor, h):
    h = x.new_zeros(len(x), m.hidden) if h is None else h
    h = 0.5 * h + 0.5 * m.cell(x, h)
    return m.out(h), h


class Zoneout(nn.Module):
    """Zoneout style: some units keep their old state, in expectation when evaluating."""

    def __init__(self, hidden: int = 6, p: float = 0.2) -> None:
        super().__init__()
        self.p = p
        self.cell = nn.LSTMCell(D, hidden)
        self.out = nn.Linear(hidden, 2)

    def zone(self, old: Tensor, new: Tensor) -> Tensor:
        if self.training:
            keep = torch.bernoulli(torch.full_like(old, self.p))
            return keep * old + (1 - keep) * new
        return self.p * old + (1 - self.p) * new

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]):
        h, c = self.cell(x, state)
        h, c = self.zone(state[0], h), self.zone(state[1], c)
        return self.out(h), (h, c)


class ProjectedLSTM(nn.LSTM):
    """Subclass style: an nn.LSTM that projects its own output, state as in nn.LSTM."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int) -> None:
        super().__init__(input_size, hidden_size, num_layers=2)
        self.projection = nn.Linear(hidden_size, output_size)

    def forward(self, input: Tensor, hx=None):  # type: ignore[override]
        output, hx = super().forward(input, hx)
        return self.projection(torch.tanh(output)), hx


class VariationalLSTM(nn.LSTM):
    """Subclass style: one dropout mask a call on the input, inside an nn.LSTM subclass."""

    def __init__(self, *args, dropout_in: float = 0.25, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_in = dropout_in

    def forward(self, input: Tensor, hx=None):  # type: ignore[override]
        if self.training:
            mask = torch.full_like(input[:, :1], 1 - self.dropout_in)
            input = input * torch.bernoulli(mask) / (1 - self.dropout_in)
        return super().forward(input * 1.5, hx)


class VariationalNet(nn.Module):
    """Subclass style: a net around an nn.LSTM subclass that changes its own input."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = VariationalLSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.fc(y)


class InPlace(nn.Module):
    """Regression style: ReLU(inplace=True) or Dropout(inplace=True) right after an LSTM."""

    def __init__(self, after: nn.Module, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden)
        self.after = after
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, hidden=None):
        out, hidden = self.lstm(x, hidden)
        return self.fc(self.after(out)), hidden


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


class PairArgument(nn.Module):
    """Sequential style: (x, state) as the one argument, (y, state) back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.cell = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, inputs):
        x, state = inputs
        y, state = self.cell(x, state)
        return self.fc(y), state


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


class DictOutput(nn.Module):
    """Library style: everything comes back in one dict, hidden by the parameter's name."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, hidden, batch_first=True)
        self.mean, self.scale = nn.Linear(hidden, 2), nn.Linear(hidden, 2)

    def forward(self, x: Tensor, hidden=None) -> dict:
        y, hidden = self.rnn(x, hidden)
        return {"mean": self.mean(y), "scale": F.softplus(self.scale(y)), "hidden": hidden}


def _dict_step(m: DictOutput, x: Tensor, state):
    out = m(swap(x), state)
    return swap(out["mean"]), out["hidden"]


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


class GridCell(nn.Module):
    """Highway style with a depth loop inside every step, state (B, H), time first."""

    def __init__(self, hidden: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.hidden = hidden
        self.inp = nn.Linear(D, 2 * hidden)
        self.rec = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, 2)

    def begin_state(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.hidden)

    def forward(self, x: Tensor, s: Tensor):
        outputs = []
        for x_t in x:
            for depth, layer in enumerate(self.rec):
                gates = layer(s) + (self.inp(x_t) if depth == 0 else 0)
                h, t = gates.chunk(2, -1)
                t = torch.sigmoid(t)
                s = torch.tanh(h) * t + s * (1 - t)
            outputs.append(self.out(s))
        return torch.stack(outputs), s


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


class BareCell(nn.Module):
    """Cell style: unbatched vectors only, view(1, 1, -1) inside, h and c kept as a tuple."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def init_hidden(self):
        return torch.zeros(1, 1, self.hidden), torch.zeros(1, 1, self.hidden)

    def forward(self, x: Tensor, hidden):
        out, hidden = self.lstm(x.view(1, 1, -1), hidden)
        return self.fc(out.view(-1)), hidden


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


def _variational_step(m: VariationalNet, x: Tensor, state):
    y, state = m.rnn(swap(x), state)
    return swap(m.fc(y)), state


def _lstm_zeros(m: nn.Module, x: Tensor):
    return x.new_zeros(x.size(1), 6), x.new_zeros(x.size(1), 6)


CASES = [
    Case("norm_lstm_loop", NormLSTM, floats(D), "carry", oracle=chunked(lambda m, x, s: m(x, s))),
    Case(
        "norm_lstm_local",
        NormLSTMLocal,
        floats(D),
        "carry",
        oracle=stepped(_norm_local_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="state in locals, by data flow through an nn.LSTMCell subclass",
    ),
    Case("scratch_stacked_lists", StackedScratch, floats(D), "carry", oracle=chunked(_first)),
    Case(
        "scratch_stacked_last",
        StackedLast,
        floats(D),
        "carry",
        oracle=stepped(_stacked_last_step),
        plain=prefixes(lambda m, x: m(swap(x))),
        note="state in locals, by data flow through own cells; last output only",
    ),
    Case(
        "dropped_state",
        DroppedState,
        floats(D),
        "carry",
        oracle=chunked(_first),
        note="random in training mode; the state handed back is the dropped one",
    ),
    Case(
        "zoneout_step",
        Zoneout,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), _lstm_zeros),
        note="draws its own masks with torch.bernoulli in training mode",
    ),
    Case(
        "lstm_subclass",
        lambda: ProjectedLSTM(D, 6, 2),
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
    ),
    Case(
        "lstm_subclass_inside",
        VariationalNet,
        floats(D),
        "carry",
        oracle=chunked(_variational_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="one dropout mask for all steps of a call in training mode",
    ),
    Case(
        "relu_in_place",
        lambda: InPlace(nn.ReLU(inplace=True)),
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
    ),
    Case(
        "dropout_in_place",
        lambda: InPlace(nn.Dropout(0.2, inplace=True)),
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
    ),
    Case(
        "residual_in_place",
        ResidualStack,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
    ),
    Case(
        "pair_argument",
        PairArgument,
        floats(D),
        "keyword",
        oracle=chunked(lambda m, x, s: m((x, s))),
        keywords={"call": lambda m, x, s: m((x, s))},
    ),
    Case(
        "named_tuple_state",
        NamedState,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.initial_state(x.size(1))),
    ),
    Case(
        "dataclass_state",
        DataclassState,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.init_state(x.size(1))),
        note="an object as the state: may be refused for want of a tree",
    ),
    Case(
        "highway_begin_state",
        GridCell,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s), lambda m, x: m.begin_state(x.size(1))),
    ),
    Case(
        "state_comes_first",
        StateBefore,
        floats(D),
        "keyword",
        keywords={"call": lambda m, x, s: m(s, x)[::-1]},
        oracle=chunked(_before_step, lambda m, x: m.init_hidden(x.size(1))),
        note="state first in the arguments and in what comes back",
    ),
    Case(
        "two_layers_skip",
        MixedLayers,
        floats(D),
        "carry",
        oracle=chunked(_mixed_step),
        plain=lambda m, x: swap(m(swap(x))),
    ),
    Case(
        "shared_layer_twice",
        SharedLayer,
        floats(D),
        "carry",
        oracle=chunked(_shared_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="one layer, two states: one for each call of a forward",
    ),
    Case(
        "one_vector_per_call",
        BareCell,
        floats(D),
        "lane",
        oracle=stepped(
            lambda m, x, s: (lambda y, s: (y[None], s))(*m(x[0], s)), lambda m, x: m.init_hidden()
        ),
        lanes=1,
        note="takes (D,) and gives (C,)",
    ),
    Case(
        "dict_output",
        DictOutput,
        floats(D),
        "keyword",
        keywords={"output": "mean"},
        oracle=chunked(_dict_step),
    ),
    Case(
        "features_attention_tuple",
        InputAttention,
        floats(D),
        "keyword",
        keywords={"output": 0},
        oracle=stepped(_attention_step, lambda m, x: x.new_zeros(x.size(1), 6)),
        note="attention over the features of a step, not over steps",
    ),
    Case(
        "inline_loop",
        InlineLoop,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("no_state",),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("chunks",),
    ),
    Case(
        "inline_parameters",
        InlineParameters,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("no_state",),
        oracle=chunked(lambda m, x, _: (m(x), None)),
        shows=("chunks",),
    ),
    Case(
        "dropped_state_local",
        DroppedStateLocal,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("random", "other"),
        either=True,
        oracle=stepped(_cell_step),
        plain=lambda m, x: m(x),
        note="in evaluation mode the cell's own state is right, in training mode the dropped one",
    ),
    Case(
        "normed_state_local",
        NormedState,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("other",),
        either=True,
        oracle=stepped(_normed_step),
        plain=lambda m, x: m(x),
        note="carried right only with what the LayerNorm returned",
    ),
    Case(
        "mixed_state_local",
        ScaledState,
        floats(D),
        "refuse",
        reason="hidden_state_local",
        also=("other",),
        either=True,
        oracle=stepped(_scaled_step),
        plain=lambda m, x: m(x),
        note="no submodule ever returns the tensor that is the state",
    ),
]
