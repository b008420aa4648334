"""Short windows of a long measurement, drawn at random; an encoder estimates the state at the start
of each from the ten samples before it.
"""

import torch
from torch import nn


class Subspace(nn.Module):
    def __init__(self, past=10, n=6):
        super().__init__()
        self.past = past
        self.encoder = nn.Sequential(nn.Linear(2 * past, 16), nn.Tanh(), nn.Linear(16, n))
        self.f, self.g = nn.Linear(n + 1, n), nn.Linear(n, 1)

    def forward(self, u_past, y_past, u):
        x = self.encoder(torch.cat([u_past, y_past], dim=1))
        ys = []
        for u_t in u.unbind(1):
            ys.append(self.g(x).squeeze(-1))
            x = x + torch.tanh(self.f(torch.cat([x, u_t.unsqueeze(-1)], -1)))
        return torch.stack(ys, 1)


def main():
    torch.manual_seed(2115)
    u = torch.randn(400).cumsum(0) / 12
    y = (u.cumsum(0) / 20).tanh()
    model = Subspace()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(12):
        at = torch.randint(10, 370, (8,))
        window = at.unsqueeze(1) + torch.arange(-10, 30)
        u_w, y_w = u[window], y[window]
        prediction = model(u_w[:, :10], y_w[:, :10], u_w[:, 10:])
        loss = nn.functional.mse_loss(prediction, y_w[:, 10:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
