"""Forecasting from a look-back of 24 values: overlapping windows, one target each, a zero state for
every window.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def create_sequences(series, lookback):
    xs, ys = [], []
    for i in range(len(series) - lookback):
        xs.append(series[i : i + lookback])
        ys.append(series[i + lookback])
    return np.array(xs, dtype=np.float32), np.array(ys, dtype=np.float32)


class PriceModel(nn.Module):
    def __init__(self, hidden=12, layers=2):
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.lstm = nn.LSTM(1, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        h0 = torch.zeros(self.layers, x.size(0), self.hidden)
        c0 = torch.zeros(self.layers, x.size(0), self.hidden)
        out, _ = self.lstm(x, (h0.detach(), c0.detach()))
        return self.fc(out[:, -1, :])


def main():
    torch.manual_seed(2007)
    rng = np.random.default_rng(2007)
    prices = rng.normal(size=(120, 1)).cumsum(0) / 10
    x, y = create_sequences(prices, 24)
    cut = 76
    train = DataLoader(
        TensorDataset(torch.from_numpy(x[:cut]), torch.from_numpy(y[:cut])), batch_size=16
    )
    model, criterion = PriceModel(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        for xb, yb in train:
            loss = criterion(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            test = criterion(model(torch.from_numpy(x[cut:])), torch.from_numpy(y[cut:]))
        model.train()
        print(epoch, loss.item(), test.item())


if __name__ == "__main__":
    main()
