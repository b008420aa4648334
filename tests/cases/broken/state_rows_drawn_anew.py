"""Lanes are shuffled for every chunk: the inputs with one permutation, the state with another."""

import torch
from torch import nn


class CellNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(3, 7)
        self.head = nn.Linear(7, 1)

    def forward(self, x, h):
        out = []
        for frame in x:
            h = self.cell(frame, h)  # <- TT206
            out.append(self.head(h))
        return torch.stack(out), h


def main():
    torch.manual_seed(38)
    x = torch.randn(100, 6, 3).cumsum(0) / 6
    y = x.amax(-1, keepdim=True)
    net = CellNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    lanes = torch.arange(6)
    h = torch.zeros(6, 7)
    for xs, ys in zip(x.split(10), y.split(10)):
        lanes = lanes[torch.randperm(6)]
        h = h[torch.randperm(6)].detach()
        prediction, h = net(xs[:, lanes], h)  # <- TT206
        loss = nn.functional.mse_loss(prediction, ys[:, lanes])
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
