"""Recordings of unequal length run side by side; the state keeps the lanes of those that go on."""

import torch
from torch import nn


def main():
    torch.manual_seed(71)
    lengths = [72, 60, 36, 24]
    recordings = [torch.randn(n + 1, 4) for n in lengths]
    gru, head = nn.GRU(4, 9), nn.Linear(9, 4)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()])
    h = torch.zeros(1, len(lengths), 9)
    for begin in range(0, 72, 12):
        running = [r for r, n in zip(recordings, lengths) if n > begin]
        x = torch.stack([r[begin : begin + 12] for r in running], dim=1)
        following = torch.stack([r[begin + 1 : begin + 13] for r in running], dim=1)
        out, h = gru(x, h[:, : len(running)].detach())
        loss = nn.functional.mse_loss(head(out), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
