"""Second parameters that are no state, outputs that look like one, coinciding sizes, slips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, swap, tokens

D = 3
V = 11


class WithTargets(nn.Module):
    """Small-GPT style around a GRU: forward(idx, targets=None) gives (logits, loss)."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, V)

    def forward(self, idx: Tensor, targets: Tensor | None = None):
        x, _ = self.gru(self.wte(idx))
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def _targets_step(m: WithTargets, x: Tensor, state):
    y, state = m.gru(m.wte(swap(x)), state)
    return swap(m.lm_head(y)), state


class GateOutput(nn.Module):
    """An auxiliary output (B, D) of the size of the optional mask: no state, though it fits."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.fc, self.gate = nn.Linear(hidden, 2), nn.Linear(hidden, D)

    def forward(self, x: Tensor, mask: Tensor | None = None):
        if mask is not None:
            x = x * mask.unsqueeze(1)
        y, h = self.gru(x)
        return self.fc(y), torch.sigmoid(self.gate(h[-1]))


def _gate_step(m: GateOutput, x: Tensor, state):
    y, state = m.gru(swap(x), state)
    return swap(m.fc(y)), state


class ListOutput(nn.Module):
    """Loop style: the outputs come back as a Python list of (B, C), one entry a step."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for frame in x:
            h = self.cell(frame, h)
            outputs.append(self.fc(h))
        return outputs, h


class ForgottenState(nn.Module):
    """A slip: forward(x, h) returns a state but never hands h to the layer."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x)
        return self.fc(y), h


class OverwrittenState(nn.Module):
    """A slip: the state argument is set to zeros before the loop, the last one comes back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(D, hidden), nn.Linear(hidden, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor):
        h = torch.zeros_like(h)
        outputs = []
        for frame in x:
            h = torch.tanh(self.W(frame) + self.U(h))
            outputs.append(self.fc(h))
        return torch.stack(outputs), h


class HalfDetached(nn.Module):
    """Truncation style: the cell state is detached inside, the hidden state is not."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]):
        h, c = state
        y, state = self.lstm(x, (h, c.detach()))
        return self.fc(y), state


class StepMLP(nn.Module):
    """No recurrence at all: the same net on every step, with the name of a recurrent one."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.Sequential(nn.Linear(D, hidden), nn.Tanh())
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, hidden: Tensor | None = None):
        return self.fc(self.rnn(x)), hidden


class AlwaysDropping(nn.Module):
    """Monte-Carlo dropout style: functional dropout stays on when evaluating."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x, h)
        return self.fc(F.dropout(y, 0.3, training=True)), h


class FixedWindow(nn.Module):
    """Window style: all outputs of 7 steps are flattened into one Linear."""

    def __init__(self, window: int = 7, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(window * hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.fc(y.flatten(1))


class TopState(nn.Module):
    """A slip: takes (layers, B, H), gives back the top layer's (B, H)."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, 2)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x, h)
        return self.fc(y), h[-1]


def _layer_step(m, x: Tensor, state):
    y, state = m.gru(x, state)
    return m.fc(y), state


class OutputsOnly(nn.Module):
    """Sequential helper style: a layer that drops the state its LSTM returns."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def _sequence() -> nn.Sequential:
    """Sequential style: LSTMs wrapped to return their outputs only, between Linears."""
    return nn.Sequential(
        nn.Linear(D, 5), nn.Tanh(), OutputsOnly(5, 6), OutputsOnly(6, 4), nn.Linear(4, 2)
    )


def _sequence_step(m: nn.Sequential, x: Tensor, state):
    one, two = state if state is not None else (None, None)
    a, one = m[2].lstm(m[1](m[0](swap(x))), one)
    b, two = m[3].lstm(a, two)
    return swap(m[4](b)), (one, two)


class DictInput(nn.Module):
    """Batch-dict style: forward(batch) reads batch["values"], zeros inside."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y, _ = self.lstm(batch["values"])
        return self.fc(y)


def _dict_step(m: DictInput, x: Tensor, state):
    y, state = m.lstm(swap(x), state)
    return swap(m.fc(y)), state


CASES = [
    # (logits, None) comes back; targets=None is no state.
    Case(
        "targets_none",
        WithTargets,
        tokens(V),
        "carry",
        oracle=chunked(_targets_step),
    ),
    # The second output fits the mask argument and must not be fed back.
    Case(
        "gate_beside_output",
        GateOutput,
        floats(D),
        "keyword",
        keywords={"output": 0},
        oracle=chunked(_gate_step),
    ),
    Case(
        "list_of_outputs",
        ListOutput,
        floats(D),
        "refuse",
        reason="ambiguous_output",
        also=("other",),
        either=True,
        oracle=chunked(
            lambda m, x, h: (lambda y, h: (torch.stack(y), h))(*m(x, h)),
            lambda m, x: x.new_zeros(x.size(1), 6),
        ),
    ),
    # Right only if carried by the layer.
    Case(
        "forgotten_state",
        ForgottenState,
        floats(D),
        "refuse",
        reason="other",
        either=True,
        oracle=chunked(_layer_step),
    ),
    Case(
        "overwritten_state",
        OverwrittenState,
        floats(D),
        "refuse",
        reason="ignored_state",
        also=("hidden_state_local",),
    ),
    Case(
        "half_detached",
        HalfDetached,
        floats(D),
        "refuse",
        reason="detach",
    ),
    Case(
        "step_mlp",
        StepMLP,
        floats(D),
        "refuse",
        reason="no_state",
        also=("ignored_state",),
    ),
    # Fixed masks would make it repeatable.
    Case(
        "dropout_always_on",
        AlwaysDropping,
        floats(D),
        "refuse",
        reason="random",
        also=("other",),
    ),
    Case(
        "fixed_window",
        FixedWindow,
        floats(D),
        "refuse",
        reason="other",
        also=("ambiguous_output",),
        steps=7,
    ),
    # What comes back cannot be given again; right only if carried by the layer.
    Case(
        "top_state_only",
        TopState,
        floats(D),
        "refuse",
        reason="other",
        also=("ambiguous_output", "ignored_state"),
        either=True,
        oracle=chunked(_layer_step),
    ),
    Case(
        "sequential_outputs_only",
        _sequence,
        floats(D),
        "carry",
        oracle=chunked(_sequence_step),
    ),
    # Inputs turns the layout as well.
    Case(
        "dict_of_values",
        DictInput,
        floats(D),
        "keyword",
        keywords={"inputs": lambda x: {"values": x.transpose(0, 1)}},
        oracle=chunked(_dict_step),
    ),
]
