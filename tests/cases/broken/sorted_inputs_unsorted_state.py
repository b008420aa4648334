"""The lanes of every chunk are sorted by loudness.

The carried state stays in the order of the chunk before.
"""

import torch
from torch import nn


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 8, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)  # <- TT206
        return self.fc(y), h


def main():
    torch.manual_seed(36)
    data = torch.randn(5, 121, 2).cumsum(1) / 4
    model = Sorter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 5, 8)
    for start in range(0, 120, 12):
        x, y = data[:, start : start + 12], data[:, start + 1 : start + 13]
        order = x.abs().sum((1, 2)).argsort(descending=True)
        x, y = x[order], y[order]
        prediction, h = model(x, h.detach())  # <- TT206
        loss = nn.functional.mse_loss(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
