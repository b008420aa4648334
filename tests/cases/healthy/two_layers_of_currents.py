"""Two layers of one class carry a voltage, which reads the current of the step before."""

import torch
from torch import nn


class Neurons(nn.Module):
    def __init__(self, inputs, n):
        super().__init__()
        self.synapses = nn.Linear(inputs, n)

    def forward(self, x, voltage, current):
        voltage = voltage + 0.2 * (current - voltage)
        current = 0.7 * current + self.synapses(x)
        rate = torch.sigmoid(4 * voltage - 2)
        return rate, voltage * (1 - rate), current


def main():
    torch.manual_seed(59)
    drive = torch.rand(97, 3, 4)
    first, second, readout = Neurons(4, 10), Neurons(10, 6), nn.Linear(6, 4)
    modules = nn.ModuleList([first, second, readout])
    optimizer = torch.optim.Adam(modules.parameters(), lr=5e-3)
    a, b = [torch.zeros(3, 10)] * 2, [torch.zeros(3, 6)] * 2
    for begin in range(0, 96, 12):
        loss = 0.0
        for t in range(begin, begin + 12):
            rate, *a = first(drive[t], *a)
            rate, *b = second(rate, *b)
            loss = loss + nn.functional.mse_loss(readout(rate), drive[t + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        a, b = [s.detach() for s in a], [s.detach() for s in b]


if __name__ == "__main__":
    main()
