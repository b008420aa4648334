"""Ignite: a RandomSampler draws the windows, and the update function carries self.h from one to the
next.
"""

import torch
from ignite.engine import Engine
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Step:
    def __init__(self):
        self.rnn, self.fc = nn.RNN(1, 10, batch_first=True), nn.Linear(10, 1)
        self.optimizer = torch.optim.RMSprop(
            [*self.rnn.parameters(), *self.fc.parameters()], lr=1e-3
        )
        self.h = torch.zeros(1, 1, 10)

    def __call__(self, engine, batch):
        x, y = batch
        out, h = self.rnn(x, self.h)
        self.h = h.detach()
        loss = nn.functional.mse_loss(self.fc(out), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(66)
    wave = torch.sin(torch.arange(161) * 0.11).unsqueeze(-1)
    windows = TensorDataset(wave[:-1].view(16, 10, 1), wave[1:].view(16, 10, 1))
    loader = DataLoader(windows, batch_size=1, sampler=RandomSampler(windows))  # <- TT207
    trainer = Engine(Step())
    print(trainer.run(loader, max_epochs=1).output)  # <- TT207


if __name__ == "__main__":
    main()
