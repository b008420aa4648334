"""A diagonal linear recurrence with complex states: each chunk is computed by powers at once, from
the carried state, which is detached between chunks.
"""

import torch
from torch import nn


class Diagonal(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.nu = nn.Parameter(torch.log(torch.linspace(0.01, 0.5, n)))
        self.theta = nn.Parameter(torch.linspace(0.0, 3.0, n))
        self.B = nn.Parameter(torch.randn(1, n, dtype=torch.cfloat) / n)
        self.C = nn.Parameter(torch.randn(n, 1, dtype=torch.cfloat) / n)

    def forward(self, u, state):
        steps = len(u)
        log = torch.complex(-torch.exp(self.nu), self.theta)
        powers = torch.exp(log * torch.arange(steps + 1).unsqueeze(-1))
        lag = torch.arange(steps).unsqueeze(1) - torch.arange(steps)
        kernel = powers[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)
        driven = torch.einsum("tsn,sbn->tbn", kernel, u.to(self.B.dtype) @ self.B)
        x = driven + powers[1:].unsqueeze(1) * state
        return (x @ self.C).real, x[-1]


def main():
    torch.manual_seed(2127)
    u = torch.sin(torch.linspace(0, 40, 201)).view(-1, 1, 1) + torch.randn(201, 2, 1) / 10
    model = Diagonal(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = torch.zeros(2, 6, dtype=torch.cfloat)
    for i in range(0, 200, 20):
        y, state = model(u[i : i + 20], state)
        loss = nn.functional.mse_loss(y, u[i + 1 : i + 21])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()


if __name__ == "__main__":
    main()
