"""The module makes a new zero state in every forward, though its trainer walks through the
recording chunk by chunk.
"""

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.width = width
        self.first = nn.LSTMCell(channels, width)
        self.second = nn.LSTMCell(width, width)
        self.project = nn.Linear(width, channels)

    def forward(self, noisy):
        batch = noisy.size(1)
        h1 = c1 = h2 = c2 = noisy.new_zeros(batch, self.width)
        clean = []
        for frame in noisy:
            h1, c1 = self.first(frame, (h1, c1))  # <- TT201
            h2, c2 = self.second(h1, (h2, c2))  # <- TT201
            clean.append(self.project(h2))
        return torch.stack(clean)


class Fit:
    def __init__(self, model, lr=1e-3):
        self.model, self.optimizer = model, torch.optim.Adam(model.parameters(), lr=lr)

    def on_recording(self, noisy, clean, chunk):
        for at in range(0, len(noisy), chunk):
            estimate = self.model(noisy[at : at + chunk])  # <- TT201
            loss = (estimate - clean[at : at + chunk]).abs().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def main():
    torch.manual_seed(23)
    clean = torch.sin(torch.arange(96).float() / 7).view(96, 1, 1).repeat(1, 2, 2)
    Fit(Denoiser(2, 6)).on_recording(clean + 0.2 * torch.randn_like(clean), clean, chunk=8)


if __name__ == "__main__":
    main()
