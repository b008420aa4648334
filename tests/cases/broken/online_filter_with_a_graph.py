"""A trained filter runs through a live signal sample by sample, its vector of state kept in self.x
together with its graph.
"""

import torch
from torch import nn


class Filter(nn.Module):
    def __init__(self, n=6):
        super().__init__()
        self.A = nn.Parameter(0.8 * torch.eye(n))
        self.B = nn.Parameter(torch.randn(n) / n)
        self.C = nn.Parameter(torch.randn(n) / n)
        self.x = torch.zeros(n)

    def forward(self, u):
        self.x = torch.tanh(self.A @ self.x + self.B * u)  # <- TT202
        return self.C @ self.x


def main():
    torch.manual_seed(1206)
    live = torch.sin(torch.arange(300) / 9)
    highest, model = 0.0, Filter()
    model.eval()
    for sample in live:
        highest = max(highest, model(sample).item())  # <- TT202
    print(highest)


if __name__ == "__main__":
    main()
