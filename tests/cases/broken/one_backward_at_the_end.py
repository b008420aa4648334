"""A long stream is fed chunk by chunk without a cut, with one backward at its very end: all of it
stays in memory.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(26)
    cell = nn.GRUCell(2, 10)
    verdict = nn.Linear(10, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *verdict.parameters()], lr=1e-3)
    stream = torch.randn(300, 4, 2).cumsum(0) / 12
    answer = (stream[-1, :, :1] > 0).float()

    def read(chunk, h):
        for x in chunk:
            h = cell(x, h)  # <- TT202
        return h

    h = torch.zeros(4, 10)
    for chunk in stream.split(15):
        h = read(chunk, h)  # <- TT202
    loss = nn.functional.binary_cross_entropy_with_logits(verdict(h), answer)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    main()
