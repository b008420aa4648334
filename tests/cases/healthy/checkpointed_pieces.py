"""Exact gradients over a long sequence in little memory: each piece is run under
torch.utils.checkpoint, the state goes on with its graph, and there is one backward.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x, y, h):
        loss = 0.0
        for x_t, y_t in zip(x, y):
            h = self.cell(x_t, h)
            loss = loss + (self.head(h) - y_t).square().mean()
        return loss, h


def main():
    torch.manual_seed(2118)
    core = Core()
    optimizer = torch.optim.Adam(core.parameters(), lr=2e-3)
    for _ in range(3):
        walk = torch.randn(101, 3, 2).cumsum(0) / 9
        h, total = torch.zeros(3, 8), 0.0
        for x, y in zip(walk[:-1].split(20), walk[1:].split(20)):
            loss, h = checkpoint(core, x, y, h, use_reentrant=False)
            total = total + loss / 100
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
