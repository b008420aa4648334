"""Lanes whose recording ended are reset by writing zeros into the state, which tanh needs for its
gradient.
"""

# raises: in-place

import torch
from torch import nn


class ResettingCell(nn.Module):
    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.i2h = nn.Linear(n_in, n_hidden)
        self.h2h = nn.Linear(n_hidden, n_hidden, bias=False)

    def forward(self, x, ended, h):
        hs = []
        for x_t, ended_t in zip(x, ended):
            h = torch.tanh(self.i2h(x_t) + self.h2h(h))
            hs.append(h.clone())
            h[ended_t] = 0.0  # <- TT103
        return torch.stack(hs), h


def main():
    torch.manual_seed(16)
    cell, head = ResettingCell(3, 6), nn.Linear(6, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    x = torch.randn(64, 4, 3)
    ended = torch.rand(64, 4) < 0.1
    h = torch.zeros(4, 6)
    for i in range(8):
        rows = slice(8 * i, 8 * i + 8)
        hs, h = cell(x[rows], ended[rows], h.detach())
        loss = (head(hs).squeeze(-1) - x[rows].sum(-1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
