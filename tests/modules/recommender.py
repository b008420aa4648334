"""Recommenders: session GRUs, items as tokens, scores over all items."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, stepped, swap, tokens

ITEMS = 11


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


CASES = [
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
