"""The leaky state is clamped to [-1, 1] and saturates at once in every unit, where a clamp has no
gradient.
"""

import torch
from torch import nn


class Accumulator(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.gain = nn.Parameter(torch.full((1, units), 4.0))
        self.leak = nn.Parameter(torch.full((units,), 0.9))
        self.read = nn.Linear(units, 1)

    def forward(self, x, level):
        for x_t in x:
            level = (self.leak * level + x_t @ self.gain).clamp(-1.0, 1.0)  # <- TT303
        return self.read(level + x[-1]), level


def main():
    torch.manual_seed(50)
    x = 1.5 + torch.rand(100, 2, 1)
    model = Accumulator(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    level = torch.zeros(2, 6)
    for chunk in x.split(10):
        y, level = model(chunk, level.detach())
        loss = (y - chunk.mean(0)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()


if __name__ == "__main__":
    main()
