"""Lanes reset wherever their recordings end, also inside a chunk, by torch.where, out of place."""

import torch
from torch import nn


class ResetRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, first, h):
        ys = []
        for x_t, first_t in zip(x, first):
            h = torch.where(first_t.unsqueeze(-1), torch.zeros_like(h), h)
            h = self.cell(x_t, h)
            ys.append(self.head(h))
        return torch.stack(ys), h


def lane(lengths):
    pieces = [torch.randn(n, 2).cumsum(0) / 6 for n in lengths]
    first = torch.zeros(sum(lengths), dtype=torch.bool)
    first[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return torch.cat(pieces), first


def main():
    torch.manual_seed(108)
    lanes = [lane([33, 47, 20]), lane([50, 25, 25]), lane([81, 19])]
    x = torch.stack([signal for signal, _ in lanes], 1)
    first = torch.stack([flags for _, flags in lanes], 1)
    model = ResetRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(3, 8)
    for a, r in zip(x.split(10), first.split(10)):
        y, h = model(a, r, h.detach())
        loss = (y[:-1] - a[1:]).pow(2)[~r[1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
