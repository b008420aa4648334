"""Whole sine waves and LBFGS: the closure runs the two cells from zeros over all steps; the future
is predicted without gradients.
"""

import torch
from torch import nn


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, waves, future=0):
        n = len(waves)
        h1, c1, h2, c2 = (torch.zeros(n, 8) for _ in range(4))
        outputs = []
        for x in waves.split(1, dim=1):
            h1, c1 = self.first(x, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(self.linear(h2))
        for _ in range(future):
            h1, c1 = self.first(outputs[-1], (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def main():
    torch.manual_seed(2019)
    phase = torch.rand(6, 1) * 6
    data = torch.sin(torch.arange(41).view(1, -1) / 4 + phase)
    model, criterion = Sequence(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(data[2:, :-1]), data[2:, 1:])
        loss.backward()
        return loss

    for step in range(2):
        print(step, optimizer.step(closure).item())
        with torch.no_grad():
            prediction = model(data[:2, :-1], future=10)
            print(criterion(prediction[:, :-10], data[:2, 1:]).item())


if __name__ == "__main__":
    main()
