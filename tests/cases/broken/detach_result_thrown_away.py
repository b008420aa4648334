"""`self.h.detach()` returns a new tensor.

The result is thrown away, so the state keeps the graph of the chunk before.
"""

# raises: second time

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.gru = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.h = None

    def forward(self, x):
        if self.h is not None:
            self.h.detach()  # <- TT101
        out, self.h = self.gru(x, self.h)  # <- TT101
        return self.head(out)


def main():
    torch.manual_seed(0)
    signal = torch.randn(4, 96, 3).cumsum(1) / 10
    labels = (signal.sum(-1) > 0).long()

    model = Tagger(3, 8, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for start in range(0, 96, 12):
        x, y = signal[:, start : start + 12], labels[:, start : start + 12]
        optimizer.zero_grad()
        loss = criterion(model(x).reshape(-1, 2), y.reshape(-1))
        loss.backward()
        optimizer.step()
        print(f"{start:3d} {loss.item():.4f}")


if __name__ == "__main__":
    main()
