"""The lanes of every chunk are shuffled, while the state of a leaky cell keeps their last order."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.keep, self.norm = nn.Linear(1, 10), nn.Linear(10, 10), nn.LayerNorm(10)
        self.out = nn.Linear(10, 1)

    def forward(self, x, h):
        y = []
        for x_t in x:
            new = torch.tanh(self.read(x_t[:, None]) + self.keep(self.norm(h)))  # <- TT206
            h = 0.8 * h + 0.2 * new
            y.append(self.out(h)[:, 0])
        return torch.stack(y), h


def main():
    torch.manual_seed(1310)
    data = torch.sin(torch.arange(151)[:, None] * (0.05 + 0.5 * torch.rand(6)))
    net = Residual()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    h = torch.zeros(6, 10)
    for i in range(0, 150, 15):
        order = torch.randperm(6)
        y, h = net(data[i : i + 15, order], h.detach())  # <- TT206
        loss = nn.functional.mse_loss(y, data[i + 1 : i + 16, order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
