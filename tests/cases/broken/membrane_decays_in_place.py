"""Spiking neurons: the membrane decays in place, while the surrogate gradient of the spike before
still needs its value.
"""

# raises: in-place

import torch
from torch import nn


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 1.0).float()

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1.0 + 10.0 * (v - 1.0).abs()) ** 2


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.current, self.vote = nn.Linear(4, 12), nn.Linear(12, 2)

    def forward(self, events, v):
        rate = 0.0
        for frame in events:
            v *= 0.9  # <- TT103
            v += self.current(frame)  # <- TT103
            spikes = Spike.apply(v)
            v = v - spikes.detach()
            rate = rate + self.vote(spikes + 0.1 * Spike.apply(v))
        return rate / len(events), v


def main():
    torch.manual_seed(1032)
    net = Spiking()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(4):
        events, label = (torch.rand(15, 6, 4) < 0.4).float(), torch.randint(2, (6,))
        rate, _ = net(events, torch.zeros(6, 12))
        optimizer.zero_grad()
        nn.functional.cross_entropy(rate, label).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
