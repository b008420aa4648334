"""The gradient of each part of the loss is logged before the update.

Clearing it between is what is meant.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(211)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        z = net(torch.randn(8, 4))
        for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            optimizer.zero_grad()
            (a * z[:, 0].square().mean() + b * z[:, 1].abs().mean()).backward(retain_graph=True)
        optimizer.step()


if __name__ == "__main__":
    main()
