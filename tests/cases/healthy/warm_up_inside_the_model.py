"""The model warms its state up for ten steps and detaches it.

The steps before have no loss and get no credit.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        h, out = x.new_zeros(len(x), 8), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            if t == 9:
                h = h.detach()
            if t >= 10:
                out.append(self.head(h))
        return torch.stack(out, 1)


def main():
    torch.manual_seed(210)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 30, 3)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
