"""Validation in the middle of an epoch runs through self.state, and training goes on from what
validation left there.
"""

import torch
from torch import nn


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8)
        self.fc = nn.Linear(8, 1)
        self.state = None

    def forward(self, x):
        if self.state is not None:
            self.state = tuple(s.detach() for s in self.state)
        y, self.state = self.lstm(x, self.state)  # <- TT205
        return self.fc(y)


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    losses = []
    for a, b in zip(x.split(10), y.split(10)):
        losses.append(nn.functional.mse_loss(model(a), b))  # <- TT205
    model.train()
    return torch.stack(losses).mean()


def main():
    torch.manual_seed(34)
    x, xv = torch.randn(120, 3, 2).cumsum(0) / 9, torch.randn(40, 3, 2).cumsum(0) / 9
    y, yv = x.prod(-1, keepdim=True), xv.prod(-1, keepdim=True)
    model = Stateful()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (a, b) in enumerate(zip(x.split(10), y.split(10)), 1):
        loss = nn.functional.mse_loss(model(a), b)  # <- TT205
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(step, loss.item(), validate(model, xv, yv).item())


if __name__ == "__main__":
    main()
