"""A padding mask used the wrong way round multiplies the state by zero in the middle of every
chunk.
"""

import torch
from torch import nn


class MaskedRNN(nn.Module):
    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.cell = nn.GRUCell(n_in, n_hidden)
        self.head = nn.Linear(n_hidden, 1)

    def forward(self, x, padded, h):
        for x_t, padded_t in zip(x.unbind(0), padded.unbind(0)):
            h = self.cell(x_t, h)
            h = h * padded_t  # <- TT303
        return self.head(self.cell(x[-1], h)), h


def main():
    torch.manual_seed(48)
    model = MaskedRNN(2, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(100, 3, 2).cumsum(0) / 10
    padded = torch.ones(100, 1, 1)
    padded[5::10] = 0.0
    h = torch.zeros(3, 8)
    for i in range(10):
        rows = slice(10 * i, 10 * i + 10)
        y, h = model(x[rows], padded[rows], h.detach())
        loss = nn.functional.mse_loss(y.squeeze(-1), x[rows].mean((0, 2)))
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()


if __name__ == "__main__":
    main()
