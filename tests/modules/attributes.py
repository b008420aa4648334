"""State in attributes: self.hidden, lists of states, buffers, reset methods."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

D = 3


class SelfHidden(nn.Module):
    """Classifier style: init_hidden(batch) sets self.hidden, forward reads and writes it."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden_dim = hidden
        self.lstm = nn.LSTM(D, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, 2)
        self.hidden = None

    def init_hidden(self, batch_size: int) -> None:
        shape = (2, batch_size, self.hidden_dim)
        self.hidden = (torch.zeros(*shape), torch.zeros(*shape))

    def forward(self, x: Tensor) -> Tensor:
        out, self.hidden = self.lstm(x, self.hidden)
        return self.fc(out)


class HiddenStateList(nn.Module):
    """Deep controller style: a list of cells' states in self.hidden_state, reset_hidden()."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(D, 6), nn.GRUCell(6, 5)])
        self.out = nn.Linear(5, 2)
        self.reset_hidden()

    def reset_hidden(self) -> None:
        self.hidden_state: list[Tensor | None] = [None, None]

    def forward(self, x: Tensor) -> Tensor:
        for i, cell in enumerate(self.cells):
            if self.hidden_state[i] is None:
                self.hidden_state[i] = x.new_zeros(x.size(0), cell.hidden_size)
            self.hidden_state[i] = cell(x, self.hidden_state[i])
            x = self.hidden_state[i]
        return self.out(x)


class StateDictInside(nn.Module):
    """Controller style: a dict of h and c as an attribute, one step per call, reset()."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, 6)
        self.out = nn.Linear(6, 2)
        self.state: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.state = {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.state:
            zeros = x.new_zeros(x.size(0), self.cell.hidden_size)
            self.state = {"h": zeros, "c": zeros}
        h, c = self.cell(x, (self.state["h"], self.state["c"]))
        self.state["h"], self.state["c"] = h, c
        return self.out(h)


class DetachedHidden(nn.Module):
    """Stateful-forecast style: the attribute is detached before it is used again."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = None if self.hidden is None else self.hidden.detach()
        out, self.hidden = self.rnn(x, hidden)
        return self.fc(out)


class BufferState(nn.Module):
    """Deployment style: the state is a registered buffer of (lanes, H), replaced by forward."""

    def __init__(self, lanes: int = 3, hidden: int = 6) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, hidden)
        self.fc = nn.Linear(hidden, 2)
        self.register_buffer("state", torch.zeros(lanes, hidden))

    def forward(self, frame: Tensor) -> Tensor:
        self.state = self.cell(frame, self.state)
        return self.fc(self.state)


def _buffer(m: BufferState, x: Tensor, first: Tensor | None):
    if first is None:
        m.state = torch.zeros(len(x), 6)
    return m(x), x


class BesideTheLayers(nn.Module):
    """An explicit GRU state and, beside it, a running average of outputs in an attribute."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)
        self.average: Tensor | float = 0.0

    def forward(self, x: Tensor, h: Tensor | None = None):
        out, h = self.gru(x, h)
        outputs = []
        for y in self.fc(out):
            self.average = 0.7 * self.average + 0.3 * y
            outputs.append(y + self.average)
        return torch.stack(outputs), h


class StepCounter(nn.Module):
    """A plain counter in an attribute: every third step of the module's life is damped."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, hidden)
        self.fc = nn.Linear(hidden, 2)
        self.count = 0

    def forward(self, x: Tensor, h: Tensor):
        self.count += 1
        h = self.cell(x, h)
        if self.count % 3 == 0:
            h = 0.5 * h
        return self.fc(h), h


class KeptOutput(nn.Module):
    """Debugging style: the last features are kept in an attribute that nothing reads again."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        self.features = out
        return self.fc(out)


def _kept_step(m: KeptOutput, x: Tensor, state):
    out, state = m.lstm(swap(x), state)
    return swap(m.fc(out)), state


class ResetFlag(nn.Module):
    """Stateful style: forward(x, reset=False) drops self.hc if asked."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden)
        self.fc = nn.Linear(hidden, 2)
        self.hc = None

    def forward(self, x: Tensor, reset: bool = False) -> Tensor:
        if reset or self.hc is None:
            zeros = x.new_zeros(1, x.size(1), self.lstm.hidden_size)
            self.hc = (zeros, zeros)
        out, self.hc = self.lstm(x, self.hc)
        return F.softplus(self.fc(out))


def _setting(**start) -> object:
    """A start that sets attributes as the author's loop does at a stream's first step."""

    def begin(m: nn.Module, x: Tensor) -> None:
        for name, value in start.items():
            setattr(m, name, value)

    return begin


CASES = [
    # Init_hidden(batch) sets and returns nothing.
    Case(
        "self_hidden_set",
        SelfHidden,
        floats(D),
        "carry",
        oracle=chunked(
            lambda m, x, _: (swap(m(swap(x))), None), lambda m, x: m.init_hidden(x.size(1))
        ),
    ),
    # The list is changed in place, one step per call.
    Case(
        "hidden_state_list",
        HiddenStateList,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, _: (m(x), None), lambda m, x: m.reset_hidden()),
    ),
    # The dict is changed in place and empty at first.
    Case(
        "state_dict_attribute",
        StateDictInside,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, _: (m(x), None), lambda m, x: m.reset()),
    ),
    # A buffer of 3 lanes; no reset method.
    Case(
        "buffer_state",
        BufferState,
        floats(D),
        "carry",
        oracle=stepped(_buffer),
        lanes=3,
    ),
    # A changed attribute that is no state, holding a graph: deepcopy fails after a call.
    Case(
        "kept_output",
        KeptOutput,
        floats(D),
        "carry",
        oracle=chunked(_kept_step),
    ),
    # Second parameter reset=False is no state.
    Case(
        "reset_flag",
        ResetFlag,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, _: (m(x), None), _setting(hc=None)),
    ),
    Case(
        "detached_hidden",
        DetachedHidden,
        floats(D),
        "refuse",
        reason="detach",
    ),
    # Right only if the attribute is carried together with the explicit state.
    Case(
        "average_beside_state",
        BesideTheLayers,
        floats(D),
        "refuse",
        reason="other",
        also=("hidden_state_local",),
        either=True,
        oracle=chunked(lambda m, x, h: m(x, h), _setting(average=0.0)),
    ),
    # One counter for all lanes: a second stream does not start where the first did.
    Case(
        "step_counter",
        StepCounter,
        floats(D),
        "refuse",
        reason="other",
        also=("mixes_lanes",),
    ),
]
