"""A binary state with a straight-through gradient: the detached difference adds only the rounding,
and the gradient goes through the potential.
"""

import torch
from torch import nn


class Bits(nn.Module):
    def __init__(self):
        super().__init__()
        self.write, self.keep = nn.Linear(2, 10), nn.Linear(10, 10, bias=False)
        self.read = nn.Linear(10, 1)

    def forward(self, x, bits):
        for x_t in x:
            soft = torch.tanh(self.write(x_t) + self.keep(bits))
            bits = soft + (soft.sign() - soft).detach()
        return self.read(bits), bits


def main():
    torch.manual_seed(2111)
    model = Bits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(120, 4, 2).cumsum(0) / 10
    bits = torch.ones(4, 10)
    for chunk in x.split(12):
        y, bits = model(chunk, bits.detach())
        loss = nn.functional.mse_loss(y, chunk[0].sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
