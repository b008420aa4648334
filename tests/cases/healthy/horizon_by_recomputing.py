"""Stride 5, horizon 15: every window is run again from a stored state without a graph, and only its
last 5 steps have a loss.
"""

from collections import deque

import torch
from torch import nn

STRIDE, HORIZON = 5, 15


def main():
    torch.manual_seed(114)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    walk = torch.randn(91, 3, 2).cumsum(0) / 10
    starts = deque([torch.zeros(1, 3, 8)], maxlen=HORIZON // STRIDE)
    for end in range(STRIDE, 91, STRIDE):
        begin = max(0, end - HORIZON)
        out, _ = gru(walk[begin:end], starts[0])
        loss = nn.functional.mse_loss(head(out[-STRIDE:]), walk[end - STRIDE + 1 : end + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            _, h = gru(walk[end - STRIDE : end], starts[-1])
        starts.append(h)


if __name__ == "__main__":
    main()
