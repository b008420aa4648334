"""Weights are learnt on batches of 8, and every batch gets zeros for 8 lanes; the last batch has
five.
"""

# raises: wrong size

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, batch_size):
        super().__init__()
        self.rnn, self.fc = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 2)
        self.batch_size = batch_size

    def init_hidden(self):
        return torch.zeros(1, self.batch_size, 6), torch.zeros(1, self.batch_size, 6)

    def forward(self, x):
        out, _ = self.rnn(x, self.init_hidden())  # <- TT211
        return self.fc(out[:, -1])


def main():
    torch.manual_seed(1105)
    x = torch.randn(29, 10, 3).cumsum(1) / 3
    y = (x[:, -1, 0] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)  # <- TT211
    net = Net(batch_size=8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)  # <- TT211
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
