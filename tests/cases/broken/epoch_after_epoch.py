"""The state is made once, before the first epoch; from then on the end of the series goes before
its beginning.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series, width):
        self.series, self.width = series, width

    def __len__(self):
        return (len(self.series) - 1) // self.width

    def __getitem__(self, i):
        a = i * self.width
        return self.series[a : a + self.width], self.series[a + 1 : a + self.width + 1]


def main():
    torch.manual_seed(1019)
    prices = torch.randn(91, 1).cumsum(0) / 10
    loader = DataLoader(Windows(prices, 15), batch_size=1, shuffle=False)
    gru, linear = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *linear.parameters()], lr=1e-3)
    hidden = torch.zeros(1, 1, 8)  # <- TT208
    for epoch in range(4):  # <- TT208
        for x, y in loader:
            out, hidden = gru(x, hidden)  # <- TT208
            hidden = hidden.detach()
            loss = nn.functional.mse_loss(linear(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
