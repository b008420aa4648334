"""Audio effects: every batch of segments begins with 40 samples without a gradient, then one update
for each 60 samples, the state carried and cut inside the segment.
"""

import torch
from torch import nn


class Amp(nn.Module):
    def __init__(self, units=8):
        super().__init__()
        self.rec, self.lin = nn.LSTM(1, units), nn.Linear(units, 1)
        self.hidden = None

    def forward(self, x):
        y, self.hidden = self.rec(x, self.hidden)
        return self.lin(y) + x

    def detach_hidden(self):
        self.hidden = tuple(h.clone().detach() for h in self.hidden)

    def reset_hidden(self):
        self.hidden = None


def esr(output, target):
    return (target - output).square().mean() / (target.square().mean() + 1e-5)


def main():
    torch.manual_seed(2116)
    time = torch.arange(8 * 220) / 30
    clean = (torch.sin(time) * torch.sin(time / 9)).view(8, 220).t().unsqueeze(-1)
    wet = torch.tanh(3 * clean)
    amp = Amp()
    optimizer = torch.optim.Adam(amp.parameters(), lr=5e-4)
    for _ in range(2):
        for batch in torch.randperm(8).split(4):
            x, y = clean[:, batch], wet[:, batch]
            with torch.no_grad():
                amp(x[:40])
            for start in range(40, 220, 60):
                optimizer.zero_grad()
                loss = esr(amp(x[start : start + 60]), y[start : start + 60])
                loss.backward()
                optimizer.step()
                amp.detach_hidden()
            amp.reset_hidden()


if __name__ == "__main__":
    main()
