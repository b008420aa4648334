"""Two losses share one graph: retain_graph=True for the first, none for the last, and the state is
detached.
"""

import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 8)
        self.value = nn.Linear(8, 2)
        self.sign = nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)
        return self.value(y), self.sign(y), h


def main():
    torch.manual_seed(100)
    walk = torch.randn(121, 3, 2).cumsum(0) / 10
    net = TwoHeads()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 3, 8)
    for x, y in zip(walk[:-1].split(10), walk[1:].split(10)):
        value, sign, h = net(x, h)
        optimizer.zero_grad()
        nn.functional.mse_loss(value, y).backward(retain_graph=True)
        nn.functional.binary_cross_entropy_with_logits(sign, (y > 0).float()).backward()
        optimizer.step()
        h = h.detach()


if __name__ == "__main__":
    main()
