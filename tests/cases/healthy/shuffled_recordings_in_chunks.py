"""Whole recordings come shuffled, each is played in chunks from zeros.

The state is carried only inside a recording.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x, h=None):
        y, h = self.rnn(x, h)
        return self.fc(y), h


def main():
    torch.manual_seed(129)
    recordings = torch.randn(12, 41, 2).cumsum(1) / 6
    loader = DataLoader(
        TensorDataset(recordings[:, :-1], recordings[:, 1:]), batch_size=4, shuffle=True
    )
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        for recording, target in loader:
            h = None
            for x, y in zip(recording.split(10, 1), target.split(10, 1)):
                prediction, h = net(x, h)
                h = h.detach()
                loss = nn.functional.mse_loss(prediction, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
