"""Audio, video, sensors, forecasting and system identification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

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
    ),
    Case(
        "cached_conv_state",
        CachedConvLSTM,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: (lambda y, s: (swap(y), s))(*m(swap(x), s))),
    ),
    # The past before the stream is zeros.
    Case(
        "valid_conv_context",
        ValidConvGRU,
        floats(D),
        "keyword",
        keywords={"context": 2},
        oracle=chunked(_valid_step, lambda m, x: (x.new_zeros(2, x.size(1), D), None)),
    ),
    Case(
        "padded_conv",
        PaddedConvLSTM,
        floats(D),
        "refuse",
        reason="convolution",
        also=("lookahead",),
        oracle=chunked(_channels_first),
    ),
    # Causal, so only the chunk law finds it.
    Case(
        "causal_conv_no_state",
        CausalConvGRU,
        floats(D),
        "refuse",
        reason="convolution",
        oracle=chunked(_again),
    ),
    # Right in evaluation mode; batch statistics in training mode.
    Case(
        "batch_norm_lstm",
        BatchNormLSTM,
        floats(D),
        "refuse",
        reason="batch_statistics",
        also=("mixes_lanes",),
        oracle=chunked(_batch_norm_step),
    ),
    Case(
        "instance_norm_gru",
        InstanceNormGRU,
        floats(D),
        "refuse",
        reason="time_normalisation",
        also=("lookahead",),
    ),
    Case(
        "bidirectional_ecg",
        BiECG,
        floats(D),
        "refuse",
        reason="bidirectional",
    ),
    Case(
        "attention_over_outputs",
        AttentiveHead,
        floats(D),
        "refuse",
        reason="attention",
        also=("lookahead",),
    ),
]


BINS = 5


class DualPath(nn.Module):
    """Dual-path style: a bidirectional GRU over frequency, a causal one over time."""

    def __init__(self, channels: int = 2, hidden: int = 3) -> None:
        super().__init__()
        self.lift = nn.Linear(1, channels)
        self.intra = nn.GRU(channels, hidden, batch_first=True, bidirectional=True)
        self.intra_fc = nn.Linear(2 * hidden, channels)
        self.inter = nn.GRU(channels, 4, batch_first=True)
        self.inter_fc = nn.Linear(4, channels)
        self.mask = nn.Linear(channels, 1)

    def forward(self, spec: Tensor, state: Tensor | None = None):
        batch, steps, bins = spec.shape
        x = self.lift(spec.unsqueeze(-1))
        rows = x.reshape(batch * steps, bins, -1)
        rows = self.intra_fc(self.intra(rows)[0]).reshape(batch, steps, bins, -1)
        x = x + rows
        columns = x.transpose(1, 2).reshape(batch * bins, steps, -1)
        columns, state = self.inter(columns, state)
        columns = self.inter_fc(columns).reshape(batch, bins, steps, -1).transpose(1, 2)
        x = x + columns
        return spec * torch.sigmoid(self.mask(x)).squeeze(-1), state


class DualPathPlain(DualPath):
    """Dual-path style that returns its output only; the state stays in the layer."""

    def forward(self, spec: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(spec)[0]


class RunningNorm(nn.Module):
    """Online-normalisation style: a dict state with a running mean, its count and a hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(BINS, 6)
        self.fc = nn.Linear(6, BINS)

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        return {
            "mean": torch.zeros(batch_size, BINS),
            "count": torch.zeros(batch_size, 1),
            "hidden": torch.zeros(batch_size, 6),
        }

    def forward(self, frames: Tensor, state: dict[str, Tensor]):
        mean, count, hidden = state["mean"], state["count"], state["hidden"]
        outputs = []
        for frame in frames:
            count = count + 1
            mean = mean + (frame - mean) / count
            hidden = self.cell(frame - mean, hidden)
            outputs.append(self.fc(hidden))
        return torch.stack(outputs), {"mean": mean, "count": count, "hidden": hidden}


class VoiceActivity(nn.Module):
    """Voice-activity style: one frame per call, the probability squeezed to (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(BINS, 4), nn.ReLU())
        self.lstm = nn.LSTMCell(4, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, frame: Tensor, h: Tensor, c: Tensor):
        h, c = self.lstm(self.front(frame), (h, c))
        return torch.sigmoid(self.out(h)).squeeze(1), h, c


def _voice_step(m: VoiceActivity, x: Tensor, state):
    y, h, c = m(x, *state)
    return y, (h, c)


def _two_zeros(m: nn.Module, x: Tensor):
    return x.new_zeros(x.size(1), 6), x.new_zeros(x.size(1), 6)


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


def _dual_path_step(m: DualPath, x: Tensor, state):
    y, state = DualPath.forward(m, swap(x), state)
    return swap(y), state


CASES += [
    # The layer's state has B * F rows.
    Case(
        "dual_path_plain",
        DualPathPlain,
        floats(BINS),
        "carry",
        oracle=chunked(_dual_path_step),
    ),
    # Normalises over the past only, by an explicit state.
    Case(
        "running_norm_dict",
        RunningNorm,
        floats(BINS),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s), lambda m, x: m.initial_state(x.size(1))),
    ),
    # H and c without defaults; output (B,).
    Case(
        "voice_activity_frame",
        VoiceActivity,
        floats(BINS),
        "carry",
        oracle=stepped(_voice_step, _two_zeros),
    ),
]


D_F = 3


class LastGRU(nn.Module):
    """Time-first N-to-1 style: h0 zeros in forward, out[-1]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = 5
        self.rnn = nn.GRU(D_F, self.hidden_size)
        self.out = nn.Linear(self.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(1, x.size(1), self.hidden_size, device=x.device)
        out, h = self.rnn(x, h)
        return self.out(out[-1])


class SqueezedLSTM(nn.Module):
    """Regression style: top layer's h_n, one number per window, squeezed to (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D_F, 5, num_layers=2, batch_first=True, dropout=0.2)
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


class ForgottenBatchFirst(nn.Module):
    """Windows (B, T, D_F) given to an LSTM that is time first: the lanes become the time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D_F, 6)
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
        self.gru = nn.GRU(D_F, 6, batch_first=True)
        self.fc = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x)
        return self.fc(out[:, -1])


class PooledLSTM(nn.Module):
    """Sequence-regression style: the mean over all steps' outputs of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D_F, 6, batch_first=True)
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


CASES += [
    Case(
        "last_gru_time_first",
        LastGRU,
        floats(D_F),
        "carry",
        oracle=_last("rnn", lambda m, h: m.out(h)),
    ),
    Case(
        "last_hidden_squeezed",
        SqueezedLSTM,
        floats(D_F),
        "carry",
        oracle=_last("lstm", lambda m, h: m.head(h).squeeze(-1)),
    ),
    # Second parameter future=0 is no state; output (B, T).
    Case(
        "sine_cells_future",
        SineCells,
        floats(),
        "carry",
        oracle=stepped(_sine_step),
    ),
    # 20 outputs at stride 20.
    Case(
        "outputs_equal_stride",
        SameAsStride,
        floats(D_F),
        "carry",
        oracle=_last("gru", lambda m, h: m.fc(h)),
        steps=20,
    ),
    # 20 outputs, 20 lanes, 20 steps.
    Case(
        "outputs_lanes_equal_stride",
        SameAsStride,
        floats(D_F),
        "carry",
        oracle=_last("gru", lambda m, h: m.fc(h)),
        steps=20,
        lanes=20,
    ),
    # The author's windows are (B, T, D_F); time first with one lane it would be right.
    Case(
        "forgotten_batch_first",
        ForgottenBatchFirst,
        floats(D_F),
        "refuse",
        reason="mixes_lanes",
        also=("other",),
    ),
    # The running mean is a state that nothing holds.
    Case(
        "mean_over_window",
        PooledLSTM,
        floats(D_F),
        "refuse",
        reason="other",
        also=("time_normalisation", "hidden_state_local"),
    ),
]


NU, NX, NY = 2, 4, 3


class SeparateStates(nn.Module):
    """Deployment style: h and c as separate arguments, all three come back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NU, hidden, batch_first=True)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor, h: Tensor, c: Tensor):
        y, (h, c) = self.lstm(u, (h, c))
        return self.out(y), h, c


def _separate_step(m: SeparateStates, x: Tensor, state):
    y, h, c = m(swap(x), *state)
    return swap(y), (h, c)


class LearnedStart(nn.Module):
    """Identification style: a learned initial state, used when none is given."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(NU, hidden, batch_first=True)
        self.h0 = nn.Parameter(torch.randn(1, 1, hidden) * 0.5)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor, state: Tensor | None = None):
        if state is None:
            state = self.h0.expand(-1, u.size(0), -1).contiguous()
        y, state = self.rnn(u, state)
        return self.out(y), state


class Simulator(nn.Module):
    """Simulation-library style: forward(x_0, u) returns the trajectory of states."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(NX + NU, 6), nn.Tanh(), nn.Linear(6, NX))

    def forward(self, x_0: Tensor, u: Tensor) -> Tensor:
        x_step, trajectory = x_0, []
        for u_step in u.split(1):
            trajectory.append(x_step)
            x_step = x_step + self.f(torch.cat([x_step, u_step[0]], dim=-1))
        return torch.stack(trajectory)


class Residual(nn.Module):
    """State-space style with the state second and batch-first sequences: (y, x) back."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(NX + NU, 6), nn.Tanh(), nn.Linear(6, NX))
        self.g = nn.Linear(NX + NU, NY)
        self.register_buffer("x0", torch.full((NX,), 0.1))

    def forward(self, u: Tensor, x: Tensor | None = None):
        if x is None:
            x = self.x0.expand(u.shape[0], -1)
        outputs = []
        for u_t in u.unbind(1):
            z = torch.cat([x, u_t], dim=-1)
            outputs.append(self.g(z))
            x = x + 0.3 * self.f(z)
        return torch.stack(outputs, 1), x


class Autoregressive(nn.Module):
    """NARX style: the next output is predicted from the input and the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NU + NY, 6), nn.Tanh(), nn.Linear(6, NY))

    def forward(self, u: Tensor, y_prev: Tensor) -> Tensor:
        return y_prev + self.net(torch.cat([u, y_prev], dim=-1))


def _autoregressive_step(m: Autoregressive, x: Tensor, y: Tensor):
    y = m(x, y)
    return y, y


class RandomStart(nn.Module):
    """Early-tutorial style: random initial states drawn at every call."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(NU, hidden, batch_first=True)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor) -> Tensor:
        h0 = torch.randn(1, u.size(0), self.hidden)
        c0 = torch.randn(1, u.size(0), self.hidden)
        y, _ = self.lstm(u, (h0, c0))
        return self.out(y)


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


CASES += [
    Case(
        "separate_h_c",
        SeparateStates,
        floats(NU),
        "carry",
        oracle=chunked(
            _separate_step,
            lambda m, x: (x.new_zeros(1, x.size(1), 6), x.new_zeros(1, x.size(1), 6)),
        ),
    ),
    Case("learned_start", LearnedStart, floats(NU), "carry", oracle=chunked(_first)),
    Case(
        "state_space_buffer_start",
        Residual,
        floats(NU),
        "keyword",
        keywords={"start": lambda m, lanes: m.x0},
        oracle=chunked(_first),
    ),
    # One tensor comes back: output and state at once; its size is the module's secret.
    Case(
        "narx_output_is_state",
        Autoregressive,
        floats(NU),
        "keyword",
        keywords={"start": lambda lanes: torch.zeros(lanes, NY)},
        oracle=stepped(_autoregressive_step, lambda m, x: x.new_zeros(x.size(1), NY)),
    ),
    # The state after the last step never comes back.
    Case(
        "simulator_state_first",
        Simulator,
        floats(NU),
        "refuse",
        reason="hidden_state_local",
        also=("other", "ambiguous_output", "no_state", "ignored_state"),
    ),
    # Could be carried from a start that the user gives.
    Case(
        "random_start_inside",
        RandomStart,
        floats(NU),
        "refuse",
        reason="random",
        also=("other",),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
    ),
]
