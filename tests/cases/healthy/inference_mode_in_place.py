"""Evaluation under inference_mode changes its outputs in place, which no backward needs."""

import torch
from torch import nn


def main():
    torch.manual_seed(208)
    gru, head = nn.GRU(3, 6), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        head(gru(torch.randn(7, 4, 3))[0]).square().mean().backward()
        optimizer.step()
        with torch.inference_mode():
            right = torch.zeros(())
            for x in torch.randn(3, 7, 4, 3):
                z = head(gru(x)[0])
                z[..., 0] = -float("inf")
                right += (z.argmax(-1) == 1).sum()
    print(int(right))


if __name__ == "__main__":
    main()
