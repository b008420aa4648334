"""Audio: masks from spectra, channels first, states returned, frequency as another axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

BINS = 5


def to_spectrum(x: Tensor) -> Tensor:
    """(T, B, F) to (B, F, T)."""
    return x.permute(1, 2, 0).contiguous()


def from_spectrum(y: Tensor) -> Tensor:
    """(B, F, T) to (T, B, F)."""
    return y.permute(2, 0, 1).contiguous()


class MaskGRU(nn.Module):
    """Enhancement style: (B, F, T) spectrum, sigmoid mask times the input, (y, h) returned."""

    def __init__(self, bins: int = BINS, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(bins, hidden, num_layers=2, batch_first=True)
        self.mask = nn.Linear(hidden, bins)

    def forward(self, spec: Tensor, h: Tensor | None = None):
        x = torch.log1p(spec.abs()).transpose(1, 2)
        out, h = self.gru(x, h)
        mask = torch.sigmoid(self.mask(out)).transpose(1, 2)
        return mask * spec, h


class NoiseGains(nn.Module):
    """RNNoise style: three GRUs wired across, a list of states, gains and voice activity."""

    def __init__(self, features: int = BINS) -> None:
        super().__init__()
        self.dense = nn.Linear(features, 4)
        self.vad_gru = nn.GRU(4, 3, batch_first=True)
        self.noise_gru = nn.GRU(4 + 3 + features, 6, batch_first=True)
        self.denoise_gru = nn.GRU(3 + 6 + features, 7, batch_first=True)
        self.vad = nn.Linear(3, 1)
        self.gains = nn.Linear(7, 8)

    def forward(self, features: Tensor, states=None):
        if states is None:
            states = [None, None, None]
        x = torch.tanh(self.dense(features))
        v, vad_state = self.vad_gru(x, states[0])
        n, noise_state = self.noise_gru(torch.cat([x, v, features], -1), states[1])
        d, denoise_state = self.denoise_gru(torch.cat([v, n, features], -1), states[2])
        gain = torch.sigmoid(self.gains(d))
        return gain, torch.sigmoid(self.vad(v)), [vad_state, noise_state, denoise_state]


def _gains_step(m: NoiseGains, x: Tensor, states):
    gain, _, states = m(swap(x), states)
    return swap(gain), states


class DetachedGRU(nn.Module):
    """Streaming enhancement style: the state handed in is detached within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(BINS, 6, batch_first=True)
        self.fc = nn.Linear(6, BINS)

    def forward(self, x: Tensor, h: Tensor | None = None):
        if h is None:
            h = torch.zeros(1, x.size(0), 6, device=x.device)
        y, h = self.gru(x, h.detach())
        return torch.sigmoid(self.fc(y)), h


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


class LookaheadGRU(nn.Module):
    """Low-latency style: one future frame joins every frame (zeros after the last)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2 * BINS, 6, batch_first=True)
        self.fc = nn.Linear(6, BINS)

    def forward(self, x: Tensor, h: Tensor | None = None):
        future = F.pad(x, (0, 0, -1, 1))
        y, h = self.gru(torch.cat([x, future], dim=-1), h)
        return self.fc(y), h


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


class SpectrumOfTime(nn.Module):
    """Spectral-mixing style: a Fourier transform over the steps before the GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(BINS, 6, batch_first=True)
        self.fc = nn.Linear(6, BINS)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(x, dim=1).real
        out, _ = self.gru(x + 0.1 * mixed)
        return self.fc(out)


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


def _spectrum(m: nn.Module, x: Tensor, state):
    y, state = m(to_spectrum(x), state)
    return from_spectrum(y), state


def _dual_path_step(m: DualPath, x: Tensor, state):
    y, state = DualPath.forward(m, swap(x), state)
    return swap(y), state


CASES = [
    Case("mask_gru_spectrum", MaskGRU, floats(BINS), "carry", oracle=chunked(_spectrum)),
    Case(
        "noise_gains",
        NoiseGains,
        floats(BINS),
        "keyword",
        keywords={"output": 0},
        oracle=chunked(_gains_step),
        note="gains, voice activity and a list of states: which is the output must be asked",
    ),
    Case(
        "dual_path_state",
        DualPath,
        floats(BINS),
        "carry",
        oracle=chunked(_first),
        note="the state has B * F rows; a bidirectional GRU over frequency",
    ),
    Case(
        "dual_path_plain",
        DualPathPlain,
        floats(BINS),
        "carry",
        oracle=chunked(_dual_path_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="the layer's state has B * F rows",
    ),
    Case(
        "running_norm_dict",
        RunningNorm,
        floats(BINS),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s), lambda m, x: m.initial_state(x.size(1))),
        note="normalises over the past only, by an explicit state",
    ),
    Case(
        "voice_activity_frame",
        VoiceActivity,
        floats(BINS),
        "carry",
        oracle=stepped(_voice_step, _two_zeros),
        note="h and c without defaults; output (B,)",
    ),
    Case(
        "detached_state",
        DetachedGRU,
        floats(BINS),
        "refuse",
        reason="detach",
        oracle=chunked(_first),
        shows=("detach",),
    ),
    Case(
        "one_frame_ahead",
        LookaheadGRU,
        floats(BINS),
        "refuse",
        reason="lookahead",
        oracle=chunked(_first),
        shows=("lookahead", "chunks"),
    ),
    Case(
        "fourier_over_time",
        SpectrumOfTime,
        floats(BINS),
        "refuse",
        reason="lookahead",
        also=("other", "convolution", "time_normalisation", "attention"),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("lookahead",),
    ),
]
