"""Ignite's TBPTT trainer as it is meant: whole sequences, which it splits, with the state carried
inside each.
"""

import torch
from ignite.contrib.engines import Tbptt_Events, create_supervised_tbptt_trainer
from ignite.engine import Events
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 8), nn.Linear(8, 2)

    def forward(self, x, hidden=None):
        y, hidden = self.rnn(x, hidden)
        return self.head(y), hidden


def main():
    torch.manual_seed(133)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trainer = create_supervised_tbptt_trainer(net, optimizer, nn.MSELoss(), tbtt_step=10)
    losses = []
    trainer.add_event_handler(
        Tbptt_Events.TIME_ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    trainer.add_event_handler(Events.COMPLETED, lambda engine: print(sum(losses) / len(losses)))
    sequences = [torch.randn(41, 4, 2).cumsum(0) / 6 for _ in range(3)]
    trainer.run([(s[:-1], s[1:]) for s in sequences], max_epochs=1)


if __name__ == "__main__":
    main()
