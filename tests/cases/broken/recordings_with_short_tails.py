"""One step per recording: the plain mean of every chunk is sent backward, also that of a tail of 3
steps.
"""

import torch
from torch import nn


class Learner:
    chunk = 12

    def __init__(self):
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 2)
        self.optimizer = torch.optim.Adam(
            [*self.cell.parameters(), *self.head.parameters()], lr=1e-3
        )

    def loss_of(self, signal, label, h):
        losses = []
        for x_t, y_t in zip(signal, label):
            h = self.cell(x_t, h)
            losses.append(nn.functional.cross_entropy(self.head(h), y_t))
        return torch.stack(losses).mean(), h

    def learn(self, signal, label):
        h, total = torch.zeros(1, 8), 0.0
        for x, y in zip(signal.split(self.chunk), label.split(self.chunk)):
            loss, h = self.loss_of(x, y, h.detach())
            loss.backward()  # <- TT301
            total += loss.item()
        nn.utils.clip_grad_norm_(self.cell.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def main():
    torch.manual_seed(69)
    learner = Learner()
    for steps in (51, 39, 63):
        signal = torch.randn(steps, 1, 2).cumsum(0) / 6
        print(steps, learner.learn(signal, (signal.sum(-1) > 0).long()))


if __name__ == "__main__":
    main()
