"""Meta-learning: the inner updates of a recurrent model keep their graph on purpose
(create_graph=True), so that the outer loss can go back through them.
"""

import torch
from torch import nn
from torch.func import functional_call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.RNNCell(1, 6), nn.Linear(6, 1)

    def forward(self, x):
        h, ys = torch.zeros(x.size(1), 6), []
        for x_t in x:
            h = self.cell(x_t, h)
            ys.append(self.out(h))
        return torch.stack(ys)


def task():
    time = torch.linspace(0, 3, 13).view(-1, 1, 1)
    waves = (1 + torch.rand(1)) * torch.sin(time + 3 * torch.rand(1, 4, 1))
    return waves[:-1], waves[1:]


def main():
    torch.manual_seed(2121)
    net = Net()
    outer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(4):
        x, y = task()
        fast = dict(net.named_parameters())
        for _ in range(3):
            inner = nn.functional.mse_loss(functional_call(net, fast, (x[:, :2],)), y[:, :2])
            gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), gradients)}
        loss = nn.functional.mse_loss(functional_call(net, fast, (x[:, 2:],)), y[:, 2:])
        outer.zero_grad()
        loss.backward()
        outer.step()


if __name__ == "__main__":
    main()
