"""Two layers of one class detach their membrane whenever they are called, which is every step."""

import torch
from torch import nn


class Membrane(nn.Module):
    def forward(self, current, u):
        u = u.detach()  # <- TT203
        u = 0.85 * u + current
        spike = torch.sigmoid(6 * (u - 1))
        return spike, u - spike.detach()


def main():
    torch.manual_seed(97)
    first, second, a, b = nn.Linear(6, 12), nn.Linear(12, 3), Membrane(), Membrane()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
    recordings = [(torch.rand(16, 4, 6) < 0.3).float() for _ in range(6)]
    for recording in recordings:
        u, v, loss = torch.zeros(4, 12), torch.zeros(4, 3), 0.0
        labels = recording.sum((0, 2)).long() % 3
        for frame in recording:
            spikes, u = a(first(frame), u)
            _, v = b(second(spikes), v)
            loss = loss + nn.functional.cross_entropy(v, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
