"""Ignite: retain_graph=True in the update function, and the optimizer steps under the graph that it
keeps.
"""

# raises: in-place

import torch
from ignite.engine import Engine
from torch import nn


class Updater:
    def __init__(self, model, optimizer, loss_fn):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.state = None

    def __call__(self, engine, batch):
        self.model.train()
        self.optimizer.zero_grad()
        prediction, self.state = self.model(batch["x"], self.state)
        loss = self.loss_fn(prediction, batch["y"])
        loss.backward(retain_graph=True)  # <- TT102
        self.optimizer.step()
        return loss.item()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.fc(y), state


def main():
    torch.manual_seed(62)
    model = Model()
    wave = torch.sin(torch.arange(101) * 0.3).view(1, -1, 1)
    batches = [{"x": wave[:, i : i + 10], "y": wave[:, i + 1 : i + 11]} for i in range(0, 100, 10)]
    update = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    Engine(update).run(batches, max_epochs=1)


if __name__ == "__main__":
    main()
