"""Every layer learns from its own loss and detaches what it is given: layers in a row, not steps in
time.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(205)
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(5)])
    optimizer = torch.optim.SGD([*layers.parameters(), *heads.parameters()], lr=0.01)
    for _ in range(6):
        x, label, loss = torch.randn(16, 8), torch.randint(2, (16,)), 0
        optimizer.zero_grad()
        for layer, head in zip(layers, heads, strict=True):
            x = torch.relu(layer(x.detach()))
            loss = loss + nn.functional.cross_entropy(head(x), label)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
