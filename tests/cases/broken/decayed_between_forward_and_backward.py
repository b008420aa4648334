"""The recurrent weights decay by hand before the backward that still needs them."""
# raises: in-place

import torch
from torch import nn


def main():
    torch.manual_seed(89)
    series = torch.randn(73, 2, 3).cumsum(0) / 6
    cell, head = nn.LSTMCell(3, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    h, c = torch.zeros(2, 8), torch.zeros(2, 8)
    for begin in range(0, 72, 12):
        h, c, loss = h.detach(), c.detach(), 0.0
        for t in range(begin, begin + 12):
            h, c = cell(series[t], (h, c))
            loss = loss + nn.functional.mse_loss(head(h), series[t + 1])
        with torch.no_grad():
            cell.weight_hh.mul_(0.999)  # <- TT103
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
