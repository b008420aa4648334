"""The state is rounded to levels at every step; rounding has no gradient."""

import torch
from torch import nn


class Levels(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.keep = nn.Linear(2, 10), nn.Linear(10, 10, bias=False)
        nn.init.orthogonal_(self.keep.weight)
        self.vote = nn.Linear(10, 2)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 10)
        for x_t in x.unbind(1):
            h = torch.round(4 * torch.tanh(self.read(x_t) + self.keep(h))) / 4  # <- TT303
        return self.vote(h)


def main():
    torch.manual_seed(1304)
    net = Levels()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(10):
        label = torch.randint(0, 2, (6,))
        x = 0.3 * torch.randn(6, 12, 2)
        x[label == 1, :4] += 1.0
        loss = nn.functional.cross_entropy(net(x), label)
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()


if __name__ == "__main__":
    main()
