"""Stride 5, horizon 15 with retain_graph: each loss goes back over two older edges, old graphs are
let go, one step at the end.
"""

from collections import deque

import torch
from torch import nn


def main():
    torch.manual_seed(115)
    stride, edges = 5, 2
    cell, head = nn.GRUCell(2, 8), nn.Linear(8, 2)
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    walk = torch.randn(81, 3, 2).cumsum(0) / 10
    optimizer.zero_grad()
    h, older = torch.zeros(3, 8), deque(maxlen=edges)
    for begin in range(0, 80, stride):
        start = h.detach().requires_grad_()
        h, loss = start, 0.0
        for t in range(begin, begin + stride):
            h = cell(walk[t], h)
            loss = loss + nn.functional.mse_loss(head(h), walk[t + 1]) / 80
        loss.backward(retain_graph=True)
        flowing, start.grad = start.grad, None
        for leaf, end in reversed(older):
            end.backward(flowing, retain_graph=True)
            flowing, leaf.grad = leaf.grad, None
        older.append((start, h))
    optimizer.step()
    print(sum(p.grad.norm().item() for p in parameters))


if __name__ == "__main__":
    main()
