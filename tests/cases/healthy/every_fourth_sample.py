"""The signal is read at a quarter of its rate: each chunk is a strided slice, and the next begins
where it ends.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2001)
    signal = torch.randn(801, 2, 1).cumsum(0) / 20
    gru, head = nn.GRU(1, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    h = None
    for i in range(0, 800, 80):
        x, y = signal[i : i + 80 : 4], signal[i + 1 : i + 81 : 4]
        out, h = gru(x, h)
        h = h.detach()
        loss = nn.functional.mse_loss(head(out), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(i, loss.item())


if __name__ == "__main__":
    main()
