"""Every clip is a scene of its own, but the state of the convolutional cell is made once, before
the first: each clip begins with the memory of another.
"""

import torch
from torch import nn


class ConvGRU(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.zr = nn.Conv2d(channels + hidden, 2 * hidden, 3, padding=1)
        self.new = nn.Conv2d(channels + hidden, hidden, 3, padding=1)
        self.out = nn.Conv2d(hidden, channels, 1)

    def forward(self, frames, h):
        ys = []
        for x in frames:
            z, r = self.zr(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
            h = (1 - z) * h + z * torch.tanh(self.new(torch.cat([x, r * h], 1)))  # <- TT204
            ys.append(self.out(h))
        return torch.stack(ys), h


def main():
    torch.manual_seed(1101)
    clips = [torch.randn(17, 1, 2, 5, 5).cumsum(0) / 5 for _ in range(4)]
    model = ConvGRU(2, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 4, 5, 5)
    for clip in clips:  # <- TT204
        for t in range(0, 16, 8):
            prediction, h = model(clip[t : t + 8], h)  # <- TT204
            h = h.detach()
            loss = nn.functional.mse_loss(prediction, clip[t + 1 : t + 9])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
