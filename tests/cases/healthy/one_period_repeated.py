"""The series is one period, joined with itself: its end is where the next period begins."""

import torch
from torch import nn


def main():
    torch.manual_seed(1308)
    period = torch.randn(60, 3, 2).cumsum(0) / 8
    series = torch.cat([period] * 3)
    cell, head = nn.GRUCell(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(3, 8)
    for i in range(0, 160, 10):
        loss = 0.0
        for t in range(i, i + 10):
            h = cell(series[t], h)
            loss = loss + nn.functional.mse_loss(head(h), series[t + 1]) / 10
        h = h.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
