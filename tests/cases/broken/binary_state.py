"""The state is made binary by torch.sign, whose gradient is zero everywhere: the loss at the end of
a chunk says nothing about the steps before.
"""

import torch
from torch import nn


class BinaryMemory(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.write, self.keep = nn.Linear(n_in, n), nn.Linear(n, n, bias=False)
        self.read = nn.Linear(n, 1)

    def forward(self, x, bits):
        for x_t in x:
            potential = torch.tanh(self.write(x_t) + self.keep(bits))
            bits = torch.sign(potential)  # <- TT303
        return self.read(potential), bits


def main():
    torch.manual_seed(1025)
    model = BinaryMemory(2, 9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(120, 4, 2).cumsum(0) / 10
    bits = torch.ones(4, 9)
    for chunk in x.split(12):
        y, bits = model(chunk, bits.detach())
        loss = nn.functional.mse_loss(y, chunk[0].sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()


if __name__ == "__main__":
    main()
