"""Mixed precision: forward and loss under autocast in bfloat16, backward outside, the carried state
detached.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 8), nn.Linear(8, 1)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.fc(y), state


def main():
    torch.manual_seed(120)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(100, 2, 3).cumsum(0) / 10
    y = x.mean(-1, keepdim=True)
    state = None
    for a, b in zip(x.split(10), y.split(10)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction, state = net(a, state)
            loss = nn.functional.mse_loss(prediction.float(), b)
        state = tuple(s.detach().float() for s in state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
