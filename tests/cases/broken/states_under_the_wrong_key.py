"""The states of the users are looked up by number and stored by name: none is ever found, and each
session goes on from zeros.
"""

import torch
from torch import nn


class Sessions:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.states = {}

    def learn(self, user, clicks, targets):
        state = self.states.get(user)  # <- TT201
        hidden, state = self.model["core"](clicks, state)  # <- TT201
        self.states[f"user{user}"] = state.detach()  # <- TT201
        loss = nn.functional.cross_entropy(self.model["choice"](hidden), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(1012)
    model = nn.ModuleDict({"core": nn.GRU(2, 8), "choice": nn.Linear(8, 5)})
    sessions = Sessions(model, 1e-3)
    clicks = {user: torch.randn(60, 2).cumsum(0) / 6 for user in range(3)}
    items = {user: (x.sum(-1).abs() * 3).long().clamp(max=4) for user, x in clicks.items()}
    for begin in range(0, 60, 12):
        for user in clicks:
            now = slice(begin, begin + 12)
            print(user, sessions.learn(user, clicks[user][now], items[user][now]))  # <- TT201


if __name__ == "__main__":
    main()
