"""One update on whole sequences of 300 steps by a cell: the graph is as long as the sequence, and
has to be.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(209)
    cell, head = nn.LSTMCell(1, 8), nn.Linear(8, 10)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    x = torch.rand(4, 300, 1)
    h = c = torch.zeros(4, 8)
    for t in range(300):
        h, c = cell(x[:, t], (h, c))
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(h), torch.randint(10, (4,))).backward()
    optimizer.step()


if __name__ == "__main__":
    main()
