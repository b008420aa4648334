"""Backward runs after every chunk, but the state is detached only after every fourth."""

# raises: second time

import torch
from torch import nn


class Config:
    chunk = 6
    detach_every = 4
    hidden = 8
    lr = 1e-2


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.cell = nn.RNNCell(2, cfg.hidden)
        self.linear = nn.Linear(cfg.hidden, 2)
        self.optimizer = torch.optim.Adagrad(
            [*self.cell.parameters(), *self.linear.parameters()], lr=cfg.lr
        )

    def unroll(self, xs, h):
        hs = []
        for x in xs:
            h = self.cell(x, h)  # <- TT101
            hs.append(h)
        return self.linear(torch.stack(hs)), h

    def fit(self, stream):
        h = torch.zeros(stream.shape[1], self.cfg.hidden)
        n = (len(stream) - 1) // self.cfg.chunk
        for i in range(n):
            lo, hi = i * self.cfg.chunk, (i + 1) * self.cfg.chunk
            y, h = self.unroll(stream[lo:hi], h)  # <- TT101
            loss = nn.functional.mse_loss(y, stream[lo + 1 : hi + 1])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if (i + 1) % self.cfg.detach_every == 0:
                h = h.detach()


def main():
    torch.manual_seed(11)
    Trainer(Config()).fit(torch.randn(73, 3, 2).cumsum(0) / 5)


if __name__ == "__main__":
    main()
