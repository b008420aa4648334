"""The bias of the forget gate was meant to hold the state and has the wrong sign: the gate is
exactly zero, and so is the gradient of every step but the last.
"""

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.forget, self.write = nn.Linear(n_in, n), nn.Linear(n_in, n)
        self.read = nn.Linear(n, 1)
        nn.init.constant_(self.forget.bias, -150.0)

    def forward(self, x, h):
        for x_t in x:
            f = torch.sigmoid(self.forget(x_t))
            h = f * h + (1 - f) * torch.tanh(self.write(x_t))  # <- TT303
        return self.read(h), h


def main():
    torch.manual_seed(1224)
    model = Gated(2, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(150, 3, 2).cumsum(0) / 10
    h = torch.zeros(3, 8)
    for chunk in x.split(15):
        y, h = model(chunk, h.detach())
        loss = nn.functional.mse_loss(y, chunk[:1].mean(-1).t())
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()


if __name__ == "__main__":
    main()
