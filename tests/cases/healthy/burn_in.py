"""Every sampled window first warms up its state without a graph, then learns on what follows;
nothing goes from window to window.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(128)
    series = torch.randn(400, 2).cumsum(0) / 15
    gru, head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(12):
        starts = torch.randint(0, 370, (4,)).tolist()
        window = torch.stack([series[s : s + 30] for s in starts])
        with torch.no_grad():
            _, h = gru(window[:, :15])
        out, _ = gru(window[:, 15:-1], h)
        loss = nn.functional.mse_loss(head(out), window[:, 16:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
