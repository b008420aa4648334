"""Modern recurrences: minimal gates, diagonal state spaces, running attention, memories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, swap

D = 3


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
    Case("slstm_cell", SLSTM, floats(D), "carry", oracle=chunked(_first)),
    # How far a step looks back depends on the chunk; the memory is detached as well.
    Case(
        "memory_xl",
        MemoryXL,
        floats(D),
        "refuse",
        reason="attention",
        also=("detach",),
    ),
    # Positions restart at every chunk.
    Case(
        "positions_per_call",
        PositionsGRU,
        floats(D),
        "refuse",
        reason="other",
    ),
]
