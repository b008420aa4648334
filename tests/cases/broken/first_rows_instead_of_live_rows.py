"""When recordings end the live lanes are selected from the inputs, but the state keeps its first
rows instead.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(37)
    lengths = torch.tensor([30, 90, 60, 120])
    recordings = [torch.randn(n, 2).cumsum(0) / 5 for n in lengths.tolist()]
    lstm, head = nn.LSTM(2, 6), nn.Linear(6, 2)
    optimizer = torch.optim.Adam(list(lstm.parameters()) + list(head.parameters()), lr=1e-3)
    h = c = torch.zeros(1, 4, 6)
    for start in range(0, 120, 10):
        alive = [i for i, n in enumerate(lengths.tolist()) if n > start]
        x = torch.stack([recordings[i][start : start + 10] for i in alive], dim=1)
        h, c = h[:, : len(alive)].detach(), c[:, : len(alive)].detach()
        out, (h, c) = lstm(x[:-1], (h, c))  # <- TT206
        loss = nn.functional.mse_loss(head(out), x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(start, alive, loss.item())


if __name__ == "__main__":
    main()
