"""The states are kept in a list, and the loop that detaches them only rebinds its own variable."""

# raises: second time

import torch
import torch.nn.functional as F
from torch import nn


class StackedCells(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.readout = nn.Linear(sizes[-1], 1)
        self.states = []

    def reset(self, batch):
        self.states = [torch.zeros(batch, cell.hidden_size) for cell in self.cells]

    def cut(self):
        for h in self.states:
            h = h.detach()  # <- TT101

    def forward(self, x):
        ys = []
        for x_t in x:
            for i, cell in enumerate(self.cells):
                self.states[i] = cell(x_t, self.states[i])  # <- TT101
                x_t = self.states[i]
            ys.append(self.readout(x_t))
        return torch.stack(ys)


def main():
    torch.manual_seed(1)
    t = torch.arange(101) * 0.2
    wave = torch.stack([torch.sin(t), torch.sin(1.7 * t), torch.cos(t)], dim=1).unsqueeze(-1)
    net = StackedCells([1, 6, 5])
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    net.reset(batch=3)
    for x, y in zip(wave[:-1].split(10), wave[1:].split(10)):
        net.cut()
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
