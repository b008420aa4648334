"""The state is carried and detached, and passed by its keyword, after the head was trained alone
for a while.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(202)
    lstm, cell, head = nn.LSTM(2, 6), nn.GRUCell(2, 6), nn.Linear(6, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *cell.parameters(), *head.parameters()])
    stream = torch.randn(240, 2, 2).cumsum(0) / 10
    for _ in range(10):
        optimizer.zero_grad()
        head(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    state, h = None, torch.zeros(2, 6)
    for chunk in stream.split(12):
        y, state = lstm(chunk, hx=state)
        loss = head(y).square().mean()
        for x in chunk:
            h = cell(x, hx=h)
            loss = loss + head(h).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state, h = tuple(part.detach() for part in state), h.detach()


if __name__ == "__main__":
    main()
