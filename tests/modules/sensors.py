"""ECG, EEG and other sensors: fronts per step, convolutions over time, normalisations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, swap

D = 3


class PaddedConvLSTM(nn.Module):
    """CRNN style on (B, D, T): a padded convolution over time sees one step ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, 5, 3, padding=1)
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).permute(0, 2, 1)
        out, _ = self.lstm(x)
        return self.fc(out)


class CausalConvGRU(nn.Module):
    """Temporal-convolution style: zeros on the left at every call, so the past is forgotten."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.pad = kernel - 1
        self.conv = nn.Conv1d(D, 5, kernel)
        self.gru = nn.GRU(5, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x.transpose(1, 2), (self.pad, 0))
        x = torch.relu(self.conv(x)).transpose(1, 2)
        out, _ = self.gru(x)
        return self.fc(out)


class ValidConvGRU(nn.Module):
    """Gesture-net style: a valid convolution, so T + 2 steps in give T steps out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, 5, 3)
        self.gru = nn.GRU(5, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        x = torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2)
        out, h = self.gru(x, h)
        return self.fc(out), h


def _valid_step(m: ValidConvGRU, x: Tensor, state):
    past, h = state
    x = torch.cat([past, x])
    y, h = m(swap(x), h)
    return swap(y), (x[-2:], h)


class CachedConvLSTM(nn.Module):
    """Streaming style: the convolution's past frames are part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, 5, 3)
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor, state=None):
        cache, hidden = state if state is not None else (x.new_zeros(x.size(0), 2, D), None)
        x = torch.cat([cache, x], dim=1)
        features = F.elu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        out, hidden = self.lstm(features, hidden)
        return self.fc(out), (x[:, -2:], hidden)


class BatchNormLSTM(nn.Module):
    """Activity-recognition style: BatchNorm1d over the features of all lanes and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(D)
        self.lstm = nn.LSTM(D, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x.permute(0, 2, 1)).permute(0, 2, 1)
        out, _ = self.lstm(x)
        return self.fc(out)


class InstanceNormGRU(nn.Module):
    """ECG style on (B, D, T): every channel normalised over the whole recording."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(D, affine=True)
        self.gru = nn.GRU(D, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).transpose(1, 2)
        out, _ = self.gru(x)
        return self.fc(out)


class ZScoreLSTM(nn.Module):
    """Sensor style: the window's own mean and deviation are taken out in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=1, keepdim=True)
        std = x.std(dim=1, keepdim=True, unbiased=False) + 1e-3
        out, _ = self.lstm((x - mean) / std)
        return self.fc(out)


class ChannelsFirstLSTM(nn.Module):
    """Wearable style: (B, D, T) in and (B, C, T) out, as convolution people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 6, 2, batch_first=True)
        self.fc = nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.permute(0, 2, 1))
        return self.fc(out.permute(0, 2, 1))


class BiECG(nn.Module):
    """Arrhythmia style: a bidirectional LSTM over the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 5, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return self.fc(out)


class MissingData(nn.Module):
    """Clinical GRU-D style: values and mask in one (B, T, 2D) input, last value and decay kept."""

    def __init__(self, features: int = D, hidden: int = 5) -> None:
        super().__init__()
        self.features, self.hidden = features, hidden
        self.decay = nn.Parameter(torch.rand(features))
        self.cell = nn.GRUCell(2 * features, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state=None):
        if state is None:
            zeros = x.new_zeros(x.size(0), self.features)
            state = (x.new_zeros(x.size(0), self.hidden), zeros, zeros)
        h, last, since = state
        outputs = []
        for t in range(x.size(1)):
            value, seen = x[:, t].split(self.features, dim=-1)
            seen = (seen > 0).to(x.dtype)
            weight = torch.exp(-F.relu(self.decay) * since)
            filled = seen * value + (1 - seen) * weight * last
            h = self.cell(torch.cat([filled, seen], dim=-1), h)
            last = seen * value + (1 - seen) * last
            since = (since + 1) * (1 - seen)
            outputs.append(self.out(h))
        return torch.stack(outputs, dim=1), (h, last, since)


class StrideLSTM(nn.Module):
    """Listener style: pairs of steps are joined, so half as many steps come out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * D, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, size = x.shape
        x = x[:, : steps // 2 * 2].reshape(batch, steps // 2, 2 * size)
        out, _ = self.lstm(x)
        return self.fc(out)


class AttentiveHead(nn.Module):
    """EEG style: additive attention pools the LSTM's outputs of all steps at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        out, _ = self.attention(out, out, out, need_weights=False)
        return self.fc(out)


def _again(m: nn.Module, x: Tensor, _: None):
    return swap(m(swap(x))), None


def _channels_first(m: nn.Module, x: Tensor, _: None):
    return swap(m(x.permute(1, 2, 0).contiguous())), None


def _channels_step(m: ChannelsFirstLSTM, x: Tensor, state):
    out, state = m.lstm(swap(x), state)
    return m.fc(out.permute(0, 2, 1)).permute(2, 0, 1), state


def _batch_norm_step(m: BatchNormLSTM, x: Tensor, state):
    flat = m.bn(x.reshape(-1, D)).view(x.shape)
    out, state = m.lstm(swap(flat), state)
    return swap(m.fc(out)), state


CASES = [
    Case(
        "channels_first_lstm",
        ChannelsFirstLSTM,
        floats(D),
        "carry",
        oracle=chunked(_channels_step),
        plain=lambda m, x: m(x.permute(1, 2, 0)).permute(2, 0, 1),
    ),
    Case(
        "cached_conv_state",
        CachedConvLSTM,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: (lambda y, s: (swap(y), s))(*m(swap(x), s))),
    ),
    Case(
        "missing_data_gru",
        MissingData,
        floats(2 * D),
        "carry",
        oracle=chunked(lambda m, x, s: (lambda y, s: (swap(y), s))(*m(swap(x), s))),
    ),
    Case(
        "valid_conv_context",
        ValidConvGRU,
        floats(D),
        "keyword",
        keywords={"context": 2},
        oracle=chunked(_valid_step, lambda m, x: (x.new_zeros(2, x.size(1), D), None)),
        note="the past before the stream is zeros",
    ),
    Case(
        "padded_conv",
        PaddedConvLSTM,
        floats(D),
        "refuse",
        reason="convolution",
        also=("lookahead",),
        oracle=chunked(_channels_first),
        shows=("lookahead",),
    ),
    Case(
        "causal_conv_no_state",
        CausalConvGRU,
        floats(D),
        "refuse",
        reason="convolution",
        oracle=chunked(_again),
        shows=("chunks",),
        note="causal, so only the chunk law finds it",
    ),
    Case(
        "batch_norm_lstm",
        BatchNormLSTM,
        floats(D),
        "refuse",
        reason="batch_statistics",
        also=("mixes_lanes",),
        oracle=chunked(_batch_norm_step),
        shows=("mixes_lanes_training",),
        note="right in evaluation mode; batch statistics in training mode",
    ),
    Case(
        "instance_norm_gru",
        InstanceNormGRU,
        floats(D),
        "refuse",
        reason="time_normalisation",
        also=("lookahead",),
        oracle=chunked(_channels_first),
        shows=("lookahead",),
    ),
    Case(
        "z_score_lstm",
        ZScoreLSTM,
        floats(D),
        "refuse",
        reason="time_normalisation",
        also=("lookahead",),
        oracle=chunked(_again),
        shows=("lookahead",),
    ),
    Case(
        "bidirectional_ecg",
        BiECG,
        floats(D),
        "refuse",
        reason="bidirectional",
        oracle=chunked(_again),
        shows=("lookahead",),
    ),
    Case(
        "half_rate_lstm",
        StrideLSTM,
        floats(D),
        "refuse",
        reason="other",
        also=("ambiguous_output", "convolution"),
        oracle=chunked(_again),
        shows=("length",),
        note="half as many steps come out",
    ),
    Case(
        "attention_over_outputs",
        AttentiveHead,
        floats(D),
        "refuse",
        reason="attention",
        also=("lookahead",),
        oracle=chunked(_again),
        shows=("lookahead",),
    ),
]
