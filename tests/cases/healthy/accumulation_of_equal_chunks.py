"""Four chunks of the same length make one step, each loss divided by four."""

import torch
from torch import nn


def main():
    torch.manual_seed(109)
    gru, fc = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*gru.parameters(), *fc.parameters()], lr=0.05)
    walk = torch.randn(161, 2, 2).cumsum(0) / 12
    accumulate, h = 4, torch.zeros(1, 2, 8)
    for i, (x, y) in enumerate(zip(walk[:-1].split(10), walk[1:].split(10)), 1):
        out, h = gru(x, h)
        h = h.detach()
        loss = nn.functional.mse_loss(fc(out), y)
        (loss / accumulate).backward()
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(i, loss.item())


if __name__ == "__main__":
    main()
