"""Gradients are gathered over a recording with retain_graph=True at every chunk: each backward runs
through all chunks so far.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(12)
    recording = torch.randn(4, 161, 2).cumsum(1) / 10
    gru = nn.GRU(2, 8, batch_first=True)
    head = nn.Linear(8, 2)
    model = nn.ModuleList([gru, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(2):
        optimizer.zero_grad()
        h = torch.zeros(1, 4, 8)
        for start in range(0, 160, 10):
            x = recording[:, start : start + 10]
            y = recording[:, start + 1 : start + 11]
            out, h = gru(x, h)
            loss = nn.functional.mse_loss(head(out), y) / 16
            loss.backward(retain_graph=True)  # <- TT102
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
