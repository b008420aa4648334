"""Two layers keep their states in a dict, and only the first is detached between chunks."""

# raises: second time

import torch
from torch import nn


class TwoLevel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast = nn.LSTM(2, 8)
        self.slow = nn.LSTM(8, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x, states):
        y, fast = self.fast(x, states["fast"])
        y, slow = self.slow(y, states["slow"])  # <- TT101
        return self.out(y), {"fast": fast, "slow": slow}


def main():
    torch.manual_seed(3)
    model = TwoLevel()
    optim = torch.optim.Adam(model.parameters())
    x = torch.randn(120, 5, 2).cumsum(0) / 8
    target = x.mean(-1, keepdim=True).roll(3, 0)

    states = {"fast": None, "slow": None}
    for step in range(10):
        sl = slice(12 * step, 12 * (step + 1))
        if states["fast"] is not None:
            states["fast"] = tuple(s.detach() for s in states["fast"])
        pred, states = model(x[sl], states)  # <- TT101
        loss = (pred - target[sl]).pow(2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 5 == 0:
            print("step", step, "loss", loss.item())


if __name__ == "__main__":
    main()
