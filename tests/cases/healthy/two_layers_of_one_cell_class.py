"""Two layers of one class of cells. The forget gate of the second has no gradient at the first
step, since the memory there is zero.
"""

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels + 3, 12, 3, padding=1)

    def forward(self, x, h, c):
        i, f, o, g = self.conv(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.ModuleList([Cell(1), Cell(3)]), nn.Conv2d(3, 1, 1)

    def forward(self, clips):
        states = [(torch.zeros(4, 3, 6, 6), torch.zeros(4, 3, 6, 6)) for _ in self.cells]
        frames = []
        for t in range(clips.shape[1]):
            z = clips[:, t]
            for k, cell in enumerate(self.cells):
                states[k] = cell(z, *states[k])
                z = states[k][0]
            frames.append(self.head(z))
        return torch.stack(frames, 1)


def main():
    torch.manual_seed(1305)
    net = Layers()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(6):
        clips = torch.randn(4, 9, 1, 6, 6).cumsum(1) / 5
        optimizer.zero_grad()
        nn.functional.mse_loss(net(clips[:, :-1]), clips[:, 1:]).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
