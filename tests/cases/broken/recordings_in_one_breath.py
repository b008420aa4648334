"""Several recordings are played one after another, and the state of each enters the next: it is
made once, before the loop.
"""

import torch
from torch import nn


def load_recordings():
    lengths = [60, 40, 80, 50]
    return [torch.randn(n + 1, 1, 2).cumsum(0) / 8 + 3 * i for i, n in enumerate(lengths)]


def main():
    torch.manual_seed(30)
    lstm, head = nn.LSTM(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=2e-3)
    state = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    for number, recording in enumerate(load_recordings()):
        for i in range(0, len(recording) - 1, 10):
            x, y = recording[i : i + 10], recording[i + 1 : i + 11]
            out, state = lstm(x, state)  # <- TT204
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(number, loss.item())


if __name__ == "__main__":
    main()
