"""`optimizer.zero_grad` without parentheses calls nothing: the gradients of all chunks add up."""

import torch
from torch import nn


class Smoother(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(1, 6)
        self.level = nn.Linear(6, 1)

    def forward(self, xs, h):
        levels = []
        for x in xs:
            h = self.cell(x, h)
            levels.append(self.level(h))
        return torch.stack(levels), h


def main():
    torch.manual_seed(1024)
    clean = torch.randn(120, 2, 1).cumsum(0) / 8
    noisy = clean + 0.2 * torch.randn(120, 2, 1)
    model = Smoother()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    h = torch.zeros(2, 6)
    for x, y in zip(noisy.split(12), clean.split(12)):
        levels, h = model(x, h.detach())
        loss = nn.functional.mse_loss(levels, y)
        optimizer.zero_grad  # noqa: B018  # <- TT302
        loss.backward()
        optimizer.step()  # <- TT302


if __name__ == "__main__":
    main()
