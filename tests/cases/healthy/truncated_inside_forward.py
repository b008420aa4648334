"""The model cuts its graph at every 16th step of a whole sequence by itself; one loss and one
backward for all of it.
"""

import torch
from torch import nn


class Truncated(nn.Module):
    def __init__(self, truncate):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
        self.h0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.c0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.truncate = truncate

    def forward(self, x):
        state = tuple(p.expand(-1, len(x), -1).contiguous() for p in (self.h0, self.c0))
        pieces = []
        for piece in x.split(self.truncate, dim=1):
            y, state = self.lstm(piece, state)
            state = tuple(s.detach() for s in state)
            pieces.append(self.head(y))
        return torch.cat(pieces, dim=1)


def main():
    torch.manual_seed(2117)
    model = Truncated(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(6):
        x = torch.randn(4, 80, 1).cumsum(1) / 8
        loss = nn.functional.mse_loss(model(x), torch.tanh(2 * x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main()
