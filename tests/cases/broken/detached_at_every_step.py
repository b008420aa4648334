"""h is detached inside the loop over time, not between chunks: credit flows back a single step."""

import torch
from torch import nn


class StepWise(nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.cell = nn.GRUCell(n_in, n_hidden)
        self.out = nn.Linear(n_hidden, n_out)

    def forward(self, x, h):
        ys = []
        for t in range(x.shape[1]):
            h = h.detach()  # <- TT203
            h = self.cell(x[:, t], h)
            ys.append(self.out(h))
        return torch.stack(ys, 1), h


def main():
    torch.manual_seed(28)
    x = torch.randn(3, 90, 2).cumsum(1) / 9
    y = x.roll(5, 1).mean(-1, keepdim=True)
    model = StepWise(2, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    h = torch.zeros(3, 8)
    for i in range(9):
        s = slice(10 * i, 10 * i + 10)
        prediction, h = model(x[:, s], h)
        loss = nn.functional.mse_loss(prediction, y[:, s])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
