"""Many series move on together, drawn in random order each round; every series finds its own state
in a bank by its number.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stretch(Dataset):
    def __init__(self, series, begin, length):
        self.series, self.begin, self.length = series, begin, length

    def __len__(self):
        return len(self.series)

    def __getitem__(self, i):
        a, b = self.begin, self.begin + self.length
        return i, self.series[i][a:b], self.series[i][a + 1 : b + 1]


def main():
    torch.manual_seed(2027)
    series = [torch.randn(61, 2).cumsum(0) / 8 for _ in range(9)]
    lstm, head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    h_bank, c_bank = torch.zeros(1, 9, 8), torch.zeros(1, 9, 8)
    for begin in range(0, 60, 12):
        for who, x, y in DataLoader(Stretch(series, begin, 12), batch_size=3, shuffle=True):
            out, (h, c) = lstm(x, (h_bank[:, who], c_bank[:, who]))
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            h_bank[:, who] = h.detach()
            c_bank[:, who] = c.detach()


if __name__ == "__main__":
    main()
