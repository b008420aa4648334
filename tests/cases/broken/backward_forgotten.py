"""A training step with everything except loss.backward()."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model, head):
        self.model, self.head = model, head
        self.optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
        self.hidden = None

    def step(self, x, y):
        self.optimizer.zero_grad()
        out, hidden = self.model(x, self.hidden)
        self.hidden = hidden.detach()
        loss = nn.functional.l1_loss(self.head(out), y)
        self.optimizer.step()  # <- TT304
        return loss.item()


def main():
    torch.manual_seed(1026)
    trainer = Trainer(nn.GRU(2, 8), nn.Linear(8, 2))
    path = torch.randn(121, 2, 2).cumsum(0) / 9
    for i in range(0, 120, 15):
        print(i, trainer.step(path[i : i + 15], path[i + 1 : i + 16]))  # <- TT304


if __name__ == "__main__":
    main()
