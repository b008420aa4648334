"""When recordings end, inputs and state are selected by the same indices."""

import torch
from torch import nn


def main():
    torch.manual_seed(126)
    lengths = [30, 90, 60, 120]
    recordings = [torch.randn(n, 2).cumsum(0) / 5 for n in lengths]
    lstm, head = nn.LSTM(2, 6), nn.Linear(6, 2)
    optimizer = torch.optim.Adam(list(lstm.parameters()) + list(head.parameters()), lr=1e-3)
    alive = [0, 1, 2, 3]
    h = c = torch.zeros(1, 4, 6)
    for start in range(0, 120, 10):
        keep = [row for row, i in enumerate(alive) if lengths[i] > start]
        alive = [alive[row] for row in keep]
        x = torch.stack([recordings[i][start : start + 10] for i in alive], dim=1)
        h, c = h[:, keep].detach(), c[:, keep].detach()
        out, (h, c) = lstm(x, (h, c))
        loss = nn.functional.mse_loss(head(out[:-1]), x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
