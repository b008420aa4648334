"""Modern recurrences: minimal gates, diagonal state spaces, running attention, memories."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap, tokens

D = 3
V = 11


class S4D(nn.Module):
    """S4D style: forward convolves over all steps by FFT, step(u, state) is the recurrence."""

    def __init__(self, d_model: int = D, n: int = 4) -> None:
        super().__init__()
        self.n = n
        self.log_dt = nn.Parameter(torch.linspace(-2, -1, d_model))
        self.C = nn.Parameter(torch.randn(d_model, n, 2) * 0.5)
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(d_model, n)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(n).to(self.C.dtype).repeat(d_model, 1))
        self.D = nn.Parameter(torch.randn(d_model))

    def _discrete(self) -> tuple[Tensor, Tensor]:
        dt = self.log_dt.exp().unsqueeze(-1)
        A = torch.complex(-self.log_A_real.exp(), self.A_imag)
        dtA = A * dt
        return torch.exp(dtA), torch.view_as_complex(self.C) * (torch.exp(dtA) - 1) / A

    def forward(self, u: Tensor) -> Tensor:
        steps = u.size(1)
        dA, C = self._discrete()
        powers = dA.unsqueeze(-1) ** torch.arange(steps)
        kernel = 2 * (C.unsqueeze(-1) * powers).sum(1).real
        spectrum = torch.fft.rfft(u.transpose(1, 2), n=2 * steps)
        y = torch.fft.irfft(spectrum * torch.fft.rfft(kernel, n=2 * steps), n=2 * steps)
        return y[..., :steps].transpose(1, 2) + self.D * u

    def default_state(self, batch_size: int) -> Tensor:
        dtype = torch.view_as_complex(self.C).dtype
        return torch.zeros(batch_size, len(self.D), self.n, dtype=dtype)

    def step(self, u: Tensor, state: Tensor):
        dA, C = self._discrete()
        state = dA * state + u.unsqueeze(-1)
        y = 2 * (C * state).sum(-1).real + self.D * u
        return y, state


def _complex_zeros(lanes: int) -> Tensor:
    kind = torch.zeros(()).to(torch.promote_types(torch.get_default_dtype(), torch.complex32))
    return torch.zeros(lanes, D, 4, dtype=kind.dtype)


class TokenMixing(nn.Module):
    """RWKV style: one token per call, a list of states per layer, time and channel mixing."""

    def __init__(self, dim: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.dim, self.n_layer = dim, layers
        self.emb = nn.Embedding(V, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.mix = nn.Parameter(torch.rand(layers, 5, dim))
        self.decay = nn.Parameter(torch.linspace(-1, 1, dim).repeat(layers, 1))
        self.first = nn.Parameter(torch.full((layers, dim), 0.3))
        self.key = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.value = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.receptance = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.output = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.ffn = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.head = nn.Linear(dim, V, bias=False)

    def init_state(self, batch_size: int) -> list[Tensor]:
        state = []
        for _ in range(self.n_layer):
            state += [torch.zeros(batch_size, self.dim) for _ in range(4)]
            state.append(torch.full((batch_size, self.dim), -1e30))
        return state

    def time_mixing(self, i: int, x: Tensor, last: Tensor, num, den, top):
        mixed = [x * mix + last * (1 - mix) for mix in self.mix[i, :3]]
        k, v = self.key[i](mixed[0]), self.value[i](mixed[1])
        r = torch.sigmoid(self.receptance[i](mixed[2]))
        q = torch.maximum(top, self.first[i] + k)
        a, b = torch.exp(top - q), torch.exp(self.first[i] + k - q)
        wkv = (a * num + b * v) / (a * den + b)
        q = torch.maximum(top - torch.exp(self.decay[i]), k)
        a, b = torch.exp(top - torch.exp(self.decay[i]) - q), torch.exp(k - q)
        return self.output[i](r * wkv), a * num + b * v, a * den + b, q

    def forward(self, token: Tensor, state: list[Tensor]):
        x, new = self.emb(token), []
        for i in range(self.n_layer):
            last_t, last_c, num, den, top = state[5 * i : 5 * i + 5]
            normed = self.norms[2 * i](x)
            out, num, den, top = self.time_mixing(i, normed, last_t, num, den, top)
            x = x + out
            channel = self.norms[2 * i + 1](x)
            mixed = channel * self.mix[i, 3] + last_c * (1 - self.mix[i, 3])
            x = x + self.ffn[i](torch.relu(mixed) ** 2)
            new += [normed, channel, num, den, top]
        return self.head(x), new


class SLSTM(nn.Module):
    """xLSTM style: the scalar cell with exponential gates, its state (h, c, n, m)."""

    def __init__(self, size: int = D, hidden: int = 5) -> None:
        super().__init__()
        self.hidden = hidden
        self.W = nn.Linear(size, 4 * hidden)
        self.R = nn.Linear(hidden, 4 * hidden, bias=False)
        self.norm = nn.GroupNorm(1, hidden)
        self.down = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state=None):
        if state is None:
            zeros = x.new_zeros(x.size(0), self.hidden)
            state = (zeros, zeros, zeros, zeros)
        h, c, n, m = state
        outputs = []
        for t in range(x.size(1)):
            i, f, z, o = (self.W(x[:, t]) + self.R(h)).chunk(4, dim=-1)
            log_f = F.logsigmoid(f)
            m_new = torch.maximum(log_f + m, i)
            i, f = torch.exp(i - m_new), torch.exp(log_f + m - m_new)
            c = f * c + i * torch.tanh(z)
            n = f * n + i
            h = torch.sigmoid(o) * c / n
            m = m_new
            outputs.append(self.down(self.norm(h)))
        return torch.stack(outputs, dim=1), (h, c, n, m)


class MLSTM(nn.Module):
    """xLSTM style: the matrix cell, a dict with the matrix memory and its normaliser."""

    def __init__(self, size: int = D, dim: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(size, 3 * dim)
        self.gates = nn.Linear(size, 2)
        self.out = nn.Linear(dim, 2)

    def forward(self, x: Tensor, state: dict[str, Tensor] | None = None):
        if state is None:
            state = {
                "C": x.new_zeros(x.size(1), self.dim, self.dim),
                "n": x.new_zeros(x.size(1), self.dim),
            }
        C, n, outputs = state["C"], state["n"], []
        for frame in x:
            q, k, v = self.qkv(frame).chunk(3, -1)
            i, f = torch.sigmoid(self.gates(frame)).unsqueeze(-1).unbind(1)
            k = k / math.sqrt(self.dim)
            C = f.unsqueeze(-1) * C + i.unsqueeze(-1) * v.unsqueeze(-1) * k.unsqueeze(-2)
            n = f * n + i * k
            scale = (n * q).sum(-1, keepdim=True).abs().clamp(min=1.0)
            outputs.append(self.out((C @ q.unsqueeze(-1)).squeeze(-1) / scale))
        return torch.stack(outputs), {"C": C, "n": n}


class MemoryTokens(nn.Module):
    """Recurrent-memory style: memory tokens around a segment, attention within the segment."""

    def __init__(self, size: int = D, dim: int = 4, slots: int = 2) -> None:
        super().__init__()
        self.slots = slots
        self.inp = nn.Linear(size, dim)
        self.memory = nn.Parameter(torch.randn(1, slots, dim))
        self.layer = nn.TransformerEncoderLayer(dim, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(dim, 2)

    def forward(self, x: Tensor, memory: Tensor | None = None):
        if memory is None:
            memory = self.memory.expand(x.size(0), -1, -1)
        z = self.layer(torch.cat([memory, self.inp(x), memory], dim=1))
        return self.out(z[:, self.slots : -self.slots]), z[:, -self.slots :]


class MemoryXL(nn.Module):
    """Transformer-XL style: a causal layer over the call and 4 detached past steps (mems)."""

    def __init__(self, size: int = D, dim: int = 4, mem_len: int = 4) -> None:
        super().__init__()
        self.mem_len, self.dim = mem_len, dim
        self.inp = nn.Linear(size, dim)
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, 2)

    def init_mems(self, batch_size: int) -> Tensor:
        return torch.zeros(self.mem_len, batch_size, self.dim)

    def forward(self, data: Tensor, mems: Tensor):
        x = self.inp(data)
        context = torch.cat([mems, x]).transpose(0, 1)
        k, v = self.kv(context).chunk(2, -1)
        mask = torch.ones(len(x), context.size(1), dtype=torch.bool).triu(1 + self.mem_len)
        scores = (self.q(x).transpose(0, 1) @ k.transpose(1, 2)).masked_fill(mask, -1e9)
        y = (torch.softmax(scores, -1) @ v).transpose(0, 1)
        with torch.no_grad():
            mems = torch.cat([mems, x])[-self.mem_len :]
        return self.out(x + y), mems


class PositionsGRU(nn.Module):
    """A GRU with learned positions counted from the call's first step."""

    def __init__(self, size: int = D, hidden: int = 5) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, size)
        self.gru = nn.GRU(size, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        x = x + self.positions(torch.arange(x.size(1), device=x.device))
        y, h = self.gru(x, h)
        return self.out(y), h


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


CASES = [
    Case(
        "s4d_step",
        S4D,
        floats(D),
        "keyword",
        keywords={"call": lambda m, x, s: m.step(x, s), "start": _complex_zeros},
        oracle=stepped(lambda m, x, s: m.step(x, s), lambda m, x: m.default_state(x.size(1))),
        plain=lambda m, x: swap(m(swap(x))),
        note="forward is an FFT convolution: refused as it is, carried by step",
    ),
    Case(
        "token_mixing_step",
        TokenMixing,
        tokens(V),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.init_state(x.size(1))),
        note="a list of 10 leaves, two of them start at -1e30",
    ),
    Case("slstm_cell", SLSTM, floats(D), "carry", oracle=chunked(_first)),
    Case("mlstm_dict", MLSTM, floats(D), "carry", oracle=chunked(lambda m, x, s: m(x, s))),
    Case(
        "memory_tokens",
        MemoryTokens,
        floats(D),
        "refuse",
        reason="attention",
        also=("lookahead",),
        oracle=chunked(_first),
        shows=("lookahead", "chunks"),
    ),
    Case(
        "memory_xl",
        MemoryXL,
        floats(D),
        "refuse",
        reason="attention",
        also=("detach",),
        oracle=chunked(lambda m, x, s: m(x, s), lambda m, x: m.init_mems(x.size(1))),
        shows=("chunks",),
        note="how far a step looks back depends on the chunk; the memory is detached as well",
    ),
    Case(
        "positions_per_call",
        PositionsGRU,
        floats(D),
        "refuse",
        reason="other",
        oracle=chunked(_first),
        shows=("chunks",),
        note="positions restart at every chunk",
    ),
]
