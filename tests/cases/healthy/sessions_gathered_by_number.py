"""A batch of sessions is put together anew at every step, and their states are gathered and
scattered by the same numbers.
"""

import torch
from torch import nn


class Store:
    def __init__(self, n):
        self.n, self.rows = n, {}

    def gather(self, who):
        return torch.stack([self.rows.get(i, torch.zeros(self.n)) for i in who])

    def scatter(self, who, h):
        self.rows.update(zip(who, h.detach().unbind(0)))


def main():
    torch.manual_seed(2207)
    sessions = {i: torch.randn(41, 2).cumsum(0) / 6 for i in range(6)}
    at = dict.fromkeys(sessions, 0)
    store, cell, head = Store(8), nn.GRUCell(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(10):
        who = [i for i in torch.randperm(6).tolist() if at[i] < 40][:3]
        h, loss = store.gather(who), 0.0
        for k in range(8):
            x = torch.stack([sessions[i][at[i] + k] for i in who])
            y = torch.stack([sessions[i][at[i] + k + 1] for i in who])
            h = cell(x, h)
            loss = loss + nn.functional.mse_loss(head(h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        store.scatter(who, h)
        for i in who:
            at[i] += 8


if __name__ == "__main__":
    main()
