"""The initial state is a parameter.

It enters at the start of every epoch and is never detached itself.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.start = nn.ParameterDict(
            {name: nn.Parameter(0.1 * torch.randn(1, 1, hidden)) for name in "hc"}
        )
        self.lstm, self.out = nn.LSTM(1, hidden), nn.Linear(hidden, 1)

    def initial(self, lanes):
        return tuple(self.start[name].expand(-1, lanes, -1).contiguous() for name in "hc")

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.out(y), state


def main():
    torch.manual_seed(116)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    grid = torch.arange(101) * 0.15
    wave = torch.stack([grid.sin(), grid.cos()], 1).unsqueeze(-1)
    for epoch in range(2):
        state = net.initial(lanes=2)
        for i in range(0, 100, 10):
            y, state = net(wave[i : i + 10], state)
            loss = nn.functional.mse_loss(y, wave[i + 1 : i + 11])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = tuple(s.detach() for s in state)
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
