"""Ignite: a hand-written evaluator carries the state through a long recording with gradients on."""

import torch
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from torch import nn


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(1, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x, h):
        ys = []
        for x_t in x:
            h = self.cell(x_t, h)  # <- TT202
            ys.append(self.out(h))
        return torch.stack(ys), h


def main():
    torch.manual_seed(64)
    net = Filter().eval()
    states = {}

    def evaluate(engine, batch):
        x, y = batch
        prediction, states["h"] = net(x, states["h"])  # <- TT202
        return prediction.detach(), y

    evaluator = Engine(evaluate)
    evaluator.add_event_handler(Events.STARTED, lambda engine: states.update(h=torch.zeros(2, 8)))
    MeanSquaredError().attach(evaluator, "mse")
    x = torch.randn(160, 2, 1).cumsum(0) / 12
    evaluator.run(list(zip(x[:-1].split(10)[:15], x[1:].split(10)[:15])))
    print(evaluator.state.metrics)


if __name__ == "__main__":
    main()
