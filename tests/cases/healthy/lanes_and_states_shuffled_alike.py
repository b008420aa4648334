"""The lanes are put into a new order before every chunk, inputs, targets and state by the same
permutation.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 8), nn.Linear(8, 1)

    def forward(self, x, state):
        ys = []
        for frame in x:
            state = self.cell(frame, state)
            ys.append(self.head(state[0]))
        return torch.stack(ys), state


def main():
    torch.manual_seed(2105)
    x = torch.randn(100, 6, 3).cumsum(0) / 8
    y = x.amax(-1, keepdim=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = (torch.zeros(6, 8), torch.zeros(6, 8))
    for t in range(0, 100, 10):
        order = torch.randperm(6)
        x, y = x[:, order], y[:, order]
        state = tuple(s[order].detach() for s in state)
        prediction, state = net(x[t : t + 10], state)
        loss = nn.functional.mse_loss(prediction, y[t : t + 10])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
