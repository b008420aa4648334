"""A loader's samples come first in the batch, where the layer expects the steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gestures(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 9), nn.Linear(9, 3)

    def forward(self, samples):
        out, _ = self.gru(samples)  # <- TT209
        return self.head(out[:, -1])


def main():
    torch.manual_seed(61)
    movements = torch.randn(48, 15, 4).cumsum(1)
    labels = movements[:, :, 0].mean(1).clamp(-1, 1).round().long() + 1
    loader = DataLoader(TensorDataset(movements, labels), batch_size=8, shuffle=True)
    model = Gestures()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for samples, label in loader:
            loss = nn.functional.cross_entropy(model(samples), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
