"""The loader's windows are (lanes, time, features) and the GRU lacks batch_first=True: it runs
along the lanes, and carries a state for each place in the window.
"""

import torch
from torch import nn


class Tide(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 8)  # <- TT209
        self.height = nn.Linear(8, 1)

    def forward(self, x, h):
        y, h = self.gru(x, h)  # <- TT209
        return self.height(y), h


def main():
    torch.manual_seed(1209)
    time = torch.linspace(0, 30, 181)
    wind = torch.stack([torch.sin(time + k) for k in range(4)])
    wind = torch.stack([wind, wind.cos()], -1)
    height = wind.sum(-1, keepdim=True).tanh()
    net, h = Tide(), None
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for i in range(0, 180, 15):
        estimate, h = net(wind[:, i : i + 15], h)  # <- TT209
        h = h.detach()
        loss = nn.functional.mse_loss(estimate, height[:, i + 1 : i + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
