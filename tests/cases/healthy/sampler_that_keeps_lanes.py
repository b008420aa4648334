"""A batch sampler draws window s of every lane at step s: row i of a batch goes on with row i of
the one before, and the state is carried.
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
        return self.series[a : a + self.width], self.series[a + 1 : a + 1 + self.width]


class Lanes:
    def __init__(self, windows, lanes):
        self.steps, self.lanes = windows // lanes, lanes

    def __len__(self):
        return self.steps

    def __iter__(self):
        for s in range(self.steps):
            yield [lane * self.steps + s for lane in range(self.lanes)]


def main():
    torch.manual_seed(2129)
    windows = Windows(torch.randn(241, 1).cumsum(0) / 12, 10)
    loader = DataLoader(windows, batch_sampler=Lanes(len(windows), 3))
    lstm, head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(2):
        hc = None
        for x, y in loader:
            out, hc = lstm(x, hc)
            hc = tuple(s.detach() for s in hc)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
