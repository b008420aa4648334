"""A cell reads the next value, or its own prediction of it, which is cut with the state."""

import random

import torch
from torch import nn


def main():
    random.seed(7)
    torch.manual_seed(7)
    wave = torch.sin(torch.arange(161.0) / 6).unsqueeze(1)
    cell, readout = nn.GRUCell(1, 10), nn.Linear(10, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *readout.parameters()], lr=0.05)
    h, value = torch.zeros(1, 10), wave[:1]
    for begin in range(0, 160, 16):
        error = 0.0
        for t in range(begin, begin + 16):
            h = cell(value, h)
            guess = readout(h)
            error = error + nn.functional.l1_loss(guess, wave[t + 1 : t + 2])
            value = guess if random.random() < 0.4 else wave[t + 1 : t + 2]
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        h, value = h.detach(), value.detach()


if __name__ == "__main__":
    main()
