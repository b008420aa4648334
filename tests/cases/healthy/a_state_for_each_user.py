"""Visits of several users are interleaved; each user's state is kept by name, detached, and used
when that user comes again.
"""

import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self, items, n=10):
        super().__init__()
        self.items = nn.Embedding(items, n)
        self.gru = nn.GRU(n, n)
        self.n = n

    def forward(self, clicks, h):
        y, h = self.gru(self.items(clicks).unsqueeze(1), h)
        return y.squeeze(1) @ self.items.weight.t(), h


def main():
    torch.manual_seed(2009)
    model = Recommender(12)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    histories = {name: torch.randint(3, (49,)).cumsum(0) % 12 for name in ("ann", "ben", "cleo")}
    place = dict.fromkeys(histories, 0)
    memory = {name: torch.zeros(1, 1, model.n) for name in histories}
    visits = [
        "ann",
        "ben",
        "ann",
        "cleo",
        "cleo",
        "ben",
        "ann",
        "cleo",
        "ben",
        "ann",
        "ben",
        "cleo",
    ]
    for name in visits:
        at = place[name]
        clicks, clicked_next = histories[name][at : at + 12], histories[name][at + 1 : at + 13]
        scores, after = model(clicks, memory[name])
        loss = nn.functional.cross_entropy(scores, clicked_next)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory[name] = after.detach()
        place[name] = at + 12


if __name__ == "__main__":
    main()
