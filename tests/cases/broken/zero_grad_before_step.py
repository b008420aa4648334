"""zero_grad stands between backward and step: the optimizer never sees a gradient."""

import torch
from torch import nn


def main():
    torch.manual_seed(45)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.1)
    x = torch.randn(100, 3, 2).cumsum(0) / 10
    y = x.sum(-1, keepdim=True).tanh()
    h = torch.zeros(1, 3, 8)
    for i in range(10):
        out, h = gru(x[10 * i : 10 * i + 10], h.detach())
        loss = nn.functional.mse_loss(head(out), y[10 * i : 10 * i + 10])
        loss.backward()
        optimizer.zero_grad()  # <- TT302
        optimizer.step()
        print(i, loss.item())


if __name__ == "__main__":
    main()
