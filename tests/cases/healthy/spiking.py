"""Healthy loops of spiking nets."""

import torch
from torch import nn


class Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return grad / (1 + (torch.pi * u).square())


class Leaky(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.beta, self.mem = nn.Parameter(torch.full((n,), 0.9)), None

    def forward(self, current):
        if self.mem is None:
            self.mem = torch.zeros_like(current)
        reset = (self.mem > 1.0).float().detach()
        self.mem = self.beta * self.mem + current - reset
        return Surrogate.apply(self.mem - 1.0)


def spikes_with_detached_reset():
    """Leaky neurons: the reset after a spike is detached in every step, as is usual, while the
    membrane keeps its graph through time.
    """
    torch.manual_seed(2112)
    fc1, lif, fc2 = nn.Linear(5, 12), Leaky(12), nn.Linear(12, 2)
    net = nn.ModuleList([fc1, lif, fc2])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    events = (torch.rand(120, 3, 5) < 0.3).float()
    labels = (events.cumsum(0).sum(-1) // 4 % 2).long()
    for x, y in zip(events.split(20), labels.split(20)):
        if lif.mem is not None:
            lif.mem = lif.mem.detach()
        votes = torch.stack([fc2(lif(fc1(frame))) for frame in x])
        loss = nn.functional.cross_entropy(votes.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trials_in_one_tensor():
    """Trials of one label each lie one after another in a tensor, and do not go on."""
    torch.manual_seed(2113)
    current, vote = nn.Linear(4, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*current.parameters(), *vote.parameters()])
    trials, labels = torch.rand(8, 12, 3, 4), torch.randint(2, (8, 3))
    for trial, label in zip(trials, labels):
        membrane, votes = torch.zeros(3, 8), 0
        for frame in trial:
            membrane = 0.9 * membrane + current(frame)
            spikes = Surrogate.apply(membrane - 1)
            membrane = membrane - spikes.detach()
            votes = votes + vote(spikes)
        optimizer.zero_grad()
        nn.functional.cross_entropy(votes, label).backward()
        optimizer.step()
