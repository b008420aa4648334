"""Forecasting: windows of a loader, the last output only, zeros created in forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, prefixes, stepped, swap

D = 3


class LastGRU(nn.Module):
    """Time-first N-to-1 style: h0 zeros in forward, out[-1]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = 5
        self.rnn = nn.GRU(D, self.hidden_size)
        self.out = nn.Linear(self.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(1, x.size(1), self.hidden_size, device=x.device)
        out, h = self.rnn(x, h)
        return self.out(out[-1])


class SqueezedLSTM(nn.Module):
    """Regression style: top layer's h_n, one number per window, squeezed to (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 5, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        _, (h_n, _) = self.lstm(x)
        return self.head(h_n[-1]).squeeze(-1)


class SineCells(nn.Module):
    """pytorch/examples time_sequence_prediction style: two cells over input.split, future=0."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.LSTMCell(1, 5), nn.LSTMCell(5, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, waves: Tensor, future: int = 0) -> Tensor:
        lanes, kind = waves.size(0), waves.dtype
        first = torch.zeros(lanes, 5, dtype=kind), torch.zeros(lanes, 5, dtype=kind)
        second = torch.zeros(lanes, 6, dtype=kind), torch.zeros(lanes, 6, dtype=kind)
        points = []
        for point in waves.split(1, dim=1):
            first = self.below(point, first)
            second = self.above(first[0], second)
            points.append(self.linear(second[0]))
        while future > 0:
            first = self.below(points[-1], first)
            second = self.above(first[0], second)
            points.append(self.linear(second[0]))
            future -= 1
        return torch.cat(points, dim=1)


def _sine_step(m: SineCells, x: Tensor, state):
    one, two = state if state is not None else (None, None)
    one = m.below(x[:, None], one)
    two = m.above(one[0], two)
    return m.linear(two[0])[:, 0], (one, two)


class SlidingPredictor(nn.Module):
    """Time-series tutorial style with the sequence length taken for the lanes (a known slip)."""

    def __init__(self, units: int = 6, seq_len: int = 7) -> None:
        super().__init__()
        self.units, self.seq_len = units, seq_len
        self.lstm = nn.LSTM(D, units, 2, dropout=0.3)
        self.linear = nn.Linear(units, 1)
        self.reset_hidden_state()

    def reset_hidden_state(self) -> None:
        self.hidden = tuple(torch.zeros(2, self.seq_len, self.units) for _ in range(2))

    def forward(self, windows: Tensor) -> Tensor:
        count = len(windows)
        rows = windows.view(count, self.seq_len, -1)
        rows, self.hidden = self.lstm(rows, self.hidden)
        return self.linear(rows.view(self.seq_len, count, self.units)[-1])


def _sliding_whole(m: SlidingPredictor, x: Tensor, lengths) -> Tensor:
    m.reset_hidden_state()
    y = m(swap(x))
    return y.expand(x.size(0), -1, -1)


class ForgottenBatchFirst(nn.Module):
    """Windows (B, T, D) given to an LSTM that is time first: the lanes become the time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 6)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(1, x.size(1), 6)
        c0 = torch.zeros(1, x.size(1), 6)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


class SameAsStride(nn.Module):
    """N-to-1 with as many outputs as the stream has steps in a chunk: (B, 20) is not (B, T)."""

    def __init__(self, outputs: int = 20) -> None:
        super().__init__()
        self.gru = nn.GRU(D, 6, batch_first=True)
        self.fc = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x)
        return self.fc(out[:, -1])


class PooledLSTM(nn.Module):
    """Sequence-regression style: the mean over all steps' outputs of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return self.fc(out.mean(dim=1))


def _last(layer: str, head) -> object:
    """Steps of an N-to-1 net: its layer one step on, its head on what the layer gave."""

    def step(m, x: Tensor, state):
        rnn = getattr(m, layer)
        frame = x[:, None] if rnn.batch_first else x[None]
        out, state = rnn(frame, state)
        return head(m, out[:, 0] if rnn.batch_first else out[0]), state

    return stepped(step)


_window = prefixes(lambda m, x: m(swap(x)))

CASES = [
    Case(
        "last_gru_time_first",
        LastGRU,
        floats(D),
        "carry",
        oracle=_last("rnn", lambda m, h: m.out(h)),
        plain=prefixes(lambda m, x: m(x)),
    ),
    Case(
        "last_hidden_squeezed",
        SqueezedLSTM,
        floats(D),
        "carry",
        oracle=_last("lstm", lambda m, h: m.head(h).squeeze(-1)),
        plain=_window,
    ),
    Case(
        "sine_cells_future",
        SineCells,
        floats(),
        "carry",
        oracle=stepped(_sine_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="second parameter future=0 is no state; output (B, T)",
    ),
    Case(
        "outputs_equal_stride",
        SameAsStride,
        floats(D),
        "carry",
        oracle=_last("gru", lambda m, h: m.fc(h)),
        plain=_window,
        steps=20,
        note="20 outputs at stride 20",
    ),
    Case(
        "outputs_lanes_equal_stride",
        SameAsStride,
        floats(D),
        "carry",
        oracle=_last("gru", lambda m, h: m.fc(h)),
        plain=_window,
        steps=20,
        lanes=20,
        note="20 outputs, 20 lanes, 20 steps",
    ),
    Case(
        "sequence_length_as_lanes",
        SlidingPredictor,
        floats(D),
        "refuse",
        reason="mixes_lanes",
        also=("other",),
        oracle=_sliding_whole,
        steps=7,
        shows=("mixes_lanes",),
        note="the author's windows are (B, T, D); the LSTM runs over the lanes",
    ),
    Case(
        "forgotten_batch_first",
        ForgottenBatchFirst,
        floats(D),
        "refuse",
        reason="mixes_lanes",
        also=("other",),
        oracle=lambda m, x, lengths: prefixes(lambda m, x: m(swap(x)))(m, x),
        shows=("mixes_lanes",),
        note="the author's windows are (B, T, D); time first with one lane it would be right",
    ),
    Case(
        "mean_over_window",
        PooledLSTM,
        floats(D),
        "refuse",
        reason="other",
        also=("time_normalisation", "hidden_state_local"),
        oracle=chunked(lambda m, x, _: (prefixes(lambda m, x: m(swap(x)))(m, x), None)),
        shows=("chunks",),
        note="the running mean is a state that nothing holds",
    ),
]
