"""retain_graph=True keeps the chunk before alive, and optimizer.step() then changes the weights
that it was computed with.
"""

# raises: in-place

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.fc(y).squeeze(-1), state


def main():
    torch.manual_seed(15)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    x = torch.randn(100, 3, 4)
    y = x.mean(-1).cumsum(0) / 10
    state = (torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    for x_chunk, y_chunk in zip(x.split(10), y.split(10)):
        optimizer.zero_grad()
        prediction, state = net(x_chunk, state)
        loss = nn.functional.mse_loss(prediction, y_chunk)
        loss.backward(retain_graph=True)  # <- TT102
        optimizer.step()


if __name__ == "__main__":
    main()
