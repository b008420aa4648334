"""Gradient clipping before and a scheduler after every step; the rest is a plain carried loop."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


def main():
    torch.manual_seed(119)
    model = nn.ModuleDict({"rnn": nn.RNN(2, 8, num_layers=2), "out": nn.Linear(8, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=12)
    walk = torch.randn(121, 3, 2).cumsum(0) / 10
    hidden = torch.zeros(2, 3, 8)
    for step in range(12):
        piece = walk[10 * step : 10 * step + 11]
        optimizer.zero_grad(set_to_none=True)
        y, hidden = model["rnn"](piece[:-1], hidden)
        loss = nn.functional.huber_loss(model["out"](y), piece[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        scheduler.step()
        hidden.detach_()
        print(step, scheduler.get_last_lr()[0], loss.item())


if __name__ == "__main__":
    main()
