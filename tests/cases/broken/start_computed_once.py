"""The initial state is computed from a context once, before the loop.

Every sequence after the first reuses its freed graph.
"""

# raises: second time

import torch
from torch import nn


def main():
    torch.manual_seed(10)
    context = torch.randn(6, 4)
    sequences = [torch.randn(15, 6, 3) for _ in range(8)]

    start = nn.Sequential(nn.Linear(4, 10), nn.Tanh())
    gru = nn.GRU(3, 10)
    score = nn.Linear(10, 3)
    optimizer = torch.optim.Adam(
        [*start.parameters(), *gru.parameters(), *score.parameters()], lr=1e-3
    )

    h0 = start(context).unsqueeze(0)
    for number, sequence in enumerate(sequences):
        features, _ = gru(sequence[:-1], h0)  # <- TT101
        loss = (score(features) - sequence[1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item())


if __name__ == "__main__":
    main()
