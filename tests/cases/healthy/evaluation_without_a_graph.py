"""Evaluation of a long recording in chunks: the state is carried, under no_grad."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.fc(y), state


@torch.no_grad()
def evaluate(net, x, y, chunk):
    net.eval()
    state, squared = None, 0.0
    for a, b in zip(x.split(chunk, 1), y.split(chunk, 1)):
        prediction, state = net(a, state)
        squared += (prediction - b).pow(2).sum().item()
    return squared / y.numel()


def main():
    torch.manual_seed(111)
    x = torch.randn(2, 200, 3).cumsum(1) / 10
    print(evaluate(Net(), x, x.sum(-1, keepdim=True), chunk=10))


if __name__ == "__main__":
    main()
