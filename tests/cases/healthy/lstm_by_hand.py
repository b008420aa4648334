"""Truncated backpropagation by hand with nn.LSTM: both parts of the state detached between chunks,
fresh at every epoch.
"""

import torch
from torch import nn


def detach(state):
    return tuple(s.detach() for s in state)


def main():
    torch.manual_seed(104)
    lstm, head = nn.LSTM(1, 10, num_layers=2), nn.Linear(10, 1)
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    t = torch.arange(121) * 0.2
    wave = torch.stack([t.sin(), t.cos(), (t / 2).sin()], 1).unsqueeze(-1)
    for epoch in range(2):
        state = (torch.zeros(2, 3, 10), torch.zeros(2, 3, 10))
        for x, y in zip(wave[:-1].split(12), wave[1:].split(12)):
            out, state = lstm(x, detach(state))
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
