"""The outputs of the steps are written into a tensor made beforehand. Nothing needs its old values,
and autograd keeps track of the slices.
"""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.fc = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        outputs = torch.zeros(x.size(0), x.size(1), 2)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            outputs[:, t] = self.fc(h)
        return outputs, h


def main():
    torch.manual_seed(2109)
    walk = torch.randn(4, 91, 2).cumsum(1) / 9
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(4, 8)
    for t in range(0, 90, 15):
        outputs, h = model(walk[:, t : t + 15], h)
        loss = nn.functional.mse_loss(outputs, walk[:, t + 1 : t + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = h.detach()


if __name__ == "__main__":
    main()
