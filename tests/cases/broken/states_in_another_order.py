"""The inputs of the users are put together in the order of their visit, their states in the order
of their names.
"""

import torch
from torch import nn


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        ys = []
        for x_t in x:
            h = self.cell(x_t, h)  # <- TT206
            ys.append(self.out(h))
        return torch.stack(ys), h


def main():
    torch.manual_seed(1103)
    paths = {name: torch.randn(61, 2).cumsum(0) / 6 for name in ("dora", "abe", "carl", "bea")}
    states = {name: torch.zeros(8) for name in paths}
    model = Tracker()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for start in range(0, 60, 12):
        visitors = list(paths)
        x = torch.stack([paths[name][start : start + 13] for name in visitors], 1)
        h = torch.stack([states[name] for name in sorted(visitors)])  # <- TT206
        y, h = model(x[:-1], h)  # <- TT206
        loss = nn.functional.mse_loss(y, x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states.update(zip(visitors, h.detach()))


if __name__ == "__main__":
    main()
