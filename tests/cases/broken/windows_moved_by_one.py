"""Each window of 12 days begins one day after the last one, and starts from its final state."""

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(1, 8), nn.Linear(8, 1)

    def forward(self, x, h):
        y, h = self.rnn(x, h)  # <- TT207
        return self.fc(y[-1]), h


def main():
    torch.manual_seed(1301)
    price = torch.randn(133).cumsum(0).view(-1, 1, 1) / 9
    width = 12
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 1, 8)
    for i in range(60):  # <- TT207
        guess, h = model(price[i : i + width], h.detach())  # <- TT207
        loss = (guess - price[i + width]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
