"""The loop over the phases "train" and "val" has a fresh state for each phase, and gradients only
in the first.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.fc = nn.RNN(3, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return self.fc(self.drop(y)), h


def main():
    torch.manual_seed(2132)
    data = {
        "train": torch.randn(121, 4, 3).cumsum(0) / 10,
        "val": torch.randn(61, 2, 3).cumsum(0) / 10,
    }
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        for phase, series in data.items():
            net.train(phase == "train")
            hidden, running, n = None, 0.0, 0
            for i in range(0, len(series) - 1, 20):
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out, hidden = net(series[i : i + 20], hidden)
                    hidden = hidden.detach()
                    loss = nn.functional.mse_loss(out, series[i + 1 : i + 21])
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running, n = running + loss.item(), n + 1
            print(epoch, phase, running / n)


if __name__ == "__main__":
    main()
