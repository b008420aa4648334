"""The state of the GRU is detached. The running mean that the features are centred with is not, and
it reaches back into every chunk before.
"""

# raises: second time

import torch
from torch import nn


class Centred(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.features = nn.Linear(n_in, n)
        self.gru = nn.GRU(n, n)
        self.read = nn.Linear(n, n_in)
        self.mean = torch.zeros(n)

    def forward(self, x, h):
        f = self.features(x)
        self.mean = 0.95 * self.mean + 0.05 * f.mean((0, 1))  # <- TT101
        y, h = self.gru(f - self.mean, h)
        return self.read(y), h


def main():
    torch.manual_seed(1008)
    walk = torch.randn(101, 4, 2).cumsum(0) / 9
    model = Centred(2, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 4, 8)
    for x, y in zip(walk[:-1].split(20), walk[1:].split(20)):
        prediction, h = model(x, h)  # <- TT101
        h = h.detach()
        optimizer.zero_grad()
        nn.functional.mse_loss(prediction, y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
