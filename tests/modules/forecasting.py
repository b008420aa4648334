"""Forecasting: windows of a loader, the last output only, zeros created in forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, prefixes, stepped, swap

D = 3


class LastLSTM(nn.Module):
    """Stock-price tutorial style: h0 and c0 zeros in forward, fc of the last step."""

    def __init__(self, units: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.units, self.depth = units, depth
        self.lstm = nn.LSTM(D, units, depth, batch_first=True)
        self.fc = nn.Linear(units, 2)

    def forward(self, window: Tensor) -> Tensor:
        shape = (self.depth, window.size(0), self.units)
        h0 = torch.zeros(shape).requires_grad_()
        c0 = torch.zeros(shape).requires_grad_()
        days, _ = self.lstm(window, (h0.detach(), c0.detach()))
        return self.fc(days[:, -1, :])


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


class HiddenLSTM(nn.Module):
    """Forecast blog style: the head reads h_n.view(-1, hidden), relu between."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.units = units
        self.lstm = nn.LSTM(D, units, batch_first=True)
        self.middle, self.last = nn.Linear(units, 8), nn.Linear(8, 2)
        self.relu = nn.ReLU()

    def head(self, final: Tensor) -> Tensor:
        return self.last(self.relu(self.middle(self.relu(final))))

    def forward(self, window: Tensor) -> Tensor:
        start = torch.zeros(1, window.size(0), self.units)
        _, (final, _) = self.lstm(window, (start, start.clone()))
        return self.head(final.view(-1, self.units))


class SqueezedLSTM(nn.Module):
    """Regression style: top layer's h_n, one number per window, squeezed to (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 5, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        _, (h_n, _) = self.lstm(x)
        return self.head(h_n[-1]).squeeze(-1)


class EveryStepRNN(nn.Module):
    """Sine-wave tutorial style: zeros with requires_grad in forward, every step's output."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_dim = 6
        self.rnn = nn.RNN(D, self.hidden_dim, num_layers=1, batch_first=True)
        self.fc = nn.Linear(self.hidden_dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(1, x.size(0), self.hidden_dim).requires_grad_()
        out, hn = self.rnn(x, h0)
        return self.fc(out)


class OneFeature(nn.Module):
    """Univariate window style: (B, T) without a feature dimension, unsqueeze(-1), last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6, batch_first=True)
        self.linear = nn.Linear(6, 1)

    def forward(self, window: Tensor) -> Tensor:
        out, _ = self.lstm(window.unsqueeze(-1))
        return self.linear(out[:, -1])


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


class AirPassengers(nn.Module):
    """Flight-passenger tutorial style: self.hidden_cell, one series, the last prediction."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.units = units
        self.lstm = nn.LSTM(1, units)
        self.linear = nn.Linear(units, 1)
        self.hidden_cell = (torch.zeros(1, 1, units), torch.zeros(1, 1, units))

    def forward(self, series: Tensor) -> Tensor:
        months = len(series)
        seen, self.hidden_cell = self.lstm(series.view(months, 1, -1), self.hidden_cell)
        return self.linear(seen.view(months, -1))[-1]


def _passengers_start(m: AirPassengers, x: Tensor) -> None:
    size = m.units
    m.hidden_cell = (torch.zeros(1, 1, size), torch.zeros(1, 1, size))


class Horizon(nn.Module):
    """Multi-step forecast style: the last hidden state gives a horizon of (B, 4, 2) at once."""

    def __init__(self, horizon: int = 4, targets: int = 2) -> None:
        super().__init__()
        self.horizon, self.targets = horizon, targets
        self.encoder = nn.GRU(D, 6, batch_first=True)
        self.project = nn.Linear(6, horizon * targets)

    def forward(self, past: Tensor) -> Tensor:
        _, h = self.encoder(past)
        return self.project(h[-1]).view(past.shape[0], self.horizon, self.targets)


class FlatHorizon(nn.Module):
    """Multi-step forecast style: (B, horizon) from the last output, dropout before the head."""

    def __init__(self, horizon: int = 5) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 6, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, horizon)

    def forward(self, x: Tensor) -> Tensor:
        seq, _ = self.lstm(x)
        last = self.norm(seq[:, -1])
        return self.head(self.dropout(last))


class Seq2SeqForecast(nn.Module):
    """Encoder-decoder forecast style: the decoder starts from the encoder at every call."""

    def __init__(self, horizon: int = 3) -> None:
        super().__init__()
        self.horizon = horizon
        self.encoder = nn.LSTM(D, 6, batch_first=True)
        self.decoder = nn.LSTMCell(1, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.encoder(x)
        h, c = h[0], c[0]
        value, values = x[:, -1, :1], []
        for _ in range(self.horizon):
            h, c = self.decoder(value, (h, c))
            value = self.out(h)
            values.append(value)
        return torch.cat(values, dim=1)


def _seq2seq_step(m: Seq2SeqForecast, x: Tensor, state):
    _, state = m.encoder(x[:, None], state)
    h, c = state[0][0], state[1][0]
    value, values = x[:, :1], []
    for _ in range(m.horizon):
        h, c = m.decoder(value, (h, c))
        value = m.out(h)
        values.append(value)
    return torch.cat(values, dim=1), state


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
        "last_lstm_zeros",
        LastLSTM,
        floats(D),
        "carry",
        oracle=_last("lstm", lambda m, h: m.fc(h)),
        plain=_window,
        note="detaches its own zeros only, as the tutorial does: nothing is lost",
    ),
    Case(
        "last_gru_time_first",
        LastGRU,
        floats(D),
        "carry",
        oracle=_last("rnn", lambda m, h: m.out(h)),
        plain=prefixes(lambda m, x: m(x)),
    ),
    Case(
        "last_hidden_lstm",
        HiddenLSTM,
        floats(D),
        "carry",
        oracle=_last("lstm", lambda m, h: m.head(h)),
        plain=_window,
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
        "every_step_rnn_zeros",
        EveryStepRNN,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, h: (lambda y, s: (swap(m.fc(y)), s))(*m.rnn(swap(x), h))),
        plain=lambda m, x: swap(m(swap(x))),
    ),
    Case(
        "one_feature_window",
        OneFeature,
        floats(),
        "carry",
        oracle=stepped(
            lambda m, x, s: (lambda y, s: (m.linear(y[:, 0]), s))(*m.lstm(x[:, None, None], s))
        ),
        plain=prefixes(lambda m, x: m(swap(x))),
        note="float stream (T, B) without features",
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
        "air_passengers_one_lane",
        AirPassengers,
        floats(),
        "lane",
        oracle=stepped(lambda m, x, _: (m(x)[None], None), _passengers_start),
        lanes=1,
        note="last output of one series (shape (1,)); float stream (T, 1)",
    ),
    Case(
        "horizon_matrix",
        Horizon,
        floats(D),
        "carry",
        oracle=_last("encoder", lambda m, h: m.project(h).view(-1, 4, 2)),
        plain=_window,
        note="every output is a (4, 2) table: a chunk of 4 steps looks like (B, T, C)",
    ),
    Case(
        "horizon_flat",
        FlatHorizon,
        floats(D),
        "carry",
        oracle=_last("lstm", lambda m, h: m.head(m.dropout(m.norm(h)))),
        plain=_window,
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
        "lanes_equal_steps",
        EveryStepRNN,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, h: (lambda y, s: (swap(m.fc(y)), s))(*m.rnn(swap(x), h))),
        plain=lambda m, x: swap(m(swap(x))),
        steps=7,
        lanes=7,
        note="batch first with as many lanes as steps",
    ),
    Case(
        "seq2seq_forecast",
        Seq2SeqForecast,
        floats(D),
        "refuse",
        reason="other",
        also=("hidden_state_local", "ambiguous_output"),
        either=True,
        oracle=stepped(_seq2seq_step),
        plain=_window,
        note="right only if the encoder alone is carried and the decoder starts from it",
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
