"""Only the last state of the layer has a loss: its outputs get no gradient at all, which is no
fault of it.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(201)
    lstm, head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
    for _ in range(6):
        x, label = torch.randn(4, 12, 3), torch.randint(2, (4,))
        _, (h, _) = lstm(x)
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(h[-1]), label).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
