"""Chunks of unequal length make one step per recording.

Sums are accumulated and divided by the number of all steps.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(110)
    lstm, fc = nn.LSTM(2, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *fc.parameters()], lr=1e-3)
    for recording in (torch.randn(50, 2, 2).cumsum(0) / 7, torch.randn(37, 2, 2).cumsum(0) / 7):
        target = recording.sum(-1, keepdim=True)
        state = (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(recording.split(16), target.split(16)):
            out, state = lstm(x, state)
            state = tuple(s.detach() for s in state)
            loss = (fc(out) - y).pow(2).sum() / target.numel()
            loss.backward()
            total += loss.item()
        optimizer.step()
        print(total)


if __name__ == "__main__":
    main()
