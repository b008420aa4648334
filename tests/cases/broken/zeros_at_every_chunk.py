"""The hidden state is set to zeros inside the loop over adjacent chunks, so no chunk knows the one
before.
"""

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, hidden=10):
        super().__init__()
        self.hidden = hidden
        self.rnn = nn.GRU(1, hidden, num_layers=2)
        self.linear = nn.Linear(hidden, 1)

    def init_hidden(self, batch):
        return torch.zeros(2, batch, self.hidden)

    def forward(self, x, h):
        out, h = self.rnn(x, h)  # <- TT201
        return self.linear(out), h


def main():
    torch.manual_seed(21)
    grid = torch.arange(201) * 0.15
    waves = torch.stack(
        [torch.sin(grid), torch.sin(grid + 1), torch.sin(grid + 2)], dim=1
    ).unsqueeze(-1)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for start in range(0, 200, 20):
        h = model.init_hidden(3)
        prediction, h = model(waves[start : start + 20], h)  # <- TT201
        loss = nn.functional.mse_loss(prediction, waves[start + 1 : start + 21])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(start, loss.item())


if __name__ == "__main__":
    main()
