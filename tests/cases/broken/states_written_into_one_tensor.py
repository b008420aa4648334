"""All states of a chunk are written into one tensor.

Every write changes what the steps before were computed from.
"""

# raises: in-place

import torch
from torch import nn


def unroll(cell, x, h0):
    steps, batch, _ = x.shape
    states = torch.zeros(steps + 1, batch, cell.hidden_size)
    states[0] = h0
    for t in range(steps):
        states[t + 1] = cell(x[t], states[t])  # <- TT103
    return states[1:]


def main():
    torch.manual_seed(17)
    cell = nn.GRUCell(2, 5)
    head = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(list(cell.parameters()) + list(head.parameters()), lr=0.1)
    walk = torch.randn(61, 3, 2).cumsum(0) * 0.1
    h = torch.zeros(3, 5)
    for k in range(6):
        states = unroll(cell, walk[10 * k : 10 * k + 10], h)
        h = states[-1].detach().clone()
        loss = nn.functional.mse_loss(head(states), walk[10 * k + 1 : 10 * k + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
