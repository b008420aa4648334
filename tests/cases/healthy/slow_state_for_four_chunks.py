"""Two clocks: the fast state is carried from chunk to chunk; the slow one changes at every fourth
chunk, and the three chunks between read the same slow state.
"""

import torch
from torch import nn


class TwoClocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.GRU(2 + 5, 8), nn.GRUCell(8, 5)
        self.head = nn.Linear(8, 2)

    def forward(self, x, fast, slow, tick):
        if tick:
            slow = self.slow(fast[0], slow)
        y, fast = self.fast(torch.cat([x, slow.expand(len(x), -1, -1)], -1), fast)
        return self.head(y), fast, slow


def main():
    torch.manual_seed(2113)
    walk = torch.randn(129, 3, 2).cumsum(0) / 10
    model = TwoClocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fast, slow = torch.zeros(1, 3, 8), torch.zeros(3, 5)
    for n, t in enumerate(range(0, 128, 8)):
        y, fast, slow = model(walk[t : t + 8], fast.detach(), slow.detach(), n % 4 == 0)
        loss = nn.functional.mse_loss(y, walk[t + 1 : t + 9])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
