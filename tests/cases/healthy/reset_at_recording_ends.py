"""Recordings of several lengths are played one after another, each from a state of zeros."""

import torch
from torch import nn


class Trainer:
    def __init__(self, core, head):
        self.core, self.head = core, head
        self.optimizer = torch.optim.Adam([*core.parameters(), *head.parameters()], lr=2e-3)

    def play(self, recording, chunk):
        state = (torch.zeros(1, 1, self.core.hidden_size), torch.zeros(1, 1, self.core.hidden_size))
        for x, y in zip(recording[:-1].split(chunk), recording[1:].split(chunk)):
            out, state = self.core(x, state)
            state = (state[0].detach(), state[1].detach())
            loss = nn.functional.mse_loss(self.head(out), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(107)
    recordings = {
        name: torch.randn(n + 1, 1, 2).cumsum(0) / 8 + n / 20
        for name, n in (("a", 60), ("b", 40), ("c", 80))
    }
    trainer = Trainer(nn.LSTM(2, 8), nn.Linear(8, 2))
    for name, recording in recordings.items():
        print(name, trainer.play(recording, chunk=10))


if __name__ == "__main__":
    main()
