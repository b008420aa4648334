"""The label of a chunk arrives one chunk later: its loss is sent back after another step has
changed the weights.
"""

# raises: in-place

import torch
from torch import nn


def main():
    torch.manual_seed(1303)
    visits = torch.sin(torch.arange(121).view(-1, 1, 1) * (0.1 + torch.rand(1, 4, 3)))
    rnn, bought = nn.GRU(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *bought.parameters()], lr=1e-3)
    h, waiting = torch.zeros(1, 4, 8), None
    for i in range(0, 120, 10):
        y, h = rnn(visits[i : i + 10], h.detach())
        if waiting is not None:
            label = (visits[i, :, :1] > 0).float()
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(waiting, label).backward()  # <- TT103
            optimizer.step()  # <- TT103
        waiting = bought(y[-1])


if __name__ == "__main__":
    main()
