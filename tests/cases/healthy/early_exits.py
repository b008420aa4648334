"""Each layer has a head of its own, and their losses go backward one by one through the one graph
that they share.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(204)
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(9)])
    heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(9)])
    optimizer = torch.optim.SGD([*layers.parameters(), *heads.parameters()], lr=0.01)
    for _ in range(4):
        x, label = torch.randn(16, 8), torch.randint(2, (16,))
        optimizer.zero_grad()
        for i, (layer, head) in enumerate(zip(layers, heads, strict=True)):
            x = torch.relu(layer(x))
            nn.functional.cross_entropy(head(x), label).backward(retain_graph=i < 8)
        optimizer.step()


if __name__ == "__main__":
    main()
