"""Lanes are reset by writing zeros into the state, but only after backward and detach, when no
graph needs it.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2110)
    gru, head = nn.GRU(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    lanes, chunk = 4, 12
    recordings = iter([torch.randn(n, 3).cumsum(0) / 8 for n in (48, 24, 36, 60, 48, 36, 48, 24)])
    live, place = [next(recordings) for _ in range(lanes)], [0] * lanes
    h = torch.zeros(1, lanes, 8)
    for _ in range(5):
        x = torch.stack([r[p : p + chunk] for r, p in zip(live, place)], 1)
        out, h = gru(x, h)
        loss = nn.functional.mse_loss(head(out), x.sum(-1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = h.detach()
        for i in range(lanes):
            place[i] += chunk
            if place[i] == len(live[i]):
                live[i], place[i] = next(recordings), 0
                h[:, i] = 0.0


if __name__ == "__main__":
    main()
