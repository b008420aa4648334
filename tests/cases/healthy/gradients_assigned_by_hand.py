"""Conflicting gradients of two tasks are projected and put into .grad by hand before the step: no
backward is called at all.
"""

import torch
from torch import nn


def project(a, b):
    dot = (a * b).sum()
    return a - dot / b.pow(2).sum() * b if dot < 0 else a


def main():
    torch.manual_seed(2026)
    trunk = nn.GRU(2, 8)
    heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 1)])
    shared = list(trunk.parameters())
    optimizer = torch.optim.Adam([*shared, *heads.parameters()], lr=1e-3)
    walk = torch.randn(101, 3, 2).cumsum(0) / 10
    h = torch.zeros(1, 3, 8)
    for i in range(0, 100, 20):
        x, y = walk[i : i + 20], walk[i + 1 : i + 21]
        out, h = trunk(x, h.detach())
        losses = (
            nn.functional.mse_loss(heads[0](out), y),
            nn.functional.mse_loss(heads[1](out), y.norm(dim=-1, keepdim=True)),
        )
        rows = []
        for loss, head in zip(losses, heads):
            own = list(head.parameters())
            gradients = torch.autograd.grad(loss, shared + own, retain_graph=loss is losses[0])
            rows.append(torch.cat([g.flatten() for g in gradients[: len(shared)]]))
            for p, g in zip(own, gradients[len(shared) :]):
                p.grad = g
        merged = project(rows[0], rows[1]) + project(rows[1], rows[0])
        for p, g in zip(shared, merged.split([p.numel() for p in shared])):
            p.grad = g.view_as(p)
        optimizer.step()


if __name__ == "__main__":
    main()
