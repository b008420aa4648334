"""Both halves of the state are detached, but nothing takes the results: detach() changes nothing in
place.
"""

# raises: second time

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, size=9):
        super().__init__()
        self.lstm = nn.LSTM(1, size, batch_first=True)
        self.proj = nn.Linear(size, 1)

    def forward(self, x, hidden):
        y, hidden = self.lstm(x, hidden)
        return self.proj(y), hidden


def main():
    torch.manual_seed(1004)
    load = torch.sin(torch.linspace(0, 30, 201)).view(1, -1, 1) + 0.1 * torch.randn(1, 201, 1)
    net = Forecaster()
    optim = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    hidden = (torch.zeros(1, 1, 9), torch.zeros(1, 1, 9))
    for begin in range(0, 200, 25):
        x, y = load[:, begin : begin + 25], load[:, begin + 1 : begin + 26]
        hidden[0].detach()  # <- TT101
        hidden[1].detach()  # <- TT101
        forecast, hidden = net(x, hidden)  # <- TT101
        optim.zero_grad()
        loss = (forecast - y).abs().mean()
        loss.backward()
        optim.step()


if __name__ == "__main__":
    main()
