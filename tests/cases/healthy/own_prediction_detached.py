"""The model is given its last prediction as an input, detached as usual in autoregressive training;
the recurrent state keeps its graph within the chunk.
"""

import torch
from torch import nn


class Narx(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 8), nn.Linear(8, 1)

    def forward(self, control, y, h):
        ys = []
        for u in control:
            h = self.cell(torch.cat([u, y.detach()], -1), h)
            y = self.out(h)
            ys.append(y)
        return torch.stack(ys), y, h


def main():
    torch.manual_seed(2028)
    control = torch.randn(150, 2, 2).cumsum(0) / 10
    plant = control.sum(-1, keepdim=True).tanh()
    model = Narx()
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    y, h = torch.zeros(2, 1), torch.zeros(2, 8)
    for u, goal in zip(control.split(15), plant.split(15)):
        ys, y, h = model(u, y, h.detach())
        loss = nn.functional.huber_loss(ys, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
