"""The stream is (time, lanes, features), the layer is told batch_first=True: it runs along the
lanes and carries one state for every step of the chunk.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)  # <- TT209
        self.fc = nn.Linear(8, 2)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)  # <- TT209
        return self.fc(out), state


def main():
    torch.manual_seed(1020)
    time = torch.linspace(0, 20, 181).view(-1, 1, 1)
    waves = torch.cat([torch.sin(time + k) for k in range(5)], dim=1)
    waves = torch.cat([waves, waves.roll(7, 0)], dim=2)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = None
    for i in range(0, 180, 12):
        prediction, state = net(waves[i : i + 12], state)  # <- TT209
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(prediction, waves[i + 1 : i + 13])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
