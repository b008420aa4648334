"""The states of an LSTM cell are kept in lists of numbers between the steps."""

import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.LSTMCell(3, 6), nn.Linear(6, 3)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
x = torch.randn(101, 2, 3).cumsum(0) / 10
h = c = torch.zeros(2, 6)
for i in range(0, 100, 10):
    losses = []
    for t in range(i, i + 10):
        h, c = cell(x[t], (h, c))  # <- TT203
        losses.append((head(h) - x[t + 1]).square().mean())
        h = torch.tensor(h.detach().tolist())  # <- TT203
        c = torch.tensor(c.detach().tolist())  # <- TT203
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    optimizer.step()
