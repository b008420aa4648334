"""Modern recurrences: minimal gates, diagonal state spaces, running attention, memories."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap, tokens

D = 3
V = 11


class MinGRU(nn.Module):
    """minGRU style: one Linear for candidate and gate, return_next_prev_hidden flag."""

    def __init__(self, size: int = D, units: int = 5) -> None:
        super().__init__()
        self.both = nn.Linear(size, 2 * units, bias=False)
        self.out = nn.Linear(units, size, bias=False)

    def forward(
        self, x: Tensor, prev_hidden: Tensor | None = None, return_next_prev_hidden: bool = False
    ):
        candidate, logit = self.both(x).chunk(2, dim=-1)
        positive = torch.where(candidate > 0, candidate + 0.5, torch.sigmoid(candidate))
        decay = F.logsigmoid(-logit).cumsum(dim=1)
        gained = (torch.sigmoid(logit) * positive * torch.exp(-decay)).cumsum(dim=1)
        if prev_hidden is not None:
            gained = gained + prev_hidden
        hidden = torch.exp(decay) * gained
        y = self.out(hidden)
        return (y, hidden[:, -1:]) if return_next_prev_hidden else y


def _min_gru_step(m: MinGRU, x: Tensor, state):
    y, state = m(swap(x), state, return_next_prev_hidden=True)
    return swap(y), state


class LRU(nn.Module):
    """Linear recurrent unit style: a complex diagonal recurrence, state (B, N) complex."""

    def __init__(self, inputs: int = D, outputs: int = 2, states: int = 4) -> None:
        super().__init__()
        self.nu_log = nn.Parameter(torch.log(-torch.log(torch.rand(states) * 0.3 + 0.6)))
        self.theta_log = nn.Parameter(torch.log(torch.rand(states) * 3 + 0.1))
        self.B_re = nn.Parameter(torch.randn(states, inputs) / math.sqrt(2 * inputs))
        self.B_im = nn.Parameter(torch.randn(states, inputs) / math.sqrt(2 * inputs))
        self.C_re = nn.Parameter(torch.randn(outputs, states) / math.sqrt(states))
        self.C_im = nn.Parameter(torch.randn(outputs, states) / math.sqrt(states))
        self.D = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, input: Tensor, state: Tensor | None = None):
        modulus = torch.exp(-torch.exp(self.nu_log))
        Lambda = torch.polar(modulus, torch.exp(self.theta_log))
        gamma = torch.sqrt(1 - modulus**2).unsqueeze(-1)
        B = gamma * torch.complex(self.B_re, self.B_im)
        C = torch.complex(self.C_re, self.C_im)
        if state is None:
            state = torch.zeros(input.size(0), len(Lambda), dtype=B.dtype, device=B.device)
        outputs = []
        for u in input.unbind(1):
            state = Lambda * state + u.to(B.dtype) @ B.T
            outputs.append((state @ C.T).real + u @ self.D.T)
        return torch.stack(outputs, 1), state


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


class LinearAttention(nn.Module):
    """Linear-attention style: running sums of keys and values are the state."""

    def __init__(self, size: int = D, heads: int = 2, dim: int = 4) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(size, 3 * heads * dim)
        self.out = nn.Linear(heads * dim, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None):
        batch, steps, _ = x.shape
        q, k, v = self.qkv(x).view(batch, steps, 3, self.heads, self.dim).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        S = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        z = k.cumsum(1)
        if state is not None:
            S, z = S + state[0].unsqueeze(1), z + state[1].unsqueeze(1)
        y = torch.einsum("bthd,bthde->bthe", q, S) / (q * z).sum(-1, keepdim=True)
        return self.out(y.reshape(batch, steps, -1)), (S[:, -1], z[:, -1])


class SlidingWindow(nn.Module):
    """Cached-attention style: every step attends to itself and the 3 steps before, by a cache."""

    def __init__(self, size: int = D, dim: int = 4, window: int = 4) -> None:
        super().__init__()
        self.window, self.dim = window, dim
        self.qkv = nn.Linear(size, 3 * dim)
        self.out = nn.Linear(dim, 2)

    def init_cache(self, batch_size: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(batch_size, self.window - 1, self.dim)
        return zeros, zeros.clone()

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor]):
        steps = x.size(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        distance = torch.arange(k.size(1)) - torch.arange(steps).unsqueeze(1)
        visible = (distance >= 0) & (distance < self.window)
        scores = (q @ k.transpose(1, 2)).masked_fill(~visible, float("-inf"))
        y = torch.softmax(scores / math.sqrt(self.dim), -1) @ v
        past = 1 - self.window
        return self.out(y), (k[:, past:], v[:, past:])


class SelectiveSpace(nn.Module):
    """Mamba style: forward runs from zeros; step(u, conv_state, ssm_state) is the recurrence."""

    def __init__(self, size: int = D, inner: int = 4, n: int = 2, width: int = 3) -> None:
        super().__init__()
        self.inner, self.n, self.width = inner, n, width
        self.in_proj = nn.Linear(size, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, width, groups=inner, padding=width - 1)
        self.x_proj = nn.Linear(inner, 1 + 2 * n)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1.0)).repeat(inner, 1))
        self.out_proj = nn.Linear(inner, 2, bias=False)

    def _scan(self, x: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor]:
        dt, B, C = self.x_proj(x).split([1, self.n, self.n], -1)
        dt = F.softplus(dt).unsqueeze(-1)
        decay = torch.exp(-dt * torch.exp(self.A_log))
        ssm_state = decay * ssm_state + dt * x.unsqueeze(-1) * B.unsqueeze(1)
        return (ssm_state * C.unsqueeze(1)).sum(-1), ssm_state

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_proj(u).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : u.size(1)].transpose(1, 2))
        state, outputs = u.new_zeros(u.size(0), self.inner, self.n), []
        for t in range(u.size(1)):
            y, state = self._scan(x[:, t], state)
            outputs.append(y)
        return self.out_proj(torch.stack(outputs, 1) * F.silu(z))

    def step(self, u: Tensor, conv_state: Tensor, ssm_state: Tensor):
        x, z = self.in_proj(u).chunk(2, -1)
        conv_state = torch.cat([conv_state[..., 1:], x.unsqueeze(-1)], -1)
        x = F.silu((conv_state * self.conv.weight.squeeze(1)).sum(-1) + self.conv.bias)
        y, ssm_state = self._scan(x, ssm_state)
        return self.out_proj(y * F.silu(z)), conv_state, ssm_state


def _selective_start(lanes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(lanes, 4, 3), torch.zeros(lanes, 4, 2)


def _selective_step(m: SelectiveSpace, x: Tensor, state):
    y, conv_state, ssm_state = m.step(x, *state)
    return y, (conv_state, ssm_state)


class LiquidCell(nn.Module):
    """One step of a closed-form continuous cell, with the time since the last step."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(size + hidden, 7), nn.Tanh())
        self.ff1, self.ff2 = nn.Linear(7, hidden), nn.Linear(7, hidden)
        self.time = nn.Linear(7, hidden)

    def forward(self, x: Tensor, hx: Tensor, ts: Tensor | float):
        z = self.backbone(torch.cat([x, hx], 1))
        gate = torch.sigmoid(self.time(z) * ts)
        new = torch.tanh(self.ff1(z)) * (1 - gate) + gate * torch.tanh(self.ff2(z))
        return new, new


class Liquid(nn.Module):
    """Liquid-network style: batch first, hx=None and timespans=None, (readout, hx) back."""

    def __init__(self, size: int = D, hidden: int = 5) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = LiquidCell(size, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, input: Tensor, hx: Tensor | None = None, timespans: Tensor | None = None):
        if hx is None:
            hx = torch.zeros((input.size(0), self.hidden), device=input.device)
        sequence = []
        for t in range(input.size(1)):
            ts = 1.0 if timespans is None else timespans[:, t : t + 1]
            out, hx = self.cell(input[:, t], hx, ts)
            sequence.append(self.fc(out))
        return torch.stack(sequence, dim=1), hx


class Legendre(nn.Module):
    """Legendre-memory style: a fixed state space beside a hidden state, (h, m) as the state."""

    def __init__(self, size: int = D, hidden: int = 5, order: int = 4, theta: float = 6.0) -> None:
        super().__init__()
        self.hidden, self.order = hidden, order
        q = torch.arange(order, dtype=torch.get_default_dtype())
        R = (2 * q + 1).unsqueeze(1) / theta
        i, j = torch.meshgrid(q, q, indexing="ij")
        A = R * torch.where(i < j, -1.0, (-1.0) ** (i - j + 1))
        self.register_buffer("A", torch.matrix_exp(A))
        self.register_buffer("B", R.squeeze(1) * (-1.0) ** q)
        self.e_x, self.e_h = nn.Linear(size, 1, bias=False), nn.Linear(hidden, 1, bias=False)
        self.W_x, self.W_h = nn.Linear(size, hidden), nn.Linear(hidden, hidden, bias=False)
        self.W_m = nn.Linear(order, hidden, bias=False)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None):
        if state is None:
            state = x.new_zeros(x.size(0), self.hidden), x.new_zeros(x.size(0), self.order)
        h, m = state
        output = []
        for t in range(x.size(1)):
            u = self.e_x(x[:, t]) + self.e_h(h)
            m = m @ self.A.T + u * self.B
            h = torch.tanh(self.W_x(x[:, t]) + self.W_h(h) + self.W_m(m))
            output.append(h)
        return torch.stack(output, 1), (h, m)


class Reservoir(nn.Module):
    """Echo-state style: fixed random weights in buffers, a trained readout, leaky state."""

    def __init__(self, size: int = D, units: int = 8) -> None:
        super().__init__()
        W = torch.randn(units, units)
        self.register_buffer("W", 0.9 * W / torch.linalg.eigvals(W).abs().max())
        self.register_buffer("W_in", torch.randn(units, size))
        self.readout = nn.Linear(units, 2)
        self.leak = 0.6

    def forward(self, u: Tensor, h: Tensor | None = None):
        if h is None:
            h = u.new_zeros(u.size(1), self.W.size(0))
        states = []
        for frame in u:
            h = (1 - self.leak) * h + self.leak * torch.tanh(frame @ self.W_in.T + h @ self.W.T)
            states.append(h)
        return self.readout(torch.stack(states)), h


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


class RetentionFlag(nn.Module):
    """Retention style: state in forward(x, state=None, return_state=False), decay per head."""

    def __init__(self, size: int = D, dim: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(size, 3 * dim, bias=False)
        self.register_buffer("gamma", torch.tensor(0.8))
        self.out = nn.Linear(dim, 2)

    def forward(self, x: Tensor, state: Tensor | None = None, return_state: bool = False):
        batch, steps, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        power = torch.arange(steps, device=x.device)
        lag = power.unsqueeze(1) - power
        decay = torch.where(lag >= 0, self.gamma ** lag.clamp(min=0), torch.zeros(()))
        y = (q @ k.transpose(1, 2) * decay) @ v
        grow = self.gamma ** (steps - 1 - power)
        new = (k * grow.view(1, -1, 1)).transpose(1, 2) @ v
        if state is not None:
            y = y + (self.gamma ** (power + 1)).view(1, -1, 1) * (q @ state)
            new = new + self.gamma**steps * state
        y = self.out(y)
        return (y, new) if return_state else y


def _retention_step(m: RetentionFlag, x: Tensor, state):
    y, state = m(swap(x), state, return_state=True)
    return swap(y), state


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
        "min_gru_flag",
        MinGRU,
        floats(D),
        "keyword",
        keywords={"call": lambda m, x, s: m(x, s, return_next_prev_hidden=True)},
        oracle=chunked(_min_gru_step),
        note="the state comes back only by the flag return_next_prev_hidden",
    ),
    Case("lru_complex", LRU, floats(D), "carry", oracle=chunked(_first), note="a complex state"),
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
    Case("linear_attention_state", LinearAttention, floats(D), "carry", oracle=chunked(_first)),
    Case(
        "sliding_window_cache",
        SlidingWindow,
        floats(D),
        "carry",
        oracle=chunked(_first, lambda m, x: m.init_cache(x.size(1))),
        note="start method init_cache; attention over a fixed past that the state holds",
    ),
    Case(
        "selective_space_step",
        SelectiveSpace,
        floats(D),
        "keyword",
        keywords={
            "call": lambda m, x, s: (lambda y, *s: (y, s))(*m.step(x, *s)),
            "start": _selective_start,
        },
        oracle=stepped(_selective_step, lambda m, x: _selective_start(x.size(1))),
        plain=lambda m, x: swap(m(swap(x))),
        note="two states as arguments of step",
    ),
    Case(
        "liquid_timespans",
        Liquid,
        floats(D),
        "carry",
        oracle=chunked(_first),
        note="third parameter timespans=None is no state",
    ),
    Case("legendre_memory", Legendre, floats(D), "carry", oracle=chunked(_first)),
    Case(
        "reservoir_buffers",
        Reservoir,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, h: m(x, h)),
        note="nothing trained upstream of the state: no gradient crosses a boundary, none lost",
    ),
    Case(
        "retention_flag",
        RetentionFlag,
        floats(D),
        "keyword",
        keywords={"call": lambda m, x, s: m(x, s, return_state=True)},
        oracle=chunked(_retention_step),
    ),
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
