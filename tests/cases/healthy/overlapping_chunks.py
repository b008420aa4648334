"""Chunks of 30 steps that move on by 10: the state is taken at the tenth step, where the next chunk
begins, so the last 20 steps are read again.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(2, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        states, _ = self.gru(x, h)
        return self.head(states), states


def main():
    torch.manual_seed(2128)
    walk = torch.randn(131, 3, 2).cumsum(0) / 10
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    h = torch.zeros(1, 3, 8)
    for i in range(0, 101, 10):
        prediction, states = net(walk[i : i + 30], h)
        loss = nn.functional.mse_loss(prediction, walk[i + 1 : i + 31])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        h = states[9:10].detach()


if __name__ == "__main__":
    main()
