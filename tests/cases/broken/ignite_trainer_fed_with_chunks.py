"""Ignite's TBPTT trainer gets each chunk of a long stream as a batch of its own.

It starts every batch without a state.
"""

import torch
from ignite.contrib.engines import Tbptt_Events, create_supervised_tbptt_trainer
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(2, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, hidden=None):
        y, hidden = self.rnn(x, hidden)  # <- TT201
        return self.head(y), hidden


def main():
    torch.manual_seed(63)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trainer = create_supervised_tbptt_trainer(net, optimizer, nn.MSELoss(), tbtt_step=10)

    @trainer.on(Tbptt_Events.TIME_ITERATION_COMPLETED)
    def log(engine):
        print(engine.state.iteration, round(engine.state.output, 4))

    stream = torch.randn(121, 4, 2).cumsum(0) / 11
    chunks = list(zip(stream[:-1].split(10), stream[1:].split(10)))
    trainer.run(chunks, max_epochs=1)  # <- TT201


if __name__ == "__main__":
    main()
