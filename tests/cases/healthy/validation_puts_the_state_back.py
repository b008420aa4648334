"""Validation in the middle of an epoch sets the training state aside, starts from its own, and puts
the first one back.
"""

import torch
from torch import nn


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(2, 8), nn.Linear(8, 1)
        self.state = None

    def forward(self, x):
        if self.state is not None:
            self.state = tuple(s.detach() for s in self.state)
        y, self.state = self.lstm(x, self.state)
        return self.fc(y)


@torch.no_grad()
def validate(model, x, y):
    kept, model.state = model.state, None
    model.eval()
    losses = [nn.functional.mse_loss(model(a), b).item() for a, b in zip(x.split(10), y.split(10))]
    model.train()
    model.state = kept
    return sum(losses) / len(losses)


def main():
    torch.manual_seed(125)
    x, xv = torch.randn(120, 3, 2).cumsum(0) / 9, torch.randn(40, 3, 2).cumsum(0) / 9
    y, yv = x.prod(-1, keepdim=True), xv.prod(-1, keepdim=True)
    model = Stateful()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (a, b) in enumerate(zip(x.split(10), y.split(10)), 1):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(step, loss.item(), validate(model, xv, yv))


if __name__ == "__main__":
    main()
