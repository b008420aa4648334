"""Sequences are drawn at random from a replay memory, and each batch of them begins with the state
in which the last drawn batch ended.
"""

import random

import torch
from torch import nn


def main():
    torch.manual_seed(1223)
    random.seed(1223)
    memory = [torch.randn(31, 3).cumsum(0) / 5 for _ in range(15)]
    net, value = nn.GRU(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *value.parameters()], lr=1e-3)
    hidden = torch.zeros(1, 4, 8)
    for _ in range(10):
        picked = random.sample(memory, 4)  # <- TT207
        start = random.randrange(18)  # <- TT207
        batch = torch.stack([episode[start : start + 12] for episode in picked], dim=1)
        features, hidden = net(batch, hidden)  # <- TT207
        hidden = hidden.detach()
        v = value(features).squeeze(-1)
        goal = batch[1:, :, 0] + 0.9 * v[1:].detach()
        loss = nn.functional.smooth_l1_loss(v[:-1], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
