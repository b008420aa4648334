"""Windows cut side by side from recordings of a wrist sensor, each with a label of its own:
independent samples for a classifier, in the order of the files.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Activity(Dataset):
    def __init__(self, recordings, labels, width):
        self.items = [
            (signal[i : i + width], label)
            for signal, label in zip(recordings, labels)
            for i in range(0, len(signal) - width + 1, width)
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.lstm = nn.LSTM(3, 10, batch_first=True)
        self.classify = nn.Linear(10, classes)

    def forward(self, x):
        _, (h, _) = self.lstm(x)
        return self.classify(h[-1])


def main():
    torch.manual_seed(2006)
    recordings = [torch.randn(n, 3).cumsum(0) / 6 for n in (130, 100, 160, 90)]
    data = Activity(recordings, [0, 1, 2, 1], 16)
    loader = DataLoader(data, batch_size=8, shuffle=False)
    net = Net(3)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(2):
        right = 0
        for x, y in loader:
            optimizer.zero_grad()
            logits = net(x)
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            right += (logits.argmax(-1) == y).sum().item()
        print(epoch, right / len(data))


if __name__ == "__main__":
    main()
