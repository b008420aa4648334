"""The recordings lie in the order of their lengths, the longest first, so the lanes that go on are
the first rows, of the inputs and of the state alike.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2104)
    lengths = [100, 80, 80, 40, 20]
    recordings = [torch.randn(n + 1, 2).cumsum(0) / 7 for n in lengths]
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(1, 5, 8)
    for t in range(0, 100, 20):
        n = sum(length >= t + 20 for length in lengths)
        chunk = torch.stack([r[t : t + 21] for r in recordings[:n]], dim=1)
        out, h = gru(chunk[:-1], h[:, :n].detach())
        loss = nn.functional.mse_loss(head(out), chunk[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(t, n, loss.item())


if __name__ == "__main__":
    main()
