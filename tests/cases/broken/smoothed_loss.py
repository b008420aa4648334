"""The loss for the display is smoothed as a tensor, so that each value hangs on all the graphs
before.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(1028)
    cell, out = nn.LSTMCell(2, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *out.parameters()], lr=1e-3)
    inputs = torch.randn(150, 3, 2).cumsum(0) / 10
    targets = (inputs[..., :1] * inputs[..., 1:]).tanh()
    h, c = torch.zeros(3, 8), torch.zeros(3, 8)
    smooth = None
    for chunk in range(10):
        h, c = h.detach(), c.detach()
        errors = []
        for t in range(15 * chunk, 15 * chunk + 15):
            h, c = cell(inputs[t], (h, c))
            errors.append((out(h) - targets[t]).square().mean())
        loss = torch.stack(errors).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss  # <- TT104
        print(f"{chunk} {smooth:.4f}")


if __name__ == "__main__":
    main()
