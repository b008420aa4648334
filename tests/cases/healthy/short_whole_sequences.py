"""Plain backpropagation through short whole sequences, shuffled.

Each starts from nothing because each is complete.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out)


def main():
    torch.manual_seed(103)
    sequences = torch.randn(32, 16, 2).cumsum(1) / 4
    loader = DataLoader(
        TensorDataset(sequences[:, :-1], sequences[:, 1:]), batch_size=8, shuffle=True
    )
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
