"""Means over chunks of 16, 16, 16 and 2 steps are gathered into one step as if each chunk counted
the same.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(43)
    lstm, head = nn.LSTM(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for epoch in range(3):
        walk = torch.randn(51, 3, 2).cumsum(0) / 7
        chunks = list(zip(walk[:-1].split(16), walk[1:].split(16)))
        state = (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
        optimizer.zero_grad()
        for x, y in chunks:
            out, state = lstm(x, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(head(out), y) / len(chunks)
            loss.backward()  # <- TT301
        optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
