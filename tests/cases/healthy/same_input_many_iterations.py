"""A refinement net reads the same features eight times on purpose: its GRU moves an estimate step
by step, each with a loss, all in one graph.
"""

import torch
from torch import nn


class Refiner(nn.Module):
    def __init__(self, n=10):
        super().__init__()
        self.features = nn.Linear(6, n)
        self.gru, self.delta = nn.GRUCell(n + 2, n), nn.Linear(n, 2)

    def forward(self, pair, iterations):
        context = torch.tanh(self.features(pair))
        hidden, flow, estimates = context, torch.zeros(len(pair), 2), []
        for _ in range(iterations):
            flow = flow.detach()
            hidden = self.gru(torch.cat([context, flow], -1), hidden)
            flow = flow + self.delta(hidden)
            estimates.append(flow)
        return estimates


def main():
    torch.manual_seed(2023)
    model = Refiner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=12)
    for _ in range(12):
        pair = torch.randn(16, 6)
        truth = pair[:, :2] - pair[:, 3:5]
        loss = 0.0
        for k, estimate in enumerate(model(pair, 8)):
            loss = loss + 0.8 ** (7 - k) * (estimate - truth).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


if __name__ == "__main__":
    main()
