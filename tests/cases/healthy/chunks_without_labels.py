"""Many chunks have no label: those only move the state on, without a graph, and make no step."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(3, 8), nn.Linear(8, 2)

    def forward(self, x, h):
        y, h = self.gru(x, h)
        return self.fc(y[-1]), h


def main():
    torch.manual_seed(2133)
    x = torch.randn(240, 2, 3).cumsum(0) / 10
    labels = {3: torch.tensor([0, 1]), 4: torch.tensor([1, 1]), 9: torch.tensor([0, 0])}
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 2, 8)
    for number, chunk in enumerate(x.split(20)):
        if number not in labels:
            with torch.no_grad():
                _, h = model(chunk, h)
            continue
        logits, h = model(chunk, h)
        h = h.detach()
        loss = nn.functional.cross_entropy(logits, labels[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
