"""Steps that were not measured are passed over; the state goes on behind them."""

import torch
from torch import nn


def main():
    torch.manual_seed(83)
    level = torch.randn(151, 2, 2).cumsum(0) / 4
    level[torch.rand(151) < 0.2] = float("nan")
    cell, head = nn.LSTMCell(2, 9), nn.Linear(9, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-2)
    h, c = torch.zeros(2, 9), torch.zeros(2, 9)
    for begin in range(0, 150, 15):
        h, c, loss = h.detach(), c.detach(), torch.zeros(())
        for t in range(begin, begin + 15):
            if level[t].isnan().any():
                continue
            h, c = cell(level[t], (h, c))
            if not level[t + 1].isnan().any():
                loss = loss + (head(h) - level[t + 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
