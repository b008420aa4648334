"""The first of two layers is frozen; both states are carried and detached."""

import torch
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high, self.fc = nn.GRU(2, 6), nn.GRU(6, 6), nn.Linear(6, 2)
        for p in self.low.parameters():
            p.requires_grad = False

    def forward(self, x, states):
        y, low = self.low(x, states["low"])
        y, high = self.high(y, states["high"])
        return self.fc(y), {"low": low, "high": high}


def main():
    torch.manual_seed(124)
    model = Two()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    walk = torch.randn(101, 2, 2).cumsum(0) / 10
    states = {"low": torch.zeros(1, 2, 6), "high": torch.zeros(1, 2, 6)}
    for i in range(0, 100, 10):
        y, states = model(walk[i : i + 10], states)
        loss = nn.functional.mse_loss(y, walk[i + 1 : i + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states = {name: h.detach() for name, h in states.items()}


if __name__ == "__main__":
    main()
