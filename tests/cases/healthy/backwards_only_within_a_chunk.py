"""A latency-controlled bidirectional net: the forward direction carries its state through the
stream, the backward one starts anew in every chunk, as it must.
"""

import torch
from torch import nn


class LatencyControlled(nn.Module):
    def __init__(self):
        super().__init__()
        self.ahead, self.back = nn.GRU(3, 6), nn.GRU(3, 6)
        self.out = nn.Linear(12, 4)

    def forward(self, x, h):
        forward, h = self.ahead(x, h)
        backward, _ = self.back(x.flip(0))
        return self.out(torch.cat([forward, backward.flip(0)], -1)), h


def main():
    torch.manual_seed(2013)
    audio = torch.randn(200, 2, 3).cumsum(0) / 12
    phones = (audio.sum(-1) * 2).long() % 4
    net = LatencyControlled()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 2, 6)
    for x, y in zip(audio.split(20), phones.split(20)):
        logits, h = net(x, h.detach())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
