"""Two of the five recordings end earlier: their lanes are left out of the inputs, but the state
keeps all five.
"""

# raises: wrong size

import torch
from torch import nn


def main():
    torch.manual_seed(1022)
    recordings = [torch.randn(n, 3).cumsum(0) / 7 for n in (121, 121, 121, 61, 41)]
    model = nn.ModuleDict({"gru": nn.GRU(3, 8), "head": nn.Linear(8, 3)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, len(recordings), 8)
    for start in range(0, 120, 20):
        live = [r for r in recordings if len(r) > start + 20]
        chunk = torch.stack([r[start : start + 21] for r in live], dim=1)
        out, h = model["gru"](chunk[:-1], h)  # <- TT211
        h = h.detach()
        loss = nn.functional.mse_loss(model["head"](out), chunk[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
