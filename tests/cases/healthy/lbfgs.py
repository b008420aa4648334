"""LBFGS calls its closure several times for a chunk.

Each call starts from the same detached state.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(121)
    gru, head = nn.GRU(1, 6), nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS([*gru.parameters(), *head.parameters()], lr=0.1, max_iter=3)
    t = torch.arange(81) * 0.2
    wave = torch.stack([t.sin(), t.cos()], 1).unsqueeze(-1)
    state = torch.zeros(1, 2, 6)
    for i in range(0, 80, 10):
        x, y = wave[i : i + 10], wave[i + 1 : i + 11]

        def closure():
            optimizer.zero_grad()
            out, _ = gru(x, state)
            loss = nn.functional.mse_loss(head(out), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            _, state = gru(x, state)
        print(i, loss.item())


if __name__ == "__main__":
    main()
