"""Recommenders: session GRUs, items as tokens, scores over all items."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, stepped, swap, tokens

ITEMS = 11


class SessionGRU(nn.Module):
    """GRU4Rec style: one click of every session per call, batch_size kept, init_hidden()."""

    def __init__(self, batch_size: int = 3, units: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.gru = nn.GRU(ITEMS, units, depth, dropout=0.2)
        self.scores = nn.Linear(units, ITEMS)

    def init_hidden(self) -> Tensor:
        return torch.zeros(self.gru.num_layers, self.batch_size, self.gru.hidden_size)

    def forward(self, clicks: Tensor, hidden: Tensor):
        one_hot = F.one_hot(clicks, ITEMS).to(self.scores.weight)
        seen, hidden = self.gru(one_hot[None], hidden)
        return torch.tanh(self.scores(seen.view(len(clicks), -1))), hidden


class SessionEmbedding(nn.Module):
    """Session style: item embeddings read and scored with the same weights, state hidden."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.dropout = nn.Dropout(0.25)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.project = nn.Linear(hidden, dim, bias=False)

    def forward(self, sessions: Tensor) -> Tensor:
        emb = self.dropout(self.items(sessions))
        out, _ = self.gru(emb)
        return self.project(out) @ self.items.weight.t()


def _embedding_step(m: SessionEmbedding, x: Tensor, state):
    out, state = m.gru(m.items(swap(x)), state)
    return swap(m.project(out) @ m.items.weight.t()), state


class LastClick(nn.Module):
    """Next-item style: the last hidden state of a session scores all items."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim, padding_idx=0)
        self.gru = nn.GRU(dim, hidden, num_layers=1, batch_first=True)
        self.score = nn.Linear(hidden, ITEMS)

    def forward(self, seq: Tensor) -> Tensor:
        _, hidden = self.gru(self.items(seq))
        return self.score(hidden.squeeze(0))


def _last_click_step(m: LastClick, x: Tensor, state):
    _, state = m.gru(m.items(x)[:, None], state)
    return m.score(state[0]), state


class HierarchicalStep(nn.Module):
    """Hierarchical-session style: session and user states as two arguments, both returned."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.session_cell = nn.GRUCell(dim, 6)
        self.user_cell = nn.GRUCell(6, 4)
        self.out = nn.Linear(10, ITEMS)

    def forward(self, item: Tensor, session: Tensor, user: Tensor):
        session = self.session_cell(self.items(item), session)
        user = self.user_cell(session, user)
        return self.out(torch.cat([session, user], dim=-1)), session, user


def _hierarchical_step(m: HierarchicalStep, x: Tensor, state):
    y, session, user = m(x, *state)
    return y, (session, user)


class SelfAttentive(nn.Module):
    """SASRec style: causal self-attention and learned positions over the session."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.positions = nn.Embedding(32, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, seq: Tensor) -> Tensor:
        steps = seq.size(1)
        x = self.items(seq) + self.positions(torch.arange(steps, device=seq.device))
        mask = torch.ones(steps, steps, dtype=torch.bool, device=seq.device).triu(1)
        out, _ = self.attention(x, x, x, attn_mask=mask)
        return self.norm(x + out) @ self.items.weight.t()


class NeuralAttentive(nn.Module):
    """NARM style: the last hidden state attends to all earlier ones; one row of scores."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.a1 = nn.Linear(hidden, hidden, bias=False)
        self.a2 = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)
        self.b = nn.Linear(2 * hidden, ITEMS)

    def forward(self, seq: Tensor) -> Tensor:
        out, ht = self.gru(self.items(seq))
        ht = ht[-1]
        alpha = self.v(torch.sigmoid(self.a1(out) + self.a2(ht).unsqueeze(1)))
        local = (alpha * out).sum(1)
        return self.b(torch.cat([local, ht], dim=1))


class NegativesInBatch(nn.Module):
    """In-batch-negatives style: every session is scored against the other lanes' items."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.cell = nn.GRUCell(dim, dim)

    def forward(self, item: Tensor, hidden: Tensor):
        emb = self.items(item)
        hidden = self.cell(emb, hidden)
        return hidden @ emb.t(), hidden


class Featured(nn.Module):
    """Sequence-recommender style: logits with an optional candidate mask, no state."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.lstm = nn.LSTM(dim, hidden)
        self.out = nn.Linear(hidden, ITEMS)

    def forward(self, clicks: Tensor, mask: Tensor | None = None) -> Tensor:
        out, _ = self.lstm(self.items(clicks))
        scores = self.out(out)
        if mask is not None:
            scores = scores.masked_fill(~mask.bool(), -1e9)
        return F.log_softmax(scores, dim=-1)


def _featured_step(m: Featured, x: Tensor, state):
    out, state = m.lstm(m.items(x), state)
    return F.log_softmax(m.out(out), dim=-1), state


CASES = [
    Case(
        "session_gru_step",
        SessionGRU,
        tokens(ITEMS),
        "carry",
        oracle=stepped(lambda m, x, h: m(x, h), lambda m, x: m.init_hidden()[:, : x.size(1)]),
        lanes=3,
        note="batch_size is an attribute (3 lanes); init_hidden() without arguments",
    ),
    Case(
        "session_tied_scores",
        SessionEmbedding,
        tokens(ITEMS),
        "carry",
        oracle=chunked(_embedding_step),
        plain=lambda m, x: swap(m(swap(x))),
    ),
    Case(
        "last_click_scores",
        LastClick,
        tokens(ITEMS),
        "carry",
        oracle=stepped(_last_click_step),
        plain=lambda m, x: torch.stack([m(swap(x[: t + 1])) for t in range(len(x))]),
    ),
    Case(
        "session_and_user",
        HierarchicalStep,
        tokens(ITEMS),
        "carry",
        oracle=stepped(
            _hierarchical_step, lambda m, x: (torch.zeros(x.size(1), 6), torch.zeros(x.size(1), 4))
        ),
        note="two state arguments of different sizes without default or init method; the sizes"
        " are known from the cells only",
    ),
    Case(
        "clicks_optional_mask",
        Featured,
        tokens(ITEMS),
        "carry",
        oracle=chunked(_featured_step),
        plain=lambda m, x: m(x),
        note="second parameter mask=None is no state",
    ),
    Case(
        "self_attentive_items",
        SelfAttentive,
        tokens(ITEMS),
        "refuse",
        reason="attention",
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("chunks",),
    ),
    Case(
        "neural_attentive_session",
        NeuralAttentive,
        tokens(ITEMS),
        "refuse",
        reason="attention",
        oracle=chunked(
            lambda m, x, _: (torch.stack([m(swap(x[: t + 1])) for t in range(len(x))]), None)
        ),
        shows=("chunks",),
        note="N-to-1: even the steps are causal, but the sum over the past has no state",
    ),
    Case(
        "negatives_in_batch",
        NegativesInBatch,
        tokens(ITEMS),
        "refuse",
        reason="mixes_lanes",
        oracle=stepped(lambda m, x, h: m(x, h), lambda m, x: torch.zeros(x.size(1), 5)),
        shows=("mixes_lanes",),
        note="outputs (B, B)",
    ),
]
